"""Tables and managers: growth is all or nothing, slots never overlap, arrays that a plan holds never change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.cache.features import FeatureCache
from hydra_engine.cache.ledger import MAX_LINES, Ledger
from hydra_engine.cache.manager import CacheManager
from hydra_engine.cache.slots import SlotPool
from hydra_engine.cache.table import BlockTable
from hydra_engine.core.ids import BlockHash, FeatureKey, RequestId


def slots_of(table: BlockTable) -> list[int]:
    """The slots of token positions [0, num_slots), as `core/plans.py` defines them."""
    size = table.block_size
    return [int(table.block_ids[p // size]) * size + p % size for p in range(table.num_slots)]


def test_slots_follow_the_block_ids() -> None:
    table = BlockTable(capacity=3, block_size=4)
    table.append([7, 2])
    assert slots_of(table) == [28, 29, 30, 31, 8, 9, 10, 11]
    assert (table.num_blocks, table.num_slots) == (2, 8)


@pytest.mark.parametrize(("tokens", "missing"), [(0, 0), (1, 0), (4, 0), (5, 1), (9, 2)])
def test_missing_counts_whole_blocks(tokens: int, missing: int) -> None:
    table = BlockTable(capacity=9, block_size=4)
    table.append([0])
    assert table.missing(tokens) == missing


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
        manager.check()
        assert {h: t.num_blocks for h, t in manager.tables.items()} == model
        slots = [slot for table in manager.tables.values() for slot in slots_of(table)]
        assert len(slots) == len(set(slots)) and all(0 <= slot < num_blocks * 4 for slot in slots)


def ledger() -> tuple[Ledger, CacheManager, FeatureCache, SlotPool]:
    kv: CacheManager[RequestId] = CacheManager(300, 4)
    features, seq_slots = FeatureCache(CacheManager(4, 4)), SlotPool(300)
    return Ledger(kv, features, seq_slots), kv, features, seq_slots


PICTURE = FeatureKey(b"picture")


def test_the_ledger_names_holders_and_is_empty_at_rest() -> None:
    books, kv, features, seq_slots = ledger()
    kv.grow(RequestId(3), 9, capacity=20)
    seq_slots.allocate(RequestId(3))
    features.need((RequestId(3), 1), PICTURE, 4)
    features.need((RequestId(4), 0), PICTURE, 4)
    features.reserve(PICTURE)
    snapshot = books.report([RequestId(3), RequestId(4)])
    assert (snapshot.num_requests, snapshot.kv_blocks_held, snapshot.image_blocks_held) == (2, 3, 1)
    shared = ("request 3 image 1: 1 blocks", "request 4 image 0: 1 blocks")
    assert snapshot.holders == ("request 3: 3 KV blocks", *shared)
    assert not snapshot.problems
    kv.free(RequestId(3))
    seq_slots.free(RequestId(3))
    features.drop((RequestId(3), 1), PICTURE)
    features.drop((RequestId(4), 0), PICTURE)
    assert books.report([]).holders == ("an encode that no request waits for any more: 1 blocks",)
    features.finish(PICTURE, failed=False)
    rest = books.report([])
    assert (rest.kv_blocks_held, rest.image_blocks_held, rest.holders, rest.problems) == (0, 0, (), ())
    assert (rest.kv_blocks_total, rest.image_blocks_total) == (300, 4)


def test_the_ledger_reports_blocks_of_the_dead_and_broken_books() -> None:
    books, kv, features, seq_slots = ledger()
    kv.grow(RequestId(1), 4, capacity=4)
    seq_slots.allocate(RequestId(1))
    features.need((RequestId(2), 0), PICTURE, 4)
    features.reserve(PICTURE)
    dead = ("request 1 is gone and holds KV blocks", "request 2 is gone and holds image 0")
    assert books.problems([]) == (*dead, "request 1 is gone and holds a sequence slot")
    kv._pool.allocate(1)
    with pytest.raises(AssertionError, match="no table has"):
        books.check([RequestId(1), RequestId(2)])


def test_whoever_holds_blocks_has_a_slot_and_states_are_counted_by_slots() -> None:
    _, kv, features, seq_slots = ledger()
    books = Ledger(kv, features, seq_slots, has_states=True)
    seq_slots.allocate(RequestId(1))
    snapshot = books.report([RequestId(1)])
    assert snapshot.problems == ("sequence slots and KV blocks are not held by the same requests",)
    assert (snapshot.state_slots_held, snapshot.state_slots_total) == (1, 300)


def test_holders_are_given_one_block_each_or_none_at_all() -> None:
    manager: CacheManager[int] = CacheManager(6, 4)
    for holder in (1, 2):
        manager.grow(holder, 4, capacity=12)
    assert manager.extend([2, 1]) == [2, 3]
    assert [manager.tables[holder].blocks() for holder in (1, 2)] == [[0, 3], [1, 2]]
    assert manager.tables[1].num_slots == 8
    assert manager.extend([1, 2]) == [4, 5] and manager.extend([1]) == [] and manager.extend([]) == []
    manager.check()
    manager.free(1)
    with pytest.raises(AssertionError, match="beyond the maximum"):
        manager.extend([2])


# ---- shared blocks


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


def test_a_block_is_in_several_tables_only_as_often_as_it_is_held() -> None:
    manager: CacheManager[int] = CacheManager(4, 4)
    manager.grow(1, 4, capacity=4)
    manager.set_hashes(1, 0, [name(1)])
    manager.adopt(2, [name(1)], capacity=8)
    manager.check()
    assert manager.tables[1].blocks() == manager.tables[2].blocks() and manager.num_held == 1
    manager.grow(3, 4, capacity=4)
    manager._tables[3].block_ids[0] = manager._tables[1].block_ids[0]
    with pytest.raises(AssertionError, match="no table has"):
        manager.check()
    manager._pool.release([1])
    with pytest.raises(AssertionError, match="in 3 tables and held 2 times"):
        manager.check()


def test_a_block_twice_in_one_table_is_noticed() -> None:
    manager: CacheManager[int] = CacheManager(4, 4)
    manager.grow(1, 8, capacity=8)
    manager._tables[1].block_ids[1] = manager._tables[1].block_ids[0]
    with pytest.raises(AssertionError, match="in one table twice"):
        manager.check()


def test_what_is_found_ends_at_the_first_name_without_a_block() -> None:
    manager: CacheManager[int] = CacheManager(4, 4)
    manager.grow(1, 12, capacity=12)
    manager.set_hashes(1, 0, [name(0)])
    manager.set_hashes(1, 2, [name(2)])
    assert manager.hashes(1) == [name(0), None, name(2)] and manager.hashes(9) == []
    assert manager.find([name(0), name(1), name(2)]) == [manager.tables[1].blocks()[0]]
    assert manager.find(name(n) for n in (2, 0, 2)) == [2, 0, 2]
    assert manager.find([]) == manager.find([name(7)]) == []


def test_held_blocks_cost_a_newcomer_nothing_and_unheld_ones_count_as_free() -> None:
    manager: CacheManager[int] = CacheManager(4, 4)
    for holder in (1, 2):
        manager.grow(holder, 4, capacity=4)
        manager.set_hashes(holder, 0, [name(holder)])
    manager.free(2)
    found = manager.find([name(1), name(2)])
    assert (manager.num_free, len(manager._pool._evictable)) == (3, 1)
    assert manager.num_to_take(16, found) == 3, "one is held by others already"
    manager.adopt(3, [name(1), name(2)], capacity=16)
    assert manager.num_free == 2 and manager.grow(3, 16, capacity=16) and manager.num_free == 0
    assert manager.tables[3].blocks()[:2] == found
    manager.check()
    assert (manager.free(1), manager.num_free) == (1, 0), "its block has another holder"
    assert (manager.free(3), manager.num_free) == (4, 4)


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    manager: CacheManager[int] = CacheManager(4, 4)
    names = [name(n) for n in range(4)]
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
    manager.set_hashes(1, 0, [name(0)])
    manager.free(1)
    manager.forget([name(0), name(5)])
    assert manager.find([name(0)]) == [] and (manager.num_free, len(manager._pool._evictable)) == (2, 0)
    manager.check()


def test_a_long_list_of_holders_is_cut_with_a_count() -> None:
    books, kv, _, _ = ledger()
    for number in range(250):
        kv.grow(RequestId(number), 1, capacity=1)
    holders = books.report([RequestId(n) for n in range(250)]).holders
    assert len(holders) == MAX_LINES and holders[-1] == "and 51 more"
