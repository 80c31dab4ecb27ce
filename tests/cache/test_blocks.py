"""Blocks: the pool against a brute-force model (no block is handed out twice, nothing is lost, content is evicted LRU),
tables (growth is all or nothing, slots never overlap, arrays that a plan holds never change) and sequence slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hydra_engine.cache.blocks import BlockPool, BlockTable, CacheManager, OutOfBlocks, SlotPool
from hydra_engine.cache.ledger import check_pool, check_slots, check_tables
from hydra_engine.core.ids import BlockHash, RequestId
from tests.cache.hashes import hashes_of
from tests.examples import examples


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


class PoolMachine(RuleBasedStateMachine):
    """The model: owners per block, content per block, and the order in which content became evictable."""

    @initialize(size=st.integers(0, 8))
    def start(self, size: int) -> None:
        self.size = size
        self.pool = BlockPool(size)
        self.owners: dict[int, int] = {}
        self.content: dict[int, BlockHash] = {}
        self.evictable: list[int] = []

    @property
    def num_free(self) -> int:
        return self.size - len(self.owners)

    @rule(count=st.integers(0, 9))
    def allocate_is_all_or_nothing_and_never_gives_a_held_block(self, count: int) -> None:
        if count > self.num_free:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        plain = self.num_free - len(self.evictable)
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == len(blocks) == count
        assert not set(blocks) & self.owners.keys()
        evicted = [b for b in blocks if b in self.evictable]
        assert evicted == self.evictable[: max(0, count - plain)], "content is evicted late and least recent first"
        for block in blocks:
            self.owners[block] = 1
            self.content.pop(block, None)
        self.evictable = self.evictable[len(evicted) :]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data) -> None:
        block = data.draw(st.sampled_from(sorted(self.owners)))
        self.pool.release([block])
        self.owners[block] -= 1
        if not self.owners[block]:
            del self.owners[block]
            if block in self.content:
                self.evictable.append(block)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), number=st.integers(0, 5))
    def name(self, data, number: int) -> None:
        block = data.draw(st.sampled_from(sorted(set(self.owners) - set(self.content)) or [None]))
        if block is None:
            return
        known = key(number) in self.content.values()
        assert self.pool.set_hash(block, key(number)) is not known
        if not known:
            self.content[block] = key(number)

    @rule(number=st.integers(0, 5))
    def acquire_finds_content_until_it_is_evicted(self, number: int) -> None:
        expected = next((b for b, k in self.content.items() if k == key(number)), None)
        assert self.pool.find(key(number)) == expected
        assert self.pool.acquire(key(number)) == expected
        if expected is not None:
            self.owners[expected] = self.owners.get(expected, 0) + 1
            if expected in self.evictable:
                self.evictable.remove(expected)

    @rule(number=st.integers(0, 5))
    def forget_takes_only_content_that_nobody_holds(self, number: int) -> None:
        block = next((b for b, k in self.content.items() if k == key(number)), None)
        if block is not None and block in self.owners:
            with pytest.raises(AssertionError, match="is held"):
                self.pool.forget(key(number))
            return
        assert self.pool.forget(key(number)) is (block is not None)
        if block is not None:
            del self.content[block]
            self.evictable.remove(block)

    @rule()
    def forget_evictable_leaves_what_is_held(self) -> None:
        assert self.pool.forget_evictable() == len(self.evictable)
        for block in self.evictable:
            del self.content[block]
        self.evictable.clear()

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        check_pool(self.pool)
        assert self.pool.num_free == self.num_free
        assert self.pool.num_held == len(self.owners)
        assert len(self.pool._evictable) == len(self.evictable)
        assert all(self.pool.refcount(block) == self.owners.get(block, 0) for block in range(self.size))
        assert all(key == self.content.get(block) for block, key in enumerate(self.pool._keys))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None)


def test_a_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 of 4 free"):
        pool.allocate(2)
    assert len(pool.allocate(1)) == 1
    check_pool(pool)


def test_releasing_more_often_than_held_is_a_bug() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(blocks)


def test_renaming_a_block_to_other_content_is_a_bug() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    assert pool.set_hash(block, key(1))
    assert pool.set_hash(block, key(1)), "saying it again changes nothing"
    with pytest.raises(AssertionError, match="other content"):
        pool.set_hash(block, key(2))


@pytest.mark.parametrize("damage", ["free twice", "lost", "two states", "wrong name"])
def test_check_notices(damage: str) -> None:
    pool = BlockPool(3)
    held = pool.allocate(1)
    pool.set_hash(held[0], key(1))
    if damage == "free twice":
        pool._free.append(pool._free[0])
    elif damage == "lost":
        pool._free.pop()
    elif damage == "two states":
        pool._free.append(held[0])
    else:
        pool._block_of[key(2)] = held[0]
    with pytest.raises(AssertionError):
        check_pool(pool)


# ---- tables and managers


def slots_of(table: BlockTable, size: int = 4) -> list[int]:
    """The slots of the token positions that have a block of `size` tokens, as `core/plans.py` defines them."""
    return [int(table.block_ids[p // size]) * size + p % size for p in range(table.num_blocks * size)]


def test_slots_follow_the_block_ids() -> None:
    table = BlockTable(np.zeros(3, np.int32))
    table.append([7, 2])
    assert slots_of(table) == [28, 29, 30, 31, 8, 9, 10, 11]
    assert table.num_blocks == 2


@pytest.mark.parametrize(("tokens", "missing"), [(0, 0), (1, 0), (4, 0), (5, 1), (9, 2)])
def test_growth_counts_whole_blocks(tokens: int, missing: int) -> None:
    manager: CacheManager[int] = CacheManager(9, 4)
    manager.grow(1, 4, capacity=36)
    assert manager.grow(1, tokens, capacity=36)
    assert manager.tables[1].num_blocks == 1 + missing and manager.pool.num_held == 1 + missing


def test_growth_appends_in_place_and_never_moves_the_array() -> None:
    manager: CacheManager[int] = CacheManager(8, 4)
    assert manager.grow(1, 5, capacity=20)
    view = manager.tables[1].block_ids
    before = view[:2].copy()
    assert view.dtype == np.int32 and len(view) == 5
    assert manager.grow(1, 20, capacity=20)
    assert manager.tables[1].block_ids is view
    assert (view[:2] == before).all()


def test_the_array_of_a_freed_holder_keeps_its_ids() -> None:
    manager: CacheManager[int] = CacheManager(2, 4)
    manager.grow(1, 8, capacity=8)
    view = manager.tables[1].block_ids
    before = view.copy()
    manager.free(1)
    manager.grow(2, 8, capacity=8)
    manager.grow(1, 0, capacity=8)
    assert (view == before).all() and manager.tables[1].block_ids is not view


def test_growing_beyond_the_declared_maximum_is_a_bug() -> None:
    manager: CacheManager[int] = CacheManager(8, 4)
    manager.grow(1, 4, capacity=4)
    with pytest.raises(AssertionError, match="beyond the maximum"):
        manager.grow(1, 5, capacity=4)


@settings(deadline=None)
@given(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=40))
def test_growth_is_all_or_nothing_and_slots_never_overlap(num_blocks: int, calls) -> None:
    """Random grow and free (zero tokens) against a model that only counts blocks per holder."""
    manager: CacheManager[int] = CacheManager(num_blocks, 4)
    model: dict[int, int] = {}
    for holder, tokens in calls:
        if tokens == 0:
            assert manager.free(holder) == model.pop(holder, 0)
        else:
            wanted = max(model.get(holder, 0), -(-tokens // 4))
            fits = sum(model.values()) - model.get(holder, 0) + wanted <= num_blocks
            assert manager.grow(holder, tokens, capacity=30) is fits
            if fits:
                model[holder] = wanted
        check_tables(manager)
        assert {h: t.num_blocks for h, t in manager.tables.items()} == model
        slots = [slot for table in manager.tables.values() for slot in slots_of(table)]
        assert len(slots) == len(set(slots)) and all(0 <= slot < num_blocks * 4 for slot in slots)


def test_holders_are_given_one_block_each_or_none_at_all() -> None:
    manager: CacheManager[int] = CacheManager(6, 4)
    for holder in (1, 2):
        manager.grow(holder, 4, capacity=12)
    assert manager.extend([2, 1]) == [2, 3]
    assert [manager.tables[holder].blocks() for holder in (1, 2)] == [[0, 3], [1, 2]]
    assert manager.tables[1].num_blocks == 2
    assert manager.extend([1, 2]) == [4, 5] and manager.extend([1]) == [] and manager.extend([]) == []
    check_tables(manager)
    manager.free(1)
    with pytest.raises(AssertionError, match="beyond the maximum"):
        manager.extend([2])


# ---- shared blocks


def test_a_block_is_in_several_tables_only_as_often_as_it_is_held() -> None:
    manager: CacheManager[int] = CacheManager(4, 4)
    manager.grow(1, 4, capacity=4)
    manager.set_hashes(1, 0, [key(1)])
    manager.adopt(2, [key(1)], capacity=8)
    check_tables(manager)
    assert manager.tables[1].blocks() == manager.tables[2].blocks() and manager.pool.num_held == 1
    manager.grow(3, 4, capacity=4)
    manager._tables[3].block_ids[0] = manager._tables[1].block_ids[0]
    with pytest.raises(AssertionError, match="no table has"):
        check_tables(manager)
    manager.pool.release([1])
    with pytest.raises(AssertionError, match="in 3 tables and held 2 times"):
        check_tables(manager)


def test_a_block_twice_in_one_table_is_noticed() -> None:
    manager: CacheManager[int] = CacheManager(4, 4)
    manager.grow(1, 8, capacity=8)
    manager._tables[1].block_ids[1] = manager._tables[1].block_ids[0]
    with pytest.raises(AssertionError, match="in one table twice"):
        check_tables(manager)


def test_what_is_found_ends_at_the_first_name_without_a_block() -> None:
    manager: CacheManager[int] = CacheManager(4, 4)
    manager.grow(1, 12, capacity=12)
    manager.set_hashes(1, 0, [key(0)])
    manager.set_hashes(1, 2, [key(2)])
    assert hashes_of(manager, 1) == [key(0), None, key(2)] and hashes_of(manager, 9) == []
    assert manager.find([key(0), key(1), key(2)]) == [manager.tables[1].blocks()[0]]
    assert manager.find(key(n) for n in (2, 0, 2)) == [2, 0, 2]
    assert manager.find([]) == manager.find([key(7)]) == []


def test_held_blocks_cost_a_newcomer_nothing_and_unheld_ones_count_as_free() -> None:
    manager: CacheManager[int] = CacheManager(4, 4)
    for holder in (1, 2):
        manager.grow(holder, 4, capacity=4)
        manager.set_hashes(holder, 0, [key(holder)])
    manager.free(2)
    found = manager.find([key(1), key(2)])
    assert (manager.pool.num_free, len(manager.pool._evictable)) == (3, 1)
    assert manager.blocks_for(16) - sum(manager.pool.refcount(block) > 0 for block in found) == 3, (
        "one is held by others already"
    )
    manager.adopt(3, [key(1), key(2)], capacity=16)
    assert manager.pool.num_free == 2 and manager.grow(3, 16, capacity=16) and manager.pool.num_free == 0
    assert manager.tables[3].blocks()[:2] == found
    check_tables(manager)
    assert (manager.free(1), manager.pool.num_free) == (1, 0), "its block has another holder"
    assert (manager.free(3), manager.pool.num_free) == (4, 4)


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    manager: CacheManager[int] = CacheManager(4, 4)
    names = [key(n) for n in range(4)]
    manager.grow(1, 16, capacity=16)
    for index in range(4):
        manager.set_hashes(1, index, [names[index]])
    manager.free(1)
    for left in (4, 3, 2, 1):
        assert len(manager.find(names)) == left
        manager.grow(10 + left, 4, capacity=4)
    assert manager.find(names) == []


def test_content_that_is_forgotten_is_not_found_and_its_blocks_are_plainly_free() -> None:
    manager: CacheManager[int] = CacheManager(2, 4)
    manager.grow(1, 8, capacity=8)
    manager.set_hashes(1, 0, [key(0)])
    manager.free(1)
    manager.forget([key(0), key(5)])
    assert manager.find([key(0)]) == [] and (manager.pool.num_free, len(manager.pool._evictable)) == (2, 0)
    check_tables(manager)


# ---- sequence slots


def test_slots_are_taken_and_given_back() -> None:
    pool = SlotPool(2)
    first, second = RequestId(1), RequestId(2)
    assert (pool.allocate(first), pool.allocate(second), pool._free) == (0, 1, [])
    check_slots(pool)
    with pytest.raises(AssertionError):
        pool.allocate(first)
    pool.free(first)
    pool.free(first)
    assert pool._free == [0] and pool.allocate(RequestId(3)) == 0
    assert {pool.slot_of[RequestId(3)], pool.slot_of[second]} == {0, 1}
    check_slots(pool)
    pool.slot_of[first] = pool.slot_of[second]
    with pytest.raises(AssertionError, match="lost or held twice"):
        check_slots(pool)


def test_the_lowest_free_slot_goes_first() -> None:
    pool = SlotPool(4)
    for number in range(4):
        pool.allocate(RequestId(number))
    for number in (3, 1, 2):
        pool.free(RequestId(number))
    assert [pool.allocate(RequestId(number)) for number in (5, 6, 7)] == [1, 2, 3]
