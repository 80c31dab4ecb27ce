"""Resources that clients share, and fair rules for them: bytes, slots, threads.

`ByteBudget` bounds the bytes that clients make the process hold. What does not fit is refused at once instead of
waiting, so no holder ever waits for more.

`FairQueue` and `Turns` are the rule by which clients share a resource that they wait for: while a job is the next one
of its client, at most one job of each other client starts before it; of the clients that may start, the one with the
least used time is first. So no client waits longer because another sends many jobs, and a client with long jobs delays
mainly itself.

`WorkerPool` runs work that must not run on the event loop in threads, in fair turns, with a bounded queue. Decoding and
tokenising release the interpreter lock for most of their time; parsing does not.

Does not know what the bytes, jobs and work are.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from hydra_engine.errors import EngineClosed, Unavailable

HALF_LIFE_S = 60.0  # after which a client's used time counts half
MAX_CLIENTS = 10_000  # clients remembered at once

J = TypeVar("J")
T = TypeVar("T")


class ByteBudget:
    """A budget of `max_bytes` in which the leases of one client never hold more than they leave free: one client alone
    gets at most half, each of two a third, and a new client always finds space. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0
        self._held_by: dict[str, int] = {}  # bytes by client, without zeros

    def fits(self, num_bytes: int, client: str | None = None) -> bool:
        """True if `num_bytes` more fit. `client` None: only the total is checked, not a client's share."""
        left = self.max_bytes - self.held - num_bytes
        return left >= (0 if client is None else self._held_by.get(client, 0) + num_bytes)

    def lease(self, client: str | None = None) -> Lease:
        return Lease(self, client)

    def change(self, num_bytes: int, client: str | None) -> None:
        """Adds `num_bytes` (or subtracts, if negative). Called by leases only."""
        self.held += num_bytes
        if client is not None:
            now = self._held_by.get(client, 0) + num_bytes
            if now:
                self._held_by[client] = now
            else:
                self._held_by.pop(client, None)


class Lease:
    """The bytes that one user holds. `release` returns all of them and may be called again."""

    __slots__ = ("_budget", "client", "held")

    def __init__(self, budget: ByteBudget, client: str | None) -> None:
        self._budget = budget
        self.client = client
        self.held = 0

    def fits(self, num_bytes: int) -> bool:
        """True if `reserve` would succeed."""
        return self._budget.fits(num_bytes, self.client)

    def reserve(self, num_bytes: int) -> bool:
        """Takes bytes; False, and nothing taken, if they do not fit."""
        if not self.fits(num_bytes):
            return False
        self._budget.change(num_bytes, self.client)
        self.held += num_bytes
        return True

    def release(self) -> None:
        self._budget.change(-self.held, self.client)
        self.held = 0

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(slots=True)
class _Client(Generic[J]):
    jobs: deque[J] = field(default_factory=deque)
    next_since: int = 0  # tick of the queue at which its next job became the next
    begun_at: int = -1  # tick at which its latest job began
    used_s: float = 0.0
    used_at: float = 0.0
    num_running: int = 0  # jobs begun and not ended


class FairQueue(Generic[J]):
    """A queue of the jobs of many clients, for one thread at a time. A client's waiting jobs may be at most as many as
    the free places: one alone gets half of `max_waiting`, each of two a third, so a new client's first job always fits.
    """

    def __init__(self, noun: str, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`noun`: what waits, in the plural, for error messages. `max_waiting`: jobs of all clients."""
        self._noun = noun
        self._max_waiting = max_waiting
        self._clock = clock
        self._clients: OrderedDict[str, _Client[J]] = OrderedDict()
        self._waiting: OrderedDict[str, _Client[J]] = OrderedDict()  # by the wait of its next job, the longest first
        self._num_waiting = 0
        self._now = 0

    def __len__(self) -> int:
        return self._num_waiting

    def num_running(self, client: str) -> int:
        """Number of the client's jobs that have begun and not ended."""
        return self._clients[client].num_running if client in self._clients else 0

    def has_waiting(self, client: str) -> bool:
        """True if a job of the client waits."""
        return client in self._waiting

    def push(self, client: str, job: J) -> None:
        """Queues a job. Raises Unavailable if the queue, or the client's share of it, is full."""
        state = self._find(client)
        if self._max_waiting - self._num_waiting <= len(state.jobs):
            raise Unavailable(f"too many {self._noun} are waiting; try again later")
        state.jobs.append(job)
        self._num_waiting += 1
        if client not in self._waiting:
            self._wait(client, state)

    def pop(self, may_begin: Callable[[str], bool] = lambda _client: True) -> tuple[str, J] | None:
        """Begins the next job and returns (client, job); None if no client may begin. The caller must call `end` for
        it."""
        chosen = self._next(may_begin)
        if chosen is None:
            return None
        state = self._waiting.pop(chosen)
        job = state.jobs.popleft()
        self._num_waiting -= 1
        self.begin(chosen)
        if state.jobs:
            self._wait(chosen, state)
        return chosen, job

    def begin(self, client: str) -> None:
        """Begins a job that did not have to wait."""
        state = self._find(client)
        state.num_running += 1
        state.begun_at = self._tick()

    def end(self, client: str, used_s: float) -> None:
        """Ends a job that had begun, after `used_s` seconds."""
        state, now = self._clients[client], self._clock()
        state.num_running -= 1
        state.used_s, state.used_at = self._used(state, now) + used_s, now

    def remove(self, client: str, job: J) -> None:
        state = self._waiting[client]
        was_next = state.jobs[0] is job
        state.jobs.remove(job)
        self._num_waiting -= 1
        if was_next:
            del self._waiting[client]
            if state.jobs:
                self._wait(client, state)

    def _next(self, may_begin: Callable[[str], bool]) -> str | None:
        """The client whose job begins next: no client begins twice while another that may begin waits."""
        now, since, best, min_s = self._clock(), None, None, 0.0
        for client, state in self._waiting.items():
            if not may_begin(client):
                continue
            since = state.next_since if since is None else since
            if state.begun_at > since:
                continue
            used_s = self._used(state, now)
            if best is None or used_s < min_s:
                best, min_s = client, used_s
        return best

    def _used(self, state: _Client[J], now: float) -> float:
        return state.used_s * math.exp2((state.used_at - now) / HALF_LIFE_S)

    def _wait(self, client: str, state: _Client[J]) -> None:
        state.next_since = self._tick()
        self._waiting[client] = state

    def _tick(self) -> int:
        """Advances the logical clock that orders beginnings and waits; returns its time."""
        self._now += 1
        return self._now

    def _find(self, client: str) -> _Client[J]:
        state = self._clients.get(client)
        if state is None:
            state = self._clients[client] = _Client()
            if len(self._clients) > MAX_CLIENTS:
                self._forget()
        self._clients.move_to_end(client)
        return state

    def _forget(self) -> None:
        """Drops the client without jobs that was seen least recently. Clients with jobs are bounded by the number of
        jobs."""
        for client, state in self._clients.items():
            if not state.jobs and not state.num_running:
                del self._clients[client]
                return


class Turns:
    """Slots for a number of jobs at once, given to clients in turn, on one event loop. With `keeps_free` a client gets
    at most as many slots as it leaves free, but at least one: for jobs that wait for a third party, which may be slow.
    """

    def __init__(
        self,
        noun: str,
        *,
        num_slots: int,
        max_waiting: int,
        keeps_free: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`noun`: what waits, in the plural, for error messages. `num_slots`: jobs at once. `max_waiting`: waiting jobs
        of all clients."""
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(noun, max_waiting, clock)
        self._num_free = num_slots
        self._keeps_free = keeps_free
        self._clock = clock

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Holds a slot within the context. Raises Unavailable if too many jobs wait."""
        await self.acquire(client)
        begun_s = self._clock()
        try:
            yield
        finally:
            self.release(client, self._clock() - begun_s)

    async def acquire(self, client: str) -> None:
        """Waits for a slot, which the caller returns by `release`. Raises Unavailable if too many jobs wait."""
        # A slot is free beside waiting jobs only if their clients may not begin.
        if self._num_free and not self._queue.has_waiting(client) and self._may_begin(client):
            self._num_free -= 1
            self._queue.begin(client)
            return
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.push(client, given)
        try:
            await asyncio.shield(given)
        except asyncio.CancelledError:
            if given.done():
                self.release(client, 0.0)
            else:
                self._queue.remove(client, given)
            raise

    def release(self, client: str, used_s: float) -> None:
        """Returns a slot after `used_s` seconds of use."""
        self._queue.end(client, used_s)
        self._num_free += 1
        self._give_out()

    def _give_out(self) -> None:
        while self._num_free and (begun := self._queue.pop(self._may_begin)) is not None:
            self._num_free -= 1
            begun[1].set_result(None)

    def _may_begin(self, client: str) -> bool:
        num_running = self._queue.num_running(client)
        return not self._keeps_free or not num_running or num_running < self._num_free


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
