"""A pool of threads for work that must not run on the event loop, which clients take in turn, with a bound on how much
may wait.

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
_Place = tuple[Turns, str]  # and the client that it is taken for


class WorkerPool:
    """Owned by one event loop. `close` drops what waits and does not wait for what runs."""

    def __init__(self, name: str, *, num_workers: int, max_waiting: int, of: str) -> None:
        """`of` names, in the plural, what is worked on. `max_waiting` of all clients, half of it of one alone."""
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix=name)
        self._threads = Turns(of, num_places=num_workers, max_waiting=max_waiting)
        self._waits: set[asyncio.Timeout] = set()
        self._closed = False

    async def run(self, client: str, work: Callable[..., T], *args: object, turns: Turns | None = None) -> T:
        """The result of `work(*args)` in a thread. A place in `turns` is taken before a thread is, and given back with
        it. Cancelling takes waiting work out of the queue; running work goes on unheard and keeps its thread. Raises
        Unavailable when a queue is full."""
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
        if self._closed:
            raise _closed()
        num_taken = 0
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                for turns, client in places:
                    await turns.take(client)
                    num_taken += 1
            if self._closed:  # at the moment when it was given one
                raise _closed()
        except BaseException as error:
            _give_back(places[:num_taken], 0.0)
            if isinstance(error, TimeoutError):
                raise _closed() from None
            raise
        finally:
            self._waits.discard(wait)


def _in_thread(end: Callable[[Future[T]], None], loop: asyncio.AbstractEventLoop, job: Future[T]) -> None:
    with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
        loop.call_soon_threadsafe(end, job)


def _end(result: asyncio.Future[T], places: Sequence[_Place], begun_s: float, job: Future[T]) -> None:
    _give_back(places, time.monotonic() - begun_s)
    if result.done():  # nobody waits
        return
    error = job.exception()
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(job.result())


def _give_back(places: Sequence[_Place], used_s: float) -> None:
    for turns, client in places:
        turns.give_back(client, used_s)


def _closed() -> EngineClosed:
    return EngineClosed("the engine was closed before the request was read")
