"""Sockets and connections: serves an application on an address.

New connections are accepted while places are free (`state.py:Places`), and wait while there are no file descriptors.
Their bytes are parsed a piece at a time, in rotation, and up to a limit per turn of the event loop, so that no input
can block other connections for longer. A line costs far more than a byte, because each header, each chunk and each end
of one is a line. Does not know routes, signals or what is served.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.web_protocol import RequestHandler

from hydra_engine.errors import InvalidRequest, RequestFailed, ResourceError
from hydra_engine.server.http import answers
from hydra_engine.server.http.answers import COMMENT, STREAM, error_response, from_http
from hydra_engine.server.state import PLACES, Episode, Places

logger = logging.getLogger(__name__)

# ---- turns of parsing

PIECE_BYTES = 8 << 10
_LINES_A_TURN = 4096  # per turn; about five milliseconds of one-byte chunks
_BYTES_A_LINE = 1024  # plain bytes that count as one line


class ReadingTurns:
    """Shared turns of the connections of one server, on one event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Connection, None] = OrderedDict()  # longest waiting first
        self._left = _LINES_A_TURN
        self._is_turn = False  # the next turn is scheduled

    def may_parse(self) -> bool:
        """True if a connection that is not in the queue may parse in this turn."""
        return self._left > 0 and not self._waiting

    def count(self, piece: bytes) -> None:
        """Counts a piece that is about to be parsed."""
        self._left -= 1 + piece.count(b"\n") + len(piece) // _BYTES_A_LINE
        self._ask_for_next()

    def enqueue(self, source: Connection) -> None:
        """Queues a connection for its next piece. Idempotent until its turn."""
        self._waiting.setdefault(source)
        self._ask_for_next()

    def discard(self, source: Connection) -> None:
        self._waiting.pop(source, None)

    def _ask_for_next(self) -> None:
        if not self._is_turn:
            self._is_turn = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Runs the next turn: one piece of each waiting connection, until the limit."""
        self._is_turn, self._left = False, _LINES_A_TURN
        while self._left > 0 and self._waiting:
            source, _ = self._waiting.popitem(last=False)
            if source.parse_piece():
                self._waiting[source] = None
        if self._waiting:
            self._ask_for_next()


# ---- connections

SWITCH_S = 0.001  # a computing thread, such as one that parses a large body, yields to the loop within this
CLOSE_S = 2.0  # time to send the last answers after a drain

_IDLE_S = 75.0  # an idle connection is closed after this
_HEADERS_S = 20.0  # a connection whose headers are not complete within this is closed
_SPARE_HEADERS_S = 2.0  # the same on a spare place
_SLOWEST_READER = 16 << 10  # bytes a second at which a whole answer must leave, besides STALL_S
_READ_AHEAD_BYTES = 64 << 10  # of a body, before the handler reads it
_ANSWERED_S = 0.02  # most requests are answered within this; only then is a half-closed connection probed
_LOOK_S = 0.03
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"  # clients skip it, however often it comes
_LINGER_S = 2.0  # the rest of a refused body is dropped for this long, so that the client sees the answer
_MAX_HEADER_BYTES = 16 << 10
_MAX_FRAMING_BYTES = 32 << 10  # sizes, extensions and ends of chunks; plus as many as the body has
_RECEIVED_AT_ONCE = 64 << 10  # bytes received at once and held until they are parsed
_BACKLOG = 1024


class Connection(RequestHandler):
    """aiohttp's connection, with our messages for invalid HTTP and with parsing in turns. Closes connections that do
    not send their headers, send hardly anything but chunk sizes, or do not read their answers. None of that takes a
    place in the engine.

    A client that has sent its requests may close its side of the connection and read on (RFC 9112, 9.6), which looks as
    if it had gone. To tell the two apart the server sends it something: a client that has gone resets the connection.
    """

    __slots__ = (
        *("_body", "_body_wire_bytes", "_gone_timer", "_half_closed", "_headers_timer"),
        *("_num_answered", "_num_parsed", "_places", "_turns", "_unparsed"),
    )

    def __init__(self, manager: web.Server, places: Places, turns: ReadingTurns, **options: Any) -> None:
        super().__init__(manager, **options)
        self._headers_timer: asyncio.TimerHandle | None = None
        self._gone_timer: asyncio.TimerHandle | None = None
        self._half_closed = False
        self._places = places
        self._turns = turns
        self._unparsed = b""  # received bytes; the first `_num_parsed` of them are parsed, the rest wait for a turn
        self._num_parsed = 0
        self._num_answered = 0
        self._body: StreamReader | None = None  # body of the latest request
        self._body_wire_bytes = 0  # bytes of its chunks on the wire, from the piece after its headers on

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.max_size = _RECEIVED_AT_ONCE  # type: ignore[attr-defined]  # of asyncio's own transports
        super().connection_made(transport)
        self._places.add(self)
        if self._places.is_spare(self):
            self._lingering_time = 0.0
        self._expect_headers()

    # ---- what the client sends, a piece at a time

    def data_received(self, data: bytes) -> None:
        if not data:  # called to go on after a pause
            super().data_received(data)
        elif self._unparsed or len(data) > PIECE_BYTES or not self._turns.may_parse():
            self._unparsed += data
            while self._turns.may_parse() and self.parse_piece():
                pass
        else:
            self._parse(data)
        if self._unparsed:
            if not self._buffer_paused:
                self._pause_reading_for_buffer()
            if not self._is_held:
                self._turns.enqueue(self)

    def parse_piece(self) -> bool:
        """Parses one piece of the unparsed bytes. True if more could be parsed now."""
        end = self._num_parsed + PIECE_BYTES
        piece = self._unparsed[self._num_parsed : end]
        if end >= len(self._unparsed):
            self._unparsed, end = b"", 0
        self._num_parsed = end
        self._parse(piece)
        if self._unparsed:
            return not self._is_held
        if self._buffer_paused:
            self._resume_reading_if_drained()
        return False

    @property
    def _is_held(self) -> bool:
        """True until the queued requests or parts of a body have been consumed; nothing more is parsed before."""
        return self._reading_paused or len(self._messages) >= self._max_msg_queue_size

    def _resume_reading_if_drained(self) -> None:
        if self._unparsed:
            self._turns.enqueue(self)
        else:
            super()._resume_reading_if_drained()

    def _parse(self, piece: bytes) -> None:
        self._turns.count(piece)
        num_requests = self._request_count
        super().data_received(piece)
        if self._request_count != num_requests:
            self._body = self._messages[-1][1]
            self._body_wire_bytes = 0 if self._body.is_eof() else self._body.total_bytes
        elif self._body is not None and not self._body.is_eof():
            self._body_wire_bytes += len(piece)
            if self._body_wire_bytes > _MAX_FRAMING_BYTES + 2 * self._body.total_bytes:
                self._refuse(self._body)
        if self._waiter is None or self._waiter.done():
            self._places.mark_busy(self)
            self._stop_timer()  # headers are here, or a request is being answered
        elif self._headers_timer is None:
            self._expect_headers()

    def _refuse(self, body: StreamReader) -> None:
        """Fails a body of too many tiny chunks, and stops reading it and what may follow it."""
        if self._num_answered < self._request_count:  # else the rest is read and dropped
            body.set_exception(
                InvalidRequest(
                    "the chunks of the request body are too small or their extensions too long; send larger ones"
                )
            )
        body.feed_eof()
        self._unparsed, self._num_parsed = b"", 0
        self._close = True

    # ---- the end of a connection

    def connection_lost(self, exc: BaseException | None) -> None:
        self._places.discard(self)
        self._turns.discard(self)
        self._unparsed = b""
        self._stop_timer()
        if self._gone_timer is not None:
            self._gone_timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio lets it say that the transport stays open
        is_busy = bool(self._messages) or self._num_answered < self._request_count
        if is_busy and not self._half_closed:
            self._half_closed = True
            self._gone_timer = asyncio.get_running_loop().call_later(_ANSWERED_S, self._probe)
        return is_busy

    def _probe(self) -> None:
        """Sends bytes that change no answer, to find out if the client has gone."""
        request = self._current_request
        if request is None or self.transport is None:
            pass
        elif not request.content.is_eof() or request.version < HttpVersion11:
            self.close_at_once()  # half a body, or a client without support for interim answers
        elif not request.writer.output_size:
            self.transport.write(_INTERIM)
        elif (stream := request.get(STREAM)) is not None and stream.is_free:
            stream.send_now(COMMENT)
        self._look()

    def _look(self) -> None:
        """Checks until the answer is finished whether the client has reset the connection."""
        self._gone_timer = None
        if self.transport is None:
            return
        if self._waiter is not None and not self._messages:
            self.force_close()  # all is answered
        elif self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.close_at_once()
        else:
            self._gone_timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def close_at_once(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _expect_headers(self) -> None:
        limit_s = _SPARE_HEADERS_S if self._places.is_spare(self) else _HEADERS_S
        self._headers_timer = asyncio.get_running_loop().call_later(limit_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _give_up(self) -> None:
        self._headers_timer = None
        if self._waiter is not None and not self._waiter.done():
            self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends a whole answer; a stream has been sent by now (`answers.py` cuts slow readers off)."""
        if isinstance(resp, web.HTTPException):  # aiohttp's own, for an Expect header
            resp = error_response(from_http(resp), request=request)
        if (self._close or self._places.is_spare(self)) and not resp.prepared:
            resp.force_close()
        limit_s = answers.STALL_S + (resp.content_length or 0) / _SLOWEST_READER
        try:
            async with asyncio.timeout(limit_s):
                finished = await super().finish_response(request, resp, start_time)
        except TimeoutError:
            logger.warning("slow_reader: cut off, an answer was not read within %g s", limit_s)
            self.close_at_once()
            return resp, True
        self._num_answered += 1
        if not self._messages:
            self._places.mark_idle(self)
            if self._half_closed:
                self.close()
        return finished

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError) or request.writer.output_size > 0:
            raise ConnectionError("the client has gone") from exc
        if status < 500:
            response = error_response(InvalidRequest("the request is not valid HTTP or its headers are too large"))
        else:
            logger.error("an answer could not be sent", exc_info=exc)
            response = error_response(RequestFailed("internal error"))
        response.force_close()
        return response


# ---- accepting

_CLOSED_AT_ONCE = 16
_WAIT_S = 0.05  # until the next try, when there are no descriptors
_NOT_NOW = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """An acceptor of connections on listening sockets, which it owns."""

    def __init__(self, sockets: Iterable[socket.socket], make: Callable[[], asyncio.Protocol], places: Places) -> None:
        self.sockets = tuple(sockets)
        self._make = make
        self._places = places
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._short = Episode()

    def start(self) -> None:
        self._pause = None
        for sock in self.sockets:
            self._loop.add_reader(sock, self._accept, sock)

    def close(self) -> None:
        """Stops accepting and closes the sockets. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        for task in self._opening:
            task.cancel()
        for sock in self.sockets:
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock)
            sock.close()

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(self._places.num_spare):  # in one turn of the loop, so refused ones are closed by the next
            try:
                connection, _ = sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue  # its client has disconnected
            except OSError as error:
                if error.errno not in _NOT_NOW:
                    raise
                self._wait(error)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, connection)
        except OSError as error:
            logger.debug("a connection ended before it began: %s", error)
            connection.close()

    def _wait(self, error: OSError) -> None:
        """Pauses accepting until there are descriptors again; new connections wait in the system's queue."""
        self._short.warn("new connections wait: %s; idle ones are closed to make room", (error.strerror or "").lower())
        for sock in self.sockets:
            self._loop.remove_reader(sock)
        self._places.close_idle(_CLOSED_AT_ONCE)
        self._pause = self._loop.call_later(_WAIT_S, self.start)


async def bind(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Opens sockets that listen on all addresses of the host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError:
                continue  # the system has no such addresses
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(backlog)
            sock.setblocking(False)
        if not sockets:
            raise OSError(errno.EAFNOSUPPORT, "no address can be listened on")
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


# ---- serving


@dataclass(frozen=True, slots=True)
class Listening:
    """A running application on an address."""

    runner: web.AppRunner
    acceptor: Acceptor
    url: str

    @property
    def addresses(self) -> list[str]:
        return [str(sock.getsockname()[0]) for sock in self.acceptor.sockets]

    async def close(self) -> None:
        """Closes idle connections at once and busy ones after `CLOSE_S`."""
        self.acceptor.close()
        await self.runner.cleanup()


async def listen(app: web.Application, host: str, port: int) -> Listening:
    """Starts serving on the address. Raises ResourceError if it cannot be bound."""
    places = app[PLACES]
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_S)
    await runner.setup()
    assert runner.server is not None
    connection = partial(
        Connection,
        runner.server,
        places,
        ReadingTurns(),
        loop=asyncio.get_running_loop(),
        auto_decompress=False,  # a small compressed body must not become a large one
        keepalive_timeout=_IDLE_S,
        lingering_time=_LINGER_S,
        read_bufsize=_READ_AHEAD_BYTES,
        max_line_size=_MAX_HEADER_BYTES,
        max_field_size=_MAX_HEADER_BYTES,
        logger=logger,
        access_log=None,  # turns it off
    )
    try:
        sockets = await bind(host, port, _BACKLOG)
    except OSError as error:
        await runner.cleanup()
        raise ResourceError(f"cannot listen on {host}:{port}: {_why(error)}", param="port") from error
    acceptor = Acceptor(sockets, connection, places)
    acceptor.start()
    return Listening(runner, acceptor, _url(host, sockets[0].getsockname()[1]))


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "no such host"
    return str(error) if error.errno is None else os.strerror(error.errno).lower()


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
