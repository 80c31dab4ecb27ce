"""Language plans -> model inputs: numpy arrays, sent to the device in one copy.

Slot of position p: `block_ids[p // S] * S + p % S`. Does not know requests, models or sampling; allocates no block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.base import Ops, PagedCache, States
from hydra_engine.backend.device import Device
from hydra_engine.core.plans import BlockIds, DecodeRows, Int64s, LanguagePlan, slots_of
from hydra_engine.models.implementation import ServedModel
from hydra_engine.models.layers.decoder import LanguageInput, Scored
from hydra_engine.worker.language.slot_table import SlotTable, StateTable, counts_of, starts_of
from hydra_engine.worker.ports import PromptPositions


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts that all steps of a lane share: the model, its device and its caches (None: it has none of the
    kind)."""

    model: ServedModel
    ops: Ops
    device: Device
    kv_cache: PagedCache
    image_cache: PagedCache | None
    states: StateTable | None
    multimodal_rope: bool


class StepRows(NamedTuple):
    """A language step of T tokens in B rows, of which B' sample, in host arrays. The int32 arrays go to
    `Ops.plan_attention`."""

    token_ids: Int64s  # [T]
    positions: Int64s  # [T] or [3, T]
    position_end: int  # more than the largest of them
    slots: Int64s  # [T]
    logit_rows: Int64s  # [B']
    cu_q: BlockIds  # [B + 1]
    num_context: BlockIds  # [B]
    block_tables: BlockIds  # [B, W]


def step_rows(
    plan: LanguagePlan, slot_table: SlotTable, block_size: int, rope: Sequence[PromptPositions] | None = None
) -> StepRows:
    """Builds the rows of a plan with at least one row, whose chunks have at least one token each.

    `slot_table` has the tokens that a plan made ahead lacks (-1; on an asynchronous device they stay -1) and the rotary
    deltas of decodes, whose requests own their slots (`SlotTable.begin_step`; a benchmark may set
    `slot_table.owners[decodes.seq_slots] = decodes.request_ids` instead). `rope` has the multimodal rotary positions of
    each chunk, `()` for a plan of decodes, and is None where positions are 1-D. Asserts that the plan has the blocks of
    every context.
    """
    if plan.chunks:
        return _mixed_rows(plan, slot_table, block_size, rope)
    return _decode_rows(plan.decodes, slot_table, block_size, multimodal=rope is not None)


def sent_input(
    plan: LanguagePlan,
    rows: StepRows,
    ops: Ops,
    device: Device,
    *,
    image_block_size: int,
    states: StateTable | None = None,
    scored: Scored | None = None,
    beside: Sequence[npt.NDArray[np.generic]] = (),
) -> tuple[LanguageInput, tuple[Tensor, ...]]:
    """Sends `rows` and the arrays `beside` them to the device in one copy. Returns the model's input, with the
    attention and the recurrent states planned, and the device tensors of `beside`."""
    pieces = image_merges(plan, rows.cu_q, image_block_size)
    merges = tuple(np.concatenate(part) for part in zip(*pieces, strict=True))
    attention = ops.plan_attention(
        torch.from_numpy(rows.cu_q), torch.from_numpy(rows.num_context), torch.from_numpy(rows.block_tables)
    )
    sent = device.send((rows.token_ids, rows.positions, rows.slots, rows.logit_rows, *merges, *beside))
    token_ids, positions, slots, logit_rows, *others = sent
    image_rows, image_slots = others[:2] if merges else (None, None)
    inputs = LanguageInput(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        attention=attention,
        logit_rows=logit_rows,
        position_end=rows.position_end,
        image_rows=image_rows,
        image_slots=image_slots,
        states=None if states is None else States(states.cache, ops.plan_states(states.rows(plan))),
        scored=scored,
    )
    return inputs, tuple(others[len(merges) :])


def _decode_rows(decodes: DecodeRows, slot_table: SlotTable, block_size: int, *, multimodal: bool) -> StepRows:
    """Builds a decode step, the most frequent kind, without a loop over rows."""
    starts, tables = decodes.starts, decodes.block_tables
    longest = int(np.maximum.reduce(starts))  # without the Python of starts.max()
    assert longest // block_size < tables.shape[1], "plan lacks blocks"
    blocks = starts // block_size
    rows, cu_q = _one_each(len(decodes))
    positions = _decode_positions(decodes, slot_table, multimodal=multimodal)
    return StepRows(
        token_ids=slot_table.tokens(decodes),
        positions=positions,
        position_end=int(positions.max()) + 1 if multimodal else longest + 1,
        slots=(tables[rows, blocks] - blocks) * block_size + starts,
        logit_rows=rows,
        cu_q=cu_q,
        num_context=(starts + 1).astype(np.int32),
        block_tables=tables,
    )


@lru_cache(maxsize=256)
def _one_each(num_rows: int) -> tuple[Int64s, BlockIds]:
    """(row indices [B], cu_q [B + 1]) of a step of one token per row. Shared by calls: read only."""
    bounds = np.arange(num_rows + 1)
    return bounds[:-1], bounds.astype(np.int32)


def _mixed_rows(
    plan: LanguagePlan, slot_table: SlotTable, block_size: int, rope: Sequence[PromptPositions] | None
) -> StepRows:
    """Builds a step of decodes and at least one chunk. Parameters as in `step_rows`."""
    counts, starts = counts_of(plan), starts_of(plan)
    num_rows, num_decodes = plan.num_rows, len(plan.decodes)
    cu_q = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(counts, out=cu_q[1:])
    num_tokens = int(cu_q[-1])
    num_context = starts + counts
    tables = _block_tables(plan, -(-num_context // block_size))
    row_of_token = np.repeat(np.arange(num_rows), counts)
    indices = np.arange(num_tokens) + np.repeat(starts - cu_q[:-1], counts)
    positions = indices
    if rope is not None:
        pieces = [
            prompt.slice(chunk.start, len(chunk.token_ids)) for chunk, prompt in zip(plan.chunks, rope, strict=True)
        ]
        positions = np.concatenate([_decode_positions(plan.decodes, slot_table, multimodal=True), *pieces], axis=1)
    token_ids = np.empty(num_tokens, dtype=np.int64)
    token_ids[:num_decodes] = slot_table.tokens(plan.decodes)
    prompts = chain.from_iterable(chunk.token_ids for chunk in plan.chunks)
    token_ids[num_decodes:] = np.fromiter(prompts, dtype=np.int64, count=num_tokens - num_decodes)
    sampled = np.ones(num_rows, dtype=np.bool_)
    sampled[num_decodes:] = [chunk.sample for chunk in plan.chunks]
    return StepRows(
        token_ids=token_ids,
        positions=positions,
        position_end=int(positions.max()) + 1,
        slots=tables[row_of_token, indices // block_size].astype(np.int64) * block_size + indices % block_size,
        logit_rows=cu_q[1:][sampled] - 1,
        cu_q=cu_q.astype(np.int32),
        num_context=num_context.astype(np.int32),
        block_tables=tables,
    )


def _decode_positions(decodes: DecodeRows, slot_table: SlotTable, *, multimodal: bool) -> Int64s:
    """Rotary positions of the decodes' tokens: [B], or if `multimodal` [3, B], shifted by each request's rotary delta
    and equal on all axes, since they follow the prompt."""
    if not multimodal:
        return decodes.starts
    positions = np.empty((3, len(decodes)), dtype=np.int64)
    positions[:] = decodes.starts + slot_table.rope_deltas[decodes.seq_slots]
    return positions


def _block_tables(plan: LanguagePlan, num_blocks: Int64s) -> BlockIds:
    """Block tables [B, max blocks]. `num_blocks`: blocks that each row's context needs; asserts that the plan has them.
    Entries after a row's context are 0 or further blocks of the row."""
    width, num_decodes = int(num_blocks.max()), len(plan.decodes)
    given = plan.decodes.block_tables[:, :width]
    tables = np.zeros((plan.num_rows, width), dtype=np.int32)
    tables[:num_decodes, : given.shape[1]] = given
    assert num_blocks[:num_decodes].max(initial=0) <= given.shape[1], "plan lacks blocks"
    for row, (chunk, needed) in enumerate(
        zip(plan.chunks, num_blocks[num_decodes:].tolist(), strict=True), num_decodes
    ):
        assert chunk.num_blocks >= needed, "plan lacks blocks"
        tables[row, :needed] = chunk.block_ids[:needed]
    return tables


def image_merges(plan: LanguagePlan, cu_q: BlockIds, image_block_size: int) -> list[tuple[Int64s, Int64s]]:
    """Pairs (token rows of the step that take image features, their image cache slots), one pair per image slice of the
    chunks."""
    merges: list[tuple[Int64s, Int64s]] = []
    for chunk, begin in zip(plan.chunks, cu_q[len(plan.decodes) : -1].tolist(), strict=True):
        for piece in chunk.images:
            assert piece.row + piece.count <= len(chunk.token_ids), "image slice reaches beyond its chunk"
            first = begin + piece.row
            slots = slots_of(piece.block_ids, piece.offset, piece.count, image_block_size)
            merges.append((np.arange(first, first + piece.count), slots))
    return merges
