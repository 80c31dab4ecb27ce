"""Plans become tensors: every slot, position and merge recomputed one token at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hydra_engine.backend.base import StateCache
from hydra_engine.backend.cpu.device import CpuDevice
from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.plans import ChunkRow, ImageSlice, LanguagePlan, slots_of
from hydra_engine.models.layers.decoder import LanguageInput
from hydra_engine.worker.language.batches import sent_input, step_rows
from hydra_engine.worker.language.sampler import SamplingState
from hydra_engine.worker.language.slot_table import SlotTable, StateTable, part_of, request_ids_of
from hydra_engine.worker.ports import PromptPositions, WorkerRequest
from hydra_engine.worker.vision.lane import vision_input, vision_slots
from tests.worker.fakes import Decode, FakeOps, Rig, Row, make_picture, make_request, plan_of

CPU = CpuDevice(1)
NUM_SLOTS = 16
UNREAD = 600  # the token of slot s that nobody has read is UNREAD + s


def slot_table_for(rows: list[Row]) -> SlotTable:
    slot_table = SlotTable(NUM_SLOTS)
    for row in rows:
        slot_table.owners[row.seq_slot] = row.request_id
    everyone = np.arange(NUM_SLOTS)
    slot_table.put(everyone, UNREAD + everyone)
    slot_table.rope_deltas[:] = everyone
    return slot_table


def build(
    rows: list[Row],
    block_size: int,
    *,
    image_block_size: int = 5,
    rope: list[PromptPositions] | None = None,
    states: StateTable | None = None,
) -> LanguageInput:
    plan = plan_of(StepId(0), rows, block_size=block_size)
    host = step_rows(plan, slot_table_for(rows), block_size, rope)
    return sent_input(plan, host, FakeOps(), CPU, image_block_size=image_block_size, states=states)[0]


def random_rows(rng: np.random.Generator, block_size: int) -> list[Row]:
    """Decode rows first, then chunks; shuffled blocks and slots, spare capacity behind the valid entries."""
    num_decodes, num_chunks = int(rng.integers(0, 5)), int(rng.integers(0, 4))
    rows: list[Row] = []
    blocks = iter(rng.permutation(10_000).astype(np.int32))
    seq_slots = rng.permutation(NUM_SLOTS).tolist()
    for index in range(max(num_decodes + num_chunks, 1)):
        count = 1 if index < num_decodes else int(rng.integers(1, 40))
        start = int(rng.integers(0, 50))
        num_blocks = -(-(start + count) // block_size) + int(rng.integers(0, 3))
        table = np.full(num_blocks + 4, -7, dtype=np.int32)
        table[:num_blocks] = [next(blocks) for _ in range(num_blocks)]
        tokens = tuple(int(t) for t in rng.integers(0, 500, count))
        if index < num_decodes:
            token = tokens[0] if rng.integers(2) else -1
            rows.append(Decode(RequestId(index), seq_slots[index], token, start, 3, table))
            continue
        slices = []
        if count > 6:
            image_blocks = np.asarray([next(blocks) for _ in range(9)], dtype=np.int32)
            slices = [ImageSlice(1, 2, 3, image_blocks), ImageSlice(4, count - 4, 0, image_blocks[::-1].copy())]
        sample = bool(rng.integers(2))
        rows.append(
            ChunkRow(RequestId(index), seq_slots[index], tokens, start, table, num_blocks, sample, 0, tuple(slices))
        )
    return rows


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_language_input_equals_a_token_by_token_computation(block_size: int) -> None:
    for seed in range(40):
        rows = random_rows(np.random.default_rng(seed), block_size)
        inputs = build(rows, block_size)
        tokens, positions, slots, logit_rows, image_rows, image_slots, cu_q = [], [], [], [], [], [], [0]
        for row in rows:
            for piece in row.images if isinstance(row, ChunkRow) else ():
                for i in range(piece.count):
                    image_rows.append(len(tokens) + piece.row + i)
                    feature = piece.offset + i
                    image_slots.append(int(piece.block_ids[feature // 5]) * 5 + feature % 5)
            for i, token in enumerate(row.token_ids):
                position = row.start + i
                tokens.append(token if token >= 0 else UNREAD + row.seq_slot)
                positions.append(position)
                slots.append(int(row.block_ids[position // block_size]) * block_size + position % block_size)
            cu_q.append(len(tokens))
            if isinstance(row, Decode) or row.sample:
                logit_rows.append(len(tokens) - 1)
        assert inputs.token_ids.tolist() == tokens
        assert inputs.positions.tolist() == positions and inputs.position_end == max(positions) + 1
        assert inputs.slots.tolist() == slots
        assert inputs.logit_rows.tolist() == logit_rows
        assert (inputs.image_rows is None) == (not image_rows)
        if inputs.image_rows is not None and inputs.image_slots is not None:
            assert inputs.image_rows.tolist() == image_rows
            assert inputs.image_slots.tolist() == image_slots
        plan = inputs.attention
        assert plan.cu_q.tolist() == cu_q
        assert plan.num_context.tolist() == [r.start + len(r.token_ids) for r in rows]
        for table, row in zip(plan.block_tables, rows, strict=True):
            used = -(-(row.start + len(row.token_ids)) // block_size)
            assert table[:used].tolist() == row.block_ids[:used].tolist()
        assert (plan.block_tables >= 0).all()
        check_types(inputs)


def check_types(inputs: LanguageInput) -> None:
    plan = inputs.attention
    for tensor in (inputs.token_ids, inputs.positions, inputs.slots, inputs.logit_rows):
        assert tensor.dtype == torch.int64
    for tensor in (plan.cu_q, plan.num_context, plan.block_tables):
        assert tensor.dtype == torch.int32


def decodes_of(rng: np.random.Generator, block_size: int, count: int) -> list[Row]:
    """Draws decode rows, also with starts at the ends of blocks."""
    rows: list[Row] = []
    for index, seq_slot in enumerate(rng.permutation(NUM_SLOTS)[:count].tolist()):
        start = int(rng.integers(1, 4 * block_size + 1)) if index % 2 else block_size * (1 + index) - index % 3
        table = rng.permutation(1000).astype(np.int32)
        rows.append(Decode(RequestId(100 + index), seq_slot, int(rng.integers(-1, 3)), start, 4, table))
    return rows


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("with_states", [False, True])
def test_a_step_of_decodes_equals_the_same_rows_beside_a_chunk(multimodal: bool, with_states: bool) -> None:
    """The fast path for decodes builds the same arrays as the general one."""
    rng = np.random.default_rng(2)
    for count in (1, 2, 9):
        rows = decodes_of(rng, 4, count)
        beside = ChunkRow(RequestId(7), 15, (5,), 0, np.zeros(1, dtype=np.int32), 1, False, 0)
        rows = [row for row in rows if row.seq_slot != beside.seq_slot] or [replace(rows[0], seq_slot=0)]
        text = PromptPositions(np.zeros((3, 1), dtype=np.int64), 0)
        states = None
        if with_states:
            states = StateTable(
                StateCache(torch.zeros(2 * NUM_SLOTS, 1, 3, 4), torch.zeros(2 * NUM_SLOTS, 1, 1, 2, 2)), NUM_SLOTS
            )
            for row in rows:
                tokens = (1,) * row.start
                states.advance(
                    plan_of(StepId(0), [ChunkRow(row.request_id, row.seq_slot, tokens, 0, row.block_ids, 9, False, 0)])
                )
        short = build(rows, 4, rope=[] if multimodal else None, states=states)
        long = build([*rows, beside], 4, rope=[text] if multimodal else None, states=states)
        number = len(rows)
        for name in ("token_ids", "positions", "slots", "logit_rows"):
            assert torch.equal(getattr(short, name), getattr(long, name)[..., :number]), name
        assert torch.equal(short.attention.cu_q, long.attention.cu_q[:-1])
        assert torch.equal(short.attention.num_context, long.attention.num_context[:-1])
        assert torch.equal(short.attention.block_tables, long.attention.block_tables[:-1])
        assert short.position_end == long.position_end
        assert short.image_rows is None and short.image_slots is None
        check_types(short)
        if short.states is not None and long.states is not None:
            for few, many in zip(short.states.rows.lists(), long.states.rows.lists(), strict=True):
                assert few == many[: len(few)]


@pytest.mark.parametrize("block_size", [1, 16])
def test_multimodal_positions_come_from_the_prompt_and_behind_it_from_the_slot(block_size: int) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rows = random_rows(rng, block_size)
        rope, expected = [], []
        for row in rows:
            if isinstance(row, Decode):
                expected += [[row.start + row.seq_slot] * 3]
                continue
            end = row.start + len(row.token_ids)
            num_prompt = int(rng.integers(1, end + 10))
            known = PromptPositions(rng.integers(0, 99, (3, num_prompt)), int(rng.integers(-9, 9)))
            rope.append(known)
            for place in range(row.start, end):
                inside = place < num_prompt
                expected.append(known.prompt[:, place].tolist() if inside else [place + known.delta] * 3)
        inputs = build(rows, block_size, rope=rope)
        assert inputs.positions.T.tolist() == expected
        assert inputs.position_end == max(max(three) for three in expected) + 1
        check_types(inputs)


LACKING: list[Row] = [
    Decode(RequestId(1), 3, 4, 16, 0, np.arange(9, dtype=np.int32)),
    ChunkRow(RequestId(1), 3, (4,), 16, np.arange(9, dtype=np.int32), 1, True, 0),
]


@pytest.mark.parametrize("row", LACKING, ids=["decode", "chunk"])
@pytest.mark.parametrize("company", [False, True])
def test_a_plan_that_lacks_blocks_is_a_bug(row: Row, company: bool) -> None:
    other = ChunkRow(RequestId(2), 4, (4,), 0, np.arange(9, dtype=np.int32), 9, True, 0)
    rows = [row, other] if company else [row]
    plan = plan_of(StepId(0), rows, block_size=16)
    if isinstance(row, Decode):
        decodes = replace(plan.decodes, block_tables=plan.decodes.block_tables[:, :1].copy())
        plan = LanguagePlan(plan.step_id, decodes, plan.chunks)
    with pytest.raises(AssertionError, match="lacks blocks"):
        step_rows(plan, slot_table_for(rows), 16)


def test_a_slot_that_is_anothers_is_a_bug() -> None:
    row = Decode(RequestId(1), 3, -1, 4, 0, np.arange(9, dtype=np.int32))
    slot_table = slot_table_for([row])
    slot_table.owners[3] = 2
    with pytest.raises(AssertionError, match="not its request's"):
        step_rows(plan_of(StepId(0), [row]), slot_table, 4)


def test_a_slot_that_has_become_anothers_is_noticed_although_the_plan_before_had_the_same_rows() -> None:
    rows: list[Row] = [Decode(RequestId(1), 3, 7, 5, 1, np.arange(4, dtype=np.int32))]
    slot_table, plan = slot_table_for(rows), plan_of(StepId(0), rows, block_size=4)
    for _ in range(2):
        assert slot_table.tokens(plan.decodes).tolist() == [7]
    other = make_request(2, [5, 6])
    chunk = ChunkRow(other.id, 3, other.prompt_token_ids, 0, np.arange(4, dtype=np.int32), 4, True, 0)
    slot_table.begin_step(
        plan_of(StepId(1), [chunk], block_size=4), [WorkerRequest(other, SamplingState.from_request(other), {}, 0)]
    )
    with pytest.raises(AssertionError, match="not its request's"):
        slot_table.tokens(plan.decodes)


def test_feature_slots_follow_the_blocks() -> None:
    assert slots_of(np.asarray([7, 2, 9], dtype=np.int32), 2, 5, 3).tolist() == [23, 6, 7, 8, 27]
    large = slots_of(np.asarray([2**31 - 1], dtype=np.int32), 0, 2, 64)
    assert large.tolist() == [(2**31 - 1) * 64, (2**31 - 1) * 64 + 1]


def test_vision_input_keeps_pixels_and_order() -> None:
    rig = Rig()
    pictures = [make_picture(name, fill, start) for name, fill, start in (("a", 10, 0), ("b", 20, 5))]
    request = make_request(1, [96] * 10, images=tuple(item for item, _ in pictures))
    items = [rig.item(request, index) for index in (0, 1)]
    inputs = vision_input(request.images, [p for _, p in pictures], vision_slots(items, 3), CPU)
    assert all(pixels.shape == (1, 8, 8, 3) and pixels.dtype == torch.uint8 for pixels in inputs.pixels)
    assert [int(pixels[0, 7, 7, 2]) for pixels in inputs.pixels] == [10, 20]
    assert inputs.sources == ((8, 8), (8, 8)) and inputs.arrays == ()
    assert inputs.grids == ((1, 1, 5), (1, 1, 5))
    expected = [int(i.block_ids[f // 3]) * 3 + f % 3 for i in items for f in range(5)]
    assert inputs.slots.tolist() == expected
    rig.worker.close()


def test_a_part_of_a_step_runs_where_and_beside_what_the_step_does() -> None:
    blocks = np.arange(4, dtype=np.int32)
    rows = [Decode(i, i, 7, 3, 1, blocks) for i in range(2)]
    chunk = ChunkRow(RequestId(2), 2, (5, 6), 0, blocks, 4, True, 0)
    plan = replace(plan_of(StepId(3), [*rows, chunk], vision_s=0.5), partition=2)
    request = make_request(2, [5, 6])
    record = WorkerRequest(request, SamplingState.from_request(request), {}, 0)
    for indices, expected in (([1, 2], [record]), ([0], [])):
        part, records = part_of(plan, [record], np.array(indices))
        assert request_ids_of(part).tolist() == indices and records == expected
        assert (part.step_id, part.vision_s, part.partition) == (3, 0.5, 2)
