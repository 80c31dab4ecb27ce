"""Fair turns: the rule by which clients share a resource that they wait for.

While a job is the next one of its client, at most one job of each other client starts before it; of the clients that
may start, the one with the least used time is first. So no client waits longer because another sends many jobs, and a
client with long jobs delays mainly itself. Does not know what the jobs are.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hydra_engine.errors import Unavailable

HALF_LIFE_S = 60.0  # after which a client's used time counts half
MAX_CLIENTS = 10_000  # clients remembered at once

J = TypeVar("J")


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

    def running(self, client: str) -> int:
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
        if (
            self._num_free and not self._queue.has_waiting(client) and self._may_begin(client)
        ):  # clients that wait may not begin
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
        num_running = self._queue.running(client)
        return not self._keeps_free or not num_running or num_running < self._num_free
