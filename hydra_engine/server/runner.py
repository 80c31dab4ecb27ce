"""Sockets and signals: binds before the model loads, serves, drains, ends.

Does not know routes or what is served; loading and closing the engine are the caller's two functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from hydra_engine.config import ServerConfig, environment_admin_key, environment_api_keys
from hydra_engine.core.outputs import Result
from hydra_engine.errors import InvalidRequest, RequestFailed, ResourceError
from hydra_engine.server import access, sse
from hydra_engine.server.app import build_app
from hydra_engine.server.auth import KEYS, KeyRing
from hydra_engine.server.context import LIFECYCLE, METRICS, Lifecycle
from hydra_engine.server.cors import is_loopback
from hydra_engine.server.errors import error_response
from hydra_engine.server.port import EnginePort

logger = logging.getLogger(__name__)
request_log = logging.getLogger("hydra_engine.requests")

_IDLE_S = 75.0  # an idle connection is closed after this
_HEADERS_S = 20.0  # one whose first or next headers do not come in full
_SLOWEST_READER = 16 << 10  # bytes a second at which a whole answer must leave, besides STALL_S
_READ_AHEAD_BYTES = 64 << 10  # of a body that nobody has asked for yet
_LINGER_S = 2.0  # how long the rest of a refused body is read and dropped so that the client sees the answer
_CLOSE_S = 2.0  # what the last answers get for leaving after a drain
_MAX_HEADER_BYTES = 16 << 10
_MAX_CONNECTIONS = 4096
_BACKLOG = 1024
_WATCH_S = 0.5
_SWITCH_S = 0.001  # a thread that computes, such as one that parses a large body, lets the loop go on within this


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
    """An application on a socket."""

    runner: web.AppRunner
    server: asyncio.Server
    url: str

    async def close(self) -> None:
        """Ends idle connections at once and busy ones after a moment."""
        self.server.close()
        await self.runner.cleanup()


async def listen(app: web.Application, host: str, port: int) -> Listening:
    """Raises ResourceError when the address cannot be had."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_CLOSE_S)
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

    try:
        server = await loop.create_server(connection, host, port, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        await runner.cleanup()
        raise ResourceError(f"cannot listen on {host}:{port}: {_why(error)}", param="port") from error
    bound_port = server.sockets[0].getsockname()[1]
    return Listening(runner, server, f"http://{_url_host(host)}:{bound_port}")


async def serve(
    engine: EnginePort,
    config: ServerConfig,
    *,
    start: Callable[[], Awaitable[None]],
    stop: Callable[[], Awaitable[None]],
    ready: Callable[[str], None] | None = None,
    model_name: str | None = None,
    debug_endpoints: bool = False,
) -> int:
    """Serves until a signal or the engine's end; the exit code of the process. Call it on the main thread.

    The port is bound first, so a wrong one fails in no time and health answers while `start` loads the model.
    `ready` gets the URL once requests are served; `stop` is called whatever ends the serving. The first SIGTERM or
    SIGINT drains, the second ends at once, a third one meets the system's default. SIGHUP reads the file of API keys
    again, if there is one.
    """
    if config.access_log != "off":
        access.turn_on(config.access_log)
    app = build_app(engine, config, model_name=model_name, debug_endpoints=debug_endpoints)
    listening = await listen(app, config.host, config.port)
    signals = _Signals()
    sys.setswitchinterval(_SWITCH_S)
    try:
        _warn_of_exposure(listening, app[KEYS], config)
        with signals.installed(), _reloading(app[KEYS]):
            return await _run(engine, config, app, listening, signals, start, ready)
    finally:
        try:
            await listening.close()
        finally:
            await stop()


def _warn_of_exposure(listening: Listening, keys: KeyRing, config: ServerConfig) -> None:
    addresses = [str(sock.getsockname()[0]) for sock in listening.server.sockets]
    if not keys.asks and not all(is_loopback(address) for address in addresses):
        logger.warning(
            "%s is reachable from other machines and asks for no API key; see --api-key-file, or --host 127.0.0.1",
            listening.url,
        )
    given = {*config.api_key, config.admin_key} - {*environment_api_keys(), environment_admin_key(), None}
    if given:
        logger.warning(
            "a key was given on the command line or in the file of --config, where others may read it; "
            "--api-key-file, HYDRA_API_KEY and HYDRA_ADMIN_KEY are safer"
        )


@contextlib.contextmanager
def _reloading(keys: KeyRing) -> Iterator[None]:
    if not keys.has_file:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, keys.reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


async def _run(
    engine: EnginePort,
    config: ServerConfig,
    app: web.Application,
    listening: Listening,
    signals: _Signals,
    start: Callable[[], Awaitable[None]],
    ready: Callable[[str], None] | None,
) -> int:
    if not await _load(start, signals):
        return 0
    gc.collect()
    gc.freeze()  # full collections pass over what has been loaded, which would take them a tenth of a second
    engine.add_observer(app[METRICS].observe)
    if config.enable_log_requests:
        request_log.setLevel(logging.INFO)  # asked for by name, whatever the level of the rest
        engine.add_observer(_log_request)
    logger.info("ready on %s", listening.url)
    if ready is not None:
        ready(listening.url)
    if not await _until_signal_or_loss(engine, signals):
        logger.error("the instances of a stage have ended for good; the server ends too")
        await asyncio.sleep(_CLOSE_S)  # clients are told, and health says it once more
        return 1
    return await _drain(app[LIFECYCLE], config.shutdown_timeout_s, signals)


def _log_request(result: Result) -> None:
    """Sizes and times only: neither the prompt nor the answer."""
    usage, metrics = result.usage, result.metrics
    request_log.info(
        "%s %s: %d prompt tokens (%d of images), %d tokens out, first after %s s, %.3f s in all",
        result.request_id,
        result.finish_reason.value,
        usage.prompt_tokens,
        usage.image_tokens,
        usage.completion_tokens,
        "-" if metrics.ttft_s is None else f"{metrics.ttft_s:.3f}",
        metrics.e2e_s,
    )


async def _load(start: Callable[[], Awaitable[None]], signals: _Signals) -> bool:
    """False when a signal came first."""
    loading = asyncio.ensure_future(start())
    interrupted = asyncio.create_task(signals.first.wait())
    try:
        await asyncio.wait({loading, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return False
        await loading
        return True
    finally:
        for task in (loading, interrupted):
            task.cancel()
        await asyncio.gather(loading, interrupted, return_exceptions=True)


async def _until_signal_or_loss(engine: EnginePort, signals: _Signals) -> bool:
    """False when the engine can serve no more. One instance that ends is no reason: it is started again."""
    while not engine.lost and engine.health()[1] != "closed":
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signals.first.wait(), _WATCH_S)
            return True
    return False


async def _drain(lifecycle: Lifecycle, timeout_s: float, signals: _Signals) -> int:
    """Refuses new requests, waits for the running ones, then ends them with an error."""
    lifecycle.draining = True
    logger.info("shutting down: %d requests may still finish, for at most %g s", lifecycle.num_running, timeout_s)
    idle = asyncio.create_task(lifecycle.wait_idle())
    again = asyncio.create_task(signals.second.wait())
    try:
        await asyncio.wait({idle, again}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        lifecycle.expire()
        if signals.second.is_set():
            logger.warning("second signal: ending at once")
            return 128 + (signals.number or 0)
        if not idle.done():
            logger.warning("%d requests did not finish in time", lifecycle.num_running)
            await asyncio.wait({idle, again}, timeout=_CLOSE_S, return_when=asyncio.FIRST_COMPLETED)
        return 0
    finally:
        idle.cancel()
        again.cancel()
        await asyncio.gather(idle, again, return_exceptions=True)


class _Signals:
    """The first and the second SIGTERM or SIGINT as events."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.number: int | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            self._remove()

    def _on_signal(self, number: int) -> None:
        self.number = number
        if self.first.is_set():
            self.second.set()
            self._remove()
        self.first.set()

    def _remove(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _why(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno).lower()
    return "not a port number"


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
