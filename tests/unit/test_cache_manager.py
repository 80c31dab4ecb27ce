"""Tables and managers: growth is all or nothing, slots never overlap, arrays that a plan holds never change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.cache.ledger import MAX_LINES, Ledger
from hydra_engine.cache.manager import CacheManager
from hydra_engine.cache.table import BlockTable
from hydra_engine.core.ids import RequestId


def test_slots_follow_the_block_ids() -> None:
    table = BlockTable(capacity=3, block_size=4)
    table.append([7, 2])
    assert [table.slot(p) for p in (0, 3, 4, 7)] == [28, 31, 8, 11]
    assert (table.num_blocks, table.num_slots) == (2, 8)
    with pytest.raises(AssertionError, match="has no slot"):
        table.slot(8)


@pytest.mark.parametrize(("tokens", "missing"), [(0, 0), (1, 0), (4, 0), (5, 1), (9, 2)])
def test_missing_counts_whole_blocks(tokens: int, missing: int) -> None:
    table = BlockTable(capacity=9, block_size=4)
    table.append([0])
    assert table.missing(tokens) == missing


def test_growth_appends_in_place_and_never_moves_the_array() -> None:
    manager: CacheManager[int] = CacheManager(8, 4)
    assert manager.grow(1, 5, max_tokens=20)
    view = manager.tables[1].block_ids
    before = view[:2].copy()
    assert view.dtype == np.int32 and len(view) == 5
    assert manager.grow(1, 20, max_tokens=20)
    assert manager.tables[1].block_ids is view
    assert (view[:2] == before).all()


def test_the_array_of_a_freed_holder_keeps_its_ids() -> None:
    manager: CacheManager[int] = CacheManager(2, 4)
    manager.grow(1, 8, max_tokens=8)
    view = manager.tables[1].block_ids
    before = view.copy()
    manager.free(1)
    manager.grow(2, 8, max_tokens=8)
    manager.grow(1, 0, max_tokens=8)
    assert (view == before).all() and manager.tables[1].block_ids is not view


def test_growing_beyond_the_declared_maximum_is_a_bug() -> None:
    manager: CacheManager[int] = CacheManager(8, 4)
    manager.grow(1, 4, max_tokens=4)
    with pytest.raises(AssertionError, match="beyond the maximum"):
        manager.grow(1, 5, max_tokens=4)


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
            assert manager.grow(holder, tokens, max_tokens=30) is fits
            if fits:
                model[holder] = wanted
        manager.check()
        assert {h: t.num_blocks for h, t in manager.tables.items()} == model
        slots = [t.slot(p) for t in manager.tables.values() for p in range(t.num_slots)]
        assert len(slots) == len(set(slots)) and all(0 <= slot < num_blocks * 4 for slot in slots)


def ledger() -> tuple[Ledger, CacheManager, CacheManager]:
    kv: CacheManager[RequestId] = CacheManager(300, 4)
    images: CacheManager[tuple[RequestId, int]] = CacheManager(4, 4)
    return Ledger(kv, images), kv, images


def test_the_ledger_names_holders_and_is_empty_at_rest() -> None:
    books, kv, images = ledger()
    kv.grow(RequestId(3), 9, max_tokens=20)
    images.grow((RequestId(3), 1), 4, max_tokens=4)
    snapshot = books.snapshot([RequestId(3)])
    assert (snapshot.num_requests, snapshot.kv_blocks_held, snapshot.image_blocks_held) == (1, 3, 1)
    assert snapshot.holders == ("request 3: 3 KV blocks", "request 3 image 1: 1 blocks")
    assert not snapshot.problems
    kv.free(RequestId(3))
    images.free((RequestId(3), 1))
    rest = books.snapshot([])
    assert (rest.kv_blocks_held, rest.image_blocks_held, rest.holders, rest.problems) == (0, 0, (), ())
    assert (rest.kv_blocks_total, rest.image_blocks_total) == (300, 4)


def test_the_ledger_reports_blocks_of_the_dead_and_broken_books() -> None:
    books, kv, images = ledger()
    kv.grow(RequestId(1), 4, max_tokens=4)
    images.grow((RequestId(2), 0), 4, max_tokens=4)
    assert books.problems([]) == ("request 1 is gone and holds KV blocks", "request 2 is gone and holds image 0")
    kv._pool.allocate(1)
    with pytest.raises(AssertionError, match="no table has"):
        books.check([RequestId(1), RequestId(2)])


def test_a_block_in_two_tables_is_noticed() -> None:
    manager: CacheManager[int] = CacheManager(4, 4)
    manager.grow(1, 4, max_tokens=4)
    manager.grow(2, 4, max_tokens=4)
    manager._tables[2].block_ids[0] = manager._tables[1].block_ids[0]
    with pytest.raises(AssertionError, match="two tables"):
        manager.check()


def test_a_long_list_of_holders_is_cut_with_a_count() -> None:
    books, kv, _ = ledger()
    for number in range(250):
        kv.grow(RequestId(number), 1, max_tokens=1)
    holders = books.snapshot([RequestId(n) for n in range(250)]).holders
    assert len(holders) == MAX_LINES and holders[-1] == "and 51 more"
