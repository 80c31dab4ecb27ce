"""Writes one event stream: late headers, one write per step, comments while idle, and a limit for slow readers.

Headers wait for the first event or the first comment, so an error before either is still a plain status. An error after
them is one event (`errors.py`) and the end of the connection, without `[DONE]`: OpenAI's clients raise on `data:
{"error": ...}` and read no further, and a client that ignores it sees a stream that did not end properly. Does not know
what the events mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterable, Mapping
from types import TracebackType
from typing import Self

from aiohttp import web

from hydra_engine.server.http.access import ACCESS
from hydra_engine.server.state import REQUEST_ID

logger = logging.getLogger(__name__)

STALL_S = 30.0  # a reader that takes nothing from a full buffer for this long is cut off
COMMENT = b": keep-alive\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def send_parts(request: web.Request, parts: Iterable[bytes], headers: Mapping[str, str]) -> web.StreamResponse:
    """Sends a whole JSON answer of unknown length. Raises ConnectionError like EventStream."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", **headers})
    await response.prepare(request)
    for part in parts:
        await write_within(request, response.write(part), STALL_S)
        request[ACCESS].bytes_out += len(part)
        await asyncio.sleep(0)  # writes to a fast reader do not yield to the loop by themselves
    await write_within(request, response.write_eof(), STALL_S)
    return response


async def write_within(request: web.Request, writing: Awaitable[None], limit_s: float) -> None:
    """Awaits `writing`; aborts the connection if its reader blocks it for longer than `limit_s`. Raises
    ConnectionAbortedError then."""
    try:
        async with asyncio.timeout(limit_s):
            await writing
    except TimeoutError:
        logger.warning("%s slow_reader: cut off, nothing was read for %g s", request[REQUEST_ID], limit_s)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionAbortedError("the reader was too slow") from None


class EventStream:
    """An event stream, kept alive with comments during its `async with`. Raises ConnectionError if the reader has gone
    or does not read."""

    def __init__(self, request: web.Request, *, keepalive_s: float, stall_s: float | None = None) -> None:
        self._request = request
        self._access = request[ACCESS]
        self._stall_s = STALL_S if stall_s is None else stall_s
        self._keepalive_s = keepalive_s
        self._response = web.StreamResponse(headers=_HEADERS)
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._transport: asyncio.Transport | None = None  # set from the headers to the end, if the answer is chunked
        self._num_sending = 0
        self._last_write_s = 0.0
        self._keeper: asyncio.Task[None] | None = None

    @property
    def has_started(self) -> bool:
        return self._response.prepared

    async def __aenter__(self) -> Self:
        self._last_write_s = self._loop.time()
        if self._keepalive_s > 0:
            self._keeper = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._transport = None
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])

    async def send(self, data: bytes) -> None:
        """Sends `data`, which holds complete events."""
        if self.is_free:
            self.send_now(data)
            return
        self._num_sending += 1
        try:
            async with self._lock:
                await self._write(data)
        finally:
            self._num_sending -= 1

    async def send_parts(self, parts: Iterable[bytes]) -> None:
        """Sends the parts of complete events; other tasks run between two parts."""
        self._num_sending += 1
        try:
            async with self._lock:
                for part in parts:
                    await self._write(part)
                    await asyncio.sleep(0)
        finally:
            self._num_sending -= 1

    @property
    def is_free(self) -> bool:
        """True if a write would not wait: headers are sent, no other write runs or waits (a released lock is free
        before the next task has it), and the reader has taken what was sent."""
        transport = self._transport
        return (
            transport is not None
            and not transport.get_write_buffer_size()
            and not transport.is_closing()
            and not self._num_sending
        )

    def send_now(self, data: bytes) -> None:
        """Like `send`, but only while `is_free`: writes to the transport directly, without waiting. If the reader does
        not take the data, the next write waits."""
        assert self._transport is not None
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        self._access.bytes_out += len(data)
        self._last_write_s = self._loop.time()

    async def finish(self, last: bytes) -> web.StreamResponse:
        """Ends the stream with the event `last`; empty for none."""
        async with self._lock:
            if last:
                await self._write(last)
            await self._end()
        return self._response

    async def fail(self, last: bytes) -> web.StreamResponse:
        """Ends the stream with the error event `last` and closes the connection."""
        self._response.force_close()
        with contextlib.suppress(ConnectionError):
            async with self._lock:
                await self._write(last)
                await self._end()
        return self._response

    async def _keep_alive(self) -> None:
        loop = self._loop
        while True:
            quiet_s = loop.time() - self._last_write_s
            if quiet_s < self._keepalive_s:
                await asyncio.sleep(self._keepalive_s - quiet_s)
            elif self._lock.locked():  # a write waits for the reader: a comment would only queue after it
                await asyncio.sleep(self._keepalive_s)
            else:
                try:
                    await self.send(COMMENT)
                except ConnectionError:
                    return  # the handler learns it from its own write or is cancelled

    async def _write(self, data: bytes) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
            if self._response.headers.get("Transfer-Encoding") == "chunked":  # not with HTTP/1.0
                self._transport = self._request.transport
        await write_within(self._request, self._response.write(data), self._stall_s)
        self._access.bytes_out += len(data)
        self._last_write_s = self._loop.time()

    async def _end(self) -> None:
        await write_within(self._request, self._response.write_eof(), self._stall_s)
