"""Queues of requests in order of age, and for waiting requests also in order of urgency.

A request that returns (preempted, or its features evicted) keeps its age. An operation costs a binary search and the
move of a list's tail, however many requests wait. Does not know why a request is in a queue.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from hydra_engine.core.state import Order, RequestState, Urgency


class ArrivalQueue:
    """A queue of requests, iterated from the oldest to the youngest. It may change during an iteration by `by_age` or
    `by_urgency` only."""

    __slots__ = ("_by_order", "_orders")

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._by_order: dict[Order, RequestState] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def __contains__(self, state: RequestState) -> bool:
        return state.order in self._by_order

    def __iter__(self) -> Iterator[RequestState]:
        return map(self._by_order.__getitem__, self._orders)

    def by_age(self) -> Iterator[RequestState]:
        """Yields the oldest first. The queue may change meanwhile: a request pushed behind the latest one yielded is
        still yielded, one pushed before it is not."""
        index = 0
        while index < len(self._orders):
            order = self._orders[index]
            yield self._by_order[order]
            index = bisect_right(self._orders, order)

    def push(self, state: RequestState) -> None:
        """Adds a request at the place of its age. Asserts that it is not queued already."""
        assert state not in self, "a request is queued twice"
        self._by_order[state.order] = state
        if not self._orders or state.order > self._orders[-1]:
            self._orders.append(state.order)
        else:
            insort(self._orders, state.order)

    def discard(self, state: RequestState) -> None:
        """Removes the request if present."""
        if state in self:
            del self._by_order[state.order]
            del self._orders[bisect_left(self._orders, state.order)]

    def oldest(self) -> RequestState | None:
        return self._by_order[self._orders[0]] if self._orders else None

    def youngest(self) -> RequestState | None:
        return self._by_order[self._orders[-1]] if self._orders else None


class UrgencyQueue(ArrivalQueue):
    """A queue of requests ordered by age and also by urgency, as `urgency_of` (by default `RequestState.urgency`) gave
    it when the request was pushed or updated."""

    __slots__ = ("_urgencies", "_urgency_by_order", "_urgency_of")

    def __init__(self, urgency_of: Callable[[RequestState], Urgency] = attrgetter("urgency")) -> None:
        super().__init__()
        self._urgency_of = urgency_of
        self._urgencies: list[Urgency] = []
        self._urgency_by_order: dict[Order, Urgency] = {}

    def push(self, state: RequestState) -> None:
        super().push(state)
        urgency = self._urgency_by_order[state.order] = self._urgency_of(state)
        insort(self._urgencies, urgency)

    def discard(self, state: RequestState) -> None:
        if state in self:
            urgency = self._urgency_by_order.pop(state.order)
            del self._urgencies[bisect_left(self._urgencies, urgency)]
        super().discard(state)

    def update(self, state: RequestState, *, belongs: bool) -> None:
        """Adds the request if it `belongs` here, or moves it if its urgency has changed; else removes it if present."""
        urgency = self._urgency_by_order.get(state.order)
        if urgency is not None and (not belongs or urgency != self._urgency_of(state)):
            self.discard(state)
        if belongs and state not in self:
            self.push(state)

    @property
    def is_ranked(self) -> bool:
        """True if some request has a priority, a deadline or an amount of work in its urgency, so that the order by
        urgency may differ from that by age. It is enough to look at the first and the last: all requests without one
        have (0, inf), and any other value sorts before or behind that."""
        return any(urgency[:2] != (0, math.inf) for urgency in (*self._urgencies[:1], *self._urgencies[-1:]))

    def by_urgency(self) -> Iterator[RequestState]:
        """Yields the most urgent first. The queue may change meanwhile, as with `by_age`."""
        index = 0
        while index < len(self._urgencies):
            urgency = self._urgencies[index]
            yield self._by_order[urgency[2]]
            index = bisect_right(self._urgencies, urgency)


class StartedOrders:
    """The orders (`RequestState.order`) of started requests, to count how often a waiting request was bypassed: the
    younger requests that have started since it began to wait. Orders that no waiting request needs are dropped."""

    def __init__(self) -> None:
        self._orders: list[Order] = []  # orders of started requests, ascending

    def add(self, order: Order, oldest_waiting: Order | None) -> None:
        """Records a start. `oldest_waiting`: order of the oldest request that still waits; None if none waits."""
        if oldest_waiting is None:
            self._orders.clear()
            return
        insort(self._orders, order)
        del self._orders[: bisect_right(self._orders, oldest_waiting)]

    def younger_than(self, order: Order) -> int:
        """Number of recorded starts of younger requests; only its growth while the request of `order` waits counts."""
        return len(self._orders) - bisect_right(self._orders, order)
