"""Sequence slots of running requests: row numbers of tables with `num_seq_slots` entries. Knows ids only, not the
tables.

A request has one slot from its start until it is preempted or forgotten. The slot is the index of its last token and
sampling state in the worker's tables, and of its recurrent state if the model keeps one.
"""

from __future__ import annotations

import heapq

from hydra_engine.core.ids import RequestId


class SlotPool:
    """A pool of sequence slots. The lowest free slot is allocated first, so that few requests use the first rows of
    every table."""

    def __init__(self, num_seq_slots: int) -> None:
        assert num_seq_slots > 0, "no request could run"
        self.num_seq_slots = num_seq_slots
        self.held: dict[RequestId, int] = {}
        self._free = list(range(num_seq_slots))  # a heap

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, request_id: RequestId) -> int:
        """Allocates the lowest free slot; the caller must make sure that there is one."""
        assert request_id not in self.held, f"request {request_id} takes a second slot"
        seq_slot = self.held[request_id] = heapq.heappop(self._free)
        return seq_slot

    def free(self, request_id: RequestId) -> None:
        """Frees the request's slot, if it has one."""
        seq_slot = self.held.pop(request_id, None)
        if seq_slot is not None:
            heapq.heappush(self._free, seq_slot)

    def of(self, request_id: RequestId) -> int:
        return self.held[request_id]

    def check(self) -> None:
        """Raises AssertionError unless every slot is held once or free once."""
        slots = sorted([*self.held.values(), *self._free])
        assert slots == list(range(self.num_seq_slots)), "a slot is lost or held twice"
