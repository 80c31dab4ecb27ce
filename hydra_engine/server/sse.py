"""Writes one event stream: headers late, one write per step, comments while nothing happens, an end to slow readers.

Headers wait for the first event or the first comment, so an error before either is still a plain status. An error
after them is one `data: {"error": ...}` event and the end of the connection, without `[DONE]`: OpenAI's clients raise
on that event and never read on, and a client that ignores it sees a stream that did not end properly.
Does not know what the events mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from types import TracebackType
from typing import Self

from aiohttp import web

from hydra_engine.server.context import REQUEST_ID

logger = logging.getLogger(__name__)

STALL_S = 30.0  # a reader that takes nothing from a full buffer for this long has lost interest
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event(data: bytes, name: str = "") -> bytes:
    """OpenAI's events have no name."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data + b"\n\n"


DONE = event(b"[DONE]")


class EventStream:
    """`async with` keeps it alive. Raises ConnectionError when the reader has gone or does not read."""

    def __init__(self, request: web.Request, *, keepalive_s: float) -> None:
        self._request = request
        self._keepalive_s = keepalive_s
        self._response = web.StreamResponse(headers=_HEADERS)
        self._lock = asyncio.Lock()
        self._last_write_s = 0.0
        self._keeper: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        return self._response.prepared

    async def __aenter__(self) -> Self:
        self._last_write_s = asyncio.get_running_loop().time()
        if self._keepalive_s > 0:
            self._keeper = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])

    async def send(self, data: bytes) -> None:
        """`data` holds whole events."""
        async with self._lock:
            await self._write(data)

    async def finish(self, last: bytes = DONE) -> web.StreamResponse:
        """`last`: the event behind all others; empty for none."""
        async with self._lock:
            if last:
                await self._write(last)
            await self._end()
        return self._response

    async def fail(self, event_data: bytes) -> web.StreamResponse:
        """The last event; the connection closes after it."""
        self._response.force_close()
        with contextlib.suppress(ConnectionError):
            async with self._lock:
                await self._write(event(event_data))
                await self._end()
        return self._response

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            quiet_s = loop.time() - self._last_write_s
            if quiet_s < self._keepalive_s:
                await asyncio.sleep(self._keepalive_s - quiet_s)
            elif self._lock.locked():  # a write waits for the reader: a comment would only wait behind it
                await asyncio.sleep(self._keepalive_s)
            else:
                try:
                    await self.send(b": keep-alive\n\n")
                except ConnectionError:
                    return  # the handler learns it from its own write or is cancelled

    async def _write(self, data: bytes) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._patiently(self._response.write(data))
        self._last_write_s = asyncio.get_running_loop().time()

    async def _end(self) -> None:
        await self._patiently(self._response.write_eof())

    async def _patiently(self, writing: Awaitable[None]) -> None:
        """Cuts the connection when its reader lets a write wait for too long."""
        try:
            async with asyncio.timeout(STALL_S):
                await writing
        except TimeoutError:
            logger.warning("%s slow_reader: cut off, nothing was read for %g s", self._request[REQUEST_ID], STALL_S)
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionAbortedError("the reader was too slow") from None
