"""A pool of threads for work that must not run on the event loop, with a bound on how much may wait.

Decoding and tokenising release the interpreter lock for most of their time. Does not know what the work is.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from hydra_engine.errors import EngineClosed, Unavailable

T = TypeVar("T")


class WorkerPool:
    """Owned by one event loop. `close` drops what waits and does not wait for what runs."""

    def __init__(self, name: str, *, num_workers: int, max_waiting: int, of: str) -> None:
        """`of` names, in the plural, what is worked on."""
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix=name)
        self._max_jobs = num_workers + max_waiting
        self._num_jobs = 0
        self._of = of
        self._closed = False
        self._lock = threading.Lock()

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """The result of `work(*args)` in a thread. Cancelling takes waiting work out of the queue; running work goes on
        unheard. Raises Unavailable when the queue is full."""
        if self._closed:
            raise _closed()
        with self._lock:
            if self._num_jobs >= self._max_jobs:
                raise Unavailable(f"too many {self._of} are waiting to be read; try again later")
            self._num_jobs += 1
        job = self._executor.submit(work, *args)
        job.add_done_callback(self._on_done)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():  # it was the work that was dropped
                raise _closed() from None
            raise

    def close(self) -> None:
        self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _on_done(self, job: Future[T]) -> None:
        with self._lock:
            self._num_jobs -= 1


def _closed() -> EngineClosed:
    return EngineClosed("the engine was closed before the request was read")
