"""The blocks that requests hold in the caches of an instance, and checks of the bookkeeping.

Reads the cache managers, changes nothing. Does not know what a request does; the caller passes the live ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from hydra_engine.cache.blocks import BlockPool, CacheManager, Holder, SlotPool
from hydra_engine.cache.features import FeatureCache
from hydra_engine.cache.snapshots import StateSnapshots
from hydra_engine.core.ids import RequestId
from hydra_engine.core.reports import LedgerReport
from hydra_engine.core.state import ImageProgress

MAX_LINES = 200


class Ledger:
    """Reports who holds blocks and slots in the caches of an instance, and finds leaks. `has_states`: a sequence slot
    also holds a recurrent state, and is reported as one, as each of the `snapshots` is that a request holds."""

    def __init__(
        self,
        kv: CacheManager[RequestId],
        features: FeatureCache,
        seq_slots: SlotPool,
        *,
        has_states: bool = False,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self._kv = kv
        self._features = features
        self._seq_slots = seq_slots
        self._has_states = has_states
        self._snapshots = snapshots

    def problems(self, live: Collection[RequestId]) -> tuple[str, ...]:
        """Describes blocks and slots of requests that are not `live`, and broken bookkeeping; empty if there are
        none. `live`: the ids of all requests that are not forgotten."""
        problems = [f"request {r} is gone and holds KV blocks" for r in self._kv.tables if r not in live]
        for key, _, _ in self._features.held_blocks():
            users = self._features.users(key)
            problems += [f"request {r} is gone and holds image {i}" for r, i in users if r not in live]
        problems += [f"request {r} is gone and holds a sequence slot" for r in self._seq_slots.slot_of if r not in live]
        if self._seq_slots.slot_of.keys() != self._kv.tables.keys():
            problems.append("sequence slots and KV blocks are not held by the same requests")
        checks: dict[str, Callable[[], None]] = {
            "KV cache": partial(check_tables, self._kv),
            "image cache": partial(check_features, self._features),
            "sequence slots": partial(check_slots, self._seq_slots),
        }
        if self._snapshots is not None:
            held = self._snapshots.holdings
            problems += [f"request {r} is gone and holds snapshots of its state" for r in held if r not in live]
            checks["state snapshots"] = partial(check_snapshots, self._snapshots)
        for name, check in checks.items():
            try:
                check()
            except AssertionError as error:
                problems.append(f"{name}: {error}")
        return tuple(problems)

    def report(self, live: Collection[RequestId]) -> LedgerReport:
        """Returns the numbers of live requests and of blocks, with `has_states` also of slots (else 0), the holders of
        blocks in at most MAX_LINES lines, and the `problems`. `live`: as in `problems`."""
        lines = [f"request {r}: {table.num_blocks} KV blocks" for r, table in self._kv.tables.items()]
        for key, _, num_blocks in self._features.held_blocks():
            users = self._features.users(key)
            lines += [f"request {r} image {i}: {num_blocks} blocks" for r, i in users]
            if not users:
                lines.append(f"an encode that no request waits for any more: {num_blocks} blocks")
        snapshots = BlockPool(0) if self._snapshots is None else self._snapshots.pool
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
            state_slots_held=len(self._seq_slots.slot_of) + snapshots.num_held if self._has_states else 0,
            state_slots_total=self._seq_slots.num_seq_slots + snapshots.num_blocks if self._has_states else 0,
        )


# ---- checks, which read the private state of the classes beside this one


def check_pool(pool: BlockPool) -> None:
    """Raises AssertionError unless every block is in exactly one state and every hash leads to its block."""
    free, evictable = set(pool._free), set(pool._evictable)
    held = {block for block, count in enumerate(pool._refcounts) if count > 0}
    assert len(free) == len(pool._free), "a block is on the free list twice"
    assert not free & evictable and not free & held and not evictable & held, "a block is in two states"
    assert free | evictable | held == set(range(pool.num_blocks)), "a block is in no state"
    assert min(pool._refcounts, default=0) >= 0, "negative reference count"
    hashes = {block: key for block, key in enumerate(pool._keys) if key is not None}
    assert evictable <= hashes.keys() and free.isdisjoint(hashes), "evictable blocks have content, free ones none"
    assert {block: key for key, block in pool._block_of.items()} == hashes, "hashes and blocks disagree"


def check_tables(manager: CacheManager[Holder]) -> None:
    """Raises AssertionError unless the invariant of CacheManager holds and the pool passes `check_pool`."""
    check_pool(manager.pool)
    listed: Counter[int] = Counter()
    for table in manager._tables.values():
        blocks = table.blocks()
        assert len(blocks) == len(set(blocks)), "a block is in one table twice"
        listed.update(blocks)
    assert len(listed) == manager.pool.num_held, "the pool holds blocks that no table has"
    for block, count in listed.items():
        held = manager.pool.refcount(block)
        assert held == count, f"block {block} is in {count} tables and held {held} times"


def check_slots(seq_slots: SlotPool) -> None:
    """Raises AssertionError unless every slot is either free or held by one request."""
    slots = sorted([*seq_slots.slot_of.values(), *seq_slots._free])
    assert slots == list(range(seq_slots.num_seq_slots)), "a slot is lost or held twice"


def check_snapshots(snapshots: StateSnapshots) -> None:
    """Raises AssertionError unless the pool passes `check_pool`, requests hold exactly what it says, and the positions
    of each request's snapshots are ascending ends of blocks."""
    check_pool(snapshots.pool)
    listed: Counter[int] = Counter()
    for held in snapshots.holdings.values():
        positions = [one.position for one in held]
        assert positions == sorted(set(positions)), "two snapshots of a request at one position"
        assert not any(position % snapshots._block_size for position in positions), "a snapshot within a block"
        listed.update(one.snapshot for one in held)
    counts = {snapshot: snapshots.pool.refcount(snapshot) for snapshot in range(snapshots.pool.num_blocks)}
    assert dict(listed) == {snapshot: count for snapshot, count in counts.items() if count}, "holders and counts differ"


def check_features(features: FeatureCache) -> None:
    """Raises AssertionError as `check_tables`, and unless exactly the entries that are ENCODING or ENCODED have blocks,
    no two share a block, exactly the ENCODED ones are found by their hashes (none if features are not kept for reuse),
    and all entries without users are ENCODING."""
    check_tables(features._blocks)
    holding = {key for key, entry in features._entries.items() if entry.progress != ImageProgress.WAITING}
    assert holding == features._blocks.tables.keys(), "entries and blocks disagree"
    for key, entry in features._entries.items():
        assert entry.users or entry.progress == ImageProgress.ENCODING, "features are held for no image"
        found = features._blocks.find(features._hashes(key, entry.num_tokens))
        if features._keeps and entry.progress == ImageProgress.ENCODED:
            assert found == features._blocks.tables[key].blocks(), "encoded features cannot be found"
        else:
            assert not found, "features can be found that are not there"
    blocks = [block for table in features._blocks.tables.values() for block in table.blocks()]
    assert len(blocks) == len(set(blocks)), "two pictures share a block"
