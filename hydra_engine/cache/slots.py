"""Slots for what a running request keeps besides blocks: its recurrent state. Ids only; no tensor is known here.

A request has one slot from its start until it gives way or is forgotten.
"""

from __future__ import annotations

from hydra_engine.core.ids import RequestId


class SlotPool:
    """`num_slots` 0: the model keeps no states, and nobody gets a slot."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.held: dict[RequestId, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))

    def take(self, request_id: RequestId) -> None:
        """The caller has seen to it that one is free."""
        if self.num_slots:
            assert request_id not in self.held, f"request {request_id} takes a second slot"
            self.held[request_id] = self._free.pop()

    def free(self, request_id: RequestId) -> None:
        """Of a request that has one or none."""
        slot = self.held.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)

    def of(self, request_id: RequestId) -> int:
        """-1 where the model keeps no states."""
        return self.held[request_id] if self.num_slots else -1

    def check(self) -> None:
        """Raises AssertionError unless every slot is held once or free once."""
        known = sorted([*self.held.values(), *self._free])
        assert known == list(range(self.num_slots)), "a slot is lost or held twice"
