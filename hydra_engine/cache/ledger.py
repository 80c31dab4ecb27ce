"""The blocks that requests hold in the caches of an instance, and checks of the bookkeeping.

Reads the cache managers, changes nothing. Does not know what a request does; the caller passes the live ones.
"""

from __future__ import annotations

from collections.abc import Collection

from hydra_engine.cache.blocks import CacheManager, SlotPool
from hydra_engine.cache.features import FeatureCache
from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import LedgerReport

MAX_LINES = 200


class Ledger:
    """The ledger of one instance's caches. `has_states`: a sequence slot also holds a recurrent state, and is reported
    as one."""

    def __init__(
        self, kv: CacheManager[RequestId], features: FeatureCache, seq_slots: SlotPool, *, has_states: bool = False
    ) -> None:
        self._kv = kv
        self._features = features
        self._seq_slots = seq_slots
        self._has_states = has_states

    def problems(self, live: Collection[RequestId]) -> tuple[str, ...]:
        """Descriptions of blocks without a live owner and of broken bookkeeping; empty if there are none."""
        problems = [f"request {r} is gone and holds KV blocks" for r in self._kv.tables if r not in live]
        for key, _, _ in self._features.held_blocks():
            users = self._features.users(key)
            problems += [f"request {r} is gone and holds image {i}" for r, i in users if r not in live]
        problems += [f"request {r} is gone and holds a sequence slot" for r in self._seq_slots.slot_of if r not in live]
        if self._seq_slots.slot_of.keys() != self._kv.tables.keys():
            problems.append("sequence slots and KV blocks are not held by the same requests")
        managers: tuple[tuple[str, CacheManager[RequestId] | FeatureCache | SlotPool], ...]
        managers = (("KV cache", self._kv), ("image cache", self._features), ("sequence slots", self._seq_slots))
        for name, manager in managers:
            try:
                manager.check()
            except AssertionError as error:
                problems.append(f"{name}: {error}")
        return tuple(problems)

    def report(self, live: Collection[RequestId]) -> LedgerReport:
        """The ledger report; names at most MAX_LINES holders."""
        lines = [f"request {r}: {table.num_blocks} KV blocks" for r, table in self._kv.tables.items()]
        for key, _, num_blocks in self._features.held_blocks():
            users = self._features.users(key)
            lines += [f"request {r} image {i}: {num_blocks} blocks" for r, i in users]
            if not users:
                lines.append(f"an encode that no request waits for any more: {num_blocks} blocks")
        if len(lines) > MAX_LINES:
            lines[MAX_LINES - 1 :] = [f"and {len(lines) - MAX_LINES + 1} more"]
        return LedgerReport(
            num_requests=len(live),
            kv_blocks_held=self._kv.pool.num_held,
            kv_blocks_total=self._kv.pool.num_blocks,
            image_blocks_held=self._features.pool.num_held,
            image_blocks_total=self._features.pool.num_blocks,
            holders=tuple(lines),
            problems=self.problems(live),
            state_slots_held=len(self._seq_slots.slot_of) if self._has_states else 0,
            state_slots_total=self._seq_slots.num_seq_slots if self._has_states else 0,
        )
