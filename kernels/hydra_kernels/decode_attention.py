"""Attention of one query per request over its paged context, the context cut into splits (Flash-Decoding).

Two kernels read the cache. With one query head per KV head, every key of a tile keeps a running softmax of its own in
the lanes that hold it and all are joined at the end, so the loop has no reduction over keys and no barrier. With
several, the heads of a group are the rows of a matrix product and share what is read. A third kernel joins the splits.
Bound by memory: the context's K and V are read once.

Lengths and block tables are read on the device and the grid depends on shapes alone, so a captured launch serves every
context. A request's split boundaries depend on its own context and on `num_splits`: with `num_splits` fixed its result
does not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._attention import LOWEST, attend, load_parts, paged_rows, store_parts
from hydra_kernels._checks import check_paged, check_scale, described, output
from hydra_kernels._common import DOT_DTYPE, LOG2_E, decode_launch, split_for_lanes, split_head_dim

_PROGRAMS_PER_SM = 4
_MIN_KEYS = 64  # of a split: below that its own result costs too much of what it reads
_MAX_SPLITS = 128
_MERGE_SPLITS = 16  # joined at a time
_MERGE_WARPS = 4


@triton.jit
def _split_bounds(
    context: tl.tensor, split: tl.tensor, num_splits: tl.tensor, KEYS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Keys [first, last) of a split: equal numbers of whole tiles, the last splits fewer or none."""
    keys = tl.cdiv(tl.cdiv(context, num_splits), KEYS) * KEYS
    return split * keys, tl.minimum((split + 1) * keys, context)


# Numbers that change from step to step: a kernel for each kind of them would be compiled while serving.
_VARYING = ["num_splits", "stride_table"]
_ANYWHERE = ["block_tables", "num_context"]  # parts of what was sent: at any multiple of 4 bytes


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def _decode_mha_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    log_totals: tl.tensor,
    block_tables: tl.tensor,
    num_context: tl.tensor,
    scale: tl.tensor,
    num_splits: tl.tensor,
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    stride_table: tl.tensor,
    STRIDE_Q_HEAD: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    SINGLE: tl.constexpr,
) -> None:
    """Grid (B, Hkv, splits). out [B, Hq, splits, D], log_totals [B, Hq, splits] in base 2."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(num_context + row)
    first, last = _split_bounds(context, split, num_splits, KEYS)
    table = block_tables + row.to(tl.int64) * stride_table
    one = tl.zeros([1], tl.int64)
    q0, q1 = load_parts(q, one + row.to(tl.int64) * stride_q + head * STRIDE_Q_HEAD, one == 0, D, D0, D1)
    q0 = q0.to(tl.float32) * scale
    q1 = q1.to(tl.float32) * scale
    top = tl.full([KEYS], LOWEST, tl.float32)
    total = tl.zeros([KEYS], tl.float32)
    acc0 = tl.zeros([KEYS, D0], tl.float32)
    acc1 = tl.zeros([KEYS, D1 if D1 > 0 else 16], tl.float32)
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        position = start + tl.arange(0, KEYS)
        valid = position < last
        rows = paged_rows(table, position, valid, stride_block, stride_slot, BLOCK_SIZE) + head * STRIDE_HEAD
        k0, k1 = load_parts(k_cache, rows, valid, D, D0, D1)
        v0, v1 = load_parts(v_cache, rows, valid, D, D0, D1)
        scores = tl.sum(k0.to(tl.float32) * q0, axis=1)
        if D1 > 0:
            scores += tl.sum(k1.to(tl.float32) * q1, axis=1)
        scores = tl.where(valid, scores, float("-inf"))
        new_top = tl.maximum(top, scores)
        weights = tl.exp2(scores - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + weights
        acc0 = acc0 * shrink[:, None] + weights[:, None] * v0.to(tl.float32)
        if D1 > 0:
            acc1 = acc1 * shrink[:, None] + weights[:, None] * v1.to(tl.float32)
        top = new_top
    highest = tl.max(top, axis=0)
    shrink = tl.exp2(top - highest)
    total_all = tl.sum(total * shrink, axis=0)
    divisor = tl.where(total_all == 0.0, 1.0, total_all)
    part0 = tl.sum(acc0 * shrink[:, None], axis=0)[None, :] / divisor
    part1 = tl.sum(acc1 * shrink[:, None], axis=0)[None, :] / divisor
    place = (row.to(tl.int64) * tl.num_programs(1) + head) * num_splits + split
    kept = one == 0
    if not SINGLE:
        kept = (one + first) < last
        tl.store(log_totals + place, highest + tl.log2(divisor), mask=first < last)
    store_parts(out, one + place * D, part0, part1, kept, D, D0, D1)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def _decode_gqa_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    log_totals: tl.tensor,
    block_tables: tl.tensor,
    num_context: tl.tensor,
    scale: tl.tensor,
    num_splits: tl.tensor,
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    stride_table: tl.tensor,
    STRIDE_Q_HEAD: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    SINGLE: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """As `_decode_mha_kernel`, with the GROUP query heads of one KV head as rows of a tile of ROWS."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(num_context + row)
    first, last = _split_bounds(context, split, num_splits, KEYS)
    table = block_tables + row.to(tl.int64) * stride_table
    member = tl.arange(0, ROWS)
    query_head = head * GROUP + member
    q0, q1 = load_parts(q, row.to(tl.int64) * stride_q + query_head * STRIDE_Q_HEAD, member < GROUP, D, D0, D1)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, D0], tl.float32)
    acc1 = tl.zeros([ROWS, D1 if D1 > 0 else 16], tl.float32)
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        position = start + tl.arange(0, KEYS)
        valid = position < last
        rows = paged_rows(table, position, valid, stride_block, stride_slot, BLOCK_SIZE) + head * STRIDE_HEAD
        k0, k1 = load_parts(k_cache, rows, valid, D, D0, D1)
        v0, v1 = load_parts(v_cache, rows, valid, D, D0, D1)
        top, total, acc0, acc1 = attend(
            q0, q1, k0, k1, v0, v1, valid[None, :], top, total, acc0, acc1, scale, True, D1, DTYPE
        )
    divisor = tl.where(total == 0.0, 1.0, total)
    places = (row.to(tl.int64) * tl.num_programs(1) * GROUP + query_head) * num_splits + split
    kept = member < GROUP
    if not SINGLE:
        kept = member < tl.where(first < last, GROUP, 0)
        tl.store(log_totals + places, top + tl.log2(divisor), mask=kept)
    store_parts(out, places * D, acc0 / divisor[:, None], acc1 / divisor[:, None], kept, D, D0, D1)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["num_context"])
def _merge_kernel(
    partial: tl.tensor,
    log_totals: tl.tensor,
    num_context: tl.tensor,
    out: tl.tensor,
    num_splits: tl.tensor,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    ALL: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Grid (B, Hq): the mean of the splits' results, weighted by their totals. A context of 0 gives zeros."""
    row = tl.program_id(0)
    context = tl.load(num_context + row)
    place = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    logs = log_totals + place * num_splits
    split = tl.arange(0, ALL)
    first, last = _split_bounds(context, split, num_splits, KEYS)
    all_logs = tl.load(logs + split, mask=(split < num_splits) & (first < last), other=LOWEST)
    highest = tl.max(all_logs, axis=0)
    total = tl.sum(tl.exp2(all_logs - highest), axis=0)
    column = tl.arange(0, PADDED)
    acc = tl.zeros([PADDED], tl.float32)
    for begin in range(0, num_splits, STEP):
        some = begin + tl.arange(0, STEP)
        some_first, some_last = _split_bounds(context, some, num_splits, KEYS)
        used = (some < num_splits) & (some_first < some_last)
        weight = tl.exp2(tl.load(logs + some, mask=used, other=LOWEST) - highest)
        values = tl.load(
            partial + (place * num_splits + some[:, None]) * D + column[None, :],
            mask=used[:, None] & (column < D)[None, :],
            other=0.0,
        )
        acc += tl.sum(values * weight[:, None], axis=0)
    tl.store(out + place * D + column, (acc / total).to(out.dtype.element_ty), mask=column < D)


def choose_num_splits(batch: int, num_kv_heads: int, max_context: int, num_sms: int) -> int:
    """Splits that give every SM about four programs, each with at least 64 keys of the longest context."""
    wanted = triton.cdiv(_PROGRAMS_PER_SM * num_sms, max(1, batch * num_kv_heads))
    return max(1, min(wanted, triton.cdiv(max_context, _MIN_KEYS), _MAX_SPLITS))


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    num_context: Tensor,
    scale: float,
    *,
    num_splits: int,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q K^T) V of one query per request over all of its context -> contiguous [B, Hq, D], `out` or new.

    q [B, Hq, D], requests and heads at any stride. k_cache, v_cache [N, S, Hkv, D]: the views `data[:, layer, 0]` and
    `data[:, layer, 1]` of a block-major cache [N, L, 2, S, Hkv, D]. block_tables [B, max_blocks] int32 with dense rows,
    entries beyond the context arbitrary; num_context [B] int32; a request with context 0 gets zeros. Query head h reads
    KV head h // (Hq / Hkv). num_splits 1 to 128, see `choose_num_splits`. Nothing is read back from the device.
    """
    group = check_paged(q, k_cache, v_cache, block_tables, num_context)
    check_scale(scale)
    batch, num_heads, dim = q.shape
    if num_context.shape[0] != batch:
        raise ValueError(f"num_context: expected [{batch}], one for each query, got {described(num_context)}")
    if not 1 <= num_splits <= _MAX_SPLITS:
        raise ValueError(f"num_splits: expected 1 to {_MAX_SPLITS}, got {num_splits}")
    out = output(out, q)
    if batch == 0:
        return out
    single = num_splits == 1
    partial = log_totals = out  # the second is not touched when there is nothing to merge
    if not single:
        partial = torch.empty((batch, num_heads, num_splits, dim), dtype=torch.float32, device=q.device)
        log_totals = torch.empty((batch, num_heads, num_splits), dtype=torch.float32, device=q.device)
    launch = decode_launch(dim, group, q.dtype)
    first, rest = split_for_lanes(dim) if group == 1 else split_head_dim(dim)
    strides = (q.stride(0), k_cache.stride(0), k_cache.stride(1), block_tables.stride(0))
    tensors = (q, k_cache, v_cache, partial, log_totals, block_tables, num_context, scale * LOG2_E, num_splits)
    constants = {
        "STRIDE_Q_HEAD": q.stride(1),
        "STRIDE_HEAD": k_cache.stride(2),
        "BLOCK_SIZE": k_cache.shape[1],
        "D": dim,
        "D0": first,
        "D1": rest,
        "KEYS": launch.keys,
        "STAGES": launch.stages,
        "SINGLE": single,
        "num_warps": launch.warps,
    }
    grid = (batch, k_cache.shape[2], num_splits)
    if group == 1:
        _decode_mha_kernel[grid](*tensors, *strides, **constants)
    else:
        _decode_gqa_kernel[grid](*tensors, *strides, **constants, GROUP=group, ROWS=launch.rows, DTYPE=DOT_DTYPE)
    if not single:
        _merge_kernel[(batch, num_heads)](
            partial,
            log_totals,
            num_context,
            out,
            num_splits,
            D=dim,
            PADDED=triton.next_power_of_2(dim),
            KEYS=launch.keys,
            ALL=_MAX_SPLITS,
            STEP=_MERGE_SPLITS,
            num_warps=_MERGE_WARPS,
        )
    return out
