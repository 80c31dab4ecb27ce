"""Encodes and sends answers: JSON with long lists in slices, and server-sent events.

A mark replaces each long list in the text around it, and the list's entries are made and encoded a slice at a time: the
text is never complete in memory, and the event loop runs between two slices.

Headers of a stream wait for the first event or the first comment, so an error before either is still a plain status. An
error after them is one event (`errors.py`) and the end of the connection, without `[DONE]`: OpenAI's clients raise on
`data: {"error": ...}` and read no further, and a client that ignores it sees a stream that did not end properly. Does
not know what an answer holds or what its events mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from hydra_engine.core.schemas.numbers import encode_long
from hydra_engine.server.loggers import ACCESS
from hydra_engine.server.state import REQUEST_ID

logger = logging.getLogger(__name__)

# ---- JSON

ENTRIES = 64  # per slice; with twenty candidates each, they take about a millisecond
# JSON never contains this byte: strings escape it.
_MARK = re.compile(rb"\x00([0-9]+)\x00")
_encode = msgspec.json.Encoder(enc_hook=encode_long).encode


class Slices:
    """The long lists of one answer; for a stream, across several of its events."""

    def __init__(self) -> None:
        self._lists: list[Callable[[], Iterable[object]]] = []
        self._num_made = 0  # entries since the last encoding

    def defer(self, num_entries: int, entries: Callable[[], Iterable[object]]) -> Any:
        """Returns a placeholder for the list, for a struct that `encode` gets; the list itself if it and those before
        it are short. `entries` is called each time the list is written."""
        if self._num_made + num_entries <= ENTRIES:
            self._num_made += num_entries
            return list(entries())
        self._lists.append(entries)
        return msgspec.Raw(b"\x00%d\x00" % (len(self._lists) - 1))

    def encode(self, answer: msgspec.Struct) -> bytes | Iterator[bytes]:
        """The encoded answer; an iterator of its parts if it has long lists."""
        return self.fill(_encode(answer))

    def fill(self, data: bytes) -> bytes | Iterator[bytes]:
        """Writes the deferred lists into an answer that is already JSON; returns what `encode` returns."""
        self._num_made = 0
        around = _MARK.split(data) if self._lists else [data]
        return self._parts(around) if len(around) > 1 else data

    def _parts(self, around: list[bytes]) -> Iterator[bytes]:
        for place, piece in enumerate(around):
            if place % 2:
                yield from _written(self._lists[int(piece)]())
            else:
                yield piece


def _written(entries: Iterable[object]) -> Iterator[bytes]:
    opening, left = b"[", iter(entries)
    while part := list(islice(left, ENTRIES)):
        yield opening + _one_line(_encode(part))[1:-1]
        opening = b","
    yield b"]" if opening == b"," else b"[]"


# ---- events


def event(data: bytes, name: str = "") -> bytes:
    """A server-sent event; OpenAI's events have no name."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _one_line(data) + b"\n\n"


# Line ends for Python's str.splitlines, which many clients use, but not for server-sent events.
_SEPARATORS = [(character.encode(), b"\\u%04x" % ord(character)) for character in "\x85\u2028\u2029"]


def _one_line(data: bytes) -> bytes:
    """Escapes line separators in JSON, which some clients take for line ends. Control characters are escaped
    already."""
    if not data.isascii():
        for character, escaped in _SEPARATORS:
            data = data.replace(character, escaped)
    return data


def json_event(data: msgspec.Struct) -> bytes:
    """A server-sent event, named by the tag of its data if that has one."""
    tag = data.__struct_config__.tag
    return event(_encode(data), tag if isinstance(tag, str) else "")


DONE = event(b"[DONE]")


# (index of the choice, its text, `usage`) -> the chunk
MakeChunk = Callable[[int, Any, Any], msgspec.Struct]


class TextEvents:
    """An encoder for the events of one stream that are only text, from bytes that are made once.

    Only the text and, with a running count, the usage differ from one such event to the next; the bytes around them
    come from encoding the struct once, so the result equals its full encoding. `make` must put the text and the usage
    unchanged into one field each.
    """

    def __init__(self, make: MakeChunk) -> None:
        self._make = make
        self._around: dict[tuple[int, object], tuple[bytes, bytes]] = {}
        self._around_usage: dict[int, tuple[bytes, bytes, bytes]] = {}

    def event(self, index: int, text: str, usage: Any) -> bytes:
        """Encodes one event. `usage` is a struct, None or UNSET."""
        if isinstance(usage, msgspec.Struct):
            head, middle, tail = self._around_usage.get(index) or self._cut_twice(index)
            return b"".join((head, _one_line(_encode(text)), middle, _encode(usage), tail))
        head, tail = self._around.get((index, usage)) or self._cut(index, usage)
        return b"".join((head, _one_line(_encode(text)), tail))

    def _cut(self, index: int, usage: Any) -> tuple[bytes, bytes]:
        around = _halves(*(event(_encode(self._make(index, value, usage))) for value in (1, 2)))
        self._around[index, usage] = around
        return around

    def _cut_twice(self, index: int) -> tuple[bytes, bytes, bytes]:
        head, rest = _halves(*(event(_encode(self._make(index, value, 1))) for value in (1, 2)))
        other = event(_encode(self._make(index, 1, 2)))
        middle, tail = _halves(rest, other[len(head) + 1 :])
        self._around_usage[index] = head, middle, tail
        return head, middle, tail


def _halves(first: bytes, second: bytes) -> tuple[bytes, bytes]:
    """The bytes before and after the only byte in which `first` and `second` differ."""
    place = next(place for place, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
    assert first[place + 1 :] == second[place + 1 :], "the values are in several places"
    return first[:place], first[place + 1 :]


# ---- sending

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
        """Sends a chunk without waiting, allowed only while `is_free`: writes to the transport directly. If the reader
        does not take the data, the next write waits."""
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
