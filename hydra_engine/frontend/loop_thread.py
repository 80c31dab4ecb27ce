"""An event loop on a thread of its own, for callers that have another loop or none.

Does not know what runs on it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_S = 1.0  # after the end, for what is about to find out


class LoopThread:
    """Runs from the start until `end`, whatever the caller's own loop does."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self.loop,), name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """The caller is on this thread, and must not wait for it."""
        return self._thread is threading.current_thread()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Blocks for the result; an interrupt cancels it. Raises RuntimeError on the loop's own thread."""
        if self.is_current:
            coroutine.close()
            raise RuntimeError("blocking calls cannot run on the engine's own loop; use the async form")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def end(self, last: Coroutine[Any, Any, None]) -> Future[None]:
        """Runs `last` and then stops; to be called once, and `join` behind it."""
        future = asyncio.run_coroutine_threadsafe(last, self.loop)
        future.add_done_callback(lambda _: self.loop.call_soon_threadsafe(self.loop.stop))
        return future

    def join(self) -> None:
        """Blocks until the thread is gone."""
        self._thread.join()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Ends as `asyncio.run` does, on this thread, because a thread that runs another loop could not. Threads are
    waited for without starting one, which Python 3.12 refuses while the interpreter exits."""
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
