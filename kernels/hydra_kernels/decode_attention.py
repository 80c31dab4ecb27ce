"""Attention of one query per request over its paged context, with split contexts (Flash-Decoding).

Two kernels read the cache. With one query head per KV head, every key of a tile has a running softmax of its own in the
lanes that hold it, and all are merged at the end, so the loop has no reduction over keys and no barrier. With several,
the heads of a group are the rows of a matrix product and share what is read. The program that finishes last for a
request and KV head merges its splits, in their order: the result does not depend on which program that is. Bound by
memory: the context's K and V are read once.

Lengths and block tables are read on the device and the grid depends on shapes alone, so a captured launch serves every
context. A request's split boundaries depend on its own context and on `num_splits`: with `num_splits` fixed its result
does not depend on the batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._attention import LOWEST, attend, load_parts, paged_rows, paged_scales, store_parts
from hydra_kernels._checks import check_paged, check_scale, described, output
from hydra_kernels._common import (
    DOT_DTYPE,
    LOG2_E,
    AttentionLaunch,
    decode_launch,
    dependent_launch,
    launch_dependents,
    split_for_lanes,
    split_head_dim,
    wait_for_previous,
)
from hydra_kernels._launch import Launch, cached_launch
from hydra_kernels._occupancy import resident_programs_of
from hydra_kernels._sizes import cdiv, next_power_of_2
from hydra_kernels._splits import is_last, merge, split_bounds

Scales = tuple[Tensor, Tensor]  # of keys and of values

NUM_COUNTERS = 1 << 14
_MIN_KEYS = 64  # of a split: with fewer, its partial result costs too much beside what it reads
_MAX_SPLITS = 128
_MAX_WAVES = 4  # of split contexts: with more waves, whole contexts fill the device well enough
_BEGINNING = 32  # keys that a program could read in the time of its start and end
_MERGED = 4096  # elements of partial results that are merged at a time


# Values that change between steps are not specialised for, so that nothing is compiled while serving.
_VARYING = ["num_splits", "stride_table"]
_ANYWHERE = ["block_tables", "num_context"]  # views of a larger buffer: at any multiple of 4 bytes


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def _decode_mha_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    log_totals: tl.tensor,
    counters: tl.tensor,
    block_tables: tl.tensor,
    num_context: tl.tensor,
    scale: tl.tensor,
    num_splits: tl.tensor,
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    stride_scales: tl.tensor,
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
    PADDED: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Decode attention with one query head per KV head. Grid (B, Hkv, splits).

    out: [B, Hq, D]; partial: [B, Hq, splits, D] and log_totals: [B, Hq, splits], in base 2, of splits that have keys;
    counters: [B * Hkv], 0 before and after. SINGLE: there is one split, which writes `out`; partial, log_totals and
    counters are None. scale includes log2(e). PADDED: the least power of two >= D. STEP: splits merged at a time.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    launch_dependents(PDL)
    wait_for_previous(PDL)
    context = tl.load(num_context + row)
    first, last = split_bounds(context, split, num_splits, KEYS)
    table = block_tables + row.to(tl.int64) * stride_table
    if k_scales is not None:
        k_scales += head * BLOCK_SIZE
        v_scales += head * BLOCK_SIZE
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
        ks = paged_scales(k_scales, table, position, valid, stride_scales, BLOCK_SIZE)
        vs = paged_scales(v_scales, table, position, valid, stride_scales, BLOCK_SIZE)
        scores = tl.sum(k0.to(tl.float32) * q0, axis=1)
        if D1 > 0:
            scores += tl.sum(k1.to(tl.float32) * q1, axis=1)
        if ks is not None:
            scores *= ks
        scores = tl.where(valid, scores, float("-inf"))
        new_top = tl.maximum(top, scores)
        weights = tl.exp2(scores - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + weights
        if vs is not None:
            weights *= vs
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
    group = row.to(tl.int64) * tl.num_programs(1) + head
    if SINGLE:
        store_parts(out, one + group * D, part0, part1, one == 0, D, D0, D1)
    else:
        place = group * num_splits + split
        tl.store(log_totals + place, highest + tl.log2(divisor), mask=first < last)
        store_parts(partial, one + place * D, part0, part1, (one + first) < last, D, D0, D1)
        if is_last(counters + group, num_splits):
            merge(out, partial, log_totals, group, context, num_splits, 1, 1, D, KEYS, PADDED, STEP)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def _decode_gqa_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    log_totals: tl.tensor,
    counters: tl.tensor,
    block_tables: tl.tensor,
    num_context: tl.tensor,
    scale: tl.tensor,
    num_splits: tl.tensor,
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    stride_scales: tl.tensor,
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
    PADDED: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """Decode attention with GROUP query heads per KV head, rows of a tile of ROWS. Else as `_decode_mha_kernel`."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    launch_dependents(PDL)
    wait_for_previous(PDL)
    context = tl.load(num_context + row)
    first, last = split_bounds(context, split, num_splits, KEYS)
    table = block_tables + row.to(tl.int64) * stride_table
    if k_scales is not None:
        k_scales += head * BLOCK_SIZE
        v_scales += head * BLOCK_SIZE
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
        ks = paged_scales(k_scales, table, position, valid, stride_scales, BLOCK_SIZE)
        vs = paged_scales(v_scales, table, position, valid, stride_scales, BLOCK_SIZE)
        top, total, acc0, acc1 = attend(
            q0, q1, k0, k1, v0, v1, valid[None, :], top, total, acc0, acc1, scale, True, D1, DTYPE, ks, vs
        )
    divisor = tl.where(total == 0.0, 1.0, total)
    part0, part1 = acc0 / divisor[:, None], acc1 / divisor[:, None]
    group = row.to(tl.int64) * tl.num_programs(1) + head
    places = group * GROUP + member
    if SINGLE:
        store_parts(out, places * D, part0, part1, member < GROUP, D, D0, D1)
    else:
        places = places * num_splits + split
        kept = member < tl.where(first < last, GROUP, 0)
        tl.store(log_totals + places, top + tl.log2(divisor), mask=kept)
        store_parts(partial, places * D, part0, part1, kept, D, D0, D1)
        if is_last(counters + group, num_splits):
            merge(out, partial, log_totals, group, context, num_splits, GROUP, ROWS, D, KEYS, PADDED, STEP)


@lru_cache(maxsize=256)  # every layer of a step asks for the same
def choose_num_splits(batch: int, num_kv_heads: int, max_context: int, places: int) -> int:
    """The split count with the least estimated time if `places` programs run at once; of equals the smallest.

    Programs run in waves, each as long as one split, even if not full. Starting and ending a program costs as much as
    _BEGINNING keys. At most one split for every 64 keys of the longest context (rounded up), 128 splits and four waves;
    1 if `batch` requests have more KV heads together than there are counters.
    """
    groups = max(1, batch * num_kv_heads)
    most = min(cdiv(max_context, _MIN_KEYS), _MAX_SPLITS, _MAX_WAVES * places // groups)
    if groups > NUM_COUNTERS:
        most = 1
    beginning = _BEGINNING / max(1, max_context)

    def time(splits: int) -> float:
        return cdiv(groups * splits, places) * (1 / splits + beginning)

    return min(range(1, max(1, most) + 1), key=time)


def new_counters(device: torch.device) -> Tensor:
    """Counters of finished splits for `decode_attention` calls that never run at the same time: [NUM_COUNTERS] int32,
    zero before and after each call."""
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


class _Prepared(NamedTuple):
    """A kernel, its arguments, and the launch with its constants."""

    kernel: Any
    arguments: tuple[Any, ...]
    launch: Launch


def programs_per_sm(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    num_context: Tensor,
    scale: float,
    scales: Scales | None = None,
) -> int:
    """Programs of `decode_attention` with several splits that an SM holds at once; 4 on the host. Compiles and loads
    the kernel if needed; launches nothing."""
    check_paged(q, k_cache, v_cache, block_tables, num_context, scales)
    floats, ints = (torch.empty(0, dtype=dtype, device=q.device) for dtype in (torch.float32, torch.int32))
    kernel, arguments, launch = _prepared(
        q, k_cache, v_cache, block_tables, num_context, scale, 2, torch.empty_like(q), (floats, floats, ints), scales
    )
    return resident_programs_of(kernel, arguments, launch.constants, q.device)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    num_context: Tensor,
    scale: float,
    *,
    num_splits: int,
    counters: Tensor | None = None,
    out: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """Returns softmax(scale * q K^T) V of one query per request over all of its context: contiguous [B, Hq, D], `out`
    or new.

    q: [B, Hq, D], requests and heads at any stride. k_cache, v_cache: [N, S, Hkv, D], the views `data[:, layer, 0]` and
    `data[:, layer, 1]` of a block-major cache [N, L, 2, S, Hkv, D]. block_tables: [B, max_blocks] int32 with dense
    rows, entries beyond the context arbitrary. num_context: [B] int32; a context of 0 gives zeros. Query head h reads
    KV head h // (Hq / Hkv). num_splits: 1 to 128, see `choose_num_splits`. counters: of `new_counters`, new ones by
    default. scales: of int8 caches, the views `scales[:, layer, 0]` and `scales[:, layer, 1]`, [N, Hkv, S] float32.
    Reads nothing back from the device.
    """
    check_paged(q, k_cache, v_cache, block_tables, num_context, scales)
    check_scale(scale)
    batch, num_heads, dim = q.shape
    num_kv_heads = k_cache.shape[2]
    if num_context.shape[0] != batch:
        raise ValueError(f"num_context: expected [{batch}], one for each query, got {described(num_context)}")
    if not 1 <= num_splits <= _MAX_SPLITS:
        raise ValueError(f"num_splits: expected 1 to {_MAX_SPLITS}, got {num_splits}")
    out = output(out, q)
    if batch == 0:
        return out
    between = None
    if num_splits > 1:
        if counters is None:
            counters = torch.zeros(batch * num_kv_heads, dtype=torch.int32, device=q.device)
        if counters.shape[0] < batch * num_kv_heads or counters.dtype is not torch.int32:
            raise ValueError(f"counters: expected int32 [{batch * num_kv_heads}] or more, got {described(counters)}")
        partial = q.new_empty((batch, num_heads, num_splits, dim), dtype=torch.float32)
        log_totals = q.new_empty((batch, num_heads, num_splits), dtype=torch.float32)
        between = (partial, log_totals, counters)
    kernel, arguments, launch = _prepared(
        q, k_cache, v_cache, block_tables, num_context, scale, num_splits, out, between, scales
    )
    launch(kernel, (batch, num_kv_heads, num_splits), *arguments)
    return out


def _prepared(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    num_context: Tensor,
    scale: float,
    num_splits: int,
    out: Tensor,
    between: tuple[Tensor, Tensor, Tensor] | None,
    scales: Scales | None,
) -> _Prepared:
    """Chooses the kernel and builds its arguments and launch. between: partial results, the base-2 logarithms of their
    totals, and the counters of several splits; None for one split."""
    _, num_heads, dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    stride_q, stride_q_head, _ = q.stride()
    stride_block, stride_slot, stride_head, _ = k_cache.stride()
    group = num_heads // num_kv_heads
    stride_scales = 0 if scales is None else scales[0].stride(0)
    strides = (stride_q, stride_block, stride_slot, stride_scales, block_tables.stride(0))
    ends = (out, *(between or (None, None, None)))
    caches = (k_cache, v_cache, *(scales or (None, None)))
    arguments = (q, *caches, *ends, block_tables, num_context, scale * LOG2_E, num_splits, *strides)
    single = between is None
    of_size = decode_launch(dim, group, q.dtype)
    launch = _launches(of_size, dim, group, block_size, stride_q_head, stride_head, q.device, single=single)
    return _Prepared(_decode_mha_kernel if group == 1 else _decode_gqa_kernel, arguments, launch)


@cached_launch
def _launches(
    launch: AttentionLaunch,
    dim: int,
    group: int,
    block_size: int,
    stride_q_head: int,
    stride_head: int,
    device: torch.device,
    *,
    single: bool,
) -> Launch:
    """Constants and options of `_decode_mha_kernel` (a `group` of 1) or `_decode_gqa_kernel`. group: query heads per KV
    head. single: there is one split."""
    first, rest = split_for_lanes(dim) if group == 1 else split_head_dim(dim)
    padded = next_power_of_2(dim)
    constants: dict[str, Any] = {
        "STRIDE_Q_HEAD": stride_q_head,
        "STRIDE_HEAD": stride_head,
        "BLOCK_SIZE": block_size,
        "D": dim,
        "D0": first,
        "D1": rest,
        "KEYS": launch.keys,
        "STAGES": launch.stages,
        "SINGLE": single,
        "PADDED": padded,
        "STEP": max(1, _MERGED // (launch.rows * padded)),
        "num_warps": launch.warps,
        **dependent_launch(device),
    }
    if group > 1:
        constants |= {"GROUP": group, "ROWS": launch.rows, "DTYPE": DOT_DTYPE}
    return Launch(**constants)
