"""Sockets and signals: binds before the model loads, serves, drains, ends.

Does not know routes or what is served; the caller passes functions that load and close the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from hydra_engine import log
from hydra_engine.config import ServerConfig, environment_admin_key, environment_api_keys
from hydra_engine.core.outputs import Result
from hydra_engine.entry_points import load_entry_points
from hydra_engine.errors import ConfigError
from hydra_engine.server import loggers
from hydra_engine.server.app import build_app
from hydra_engine.server.http.access_control import KEYS, KeyRing, is_loopback
from hydra_engine.server.http.listening import CLOSE_S, SWITCH_S, Listening, listen
from hydra_engine.server.port import EnginePort
from hydra_engine.server.state import STATE, Lifecycle, ServerState

logger = logging.getLogger(__name__)
request_log = logging.getLogger("hydra_engine.requests")

_WATCH_S = 0.5
_SERVING_THRESHOLD = 700  # allocations per young collection; the command line raises it for the start


class Recording(Protocol):
    """Writes the requests of an engine to a file. The entry point `workload` in the group `hydra_engine.recordings` is
    called with the file's path, and raises ConfigError."""

    def start(self, engine: Any) -> None:
        """Records requests from now on. Runs on the engine's loop."""
        ...

    def close(self) -> None:
        """Writes the rest, after the engine has closed."""
        ...


async def serve(
    engine: EnginePort,
    config: ServerConfig,
    *,
    start: Callable[[], Awaitable[None]],
    stop: Callable[[], Awaitable[None]],
    ready: Callable[[str], None] | None = None,
    model_name: str | None = None,
) -> int:
    """Serves until a signal or the engine's end; returns the exit code of the process. Call it on the main thread.

    The port is bound first, so a wrong one fails at once and health answers while `start` loads the model. `ready` gets
    the URL once requests are served; `stop` is always called at the end. The first SIGTERM or SIGINT drains, the second
    ends at once, a third has the system's default effect. SIGHUP reads the file of API keys again, if there is one, and
    never ends the server.
    """
    app = build_app(engine, config, model_name=model_name)
    if config.access_log != "off":
        loggers.enable_access_log(config.access_log)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _on_hangup, app[KEYS])
    listening = await listen(app, config.host, config.port)
    signals, recording = _Signals(), None
    sys.setswitchinterval(SWITCH_S)
    try:
        if config.record_workload is not None:
            recording = _open_recording(Path(config.record_workload))
        _warn_of_exposure(listening, app[KEYS], config)
        with signals.installed():
            return await _run(engine, config, app[STATE], listening.url, signals, start, ready, recording)
    finally:
        try:
            await listening.close()
        finally:
            await stop()
            if recording is not None:
                recording.close()


def _open_recording(path: Path) -> Recording:
    open_at: Callable[[Path], Recording] | None = load_entry_points("hydra_engine.recordings").get("workload")
    if open_at is None:
        raise ConfigError(
            "record_workload is not in this installation; install hydra-engine anew", param="record_workload"
        )
    return open_at(path)


def _warn_of_exposure(listening: Listening, keys: KeyRing, config: ServerConfig) -> None:
    if not keys.requires_key and not all(is_loopback(address) for address in listening.addresses):
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


async def _run(
    engine: EnginePort,
    config: ServerConfig,
    state: ServerState,
    url: str,
    signals: _Signals,
    start: Callable[[], Awaitable[None]],
    ready: Callable[[str], None] | None,
    recording: Recording | None,
) -> int:
    if not await _load(start, signals):
        return 0
    gc.collect()
    gc.freeze()  # full collections skip what has been loaded; scanning it would take a tenth of a second
    gc.set_threshold(_SERVING_THRESHOLD)
    engine.add_observer(state.metrics.requests.add)
    if config.enable_log_requests:
        request_log.setLevel(logging.INFO)  # has its own option, regardless of the log level
        engine.add_observer(_log_request)
    if recording is not None:
        recording.start(engine)
    logger.info("ready on %s", url)
    if ready is not None:
        ready(url)
    lines = contextlib.nullcontext() if config.disable_log_stats else loggers.load_lines(engine)
    async with lines:
        well = await _until_signal_or_loss(engine, signals)
    if not well:
        logger.error("the instances of a stage have ended for good; the server ends too")
        await asyncio.sleep(CLOSE_S)  # clients get their errors, and health shows the loss
        return 1
    return await _drain(state.lifecycle, config.shutdown_timeout_s, signals)


def _log_request(result: Result) -> None:
    """Logs sizes and times, never the prompt or the answer."""
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
    """Loads the engine; False if a signal came first."""

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
    """Waits; True for a signal, False if the engine can serve no more. A single lost instance is restarted and does not
    count."""
    while not engine.lost and engine.health()[1] != "closed":
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signals.first.wait(), _WATCH_S)
            return True
    return False


async def _drain(lifecycle: Lifecycle, timeout_s: float, signals: _Signals) -> int:
    """Refuses new requests, waits up to `timeout_s` for the running ones, then ends them with an error. Returns the
    exit code."""
    lifecycle.draining = True
    if lifecycle.num_running:
        how = "Ctrl-C again" if signals.number == signal.SIGINT else "a second signal"
        log.log_always(f"shutting down: {timeout_s:g} s for {_running(lifecycle)} to end; {how} ends at once")
    idle = asyncio.create_task(lifecycle.wait_idle())
    again = asyncio.create_task(signals.second.wait())
    try:
        await asyncio.wait({idle, again}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        lifecycle.expire()
        if signals.second.is_set():
            logger.warning("second signal: ending at once, without %s", _running(lifecycle))
            return 128 + (signals.number or 0)
        if not idle.done():
            logger.warning("%s did not finish in time", _running(lifecycle))
            await asyncio.wait({idle, again}, timeout=CLOSE_S, return_when=asyncio.FIRST_COMPLETED)
        return 0
    finally:
        idle.cancel()
        again.cancel()
        await asyncio.gather(idle, again, return_exceptions=True)


def _running(lifecycle: Lifecycle) -> str:
    return f"{lifecycle.num_running} request{'s' * (lifecycle.num_running != 1)}"


def _on_hangup(keys: KeyRing) -> None:
    if keys.has_file:
        keys.reload()
    else:
        logger.warning("SIGHUP changes nothing: it reads --api-key-file again, and there is none")


class _Signals:
    """Events for the first and the second SIGTERM or SIGINT."""

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
