"""The HTTP client of `chat`: the server's model, and answers as streams of events. Errors have the server's messages.

For any server with OpenAI's API; only this engine sends timings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from hydra_engine.errors import ResourceError

_CONNECT_S = 10.0
_READ_S = 600.0
_POLL_S = 1.0


class ServerError(Exception):
    """The error that a server sent instead of an answer."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


@dataclass(slots=True)
class Answer:
    """An answer as received so far. `metrics` is the server's; `first_s` is measured here, seconds to the first
    text."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    first_s: float | None = None


class Piece(NamedTuple):
    """A piece of text; `is_thought`: reasoning, which is not part of the answer."""

    text: str
    is_thought: bool = False


class Client:
    """A client of one server. `url` may end in /v1, as in other clients of OpenAI's API. Ignores proxies of the
    environment."""

    def __init__(self, url: str, api_key: str | None) -> None:
        url = url if "://" in url else f"http://{url}"
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def model(self, waiting: Callable[[str], object]) -> str:
        """The server's first model, once it is loaded; `waiting` is called once, with the server's message. Raises
        ResourceError if there is no server, and ServerError."""
        announced = False
        while True:
            try:
                return self._first_model()
            except ServerError as error:
                if error.code != "not_ready":
                    raise
                if not announced:
                    waiting(f"waiting: {error.message}")
                announced = True
                time.sleep(_POLL_S)

    def _first_model(self) -> str:
        try:
            with self._request("/v1/models") as response:
                return str(json.load(response)["data"][0]["id"])
        except (OSError, HTTPException) as error:
            raise ResourceError(
                f"no server answers at {self.url}; start one with `hydra-engine serve`, or give its address with --url"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ResourceError(f"{self.url} is not a server with OpenAI's API") from error

    def stream(self, body: dict[str, Any], answer: Answer) -> Generator[Piece]:
        """Yields pieces of text; usage, metrics and the finish reason are stored in `answer`. Raises ServerError."""
        sent_s = time.monotonic()
        try:
            with self._request("/v1/chat/completions", body) as response:
                for line in response:
                    data = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == b"[DONE]":
                        continue
                    for piece in pieces_of(json.loads(data), answer):
                        if answer.first_s is None:
                            answer.first_s = time.monotonic() - sent_s
                        yield piece
        except (OSError, HTTPException) as error:
            raise ServerError("the connection to the server was lost; /retry sends the question again") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerError("the server sent an invalid chat stream") from error
        if answer.finish_reason is None:
            raise ServerError("the stream ended before the answer; /retry sends the question again")

    @contextmanager
    def _request(self, path: str, body: dict[str, Any] | None = None) -> Iterator[HTTPResponse]:
        """The response to a POST of `body`, or to a GET. Raises ServerError unless its status is 200."""
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=_CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(_READ_S)
            headers = self._headers | {"Content-Type": "application/json"}
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if data is None else "POST", parts.path + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(response)
            yield response
        finally:
            connection.close()

    def _refusal(self, response: HTTPResponse) -> ServerError:
        code = None
        try:
            error = json.loads(response.read(65536))["error"]
            message, code = str(error["message"]), error.get("code")
        except (ValueError, LookupError, TypeError, AttributeError):
            message = f"the server answered {response.status} {response.reason}"
        if response.status == 401 and not self._headers:
            message += " (give --api-key or set HYDRA_API_KEY)"
        return ServerError(message, code)


def pieces_of(event: dict[str, Any], answer: Answer) -> list[Piece]:
    if "error" in event:
        raise ServerError(str(event["error"]["message"]))
    if event.get("usage"):
        answer.usage = event["usage"]
    if event.get("metrics"):
        answer.metrics = event["metrics"]
    pieces = []
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if thought := delta.get("reasoning") or delta.get("reasoning_content"):
            pieces.append(Piece(thought, is_thought=True))
        if text := delta.get("content"):
            answer.text += text
            pieces.append(Piece(text))
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return pieces
