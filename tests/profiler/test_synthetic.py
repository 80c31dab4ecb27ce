"""Plans for measuring obey what the lanes take for granted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from hydra_engine.core.plans import LanguagePlan
from hydra_engine.profiler.grid import LanguagePoint, VisionPoint, make_grid
from hydra_engine.profiler.synthetic import PlanMaker, picture_request, text_request
from tests.profiler.fakes import SIZES, SquareVision

POINTS = [p for g in [make_grid(SIZES, SquareVision())] for p in g.coarse + g.rest]
VOCABULARY = 500


def rows(plan: LanguagePlan) -> Iterator[tuple[int, int, int, list[int]]]:
    """(slot, start, tokens, blocks) of every row."""
    decodes = plan.decodes
    for seq_slot, start, table in zip(decodes.seq_slots, decodes.starts, decodes.block_tables, strict=True):
        yield int(seq_slot), int(start), 1, table[: -(-(int(start) + 1) // SIZES.block_size)].tolist()
    for chunk in plan.chunks:
        yield chunk.seq_slot, chunk.start, len(chunk.token_ids), chunk.block_ids[: chunk.num_blocks].tolist()


@pytest.mark.parametrize("point", [p for p in POINTS if isinstance(p, LanguagePoint)], ids=str)
def test_a_plan_is_its_point_and_its_rows_share_nothing(point: LanguagePoint) -> None:
    plan = PlanMaker(SIZES, VOCABULARY).language(point)
    assert plan.load == point.load
    found = list(rows(plan))
    blocks = [block for _, _, _, blocks in found for block in blocks]
    assert len(set(blocks)) == len(blocks) and max(blocks) * SIZES.block_size < SIZES.kv_tokens
    assert len({seq_slot for seq_slot, *_ in found}) == len(found)
    for _, start, count, own in found:
        assert len(own) * SIZES.block_size >= start + count
    assert plan.decodes.block_tables.flags.c_contiguous and plan.decodes.block_tables.dtype == np.int32


def test_tokens_are_random_and_known_to_the_model() -> None:
    plan = PlanMaker(SIZES, VOCABULARY).language(LanguagePoint(8, 64, ((128, 0),)))
    ids = [*plan.decodes.token_ids.tolist(), *plan.chunks[0].token_ids]
    assert all(0 <= token < VOCABULARY for token in ids) and len(set(ids)) > 60


def test_every_request_takes_its_slot_with_a_chunk() -> None:
    plans = PlanMaker(replace(SIZES, token_budget=6), VOCABULARY).opening()
    assert [len(plan.chunks) for plan in plans] == [6, 6, 4]
    assert [chunk.seq_slot for plan in plans for chunk in plan.chunks] == list(range(16))
    assert all(chunk.request_id == chunk.seq_slot and chunk.start == 0 for plan in plans for chunk in plan.chunks)


def test_slots_with_a_state_go_on_where_they_are() -> None:
    """The lane asserts of recurrent states: a row begins at 0 or where its slot's last row ended."""
    maker = PlanMaker(SIZES, VOCABULARY, stateful=True)
    seen = dict.fromkeys(range(SIZES.max_num_seqs), 0)
    plans = maker.opening()
    for point in [p for p in POINTS if isinstance(p, LanguagePoint)] * 2:
        plans += [*maker.preparation(point), plan := maker.language(point)]
        assert plan.load.num_rows == point.load.num_rows
        assert point.load.decode_context <= plan.load.decode_context <= point.load.decode_context + 64 * 16
    for plan in plans:
        for seq_slot, start, count, _ in rows(plan):
            assert start in (0, seen[seq_slot])
            seen[seq_slot] = start + count


def test_pictures_are_noise_of_the_right_size_with_names_of_their_own() -> None:
    item = SquareVision().plan_image(84, 84).items[0]
    request, payloads = picture_request(3, VisionPoint(item, (84, 84), count=4))
    assert len({payload.digest for payload in payloads}) == 4
    assert all(len(payload.data) == 84 * 84 * 3 and payload.count == 1 for payload in payloads)
    assert len(set(payloads[0].data)) == 256
    assert [image.start for image in request.images] == [0, 9, 18, 27] and request.num_prompt == 36
    plan = PlanMaker(SIZES, VOCABULARY).vision(request)
    assert plan.num_patches == 36
    assert len({int(block) for encode in plan.items for block in encode.block_ids}) == 4
    assert request.id != text_request(3, 2048).id
