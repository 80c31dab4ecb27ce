"""A pool of threads for work that must not run on the event loop, shared by clients in fair turns, with a bounded
queue.

Decoding and tokenising release the interpreter lock for most of their time; parsing does not. Does not know what the
work is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from hydra_engine.core.fairness.turns import Turns
from hydra_engine.errors import EngineClosed

T = TypeVar("T")
_Place = tuple[Turns, str]  # (turns, client)


class WorkerPool:
    """A thread pool owned by one event loop. `close` drops waiting work and does not wait for running work."""

    def __init__(self, name: str, *, num_workers: int, max_waiting: int, noun: str) -> None:
        """`noun`: what is worked on, in the plural, for error messages. `max_waiting`: jobs of all clients; one client
        alone gets half of them."""
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix=name)
        self._threads = Turns(noun, num_slots=num_workers, max_waiting=max_waiting)
        self._waits: set[asyncio.Timeout] = set()
        self._closed = False

    async def run(self, client: str, work: Callable[..., T], *args: object, turns: Turns | None = None) -> T:
        """Runs `work(*args)` in a thread and returns its result. With `turns`, first takes a slot there, and returns
        both together. Cancelling removes waiting work from the queue; running work continues, its result is dropped,
        and it keeps its thread. Raises Unavailable if a queue is full, EngineClosed after `close`."""
        places = [(self._threads, client)]
        if turns is not None:  # waits beside the client's other work, so that it does not keep the place from others
            places = [(turns, client), (self._threads, f"{client}\0")]
        await self._take(places)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = self._executor.submit(work, *args)
        job.add_done_callback(partial(_in_thread, partial(_end, result, places, time.monotonic()), result.get_loop()))
        return await result

    def close(self) -> None:
        self._closed = True
        self._executor.shutdown(wait=False)
        for wait in self._waits:
            wait.reschedule(0.0)
        self._waits.clear()

    async def _take(self, places: Sequence[_Place]) -> None:
        """Takes all slots in order, or none if that fails. Raises EngineClosed also while it waits."""
        if self._closed:
            raise _closed()
        num_taken = 0
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                for turns, client in places:
                    await turns.acquire(client)
                    num_taken += 1
            if self._closed:  # closed just as it was given a slot
                raise _closed()
        except BaseException as error:
            _give_back(places[:num_taken], 0.0)
            if isinstance(error, TimeoutError):
                raise _closed() from None
            raise
        finally:
            self._waits.discard(wait)


def _in_thread(end: Callable[[Future[T]], None], loop: asyncio.AbstractEventLoop, job: Future[T]) -> None:
    """Calls `end` on the event loop when a job's thread is done."""
    with suppress(RuntimeError):  # the loop has ended, and with it the waiting caller
        loop.call_soon_threadsafe(end, job)


def _end(result: asyncio.Future[T], places: Sequence[_Place], begun_s: float, job: Future[T]) -> None:
    _give_back(places, time.monotonic() - begun_s)
    if result.done():  # the caller was cancelled
        return
    error = job.exception()
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(job.result())


def _give_back(places: Sequence[_Place], used_s: float) -> None:
    for turns, client in places:
        turns.release(client, used_s)


def _closed() -> EngineClosed:
    return EngineClosed("the engine was closed before the request was read")
