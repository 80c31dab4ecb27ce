"""Sends bodies and notes when which bytes come back, from any OpenAI-compatible server. Parses nothing during a load.

Every request has a connection of its own, so none waits for another and none is sent into one that the server closes.
Does not know what is asked or when.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp

from hydra_terminal.load.target import Target

_CONNECT_S = 30.0
_MAX_ERROR_CHARS = 300


@dataclass(slots=True)
class Answer:
    """Times on `time.monotonic`. `chunks`: what came, and when. `end_s` is set in any case."""

    sent_s: float
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    end_s: float = 0.0
    error: str | None = None


class Client:
    """`async with`; one for one load."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._url = target.base_url + "/v1/chat/completions"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            headers={"Content-Type": "application/json", **self._target.headers},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(self, body: bytes, answer: Answer) -> None:
        """Fills `answer` as bytes come, so that what has come is there even when this is cancelled."""
        assert self._session is not None
        answer.sent_s = time.monotonic()
        try:
            async with self._session.post(self._url, data=body) as response:
                if response.status != 200:
                    text = await response.text(errors="replace")
                    answer.error = f"HTTP {response.status}: {text[:_MAX_ERROR_CHARS]}"
                    return
                while chunk := await response.content.readany():
                    answer.chunks.append((time.monotonic(), chunk))
        except aiohttp.ClientError as error:
            answer.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
        except asyncio.CancelledError:
            answer.error = "not finished when the run ended"
            raise
        finally:
            answer.end_s = time.monotonic()

    async def page(self) -> str | None:
        """The text of /metrics, or None where the server has none."""
        assert self._session is not None
        async with self._session.get(self._target.base_url + "/metrics") as response:
            return await response.text() if response.status == 200 else None
