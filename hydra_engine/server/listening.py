"""Sockets and connections: an application on an address of its own, or on sockets that several processes share.

Does not know routes, signals or what is served.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from hydra_engine.errors import InvalidRequest, RequestFailed, ResourceError
from hydra_engine.server import sse
from hydra_engine.server.errors import error_response

logger = logging.getLogger(__name__)

SWITCH_S = 0.001  # a thread that computes, such as one that parses a large body, lets the loop go on within this
CLOSE_S = 2.0  # what the last answers get for leaving after a drain

_IDLE_S = 75.0  # an idle connection is closed after this
_HEADERS_S = 20.0  # one whose first or next headers do not come in full
_SLOWEST_READER = 16 << 10  # bytes a second at which a whole answer must leave, besides STALL_S
_READ_AHEAD_BYTES = 64 << 10  # of a body that nobody has asked for yet
_LINGER_S = 2.0  # how long the rest of a refused body is read and dropped so that the client sees the answer
_MAX_HEADER_BYTES = 16 << 10
_MAX_CONNECTIONS = 4096  # of one process
_BACKLOG = 1024
_PAUSE_S = 1.0  # before connections are taken again when there were no descriptors left
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Connection(RequestHandler):
    """aiohttp's connection with our words for what is not HTTP, a cap on their number, and an end to those that do not
    send their headers or do not read their answers. None of that holds a place in the engine."""

    __slots__ = ("_headers_timer",)

    _headers_timer: asyncio.TimerHandle | None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._headers_timer = None
        super().connection_made(transport)
        self._expect_headers()
        assert self._manager is not None
        if len(self._manager.connections) > _MAX_CONNECTIONS:
            logger.warning("closing a new connection: %d are open", _MAX_CONNECTIONS)
            self.force_close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._waiter is None or self._waiter.done():
            self._stop_timer()  # headers are here, or a request is being answered
        elif self._headers_timer is None:
            self._expect_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._headers_timer = asyncio.get_running_loop().call_later(_HEADERS_S, self._give_up)

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
        """A stream has sent all by now (`sse.py` cuts slow readers off); a whole answer leaves here."""
        limit_s = sse.STALL_S + (resp.content_length or 0) / _SLOWEST_READER
        try:
            async with asyncio.timeout(limit_s):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            logger.warning("slow_reader: cut off, an answer was not read within %g s", limit_s)
            if self.transport is not None:
                self.transport.abort()
            return resp, True

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


@dataclass(frozen=True, slots=True)
class Listening:
    """An application on an address."""

    runner: web.AppRunner
    server: asyncio.Server
    url: str

    @property
    def addresses(self) -> list[str]:
        return [str(sock.getsockname()[0]) for sock in self.server.sockets]

    async def wait_open(self) -> None:
        """It is from the start, and stays so."""

    @property
    def lost(self) -> bool:
        return False

    async def close(self) -> None:
        """Ends idle connections at once and busy ones after a moment."""
        self.server.close()
        await self.runner.cleanup()


async def listen(app: web.Application, host: str, port: int) -> Listening:
    """Raises ResourceError when the address cannot be had."""
    runner, connection = await _ready_to_serve(app)
    try:
        server = await asyncio.get_running_loop().create_server(connection, host, port, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        await runner.cleanup()
        raise _unavailable(host, port, error) from error
    return Listening(runner, server, _url(host, server.sockets[0].getsockname()[1]))


# ---- one address, several processes


@dataclass(frozen=True, slots=True)
class Bound:
    """Sockets that listen and from which others take the connections."""

    sockets: Sequence[socket.socket]
    url: str = ""

    @property
    def addresses(self) -> list[str]:
        return [str(sock.getsockname()[0]) for sock in self.sockets]

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


async def bind(host: str, port: int) -> Bound:
    """The sockets that `listen` would have. Raises ResourceError."""
    try:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
    except (OSError, OverflowError) as error:
        raise _unavailable(host, port, error) from error
    bound = Bound([socket.socket(fileno=os.dup(one.fileno())) for one in server.sockets])
    server.close()
    try:
        for sock in bound.sockets:
            sock.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise _unavailable(host, port, error) from error
    return replace(bound, url=_url(host, bound.sockets[0].getsockname()[1]))


class Sharing:
    """An application on sockets that other processes take connections from, too: one in a turn of the loop, so that a
    burst spreads over those who have time."""

    def __init__(self, runner: web.AppRunner, connection: Callable[[], Connection], sockets: Sequence[socket.socket]):
        self._runner = runner
        self._connection = connection
        self._sockets = sockets
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._take()

    @classmethod
    async def open(cls, app: web.Application, sockets: Sequence[socket.socket]) -> Sharing:
        runner, connection = await _ready_to_serve(app)
        for sock in sockets:
            sock.setblocking(False)
        return cls(runner, connection, sockets)

    async def close(self) -> None:
        """Takes no more; ends idle connections at once and busy ones after a moment."""
        self._stop()
        await self._runner.cleanup()

    def _take(self) -> None:
        self._pause = None
        for sock in self._sockets:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _stop(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was faster, or the client has gone
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            logger.warning("no connection can be taken: %s", os.strerror(error.errno).lower())
            self._stop()
            self._pause = self._loop.call_later(_PAUSE_S, self._take)
            return
        sock.setblocking(False)
        arriving = self._loop.create_task(self._loop.connect_accepted_socket(self._connection, sock))
        self._arriving.add(arriving)
        arriving.add_done_callback(self._arrived)

    def _arrived(self, arriving: asyncio.Task[object]) -> None:
        self._arriving.discard(arriving)
        if not arriving.cancelled() and (error := arriving.exception()) is not None:
            logger.info("a connection was lost as it came: %s", error)


# ---- inside


async def _ready_to_serve(app: web.Application) -> tuple[web.AppRunner, Callable[[], Connection]]:
    """The second makes the protocol of one connection."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_S)
    await runner.setup()
    manager = runner.server
    assert manager is not None
    loop = asyncio.get_running_loop()

    def connection() -> Connection:
        return Connection(
            manager,
            loop=loop,
            auto_decompress=False,  # a small compressed body must not become a large one
            keepalive_timeout=_IDLE_S,
            lingering_time=_LINGER_S,
            read_bufsize=_READ_AHEAD_BYTES,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
            logger=logger,
            access_log=None,  # type: ignore[arg-type]  # None turns it off; the annotation forgets that
        )

    return runner, connection


def _unavailable(host: str, port: int, error: Exception) -> ResourceError:
    return ResourceError(f"cannot listen on {host}:{port}: {_why(error)}", param="port")


def _why(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno).lower()
    return "not a port number"


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
