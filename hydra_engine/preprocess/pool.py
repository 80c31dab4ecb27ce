"""A pool of threads for work that must not run on the event loop, which clients take in turn, with a bound on how much
may wait.

Decoding and tokenising release the interpreter lock for most of their time. Does not know what the work is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from hydra_engine.core.fairness.turns import Turns
from hydra_engine.errors import EngineClosed

T = TypeVar("T")


class WorkerPool:
    """Owned by one event loop. `close` drops what waits and does not wait for what runs."""

    def __init__(self, name: str, *, num_workers: int, max_waiting: int, of: str) -> None:
        """`of` names, in the plural, what is worked on. `max_waiting` of all clients, half of it of one alone."""
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix=name)
        self._threads = Turns(of, num_places=num_workers, max_waiting=max_waiting)
        self._waits: set[asyncio.Timeout] = set()
        self._closed = False

    async def run(self, client: str, work: Callable[..., T], *args: object) -> T:
        """The result of `work(*args)` in a thread. Cancelling takes waiting work out of the queue; running work goes on
        unheard and keeps its thread. Raises Unavailable when the queue is full."""
        await self._take_thread(client)
        job = self._executor.submit(work, *args)
        job.add_done_callback(partial(self._on_done, asyncio.get_running_loop(), client, time.monotonic()))
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        self._closed = True
        self._executor.shutdown(wait=False)
        for wait in self._waits:
            wait.reschedule(0.0)
        self._waits.clear()

    async def _take_thread(self, client: str) -> None:
        if self._closed:
            raise _closed()
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    await self._threads.take(client)
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            raise _closed() from None
        if self._closed:  # at the moment when it was given one
            self._threads.give_back(client, 0.0)
            raise _closed()

    def _on_done(self, loop: asyncio.AbstractEventLoop, client: str, begun_s: float, _job: Future[T]) -> None:
        """In the thread that has become free."""
        with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            loop.call_soon_threadsafe(self._threads.give_back, client, time.monotonic() - begun_s)


def _closed() -> EngineClosed:
    return EngineClosed("the engine was closed before the request was read")
