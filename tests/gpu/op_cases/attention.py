"""Attention over a paged cache and over packed segments, and the plans for it."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import (
    MixedRows,
)
from hydra_engine.backend.cuda.attention import MAX_HEAD_DIM
from tests.gpu.op_cases.inputs import REFERENCE, random
from tests.gpu.side import Side
from tests.kernels.comparison import assert_attention_close
from tests.kernels.paged import Step, make_step

# ---- paged attention


HEADS = [(4, 2, 16), (2, 2, 20)]
# (queries, context) of rows: decodes alone; prompts alone; decodes before chunks, one of a single token, one of none;
# a decode behind a chunk
STEPS = {
    "decodes": [(1, 1), (1, 70), (1, 9)],
    "prompts": [(5, 5), (3, 20)],
    "mixed": [(1, 33), (1, 4), (6, 6), (1, 1), (0, 7), (2, 40)],
    "behind": [(4, 9), (1, 66)],
}
MIXED = [[(1, 33), (1, 70), (6, 6), (1, 1), (0, 7)], [(1, 1), (1, 70), (1, 9)], [(40, 45), (2, 2)]]


def attend(side: Side, step: Step, *, exact: bool = False) -> Tensor:
    ops = side.exact if exact else side.ops
    plan = ops.plan_attention(step.cu_q, step.num_context, step.block_tables)
    return ops.attention_paged(side.there(step.q), side.cache(step.cache), 1, plan, 0.3)


@pytest.mark.quick("(4, 2, 16)-mixed", "(2, 2, 20)-decodes")
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_paged_attention(side: Side, name: str, heads: tuple[int, int, int]) -> None:
    for dtype in (torch.float16, torch.float32):
        step = make_step(STEPS[name], heads, 4, dtype)
        for exact in (False, True):
            result = attend(side, step, exact=exact)
            assert_attention_close(result.cpu(), step.expected(0.3).to(dtype))


@pytest.mark.parametrize("name", ["decodes", "mixed"])
def test_head_dims_without_a_kernel_take_torch(side: Side, name: str) -> None:
    step = make_step(STEPS[name], (2, 1, MAX_HEAD_DIM + 4), 4, torch.float32)
    assert_attention_close(attend(side, step).cpu(), step.expected(0.3))
    with pytest.raises(ValueError, match="plan: expected one of plan_attention for a head dim above"):
        plan = side.ops.plan_decode(*(side.there(x[:1].contiguous()) for x in (step.num_context, step.block_tables)))
        side.ops.attention_paged(side.there(step.q)[:1], side.cache(step.cache), 1, plan, 0.3)


def test_how_a_step_is_split(side: Side) -> None:
    step = make_step(STEPS["mixed"], HEADS[0], 4, torch.float32)
    plan = side.ops.plan_attention(step.cu_q, step.num_context, step.block_tables)
    native = plan.native
    assert (native.num_decodes, native.max_decode_context, native.max_rest_q) == (2, 33, 6)
    assert native.rest_cu_q.tolist() == [0, 6, 7, 7, 9] and plan.cu_q.tolist() == step.cu_q.tolist()
    assert (plan.max_q, plan.max_context) == (6, 40)
    exact = side.exact.plan_attention(step.cu_q, step.num_context, step.block_tables).native
    assert (exact.num_decodes, exact.rest_cu_q.tolist()) == (0, step.cu_q.tolist())


def test_a_plan_does_not_read_its_tensors_again(side: Side) -> None:
    step = make_step(STEPS["mixed"], HEADS[0], 4, torch.float32)
    given = step.cu_q.clone(), step.num_context.clone(), step.block_tables.clone()
    plan = side.ops.plan_attention(*given)
    for tensor in given:
        tensor.fill_(-1)
    result = side.ops.attention_paged(side.there(step.q), side.cache(step.cache), 1, plan, 0.3)
    assert_attention_close(result.cpu(), step.expected(0.3))


@pytest.mark.quick("True")
@pytest.mark.parametrize("exact", [False, True])
def test_a_plan_of_decodes_reads_what_is_there_when_it_is_used(side: Side, exact: bool) -> None:
    """Imitates a captured step: tensors at fixed addresses, longer than needed, rows that fill up the batch."""
    ops = side.exact if exact else side.ops
    steps = [make_step([(1, n) for n in contexts], HEADS[0], 4, torch.float32) for contexts in ((9, 70), (33, 1))]
    width = max(step.block_tables.shape[1] for step in steps) + 3
    tables = torch.zeros(3, width, dtype=torch.int32, device=side.device)
    context = torch.zeros(3, dtype=torch.int32, device=side.device)
    plan = ops.plan_decode(context, tables)
    assert (plan.max_q, plan.max_context) == (1, 0)
    for step in steps:
        tables[:2, : step.block_tables.shape[1]] = step.block_tables.to(side.device)
        context[:2] = step.num_context.to(side.device)
        q = torch.cat((side.there(step.q), torch.ones(1, 4, 16, device=side.device)))
        result = ops.attention_paged(q, side.cache(step.cache), 1, plan, 0.3).cpu()
        assert_attention_close(result[:2], step.expected(0.3))
        assert not result[2].any(), "a row of no context"


@pytest.mark.quick("True")
@pytest.mark.parametrize("exact", [False, True])
def test_a_plan_of_mixed_rows_reads_what_is_there_when_it_is_used(side: Side, exact: bool) -> None:
    """Imitates a captured step: decodes beside prompts, decodes alone, a prompt alone; rows and tokens after them
    fill up the bucket."""
    ops, num_rows, num_tokens = side.exact if exact else side.ops, 6, 48
    steps = [make_step(rows, HEADS[0], 4, torch.float32) for rows in MIXED]
    width = max(step.block_tables.shape[1] for step in steps) + 3

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=side.device)

    rows = MixedRows(zeros(num_rows + 1), zeros(num_rows + 1), zeros(num_rows), zeros(num_rows), zeros(num_rows, width))
    plan = ops.plan_mixed(rows, num_tokens, 2)
    for step, num_decodes in zip(steps, (2, 3, 0), strict=True):
        given, count = len(step.num_context), step.q.shape[0]
        cu_q = torch.full((num_rows + 1,), count, dtype=torch.int32)
        cu_q[: given + 1] = step.cu_q
        for column in rows[2:]:
            column.zero_()
        rows.cu_q.copy_(cu_q)
        rows.rest_cu_q.copy_(cu_q.clamp(min=num_decodes))
        rows.num_context[:given] = step.num_context.to(side.device)
        rows.decode_context[:num_decodes] = step.num_context[:num_decodes].to(side.device)
        rows.block_tables[:given, : step.block_tables.shape[1]] = step.block_tables.to(side.device)
        q = torch.cat((side.there(step.q), torch.ones(num_tokens - count, 4, 16, device=side.device)))
        result = ops.attention_paged(q, side.cache(step.cache), 1, plan, 0.3).cpu()
        assert_attention_close(result[:count].contiguous(), step.expected(0.3))


def test_exact_attention_does_not_depend_on_batch_chunks_or_who_decodes(side: Side) -> None:
    whole = make_step([(40, 40)], (4, 2, 16), 4, torch.float16)
    together = attend(side, whole, exact=True)
    for parts in ((40,), (1, 39), (16, 16, 8), (39, 1)):
        for begin, end in pairwise(accumulate(parts, initial=0)):
            cu_q = torch.tensor([0, end - begin], dtype=torch.int32)
            context = torch.tensor([end], dtype=torch.int32)
            part = Step(whole.q[begin:end], whole.cache, whole.block_tables, cu_q, context)
            assert torch.equal(attend(side, part, exact=True), together[begin:end])


def test_messages_of_plans(side: Side) -> None:
    step = make_step(STEPS["decodes"], HEADS[0], 4, torch.float32)
    plan = side.ops.plan_attention(step.cu_q, step.num_context, step.block_tables)
    with pytest.raises(ValueError, match="q: expected 3 tokens as the plan says, got 2"):
        side.ops.attention_paged(side.there(step.q)[:2], side.cache(step.cache), 1, plan, 0.3)
    with pytest.raises(ValueError, match=r"num_context: expected torch\.int32"):
        side.ops.plan_decode(side.there(step.num_context).long(), side.there(step.block_tables))
    with pytest.raises(ValueError, match=r"num_context, block_tables: expected \[B\] and \[B, max_blocks\]"):
        side.ops.plan_decode(side.there(step.num_context)[:2], side.there(step.block_tables))
    with pytest.raises(ValueError, match="row 0 has 3 queries"):
        side.ops.plan_attention(torch.tensor([0, 3], dtype=torch.int32), step.num_context[:1], step.block_tables[:1])


# ---- packed attention


def qkv(rows: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return random(rows, 3, 2, dim, dtype=dtype).unbind(1)


@pytest.mark.parametrize("dim", [24, MAX_HEAD_DIM + 2])
def test_packed_attention(side: Side, dim: int) -> None:
    q, k, v = (side.there(x) for x in qkv(30, dim, torch.float32))
    for bounds in ([0, 7, 7, 30], (0, 30), range(0, 31, 10), [0, 7, 7, 30]):
        expected = REFERENCE.attention_packed(*qkv(30, dim, torch.float32), bounds, 0.2)
        for ops in (side.ops, side.exact):
            assert_attention_close(ops.attention_packed(q, k, v, bounds, 0.2).cpu(), expected)


def test_a_segment_of_exact_attention_does_not_depend_on_the_others(side: Side) -> None:
    q, k, v = (side.there(x) for x in qkv(80, 16, torch.float16))
    together = side.exact.attention_packed(q, k, v, [0, 5, 80], 0.2)
    alone = side.exact.attention_packed(q[:5], k[:5], v[:5], [0, 5], 0.2)
    assert torch.equal(alone, together[:5])


def test_segments_are_sent_once_and_checked(side: Side) -> None:
    ops = side.ops.attention_packed.__self__
    q, k, v = (side.there(x) for x in qkv(12, 16, torch.float32))
    first, longest = ops.segments(q, k, v, [0, 4, 12])
    assert longest == 8 and first.tolist() == [0, 4, 12] and first.dtype is torch.int32
    assert ops.segments(q, k, v, (0, 4, 12))[0] is first
    for count in range(1, 60):
        ops.segments(q, k, v, sorted({0, 12, count % 12, count // 5}))
    assert len(ops._lane.segments) <= 32
    for bad in ([0, 4, 11], [1, 12], [0, 8, 4, 12], []):
        with pytest.raises(ValueError, match="cu_seqlens: expected to rise from 0 to 12"):
            side.ops.attention_packed(q, k, v, bad, 0.2)
    with pytest.raises(ValueError, match="cu_seqlens: expected to rise from 0 to 11"):
        side.ops.attention_packed(q[:11], k[:11], v[:11], [0, 4, 12], 0.2)


@pytest.mark.quick("7, 7")
@pytest.mark.parametrize("bounds", [[0, 7, 7, 30], [0, 30, 30, 30], [0, 1, 2, 30]], ids=str)
def test_segments_are_read_at_each_use_of_a_plan(side: Side, bounds: list[int]) -> None:
    cu = side.there(torch.zeros(4, dtype=torch.int32))
    q, k, v = (side.there(x) for x in qkv(30, 24, torch.float32))
    expected = REFERENCE.attention_packed(*qkv(30, 24, torch.float32), bounds, 0.2)
    for ops in (side.ops, side.exact):
        plan = ops.plan_packed(cu, 30)
        cu.copy_(side.there(torch.tensor(bounds, dtype=torch.int32)))
        assert_attention_close(ops.attention_packed(q, k, v, plan, 0.2).cpu(), expected)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected .* torch.int32"):
        side.ops.plan_packed(cu.long(), 30)
    wide = (side.there(x) for x in qkv(30, MAX_HEAD_DIM + 2, torch.float32))
    with pytest.raises(ValueError, match="cut on the host"):
        side.ops.attention_packed(*wide, side.ops.plan_packed(cu, 30), 0.2)
