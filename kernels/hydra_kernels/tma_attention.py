"""Attention kernels for Hopper that load keys and values by the Tensor Memory Accelerator (TMA), by descriptors.

They are the kernels of packed_attention.py and prefill_attention.py with other loads: a tile of keys or values is one
instruction of one thread, addresses take no registers, and rows after the end of a segment are zeros. With head dims of
up to 80 two programs of 8 warps fit on an SM: one computes its softmax while the other multiplies. Each program makes
its descriptors in memory that the launcher gets from `scratch`.

Warp specialisation is not used: Triton 3.6 and 3.9 support it on Blackwell only (`tl.range` says so; for sm_90 the
machine code with `warp_specialize` has as many warps and no `setmaxnreg`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._attention import LOWEST, attend, load_parts, store_parts, tile_of_segment
from hydra_kernels._common import TMA_KEYS, TMA_WIDTH, capability_of, split_head_dim

_ALIGNMENT = 16  # bytes, of a descriptor's address and strides


def can_read(*tensors: Tensor) -> bool:
    """True if the kernels of this module can read all tensors [.., D], whose last dimension must be dense: 16-bit, on a
    Hopper GPU or on the host, with a padded D of at most TMA_WIDTH, addresses and strides of whole 16 bytes."""
    return all(
        x.dtype.itemsize == 2
        and sum(split_head_dim(x.shape[-1])) <= TMA_WIDTH
        and all(stride * 2 % _ALIGNMENT == 0 for stride in x.stride()[:-1])
        and x.data_ptr() % _ALIGNMENT == 0
        and capability_of(x.device) // 10 == 9
        for x in tensors
    )


def can_read_cache(k_cache: Tensor, v_cache: Tensor) -> bool:
    """True if the kernels can read a paged cache, views [N, S, Hkv, D]: `can_read` both, S a multiple of TMA_KEYS."""
    return k_cache.shape[1] % TMA_KEYS == 0 and can_read(k_cache, v_cache)


def scratch(size: int, _alignment: int, _stream: int | None) -> Tensor:
    """Allocates `size` bytes for descriptors of one launch, as Triton's allocator (`triton.set_allocator`): on the
    current device and its current stream; while a graph is captured, in its memory pool."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


# Number and alignment of segments are not specialised for: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["cu_seqlens"])
def packed_tma_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    cu_seqlens: tl.tensor,
    num_segments: tl.tensor,
    scale: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    HEADS: tl.constexpr,
    STRIDE_Q_HEAD: tl.constexpr,
    STRIDE_K_HEAD: tl.constexpr,
    STRIDE_V_HEAD: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    SEARCH: tl.constexpr,
) -> None:
    """Computes what `packed_attention._packed_kernel` does, with its arguments and grid, and TMA loads of k and v."""
    head = tl.program_id(1)
    segment, first_row = tile_of_segment(cu_seqlens, num_segments, ROWS, SEARCH)
    begin = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - begin
    if first_row >= length:
        return
    row = first_row + tl.arange(0, ROWS)
    real = row < length
    token = (begin + row).to(tl.int64)
    q0, q1 = load_parts(q, token * stride_q + head * STRIDE_Q_HEAD, real, D, D0, D1)
    keys = k + begin.to(tl.int64) * stride_k + head * STRIDE_K_HEAD
    values = v + begin.to(tl.int64) * stride_v + head * STRIDE_V_HEAD
    # Rows after the segment read as zeros, not as rows of the next segment, which may be NaN.
    keys0 = tl.make_tensor_descriptor(keys, [length, D], [stride_k, 1], [KEYS, D0])
    values0 = tl.make_tensor_descriptor(values, [length, D], [stride_v, 1], [KEYS, D0])
    keys1, values1 = keys0, values0
    if D1 > 0:
        keys1 = tl.make_tensor_descriptor(keys, [length, D], [stride_k, 1], [KEYS, D1])
        values1 = tl.make_tensor_descriptor(values, [length, D], [stride_v, 1], [KEYS, D1])
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, D0], tl.float32)
    acc1 = tl.zeros([ROWS, D1 if D1 > 0 else 16], tl.float32)
    whole = length // KEYS * KEYS
    for start in tl.range(0, whole, KEYS, num_stages=STAGES):
        k0, v0 = keys0.load([start, 0]), values0.load([start, 0])
        k1, v1 = k0, v0
        if D1 > 0:
            k1, v1 = keys1.load([start, D0]), values1.load([start, D0])
        top, total, acc0, acc1 = attend(
            q0, q1, k0, k1, v0, v1, real[:, None], top, total, acc0, acc1, scale, False, D1, DTYPE
        )
    if whole < length:
        k0, v0 = keys0.load([whole, 0]), values0.load([whole, 0])
        k1, v1 = k0, v0
        if D1 > 0:
            k1, v1 = keys1.load([whole, D0]), values1.load([whole, D0])
        seen = whole + tl.arange(0, KEYS) < length
        top, total, acc0, acc1 = attend(
            q0, q1, k0, k1, v0, v1, seen[None, :], top, total, acc0, acc1, scale, True, D1, DTYPE
        )
    places = (token * HEADS + head) * D
    store_parts(out, places, acc0 / total[:, None], acc1 / total[:, None], real, D, D0, D1)


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["block_tables", "cu_q", "num_context"])
def prefill_tma_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    block_tables: tl.tensor,
    cu_q: tl.tensor,
    num_context: tl.tensor,
    scale: tl.tensor,
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    stride_table: tl.tensor,
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
) -> None:
    """Computes what `prefill_attention._prefill_kernel` does without scales and SEARCH, with its other arguments and
    its grid. KEYS divides BLOCK_SIZE."""
    head, request = tl.program_id(1), tl.program_id(2)
    begin = tl.load(cu_q + request)
    num_rows = (tl.load(cu_q + request + 1) - begin) * GROUP
    context = tl.load(num_context + request)
    tile = tl.cdiv(num_rows, ROWS) - 1 - tl.program_id(0)
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
    # Tables name blocks of the cache only, so the descriptors need no true number of blocks.
    keys, values, most = k_cache + head * STRIDE_HEAD, v_cache + head * STRIDE_HEAD, 2147483647
    keys0 = tl.make_tensor_descriptor(keys, [most, BLOCK_SIZE, D], [stride_block, stride_slot, 1], [1, KEYS, D0])
    values0 = tl.make_tensor_descriptor(values, [most, BLOCK_SIZE, D], [stride_block, stride_slot, 1], [1, KEYS, D0])
    keys1, values1 = keys0, values0
    if D1 > 0:
        keys1 = tl.make_tensor_descriptor(keys, [most, BLOCK_SIZE, D], [stride_block, stride_slot, 1], [1, KEYS, D1])
        values1 = tl.make_tensor_descriptor(
            values, [most, BLOCK_SIZE, D], [stride_block, stride_slot, 1], [1, KEYS, D1]
        )
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, D0], tl.float32)
    acc1 = tl.zeros([ROWS, D1 if D1 > 0 else 16], tl.float32)
    for start in tl.range(0, common, KEYS, num_stages=STAGES):
        block, slot = tl.load(table + start // BLOCK_SIZE), start % BLOCK_SIZE
        k0 = keys0.load([block, slot, 0]).reshape(KEYS, D0)
        v0 = values0.load([block, slot, 0]).reshape(KEYS, D0)
        k1, v1 = k0, v0
        if D1 > 0:
            k1 = keys1.load([block, slot, D0]).reshape(KEYS, D1)
            v1 = values1.load([block, slot, D0]).reshape(KEYS, D1)
        top, total, acc0, acc1 = attend(
            q0, q1, k0, k1, v0, v1, real[:, None], top, total, acc0, acc1, scale, False, D1, DTYPE
        )
    for start in tl.range(common, end, KEYS, num_stages=1):
        block, slot = tl.load(table + start // BLOCK_SIZE), start % BLOCK_SIZE
        position = start + tl.arange(0, KEYS)
        # Slots after the context may hold NaN: their scores are masked, and their values are set to 0.
        valid = (position < context)[:, None]
        k0 = keys0.load([block, slot, 0]).reshape(KEYS, D0)
        v0 = tl.where(valid, values0.load([block, slot, 0]).reshape(KEYS, D0), 0.0)
        k1, v1 = k0, v0
        if D1 > 0:
            k1 = keys1.load([block, slot, D0]).reshape(KEYS, D1)
            v1 = tl.where(valid, values1.load([block, slot, D0]).reshape(KEYS, D1), 0.0)
        visible = position[None, :] <= row_position[:, None]
        top, total, acc0, acc1 = attend(q0, q1, k0, k1, v0, v1, visible, top, total, acc0, acc1, scale, True, D1, DTYPE)
    places = (token.to(tl.int64) * HEADS + query_head) * D
    divisor = tl.where(total == 0.0, 1.0, total)
    store_parts(out, places, acc0 / divisor[:, None], acc1 / divisor[:, None], real, D, D0, D1)
