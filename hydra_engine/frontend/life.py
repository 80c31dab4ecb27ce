"""The life of an engine: start, end, and an event loop on its own thread for callers that have another loop or none."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar

from hydra_engine.cluster.supervisor import Ahead
from hydra_engine.config import EngineConfig
from hydra_engine.core.roles import Topology
from hydra_engine.core.sampling import GenerationDefaults
from hydra_engine.errors import EngineClosed
from hydra_engine.frontend.frontend import Frontend
from hydra_engine.frontend.handle import Owner
from hydra_engine.frontend.progress import LoadProgress
from hydra_engine.models.specs.generation import read_generation
from hydra_engine.preprocess.model_files import find_model_files
from hydra_engine.preprocess.text.template_files import read_template

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_S = 1.0  # after the end, for tasks that are about to notice it


class LoopThread:
    """An event loop on its own thread; runs until `end`, independent of the caller's loop."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._ending: Future[None] | None = None
        self._thread = threading.Thread(target=_run, args=(self.loop,), name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """True on the loop's own thread, which must not block for itself."""
        return self._thread is threading.current_thread()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Blocks for the coroutine's result; an interrupt cancels it. Raises RuntimeError on the loop's own thread."""
        if self.is_current:
            coroutine.close()
            raise RuntimeError("blocking calls cannot run on the engine's own loop; use the async form")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `last`, stops the loop and joins the thread. A second caller waits for the same end."""
        with self._lock:
            if self._ending is None:
                self._ending = asyncio.run_coroutine_threadsafe(last(), self.loop)
                self._ending.add_done_callback(lambda _: self.loop.call_soon_threadsafe(self.loop.stop))
        try:
            self._ending.result()
        finally:
            self._thread.join()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop until it is stopped, then cleans up as `asyncio.run` does: on this thread, since a thread that runs
    another loop cannot. Joins the executor without a new thread, which Python 3.12 refuses at interpreter exit."""
    executor = ThreadPoolExecutor(thread_name_prefix="hydra-engine")
    loop.set_default_executor(executor)
    asyncio.set_event_loop(loop)
    loop.run_forever()
    for cancels in (False, True):
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            if cancels and not task.cancelling():
                task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=None if cancels else GRACE_S))
    loop.run_until_complete(loop.shutdown_asyncgens())
    executor.shutdown()
    loop.close()


class EngineLife:
    """The part of `Engine` beside its calls: configuration, start, the loop, close."""

    _loop: asyncio.AbstractEventLoop | None = None  # runs the whole frontend
    _thread: LoopThread | None = None  # runs the loop, unless the caller does

    def _prepare(self, config: EngineConfig, *, processes: bool, ahead: Ahead | None = None) -> None:
        self._owner = Owner()
        self.config = config = find_model_files(config)
        if config.chat_template is not None:
            read_template(config.chat_template)  # raises before gigabytes are read
        self.created = int(time.time())
        self._processes = processes or len(Topology.parse(config.topology).instances) > 1
        self._ahead = ahead
        self._frontend: Frontend | None = None
        self._closed = False
        use_file = config.generation_config == "auto"
        found = read_generation(config.model_path, config.override_generation_config, use_file=use_file)
        self.default_sampling_params, rules, unfollowed = found
        self._defaults = GenerationDefaults(found.sampling.max_tokens, rules)
        if unfollowed:
            logger.warning(
                "the model's generation settings %s are not followed; answers may differ from those of transformers",
                ", ".join(unfollowed),
            )

    def _start_on_thread(self, progress: bool | None) -> None:
        self._thread = LoopThread("hydra-engine")
        self._loop = self._thread.loop
        atexit.register(self.close)
        try:
            self._wait(self._start(progress))
        except BaseException:
            self.close()
            raise

    async def astart(self, progress: bool | None = None, tell: Callable[[str], None] | None = None) -> None:
        """Starts on the running loop. `tell` receives a line per phase if there are no bars."""
        self._loop = asyncio.get_running_loop()
        await self._start(progress, tell)

    async def _start(self, progress: bool | None, tell: Callable[[str], None] | None = None) -> None:
        self._frontend = Frontend(self.config, processes=self._processes, defaults=self._defaults, ahead=self._ahead)
        with LoadProgress(progress, tell) as bar:
            await self._frontend.start(bar.update)

    @property
    def frontend(self) -> Frontend:
        """The running frontend. Raises EngineClosed after the engine's end and in a forked child."""
        self._owner.check()
        if self._closed or self._frontend is None:
            raise EngineClosed("the engine is closed; make a new Engine")
        return self._frontend

    # ---- one loop, any caller

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the engine's loop and blocks for it. Not from that loop."""
        assert self._thread is not None
        return self._thread.run(coroutine)

    async def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the engine's loop and awaits it from any loop."""
        assert self._loop is not None
        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    # ---- end

    def close(self) -> None:
        """Ends running requests with EngineClosed and frees everything. Idempotent and thread-safe; a second caller
        waits for the same end. No-op in a forked child and after `astart` (use `aclose`). Raises RuntimeError on the
        engine's own loop."""
        if self._thread is None or not self._owner.is_here:
            return
        if self._thread.is_current:
            raise RuntimeError("the engine cannot be closed from its own loop; close it from another thread")
        self._closed = True
        try:
            self._thread.end(self._close_frontend)
        finally:
            atexit.unregister(self.close)

    async def aclose(self) -> None:
        """Does what `close` does, without blocking the caller's loop."""
        if not self._owner.is_here:
            return
        if self._thread is not None:
            await asyncio.to_thread(self.close)
        elif not self._closed:
            self._closed = True
            await self._close_frontend()

    async def _close_frontend(self) -> None:
        if self._frontend is not None:
            await self._frontend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
