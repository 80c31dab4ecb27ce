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
    """A budget of `max_bytes`. The leases of a client may grow only while together they hold no more than stays free:
    one client alone gets at most half, and leaves as much to others. Leases without a client are bounded by the total
    alone. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0
        self._held_by: dict[str, int] = {}  # bytes by client, without zeros

    def fits(self, num_bytes: int, client: str | None = None) -> bool:
        """True if the client's leases may grow by `num_bytes`. `client` None: only the total is checked."""
        left = self.max_bytes - self.held - num_bytes
        return left >= (0 if client is None else self._held_by.get(client, 0) + num_bytes)

    def lease(self, client: str | None = None) -> Lease:
        """A new lease of the client, which holds nothing yet."""
        return Lease(self, client)

    def change(self, num_bytes: int, client: str | None) -> None:
        """Counts `num_bytes` more as held by the client, or fewer if negative, without a check. Called by leases
        only."""
        self.held += num_bytes
        if client is not None:
            now = self._held_by.get(client, 0) + num_bytes
            if now:
                self._held_by[client] = now
            else:
                self._held_by.pop(client, None)


class Lease:
    """Bytes of a ByteBudget that one job of a client holds. `release` and the end of the context return all of them and
    may be repeated."""

    __slots__ = ("_budget", "client", "held")

    def __init__(self, budget: ByteBudget, client: str | None) -> None:
        self._budget = budget
        self.client = client
        self.held = 0

    def fits(self, num_bytes: int) -> bool:
        """True if `reserve` would succeed."""
        return self._budget.fits(num_bytes, self.client)

    def reserve(self, num_bytes: int) -> bool:
        """Adds bytes to the lease. Returns False, and adds nothing, if they do not fit."""
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
    """A client of a FairQueue. Ticks are the queue's logical clock."""

    jobs: deque[J] = field(default_factory=deque)  # waiting, the next one first
    next_since: int = 0  # tick of the queue at which its next job became the next
    begun_at: int = -1  # tick at which its latest job began
    used_s: float = 0.0  # used time, as it counted at `used_at`
    used_at: float = 0.0
    num_running: int = 0  # jobs begun and not ended


class FairQueue(Generic[J]):
    """A queue of the jobs of many clients, in the order that the module describes. A client may queue a job only while
    more places are free than it has jobs waiting: one alone gets half of `max_waiting`, and others find places. Not
    thread-safe."""

    def __init__(self, noun: str, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`noun`: what waits, in the plural, for error messages. `max_waiting`: the most waiting jobs of all clients.
        `clock`: in seconds, for used times."""
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
        """True if a job of the client waits, begun ones not counted."""
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
        """Begins the next job and returns (client, job); None if no waiting client may begin. The caller must
        call `end` for it."""
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
        """Counts as begun a job that did not have to be queued. The caller must call `end` for it."""
        state = self._find(client)
        state.num_running += 1
        state.begun_at = self._tick()

    def end(self, client: str, used_s: float) -> None:
        """Ends a job that had begun and adds `used_s` seconds to the client's used time."""
        state, now = self._clients[client], self._clock()
        state.num_running -= 1
        state.used_s, state.used_at = self._used(state, now) + used_s, now

    def remove(self, client: str, job: J) -> None:
        """Removes a waiting job. If it was its client's next one, the job after it waits from now on. Raises KeyError
        or ValueError if it does not wait."""
        state = self._waiting[client]
        was_next = state.jobs[0] is job
        state.jobs.remove(job)
        self._num_waiting -= 1
        if was_next:
            del self._waiting[client]
            if state.jobs:
                self._wait(client, state)

    def _next(self, may_begin: Callable[[str], bool]) -> str | None:
        """The client whose job begins next; None if no waiting client may begin. Of those that may, and have begun no
        job since the longest waiting one of them started to wait, it is the one with the least used time."""
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
        """Used time of the client in seconds, each of which counts half after HALF_LIFE_S."""
        return state.used_s * math.exp2((state.used_at - now) / HALF_LIFE_S)

    def _wait(self, client: str, state: _Client[J]) -> None:
        """Appends the client to those that wait: its next job waits from now on."""
        state.next_since = self._tick()
        self._waiting[client] = state

    def _tick(self) -> int:
        """Advances the logical clock that orders beginnings and waits; returns its time."""
        self._now += 1
        return self._now

    def _find(self, client: str) -> _Client[J]:
        """The state of a client, which counts as the latest seen. For an unknown one it is new; beyond MAX_CLIENTS
        another client without jobs is dropped for it."""
        state = self._clients.get(client)
        if state is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._forget()
            state = self._clients[client] = _Client()
        self._clients.move_to_end(client)
        return state

    def _forget(self) -> None:
        """Drops the least recently seen client that has no job, and with it its used time; does nothing if all have
        jobs, whose number bounds the clients then."""
        for client, state in self._clients.items():
            if not state.jobs and not state.num_running:
                del self._clients[client]
                return


class Turns:
    """Slots for a number of jobs at once, given to clients in the order of a FairQueue, on one event loop. With
    `keeps_free` a client that has slots gets another only while more are free than it has: for jobs that wait for a
    third party, which may be slow."""

    def __init__(
        self,
        noun: str,
        *,
        num_slots: int,
        max_waiting: int,
        keeps_free: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`noun`: what waits, in the plural, for error messages. `num_slots`: jobs at once. `max_waiting`: the most
        waiting jobs of all clients; one client alone gets half of them. `clock`: in seconds, for used times."""
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(noun, max_waiting, clock)
        self._num_free = num_slots
        self._keeps_free = keeps_free
        self._clock = clock

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Waits for a slot and holds it within the context, whose duration counts as used time of the client. Raises
        Unavailable if too many jobs wait, in all or of this client."""
        await self.acquire(client)
        begun_s = self._clock()
        try:
            yield
        finally:
            self.release(client, self._clock() - begun_s)

    async def acquire(self, client: str) -> None:
        """Waits for a slot, which the caller must return by `release`; a cancelled call has none. Raises Unavailable if
        too many jobs wait, in all or of this client."""
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
        """Returns a slot, adds `used_s` seconds to the client's used time, and gives free slots to those who wait."""
        self._queue.end(client, used_s)
        self._num_free += 1
        self._give_out()

    def _give_out(self) -> None:
        """Gives free slots to waiting jobs that may begin."""
        while self._num_free and (begun := self._queue.pop(self._may_begin)) is not None:
            self._num_free -= 1
            begun[1].set_result(None)

    def _may_begin(self, client: str) -> bool:
        """True if `keeps_free` allows the client another slot; does not check that one is free."""
        num_running = self._queue.num_running(client)
        return not self._keeps_free or not num_running or num_running < self._num_free


_Place = tuple[Turns, str]  # (turns, client)


class WorkerPool:
    """A thread pool that one event loop owns; clients get its threads in fair turns."""

    def __init__(self, name: str, *, num_workers: int, max_waiting: int, noun: str) -> None:
        """`name`: prefix of thread names. `noun`: what is worked on, in the plural, for error messages. `max_waiting`:
        the most waiting jobs of all clients; one client alone gets half of them."""
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix=name)
        self._threads = Turns(noun, num_slots=num_workers, max_waiting=max_waiting)
        self._waits: set[asyncio.Timeout] = set()
        self._closed = False

    async def run(self, client: str, work: Callable[..., T], *args: object, turns: Turns | None = None) -> T:
        """Runs `work(*args)` in a thread and returns its result or raises its error. With `turns`, first waits for a
        slot there, which is held until the work ends. A cancelled call leaves the queue if it waits; work that runs
        continues in its thread, and its result is dropped. Raises Unavailable if too many jobs wait, in all or of
        this client, and EngineClosed after `close`, also while it waits."""
        places = [(self._threads, client)]
        if turns is not None:  # waits beside the client's other work, so that it does not keep the place from others
            places = [(turns, client), (self._threads, f"{client}\0")]
        await self._take(places)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = self._executor.submit(work, *args)
        job.add_done_callback(partial(_in_thread, partial(_end, result, places, time.monotonic()), result.get_loop()))
        return await result

    def close(self) -> None:
        """Makes calls whose work has not begun, and later ones, raise EngineClosed. Does not wait for running work."""
        self._closed = True
        self._executor.shutdown(wait=False)
        for wait in self._waits:
            wait.reschedule(0.0)
        self._waits.clear()

    async def _take(self, places: Sequence[_Place]) -> None:
        """Acquires a slot for each place, in order; if that fails, releases those that it has. Raises Unavailable if a
        queue is full, and EngineClosed if the pool is closed, also while it waits."""
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
    """Has the event loop call `end` with a job that has ended; called in the job's thread. Does nothing if the loop is
    closed."""
    with suppress(RuntimeError):  # the loop has ended, and with it the waiting caller
        loop.call_soon_threadsafe(end, job)


def _end(result: asyncio.Future[T], places: Sequence[_Place], begun_s: float, job: Future[T]) -> None:
    """Releases the slots of an ended job, used since `begun_s`, and sets `result` unless the caller was cancelled."""
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
