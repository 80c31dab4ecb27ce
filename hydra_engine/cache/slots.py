"""Seats of running requests: places in tables of `num_seats` entries. Ids only; what lies there is not known here.

A request has one seat from its start until it gives way or is forgotten: the row of its decode in the scheduler's and
the worker's arrays, and the place of its recurrent state where the model keeps one.
"""

from __future__ import annotations

import heapq

from hydra_engine.core.ids import RequestId


class SeatPool:
    """The lowest free seat goes first, so that few requests sit close together."""

    def __init__(self, num_seats: int) -> None:
        assert num_seats > 0, "somebody must be able to sit"
        self.num_seats = num_seats
        self.held: dict[RequestId, int] = {}
        self._free = list(range(num_seats))  # a heap

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request_id: RequestId) -> int:
        """The caller has seen to it that one is free."""
        assert request_id not in self.held, f"request {request_id} takes a second seat"
        seat = self.held[request_id] = heapq.heappop(self._free)
        return seat

    def free(self, request_id: RequestId) -> None:
        """Of a request that has one or none."""
        seat = self.held.pop(request_id, None)
        if seat is not None:
            heapq.heappush(self._free, seat)

    def of(self, request_id: RequestId) -> int:
        return self.held[request_id]

    def check(self) -> None:
        """Raises AssertionError unless every seat is held once or free once."""
        known = sorted([*self.held.values(), *self._free])
        assert known == list(range(self.num_seats)), "a seat is lost or held twice"
