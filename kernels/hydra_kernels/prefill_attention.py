"""Causal attention of a packed step over a paged cache: prompt chunks and decodes alike.

A program takes a tile of rows of one request and one KV head. Row m of a tile is query head m % group of query token m
// group, so that all heads of a group share the K and V that are read, and a decode fills a tile with its group. Tiles
of keys start at position 0 in every chunk, and a row's sums do not depend on the other rows of its tile: a token gets
the same result in every chunking and every batch. Bound by tensor cores.

A request's tiles are visited from last to first: the longest programs start first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._attention import LOWEST, attend, load_parts, paged_rows, paged_scales, store_parts
from hydra_kernels._checks import check_paged, check_scale, check_vector, output
from hydra_kernels._common import LOG2_E, AttentionLaunch, prefill_launch, tile_constants, tma_launch
from hydra_kernels._launch import Launch, cached_launch
from hydra_kernels._sizes import cdiv, next_power_of_2
from hydra_kernels.decode_attention import Scales
from hydra_kernels.tma_attention import prefill_tma_kernel, scratch

_MAX_SEARCHED = 1024  # requests that a program can search


# Sizes change between steps, and tensors are views after the decodes, of any alignment: nothing is compiled while
# serving.
@triton.jit(
    do_not_specialize=["stride_table", "num_requests"],
    do_not_specialize_on_alignment=["block_tables", "cu_q", "num_context"],
)
def _prefill_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    out: tl.tensor,
    block_tables: tl.tensor,
    cu_q: tl.tensor,
    num_context: tl.tensor,
    scale: tl.tensor,
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    stride_scales: tl.tensor,
    stride_table: tl.tensor,
    num_requests: tl.tensor,
    HEADS: tl.constexpr,
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
    DTYPE: tl.constexpr,
    SEARCH: tl.constexpr,
) -> None:
    """Stores attention of a tile of ROWS rows, GROUP for each query token, of one KV head. Grid (tiles of the longest
    request, Hkv, B).

    With SEARCH, a power of two of at least `num_requests`: grid (upper bound of all requests' tiles, Hkv), and a
    program looks up the request of its tile. scale includes log2(e).
    """
    head = tl.program_id(1)
    if SEARCH > 0:
        index = tl.arange(0, SEARCH)
        begins = tl.load(cu_q + index, mask=index < num_requests, other=0)
        ends = tl.load(cu_q + index + 1, mask=index < num_requests, other=0)
        tiles = ((ends - begins) * GROUP + ROWS - 1) // ROWS
        before = tl.cumsum(tiles, 0) <= tl.program_id(0)  # requests whose tiles all come before this one
        request = tl.sum(before.to(tl.int32), 0)
        if request >= num_requests:
            return
        place = tl.program_id(0) - tl.sum(tl.where(before, tiles, 0), 0)
    else:
        request = tl.program_id(2)
        place = tl.program_id(0)
    begin = tl.load(cu_q + request)
    num_rows = (tl.load(cu_q + request + 1) - begin) * GROUP
    context = tl.load(num_context + request)
    tile = tl.cdiv(num_rows, ROWS) - 1 - place
    if tile < 0:
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    token = begin + row // GROUP
    query_head = head * GROUP + row % GROUP
    real = row < num_rows
    q0, q1 = load_parts(q, token.to(tl.int64) * stride_q + query_head * STRIDE_Q_HEAD, real, D, D0, D1)
    first_position = context - num_rows // GROUP
    row_position = first_position + row // GROUP
    # All rows see keys below `common`; no row sees keys from `end` on.
    common = (first_position + tile * ROWS // GROUP + 1) // KEYS * KEYS
    end = tl.minimum(context, first_position + (tile * ROWS + ROWS - 1) // GROUP + 1)
    table = block_tables + request.to(tl.int64) * stride_table
    if k_scales is not None:
        k_scales += head * BLOCK_SIZE
        v_scales += head * BLOCK_SIZE
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, D0], tl.float32)
    acc1 = tl.zeros([ROWS, D1 if D1 > 0 else 16], tl.float32)
    every = tl.full([KEYS], True, tl.int1)
    for start in tl.range(0, common, KEYS, num_stages=STAGES):
        position = start + tl.arange(0, KEYS)
        rows = paged_rows(table, position, every, stride_block, stride_slot, BLOCK_SIZE) + head * STRIDE_HEAD
        k0, k1 = load_parts(k_cache, rows, every, D, D0, D1)
        v0, v1 = load_parts(v_cache, rows, every, D, D0, D1)
        ks = paged_scales(k_scales, table, position, every, stride_scales, BLOCK_SIZE)
        vs = paged_scales(v_scales, table, position, every, stride_scales, BLOCK_SIZE)
        top, total, acc0, acc1 = attend(
            q0, q1, k0, k1, v0, v1, real[:, None], top, total, acc0, acc1, scale, False, D1, DTYPE, ks, vs
        )
    for start in tl.range(common, end, KEYS):
        position = start + tl.arange(0, KEYS)
        valid = position < end
        rows = paged_rows(table, position, valid, stride_block, stride_slot, BLOCK_SIZE) + head * STRIDE_HEAD
        k0, k1 = load_parts(k_cache, rows, valid, D, D0, D1)
        v0, v1 = load_parts(v_cache, rows, valid, D, D0, D1)
        visible = position[None, :] <= row_position[:, None]
        ks = paged_scales(k_scales, table, position, valid, stride_scales, BLOCK_SIZE)
        vs = paged_scales(v_scales, table, position, valid, stride_scales, BLOCK_SIZE)
        top, total, acc0, acc1 = attend(
            q0, q1, k0, k1, v0, v1, visible, top, total, acc0, acc1, scale, True, D1, DTYPE, ks, vs
        )
    places = (token.to(tl.int64) * HEADS + query_head) * D
    divisor = tl.where(total == 0.0, 1.0, total)
    store_parts(out, places, acc0 / divisor[:, None], acc1 / divisor[:, None], real, D, D0, D1)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_q: Tensor,
    num_context: Tensor,
    scale: float,
    *,
    max_q: int,
    out: Tensor | None = None,
    tma: bool = False,
    max_requests: int = 0,
    scales: Scales | None = None,
) -> Tensor:
    """Returns softmax(scale * q K^T + causal mask) V of each request's queries over its context: contiguous [T, Hq, D].

    q: [T, Hq, D], tokens and heads at any stride; request r has rows [cu_q[r], cu_q[r + 1]), the last of its
    num_context[r] tokens. max_q: at least the most rows of a request, at most T. k_cache, v_cache: [N, S, Hkv, D],
    strided views of a block-major cache; block_tables: [B, max_blocks] int32 with dense rows and arbitrary entries
    beyond the context; cu_q: [B + 1] and num_context: [B] int32. Query head h reads KV head h // (Hq / Hkv). Rows from
    cu_q[B] on are not written; a query with a context of 0 (padding) gets zeros. out: the result's tensor, a new one by
    default. scales: of int8 caches, as in `decode_attention`.

    tma: uses the kernel for Hopper, after setting Triton's allocator for this thread to `tma_attention.scratch`; the
    caller has checked the caches by `can_read_cache`. max_requests: upper bound of the requests that have queries, for
    steps of up to 1024 requests whose rows are known to the device only, without `tma`: launches programs for as many
    tiles as q can have then, not for the longest request times the number of requests; 0 (the default): the latter.
    Reads nothing back from the device.
    """
    group = check_paged(q, k_cache, v_cache, block_tables, num_context, scales)
    check_scale(scale)
    batch = num_context.shape[0]
    check_vector("cu_q", cu_q, batch + 1, torch.int32, q.device)
    if not 0 <= max_q <= q.shape[0]:
        raise ValueError(f"max_q: expected 0 to {q.shape[0]}, the tokens of the step, got {max_q}")
    if max_requests and (tma or batch > _MAX_SEARCHED):
        raise ValueError(f"max_requests: expected 0 for the kernel for Hopper and for {batch} requests")
    out = output(out, q)
    if batch == 0 or max_q == 0:
        return out
    dim = q.shape[2]
    launch = tma_launch(dim) if tma else prefill_launch(dim, q.dtype)
    if tma:
        triton.set_allocator(scratch)  # for this thread
    tensors = (out, block_tables, cu_q, num_context, scale * LOG2_E)
    _, block_size, num_kv_heads, _ = k_cache.shape
    stride_block, stride_slot, stride_head, _ = k_cache.stride()
    strides = (q.stride(0), stride_block, stride_slot)
    shape = q.shape[1], block_size, group, dim
    search = next_power_of_2(batch) if max_requests else None if tma else 0
    launches = _launches(shape, q.stride(1), stride_head, launch, search)
    grid = cdiv(max_q * group, launch.rows), num_kv_heads, batch
    if tma:
        launches(prefill_tma_kernel, grid, q, k_cache, v_cache, *tensors, *strides, block_tables.stride(0))
        return out
    if max_requests:  # each has at most one partial tile
        grid = q.shape[0] * group // launch.rows + max_requests, num_kv_heads, 1
    caches = (k_cache, v_cache, *(scales or (None, None)))
    stride_scales = 0 if scales is None else scales[0].stride(0)
    launches(_prefill_kernel, grid, q, *caches, *tensors, *strides, stride_scales, block_tables.stride(0), batch)
    return out


@cached_launch
def _launches(
    shape: tuple[int, int, int, int], stride_q_head: int, stride_head: int, launch: AttentionLaunch, search: int | None
) -> Launch:
    """Constants and options of `_prefill_kernel`; if `search` (its SEARCH) is None, of `prefill_tma_kernel`. shape:
    query heads, slots of a block, query heads per KV head, head dim."""
    heads, block_size, group, dim = shape
    return Launch(
        HEADS=heads,
        STRIDE_Q_HEAD=stride_q_head,
        STRIDE_HEAD=stride_head,
        BLOCK_SIZE=block_size,
        GROUP=group,
        **tile_constants(dim, launch),
        **({} if search is None else {"SEARCH": search}),
    )
