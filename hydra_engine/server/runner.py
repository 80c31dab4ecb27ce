"""Sockets and signals: binds before the model loads, serves, drains, ends.

Does not know routes or what is served; loading and closing the engine are the caller's two functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from hydra_engine.config import ServerConfig, environment_admin_key, environment_api_keys
from hydra_engine.core.outputs import Result
from hydra_engine.server import access, tracing
from hydra_engine.server.app import furnish, open_house
from hydra_engine.server.auth import KeyRing, Keys
from hydra_engine.server.commons import OwnCommons
from hydra_engine.server.context import Lifecycle
from hydra_engine.server.cors import is_loopback
from hydra_engine.server.front_workers import FrontWorkers, Logging
from hydra_engine.server.listening import CLOSE_S, SWITCH_S, bind, listen
from hydra_engine.server.port import OwnEngine

logger = logging.getLogger(__name__)
request_log = logging.getLogger("hydra_engine.requests")

_WATCH_S = 0.5
_SERVING_THRESHOLD = 700  # new objects until the collector looks; the command line raises it for the start


class Door(Protocol):
    """What takes connections: this process, or its front workers."""

    @property
    def url(self) -> str: ...

    @property
    def addresses(self) -> list[str]: ...

    async def wait_open(self) -> None:
        """Until connections are taken. Raises ResourceError when there will be none."""
        ...

    @property
    def lost(self) -> bool:
        """No connection will ever be taken again."""
        ...

    async def close(self) -> None: ...


async def serve(
    engine: OwnEngine,
    config: ServerConfig,
    *,
    start: Callable[[], Awaitable[None]],
    stop: Callable[[], Awaitable[None]],
    ready: Callable[[str], None] | None = None,
    model_name: str | None = None,
    debug_endpoints: bool = False,
    log_level: str = "info",
    log_format: str = "text",
) -> int:
    """Serves until a signal or the engine's end; the exit code of the process. Call it on the main thread.

    The port is bound first, so a wrong one fails in no time and health answers while `start` loads the model.
    `ready` gets the URL once requests are served; `stop` is called whatever ends the serving. The first SIGTERM or
    SIGINT drains, the second ends at once, a third one meets the system's default. SIGHUP reads the file of API keys
    again, if there is one. What is said of the log is for front workers, which set it up themselves.
    """
    house, commons, keys = open_house(engine, config, model_name=model_name, debug_endpoints=debug_endpoints)
    door: Door
    if config.front_workers:
        if config.otlp_endpoint is not None:
            tracing.check(config.otlp_endpoint)
        bound = await bind(config.host, config.port)
        door = workers = FrontWorkers(engine, config, house, commons, keys, bound, Logging(log_level, log_format))
        workers.start()
        reload = workers.reload_keys
    else:
        if config.access_log != "off":
            access.turn_on(config.access_log)
        door = await listen(furnish(engine, config, house), config.host, config.port)
        reload = keys.reload
    signals = _Signals()
    sys.setswitchinterval(SWITCH_S)
    try:
        _warn_of_exposure(door, keys, config)
        with signals.installed(), _reloading(keys, reload):
            return await _run(engine, config, commons, door, signals, start, ready)
    finally:
        try:
            await door.close()
        finally:
            await stop()


def _warn_of_exposure(door: Door, keys: Keys, config: ServerConfig) -> None:
    if not keys.asks and not all(is_loopback(address) for address in door.addresses):
        logger.warning(
            "%s is reachable from other machines and asks for no API key; see --api-key-file, or --host 127.0.0.1",
            door.url,
        )
    given = {*config.api_key, config.admin_key} - {*environment_api_keys(), environment_admin_key(), None}
    if given:
        logger.warning(
            "a key was given on the command line or in the file of --config, where others may read it; "
            "--api-key-file, HYDRA_API_KEY and HYDRA_ADMIN_KEY are safer"
        )


@contextlib.contextmanager
def _reloading(keys: KeyRing, reload: Callable[[], None]) -> Iterator[None]:
    if not keys.has_file:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


async def _run(
    engine: OwnEngine,
    config: ServerConfig,
    commons: OwnCommons,
    door: Door,
    signals: _Signals,
    start: Callable[[], Awaitable[None]],
    ready: Callable[[str], None] | None,
) -> int:
    if not await _load(start, door, signals):
        return 0
    gc.collect()
    gc.freeze()  # full collections pass over what has been loaded, which would take them a tenth of a second
    gc.set_threshold(_SERVING_THRESHOLD)
    engine.add_observer(commons.metrics.observe)
    if config.enable_log_requests:
        request_log.setLevel(logging.INFO)  # asked for by name, whatever the level of the rest
        engine.add_observer(_log_request)
    logger.info("ready on %s", door.url)
    if ready is not None:
        ready(door.url)
    if not await _until_signal_or_loss(engine, door, signals):
        what = "front workers" if door.lost else "instances of a stage"
        logger.error("the %s have ended for good; the server ends too", what)
        await asyncio.sleep(CLOSE_S)  # clients are told, and health says it once more
        return 1
    return await _drain(commons.lifecycle, config.shutdown_timeout_s, signals)


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


async def _load(start: Callable[[], Awaitable[None]], door: Door, signals: _Signals) -> bool:
    """False when a signal came first."""

    async def load() -> None:
        await start()
        await door.wait_open()

    loading = asyncio.create_task(load())
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


async def _until_signal_or_loss(engine: OwnEngine, door: Door, signals: _Signals) -> bool:
    """False when the engine can serve no more. One instance that ends is no reason: it is started again."""
    while not (engine.lost or door.lost) and engine.health()[1] != "closed":
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
            await asyncio.wait({idle, again}, timeout=CLOSE_S, return_when=asyncio.FIRST_COMPLETED)
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
