"""The HTTP client of `chat`: the server's model, and answers as streams of events. Errors have the server's messages.

For any server with OpenAI's API; only this engine sends timings.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from hydra_engine.errors import ResourceError

_MAX_EVENT_BYTES = 16 << 20
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
_POLL_S = 1.0


class ServerError(Exception):
    """The error that a server sent instead of an answer."""

    def __init__(self, message: str, status: int = 0, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code


@dataclass(slots=True)
class Answer:
    """The answer so far. `metrics` is the server's, `first_s` measured here: seconds until the first text."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    first_s: float | None = None


class Client:
    """For one event loop. `url` may end in /v1, as in other clients of OpenAI's API."""

    def __init__(self, url: str, api_key: str | None) -> None:
        url = url if "://" in url else f"http://{url}"
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._has_key = bool(api_key)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=_TIMEOUT, read_bufsize=_MAX_EVENT_BYTES // 2
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def model(self, waiting: Callable[[str], object]) -> str:
        """The first model that the server has, once it is loaded; `waiting` is called once, with the server's message.
        Raises ResourceError when there is no server, ServerError."""
        announced = False
        while True:
            try:
                return await self._first_model()
            except ServerError as error:
                if error.code != "not_ready":
                    raise
                if not announced:
                    waiting(f"waiting: {error.message}")
                announced = True
                await asyncio.sleep(_POLL_S)

    async def _first_model(self) -> str:
        assert self._session is not None
        try:
            async with self._session.get(f"{self.url}/v1/models") as response:
                if response.status != 200:
                    raise await self._refusal(response)
                return str((await response.json(content_type=None))["data"][0]["id"])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ResourceError(
                f"no server answers at {self.url}; start one with `hydra-engine serve`, or give its address with --url"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ResourceError(f"{self.url} is not a server with OpenAI's API") from error

    async def stream(self, body: dict[str, Any], answer: Answer) -> AsyncGenerator[str]:
        """Pieces of text; usage, metrics and the finish reason are stored in `answer`. Raises ServerError."""
        assert self._session is not None
        sent_s = time.monotonic()
        try:
            async with self._session.post(f"{self.url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    raise await self._refusal(response)
                async for event in _events(response):
                    for piece in _pieces(event, answer):
                        if answer.first_s is None:
                            answer.first_s = time.monotonic() - sent_s
                        yield piece
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerError("the connection to the server was lost; /retry sends the question again") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerError("the server sent an invalid chat stream") from error
        if answer.finish_reason is None:
            raise ServerError("the stream ended before the answer; /retry sends the question again")

    async def _refusal(self, response: aiohttp.ClientResponse) -> ServerError:
        code = None
        try:
            error = json.loads(await response.content.read(65536))["error"]
            message, code = str(error["message"]), error.get("code")
        except (ValueError, LookupError, TypeError, AttributeError):
            message = f"the server answered {response.status} {response.reason}"
        if response.status == 401 and not self._has_key:
            message += " (give --api-key or set HYDRA_API_KEY)"
        return ServerError(message, response.status, code)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def _pieces(event: dict[str, Any], answer: Answer) -> list[str]:
    if "error" in event:
        raise ServerError(str(event["error"]["message"]))
    if event.get("usage"):
        answer.usage = event["usage"]
    if event.get("metrics"):
        answer.metrics = event["metrics"]
    pieces = []
    for choice in event.get("choices") or ():
        piece = (choice.get("delta") or {}).get("content") or ""
        if piece:
            answer.text += piece
            pieces.append(piece)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return pieces
