"""Places of a state slot that a row reads and writes: never the same one, and the other way round only after a whole
step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hydra_engine.backend.base import PagedCache, StateCache
from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.plans import ChunkRow, LanguagePlan
from hydra_engine.worker.language.slot_table import StateTable, part_of
from tests.worker.fakes import Decode, Row, plan_of

BLOCKS = np.zeros(8, dtype=np.int32)
KV = PagedCache(torch.zeros(9, 1, 2, 3, 1, 1))  # blocks of 24 bytes


def chunk(seq_slot: int, start: int, count: int) -> ChunkRow:
    return ChunkRow(RequestId(seq_slot), seq_slot, (1,) * count, start, BLOCKS, 8, False, 0)


def decode(seq_slot: int, start: int) -> Decode:
    return Decode(RequestId(seq_slot), seq_slot, -1, start, 1, BLOCKS)


def plan(*rows: Row) -> LanguagePlan:
    return plan_of(StepId(1), rows)


def table() -> StateTable:
    return StateTable(StateCache(torch.zeros(9, 1, 3, 4), torch.zeros(9, 1, 1, 2, 2)), 3)


def test_places_change_roles_after_a_whole_step() -> None:
    states = table()
    first = plan(chunk(2, 0, 5), chunk(0, 0, 3))
    expected = ([0, 5, 8], [0, 0], [4, 0], [5, 1])
    assert states.rows(first).lists() == expected
    assert states.rows(first).lists() == expected  # again, for the step raised
    states.advance(first)
    both = plan(decode(0, 3), decode(2, 5))
    assert states.rows(both).lists() == ([0, 1, 2], [3, 5], [1, 5], [0, 4])
    states.advance(plan(decode(2, 5)))
    assert states.rows(plan(decode(2, 6))).lists() == ([0, 1], [6], [4], [5])
    with pytest.raises(AssertionError, match="state of 3 tokens where a row begins at 4"):
        states.rows(plan(decode(2, 6), decode(0, 4)))


def test_decodes_and_chunks_share_a_step() -> None:
    states = table()
    states.advance(plan(chunk(1, 0, 4)))
    mixed = plan(decode(1, 4), chunk(0, 0, 3))
    assert states.rows(mixed).lists() == ([0, 1, 4], [4, 0], [3, 0], [2, 1])
    states.advance(mixed)
    assert states.rows(plan(chunk(0, 3, 2))).lists() == ([0, 2], [3], [1], [0])
    assert all(
        rows.dtype == torch.int64 for rows in (states.rows(mixed_next()).cu_q, states.rows(mixed_next()).read_slots)
    )


def mixed_next() -> LanguagePlan:
    return plan(decode(1, 5), chunk(0, 3, 1))


def test_a_state_is_left_in_a_named_slot_and_read_from_there() -> None:
    """The two slots of a sequence slot stay its own; a row that is left for later reads the named slot as well."""
    states = table()
    kept = plan(replace(chunk(1, 0, 4), state_slots=(-1, 7)))
    assert states.rows(kept).lists() == ([0, 4], [0], [2], [7])
    states.advance(kept)
    behind = plan(decode(1, 4))
    assert states.rows(behind).lists() == ([0, 1], [4], [7], [2])
    states.advance(behind)
    assert states.rows(plan(decode(1, 5))).lists() == ([0, 1], [5], [2], [3])
    both = plan(replace(chunk(0, 4, 1), state_slots=(7, -1)), replace(chunk(2, 4, 2), state_slots=(7, 8)))
    states.begin(both, KV)
    states.advance(part_of(both, [None, None], np.array([1]))[0])
    rest = plan(decode(0, 4), decode(2, 6))
    assert states.rows(rest).lists() == ([0, 1, 2], [4, 6], [7, 8], [0, 4])
    named = replace(rest, state_slots=np.array([6, -1]))
    assert states.rows(named).write_slots.tolist() == [6, 4]
    assert states.rows(part_of(named, [], np.array([1]))[0]).write_slots.tolist() == [4]
    states.begin(plan(replace(chunk(1, 3, 2), state_slots=(7, -1))), KV)
    with pytest.raises(AssertionError, match="state of 4 tokens where a row begins at 3"):
        states.rows(plan(chunk(1, 3, 2)))


def test_the_next_owner_of_a_slot_begins_without_a_state() -> None:
    states = table()
    states.advance(plan(chunk(2, 0, 5)))
    (cu_q, starts, (read,), (write,)) = states.rows(plan(chunk(2, 0, 4))).lists()
    assert (cu_q, starts) == ([0, 4], [0]) and {read, write} == {4, 5}
    states.advance(plan(chunk(2, 0, 4)))
    assert states.rows(plan(decode(2, 4))).read_slots.tolist() == [write]
    # Where the last owner's state was left is a slot that another row may write.
    states.advance(plan(replace(chunk(2, 0, 4), state_slots=(-1, 7))))
    both = states.rows(plan(chunk(2, 0, 3), replace(chunk(1, 0, 4), state_slots=(-1, 7))))
    assert both.write_slots.tolist() == [4, 7] and both.read_slots.tolist() == [5, 2]


def test_a_state_moves_in_blocks_of_the_kv_cache() -> None:
    """64 bytes in three blocks of 24, whose pieces end where the two tensors of a state do; a quantized cache has only
    other bytes in a block."""
    there, here = table(), table()
    there.cache.conv.copy_(torch.rand_like(there.cache.conv))
    there.cache.recurrent.copy_(torch.rand_like(there.cache.recurrent))
    for kv in (KV, PagedCache.quantized(torch.zeros(9 * 24, dtype=torch.uint8), (9, 1, 1, 4, 1, 2), torch.float32)):
        blocks = np.array([4, 0, 7], dtype=np.int32)
        sent = plan(chunk(0, 0, 2), replace(chunk(1, 0, 6), exported_state=blocks))
        there.export(sent, kv)
        there.advance(sent)
        arrived = plan(replace(chunk(2, 6, 1), imported_state=blocks))
        here.begin(arrived, kv)
        (source,), (target,) = there.rows(plan(decode(1, 6))).read_slots, here.rows(arrived).read_slots
        assert torch.equal(there.cache.conv[source], here.cache.conv[target])
        assert torch.equal(there.cache.recurrent[source], here.cache.recurrent[target])
        assert here.rows(arrived).lists()[1:] == ([6], [4], [5])
        here = table()
