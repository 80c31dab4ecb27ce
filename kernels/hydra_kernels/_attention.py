"""Parts of the attention kernels: head dims in two tiles, keys of a paged cache, one step of the running softmax.

A head dim D is held as two tiles of D0 + D1 columns (`split_head_dim`), each a power of two as Triton requires, so that
72 and 80 are computed as 64 + 16 and not as 128. With D1 = 0 the second tile is passed along and never computed.

The running softmax (Milakov and Gimelshein 2018; Dao et al. 2022) works in base 2 on scores times scale * log2(e). A
fully masked tile of keys leaves a query's result unchanged, bit for bit: weights 0, factor 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hydra_kernels._common import dot

# Below every score, and finite, so that a difference of two scores is never NaN.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def load_parts(
    base: tl.tensor, rows: tl.tensor, mask: tl.tensor, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Loads rows of D elements at base + rows as [R, D0] and [R, D1], zero beyond D and where `mask` is false. If
    D1 is 0 the second result is the first again, and unused."""
    first = tl.arange(0, D0)[None, :]
    if D < D0:
        part0 = tl.load(base + rows[:, None] + first, mask=mask[:, None] & (first < D), other=0.0)
    else:
        part0 = tl.load(base + rows[:, None] + first, mask=mask[:, None], other=0.0)
    part1 = part0
    if D1 > 0:
        second = D0 + tl.arange(0, D1)[None, :]
        if D < D0 + D1:
            part1 = tl.load(base + rows[:, None] + second, mask=mask[:, None] & (second < D), other=0.0)
        else:
            part1 = tl.load(base + rows[:, None] + second, mask=mask[:, None], other=0.0)
    return part0, part1


@triton.jit
def store_parts(
    base: tl.tensor,
    rows: tl.tensor,
    part0: tl.tensor,
    part1: tl.tensor,
    mask: tl.tensor,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
) -> None:
    """Stores part0 [R, D0] and part1 [R, D1] as rows of D elements at base + rows where `mask` is true, rounded to the
    element type of `base`. If D1 is 0 part1 is ignored."""
    first = tl.arange(0, D0)[None, :]
    tl.store(base + rows[:, None] + first, part0.to(base.dtype.element_ty), mask=mask[:, None] & (first < D))
    if D1 > 0:
        second = D0 + tl.arange(0, D1)[None, :]
        tl.store(base + rows[:, None] + second, part1.to(base.dtype.element_ty), mask=mask[:, None] & (second < D))


@triton.jit
def tile_of_segment(
    cu_seqlens: tl.tensor, num_segments: tl.tensor, ROWS: tl.constexpr, SEARCH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns (segment of this program's tile, the tile's first row in it, which may be beyond the segment's end): axes
    2 and 0 of the grid if SEARCH is 0. ROWS: of a tile.

    With SEARCH, a power of two of at least `num_segments`, axis 0 enumerates the tiles of all segments; a program after
    the last tile gets a row beyond every segment's end.
    """
    if SEARCH > 0:
        index = tl.arange(0, SEARCH)
        begins = tl.load(cu_seqlens + index, mask=index < num_segments, other=0)
        ends = tl.load(cu_seqlens + index + 1, mask=index < num_segments, other=0)
        tiles = (ends - begins + ROWS - 1) // ROWS
        before = tl.cumsum(tiles, 0) <= tl.program_id(0)  # segments whose tiles all come before this one
        segment = tl.sum(before.to(tl.int32), 0)
        first_row = (tl.program_id(0) - tl.sum(tl.where(before, tiles, 0), 0)) * ROWS
        first_row = tl.where(segment < num_segments, first_row, 1 << 30)
        segment = tl.minimum(segment, num_segments - 1)
    else:
        segment = tl.program_id(2)
        first_row = tl.program_id(0) * ROWS
    return segment, first_row


@triton.jit
def paged_rows(
    table: tl.tensor,
    position: tl.tensor,
    mask: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Offsets from the cache of the rows of head 0 at context positions, [K] int64 in elements. `table`: a request's
    row of the block table. Positions where `mask` is false are looked up in block 0."""
    block = tl.load(table + position // BLOCK_SIZE, mask=mask, other=0)
    return block.to(tl.int64) * stride_block + position % BLOCK_SIZE * stride_slot


@triton.jit
def paged_scales(
    scales: tl.tensor,
    table: tl.tensor,
    position: tl.tensor,
    mask: tl.tensor,
    stride_block: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Scales of the head that `scales` points to, at context positions: [K] float32, 0 where `mask` is false. None if
    `scales` is None."""
    found = None
    if scales is not None:
        block = tl.load(table + position // BLOCK_SIZE, mask=mask, other=0)
        found = tl.load(scales + block.to(tl.int64) * stride_block + position % BLOCK_SIZE, mask=mask, other=0.0)
    return found


@triton.jit
def attend(
    q0: tl.tensor,
    q1: tl.tensor,
    k0: tl.tensor,
    k1: tl.tensor,
    v0: tl.tensor,
    v1: tl.tensor,
    visible: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc0: tl.tensor,
    acc1: tl.tensor,
    scale: tl.tensor,
    MASKED: tl.constexpr,
    D1: tl.constexpr,
    DTYPE: tl.constexpr,
    key_scales: tl.tensor = None,
    value_scales: tl.tensor = None,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Adds one tile of keys to the running softmax. Returns the new (top, total, acc0, acc1).

    q: [M, D]; k, v: [K, D]; visible: [M, K], read only if MASKED; top (the largest score, in base 2), total (the sum of
    weights): [M]; acc (the weighted sum of values): [M, D]. scale includes log2(e). int8 k and v come with scales [K],
    which multiply scores and weights: integers are exact in q's dtype. DTYPE: as in `dot`.
    """
    if key_scales is not None:
        k0, k1 = k0.to(tl.float32).to(q0.dtype), k1.to(tl.float32).to(q0.dtype)
        v0, v1 = v0.to(tl.float32).to(q0.dtype), v1.to(tl.float32).to(q0.dtype)
    scores = dot(q0, tl.trans(k0), tl.zeros([q0.shape[0], k0.shape[0]], tl.float32), DTYPE)
    if D1 > 0:
        scores = dot(q1, tl.trans(k1), scores, DTYPE)
    if key_scales is not None:
        scores *= key_scales[None, :]
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, axis=1)
    if value_scales is not None:
        weights *= value_scales[None, :]
    weights = weights.to(v0.dtype)
    acc0 = dot(weights, v0, acc0 * shrink[:, None], DTYPE)
    if D1 > 0:
        acc1 = dot(weights, v1, acc1 * shrink[:, None], DTYPE)
    return new_top, total, acc0, acc1
