"""Bidirectional attention within the segments of packed rows: whole pictures and windows of vision towers.

A program takes a tile of queries of one head and one segment and visits the segment's keys, full tiles without a mask.
Head dims 72 and 80 are computed as 64 + 16 columns. Bound by tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._attention import LOWEST, attend, load_parts, store_parts, tile_of_segment
from hydra_kernels._checks import check_heads, check_scale, check_vector, described
from hydra_kernels._common import LOG2_E, AttentionLaunch, packed_launch, tile_constants, tma_launch
from hydra_kernels._launch import Launch, cached_launch
from hydra_kernels._sizes import cdiv, next_power_of_2
from hydra_kernels.tma_attention import packed_tma_kernel, scratch

_LONG = 1 << 30  # rows: longer than any window
_MAX_SEARCHED = 1024  # segments that a program can search


@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["cu_seqlens"])
def _packed_kernel(
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
    """Stores attention of a tile of ROWS queries of one head. Grid (tiles of the longest segment, H, segments).

    With SEARCH, a power of two of at least `num_segments`: grid (upper bound of all segments' tiles, H), and a program
    looks up the segment of its tile. scale includes log2(e).
    """
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
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, D0], tl.float32)
    acc1 = tl.zeros([ROWS, D1 if D1 > 0 else 16], tl.float32)
    every = tl.full([KEYS], True, tl.int1)
    whole = length // KEYS * KEYS
    for start in tl.range(0, whole, KEYS, num_stages=STAGES):
        key = (begin + start + tl.arange(0, KEYS)).to(tl.int64)
        k0, k1 = load_parts(k, key * stride_k + head * STRIDE_K_HEAD, every, D, D0, D1)
        v0, v1 = load_parts(v, key * stride_v + head * STRIDE_V_HEAD, every, D, D0, D1)
        top, total, acc0, acc1 = attend(
            q0, q1, k0, k1, v0, v1, real[:, None], top, total, acc0, acc1, scale, False, D1, DTYPE
        )
    if whole < length:
        position = whole + tl.arange(0, KEYS)
        valid = position < length
        key = (begin + position).to(tl.int64)
        k0, k1 = load_parts(k, key * stride_k + head * STRIDE_K_HEAD, valid, D, D0, D1)
        v0, v1 = load_parts(v, key * stride_v + head * STRIDE_V_HEAD, valid, D, D0, D1)
        top, total, acc0, acc1 = attend(
            q0, q1, k0, k1, v0, v1, valid[None, :], top, total, acc0, acc1, scale, True, D1, DTYPE
        )
    places = (token * HEADS + head) * D
    store_parts(out, places, acc0 / total[:, None], acc1 / total[:, None], real, D, D0, D1)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    *,
    max_length: int,
    one_tile: bool = False,
    search: bool = False,
    tma: bool = False,
) -> Tensor:
    """Returns softmax(scale * q K^T) V within each segment [cu_seqlens[i], cu_seqlens[i + 1]), new contiguous [P, H,
    D].

    q, k, v: [P, H, D], rows and heads at any stride (views of one fused projection); cu_seqlens: [segments + 1] int32
    rising from 0 to P, with no segment longer than `max_length`, itself at most P; empty segments are legal. one_tile:
    uses one tile size for any `max_length`, so that a segment's result does not depend on the lengths of the others.
    search: for segments that are mostly much shorter than `max_length`, or known to the device only: launches programs
    for as many tiles as P rows can have, not for the longest segment times the number of segments; ignored beyond 1024
    segments and where that is no less. tma: uses the kernel for Hopper, after setting Triton's allocator for this
    thread to `tma_attention.scratch`; the caller has checked k and v by `can_read`. Reads nothing back from the device.
    """
    check_heads("q", q)
    for name, tensor in (("k", k), ("v", v)):
        check_heads(name, tensor, q)
        if tensor.shape != q.shape:
            raise ValueError(f"{name}: expected {list(q.shape)} like q, got {described(tensor)}")
    check_scale(scale)
    check_vector("cu_seqlens", cu_seqlens, None, torch.int32, q.device)
    num_rows, num_heads, dim = q.shape
    if cu_seqlens.shape[0] == 0:
        raise ValueError("cu_seqlens: expected [segments + 1], got no entry")
    if not 0 <= max_length <= num_rows:
        raise ValueError(f"max_length: expected 0 to {num_rows}, the packed rows, got {max_length}")
    out = q.new_empty(q.shape)
    segments = cu_seqlens.shape[0] - 1
    if segments == 0 or max_length == 0 or num_heads == 0:
        return out
    launch = tma_launch(dim) if tma else packed_launch(dim, _LONG if one_tile else max_length, q.dtype)
    if tma:
        triton.set_allocator(scratch)  # for this thread
    tiles = cdiv(max_length, launch.rows)
    max_tiles = num_rows // launch.rows + segments  # each segment has at most one partial tile
    search = search and segments <= _MAX_SEARCHED and max_tiles < segments * tiles
    grid = (max_tiles, num_heads, 1) if search else (tiles, num_heads, segments)
    strides, head_strides = (q.stride(0), k.stride(0), v.stride(0)), (q.stride(1), k.stride(1), v.stride(1))
    launches = _launches(num_heads, dim, head_strides, launch, next_power_of_2(segments) if search else 0)
    kernel = packed_tma_kernel if tma else _packed_kernel
    launches(kernel, grid, q, k, v, out, cu_seqlens, segments, scale * LOG2_E, *strides)
    return out


@cached_launch
def _launches(
    num_heads: int, dim: int, head_strides: tuple[int, int, int], launch: AttentionLaunch, search: int
) -> Launch:
    """Constants and options of `_packed_kernel` and `packed_tma_kernel`. head_strides: q, k, v. search: SEARCH."""
    return Launch(
        HEADS=num_heads,
        STRIDE_Q_HEAD=head_strides[0],
        STRIDE_K_HEAD=head_strides[1],
        STRIDE_V_HEAD=head_strides[2],
        SEARCH=search,
        **tile_constants(dim, launch),
    )
