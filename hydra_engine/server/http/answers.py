"""Encodes and sends answers: JSON with long lists in slices, server-sent events, and errors as either.

A mark replaces each long list in the text around it, and the list's entries are made and encoded a slice at a time: the
text is never complete in memory, and the event loop runs between two slices.

Exceptions become HTTP here and nowhere else: a status before the first byte of an answer, an event after it. Headers of
a stream wait for the first event or the first comment, so an error before either is still a plain status. An error
after them is one event and the end of the connection, without `[DONE]`: OpenAI's clients raise on
`data: {"error": ...}` and read no further, and a client that ignores it sees a stream that did not end properly. Bodies
of errors have OpenAI's shape, under /v1/messages Anthropic's: the style follows the route. An endpoint whose streams
end in their own event sets `FAILURE`. Does not know what a request or an answer means.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.typedefs import Handler

from hydra_engine.core.schemas.numbers import encode_long
from hydra_engine.errors import (
    ExpectationFailed,
    HydraError,
    InvalidApiKey,
    InvalidRequest,
    PayloadTooLarge,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
    Unavailable,
    UnsupportedMediaType,
)
from hydra_engine.server.http.routes import no_such_route, wrong_method
from hydra_engine.server.loggers import ACCESS, PROBES, has_anthropic_style, route_of
from hydra_engine.server.state import PLACES, REQUEST_ID, STATE

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


# ---- errors

_MAX_MESSAGE = 500
_REFUSALS = frozenset({401, 408, 413, 415, 429, 503})  # by the server's state or its limits, not by the request

_BY_STATUS: dict[int, tuple[type[HydraError], str]] = {
    408: (RequestTimeout, "the request did not arrive in time"),
    413: (PayloadTooLarge, "the request body is larger than this server accepts"),
    415: (UnsupportedMediaType, "the request body has a type that this server does not read"),
    417: (ExpectationFailed, "of the Expect header this server knows 100-continue only; leave it out"),
}


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorBody


STREAM = web.RequestKey("stream", EventStream)  # set once its status is sent
FAILURE = web.RequestKey[Callable[[HydraError], bytes]]("failure")  # the last event of a stream that fails


def error_body(error: HydraError) -> ErrorBody:
    message = " ".join(error.message.split())
    if len(message) > _MAX_MESSAGE:
        message = message[: _MAX_MESSAGE - 1] + "…"
    return ErrorBody(message, error.error_type, error.param, error.code)


def error_json(error: HydraError) -> bytes:
    return msgspec.json.encode(ErrorAnswer(error_body(error)))


# ---- Anthropic's shape

AnthropicErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
]
_ANTHROPIC_TYPES: dict[int, AnthropicErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    type: AnthropicErrorType
    message: str


class AnthropicErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorBody
    request_id: str | None


def _anthropic_json(error: HydraError, request_id: str | None) -> bytes:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = AnthropicErrorBody(kind, error_body(error).message)
    return msgspec.json.encode(AnthropicErrorAnswer(error=body, request_id=request_id))


# ---- errors as answers


def _last_event(request: web.Request, error: HydraError) -> bytes:
    if FAILURE in request:
        return request[FAILURE](error)
    if has_anthropic_style(request.path):
        return event(_anthropic_json(error, request.get(REQUEST_ID)), "error")
    return event(error_json(error))


def error_response(
    error: HydraError, headers: Mapping[str, str] | None = None, request: web.BaseRequest | None = None
) -> web.Response:
    """An error as an answer, in the style of the route of `request` (OpenAI's for None)."""
    if request is not None and has_anthropic_style(request.path):
        body = _anthropic_json(error, request.get(REQUEST_ID))
    else:
        body = error_json(error)
    response = web.Response(status=error.status, body=body, content_type="application/json")
    response.headers.update(headers or {})
    if error.status in (429, 503):
        response.headers["Retry-After"] = str(error.retry_after_s or 1)
    if isinstance(error, InvalidApiKey):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    headers: dict[str, str] = {}
    try:
        _check_connection(request)
        return await handler(request)
    except web.HTTPException as exception:
        error = from_http(exception, request)
        if "Allow" in exception.headers:
            headers["Allow"] = exception.headers["Allow"]
    except RequestAborted as exception:
        error = exception  # ended by its id, while its client still waits for it
        headers["X-Should-Retry"] = "false"  # read by OpenAI's and Anthropic's clients
    except HydraError as exception:
        error = exception
        if error.status >= 500 and request.method == "POST":
            # Not logged here: a drain logs their number, and `Places` logs that all are taken.
            is_told = error.code == "draining" or request.app[PLACES].is_spare(request.protocol)
            level = logging.INFO if is_told else logging.WARNING
            logger.log(level, "%s %d %s: %s", request[REQUEST_ID], error.status, error.code, error.message)
    except asyncio.CancelledError:
        logger.info("%s 499 the client has gone", request[REQUEST_ID])
        raise
    except ConnectionError as exception:
        logger.info("%s 499 %s", request[REQUEST_ID], exception)
        return web.Response(status=499)
    except Exception:  # the server's boundary: a bug fails only this request and is logged
        logger.exception("%s 500 unexpected error", request[REQUEST_ID])
        error = RequestFailed("internal error; the server's log has the details under this request's id")
    if ACCESS in request:
        request[ACCESS].error_code = error.code
    if error.status in _REFUSALS and request.method == "POST":
        request.app[STATE].metrics.traffic.count_refusal(error.code)
    stream: EventStream | None = request.get(STREAM)
    if stream is not None and stream.has_started:
        return await stream.fail(_last_event(request, error))
    return error_response(error, headers, request)


def _check_connection(request: web.Request) -> None:
    """Raises InvalidRequest for another HTTP version, and Unavailable on a spare connection for anything but health
    probes."""
    if request.version not in (HttpVersion10, HttpVersion11):
        raise InvalidRequest("this server speaks HTTP/1.1 and HTTP/1.0")
    if request.app[PLACES].is_spare(request.protocol) and route_of(request) not in PROBES:
        raise Unavailable("too many connections are open; try again later", retry_after_s=2)


def from_http(exception: web.HTTPException, request: web.Request | None = None) -> HydraError:
    """The error for an exception of aiohttp's; `request` is the routed request that raised it, if there is one."""
    if request is not None and exception.status == 404:
        return no_such_route(request)
    if isinstance(exception, web.HTTPMethodNotAllowed):
        return wrong_method(exception)
    if exception.status in _BY_STATUS:
        kind, message = _BY_STATUS[exception.status]
        return kind(message)
    if exception.status < 500:
        return InvalidRequest("the HTTP request is malformed")
    return RequestFailed("internal error")
