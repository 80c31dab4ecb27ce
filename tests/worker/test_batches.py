"""Plans become tensors: every slot, position and merge recomputed one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import ImageSlice, LanguageRow
from hydra_engine.models.inputs import LanguageInput
from hydra_engine.worker.batches import feature_slots, language_input, vision_input
from tests.worker.fakes import FakeOps, Rig, make_picture, make_request

CPU = torch.device("cpu")


def build(rows: list[LanguageRow], block_size: int, image_block_size: int = 5) -> LanguageInput:
    return language_input(rows, FakeOps(), block_size=block_size, image_block_size=image_block_size, device=CPU)


def random_rows(rng: np.random.Generator, block_size: int) -> list[LanguageRow]:
    """Decode rows first, then chunks; shuffled blocks, spare capacity behind the valid entries."""
    num_decodes, num_chunks = int(rng.integers(0, 5)), int(rng.integers(0, 4))
    rows = []
    blocks = iter(rng.permutation(10_000).astype(np.int32))
    for index in range(max(num_decodes + num_chunks, 1)):
        count = 1 if index < num_decodes else int(rng.integers(1, 40))
        start = int(rng.integers(0, 50))
        num_blocks = -(-(start + count) // block_size) + int(rng.integers(0, 3))
        table = np.full(num_blocks + 4, -7, dtype=np.int32)
        table[:num_blocks] = [next(blocks) for _ in range(num_blocks)]
        tokens = tuple(int(t) for t in rng.integers(0, 500, count))
        slices = []
        if count > 6:
            image_blocks = np.asarray([next(blocks) for _ in range(9)], dtype=np.int32)
            slices = [ImageSlice(1, 2, 3, image_blocks), ImageSlice(4, count - 4, 0, image_blocks[::-1].copy())]
        rows.append(
            LanguageRow(
                RequestId(index),
                tokens,
                start,
                table,
                num_blocks,
                sample=bool(rng.integers(2)),
                num_generated=0,
                is_decode=index < num_decodes,
                images=tuple(slices),
            )
        )
    return rows


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_language_input_equals_a_token_by_token_computation(block_size: int) -> None:
    for seed in range(40):
        rows = random_rows(np.random.default_rng(seed), block_size)
        inputs = build(rows, block_size)
        tokens, positions, slots, logit_rows, image_rows, image_slots, cu_q = [], [], [], [], [], [], [0]
        for row in rows:
            for piece in row.images:
                for i in range(piece.count):
                    image_rows.append(len(tokens) + piece.row + i)
                    feature = piece.offset + i
                    image_slots.append(int(piece.block_ids[feature // 5]) * 5 + feature % 5)
            for i, token in enumerate(row.token_ids):
                position = row.start + i
                tokens.append(token)
                positions.append(position)
                slots.append(int(row.block_ids[position // block_size]) * block_size + position % block_size)
            cu_q.append(len(tokens))
            if row.sample:
                logit_rows.append(len(tokens) - 1)
        assert inputs.token_ids.tolist() == tokens
        assert inputs.positions.tolist() == positions
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
        for tensor in (inputs.token_ids, inputs.positions, inputs.slots, inputs.logit_rows):
            assert tensor.dtype == torch.int64
        for tensor in (plan.cu_q, plan.num_context, plan.block_tables):
            assert tensor.dtype == torch.int32


def test_a_plan_that_lacks_blocks_is_a_bug() -> None:
    row = LanguageRow(RequestId(1), (4,), 16, np.arange(9, dtype=np.int32), 1, True, 0, True)
    with pytest.raises(AssertionError, match="lacks blocks"):
        build([row], 16)


def test_feature_slots_follow_the_blocks() -> None:
    assert feature_slots(np.asarray([7, 2, 9], dtype=np.int32), 2, 5, 3).tolist() == [23, 6, 7, 8, 27]
    large = feature_slots(np.asarray([2**31 - 1], dtype=np.int32), 0, 2, 64)
    assert large.tolist() == [(2**31 - 1) * 64, (2**31 - 1) * 64 + 1]


def test_vision_input_keeps_pixels_and_order() -> None:
    rig = Rig()
    pictures = [make_picture(name, fill, start) for name, fill, start in (("a", 10, 0), ("b", 20, 5))]
    request = make_request(1, [96] * 10, images=tuple(item for item, _ in pictures))
    items = [rig.item(request, index) for index in (0, 1)]
    inputs = vision_input(items, request.images, [p for _, p in pictures], block_size=3, device=CPU)
    assert all(pixels.shape == (1, 8, 8, 3) and pixels.dtype == torch.uint8 for pixels in inputs.pixels)
    assert [int(pixels[0, 7, 7, 2]) for pixels in inputs.pixels] == [10, 20]
    assert inputs.sources == ((8, 8), (8, 8)) and inputs.arrays == ()
    assert inputs.grids == ((1, 1, 5), (1, 1, 5))
    expected = [int(i.block_ids[f // 3]) * 3 + f % 3 for i in items for f in range(5)]
    assert inputs.slots.tolist() == expected
    rig.worker.close()
