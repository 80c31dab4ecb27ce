"""Writes keys and values to a paged int8 cache, with a float32 scale per slot and head: normed, rotated and rounded in
one launch, which also norms and rotates the queries.

    scale = max(max |x| / 127, 2^-126)        integer = round(x / scale), ties to even

A head with an infinity or a NaN gets zeros and a NaN as its scale. The format is that of csrc/cpu/cache/quantize.h.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import described
from hydra_kernels._sizes import cdiv, next_power_of_2

_TILE = 1024  # elements of half heads per program: some heads of one token


@triton.jit
def _loaded(
    source: tl.tensor, heads: tl.tensor, mask: tl.tensor, HALF: tl.constexpr, PADDED: tl.constexpr, REST: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Loads both halves of the heads numbered `heads` [R] of a token, dense at `source`: float32 [R, PADDED] each,
    zeros where `mask` is false. The first half has HALF elements, the second REST, one less if the head dim is odd."""
    column = tl.arange(0, PADDED)[None, :]
    places = source + heads[:, None] * (HALF + REST) + column
    first = tl.load(places, mask=mask[:, None] & (column < HALF), other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=mask[:, None] & (column < REST), other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _turned(
    first: tl.tensor,
    second: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns rotate(rms_norm(x)) of heads in halves, float32, for even head dims. cos, sin: pointers to their token's
    angles. norm: the weight, None: no norm. The normed value is rounded to DTYPE, as a separate norm would store it."""
    column = tl.arange(0, PADDED)
    inside = column < HALF
    if norm is not None:
        mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF)
        factor = tl.rsqrt(mean + eps)[:, None]
        lower = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        upper = tl.load(norm + HALF + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        first = ((first * factor).to(DTYPE).to(tl.float32) * lower).to(DTYPE).to(tl.float32)
        second = ((second * factor).to(DTYPE).to(tl.float32) * upper).to(DTYPE).to(tl.float32)
    c = tl.load(cos + column, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + column, mask=inside, other=0.0)[None, :]
    return first * c - second * s, second * c + first * s


@triton.jit
def _store_rounded(
    first: tl.tensor,
    second: tl.tensor,
    row: tl.tensor,
    scales: tl.tensor,
    heads: tl.tensor,
    mask: tl.tensor,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Rounds heads [R], given in halves, to int8 and stores them and their scales, BLOCK_SIZE apart; row, scales:
    pointers to the slot's head 0. A head that is not finite gets zeros and a NaN as its scale. Magnitudes are compared
    as integers, which have the same order, with infinity and NaN last."""
    bits = tl.maximum(first.to(tl.int32, bitcast=True) & 0x7FFFFFFF, second.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    top = tl.max(bits, axis=1)
    finite = top < 0x7F800000
    scale = tl.maximum(tl.div_rn(tl.where(finite, top, 0).to(tl.float32, bitcast=True), 127.0), 1.1754943508222875e-38)
    column = tl.arange(0, PADDED)[None, :]
    places = row + heads[:, None] * (HALF + REST) + column
    stored = mask[:, None] & (column < HALF)
    first = tl.where(finite[:, None], first, 0.0)
    second = tl.where(finite[:, None], second, 0.0)
    divisor = scale[:, None] + tl.zeros([1, PADDED], tl.float32)
    # Adding 1.5 * 2^23 rounds to an integer, kept in the low bits.
    lower = (tl.div_rn(first, divisor) + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    upper = (tl.div_rn(second, divisor) + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    tl.store(places, lower.to(tl.int8), mask=stored)
    tl.store(places + HALF, upper.to(tl.int8), mask=stored & (column < REST))
    tl.store(scales + heads * BLOCK_SIZE, tl.where(finite, scale, float("nan")), mask=mask)


# The number of slots is not specialised for; slots are a view of a larger buffer, of any alignment.
@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots"])
def _write_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    eps: tl.tensor,
    out: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    slots: tl.tensor,
    num_slots: tl.tensor,
    stride_block: tl.tensor,
    stride_scales: tl.tensor,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    STRIDE_COS: tl.constexpr,
    STRIDE_SIN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Norms, rotates and stores ROWS heads of one token. Grid (T, tiles of ROWS heads: of q, of k, of v). Without
    angles there is no q, and k is neither normed nor rotated. A slot of -1, or outside of the cache, is skipped."""
    token = tl.program_id(0).to(tl.int64)
    Q_TILES: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    KV_TILES: tl.constexpr = (KV_HEADS + ROWS - 1) // ROWS
    tile = tl.program_id(1)
    member = tl.arange(0, ROWS)
    if tile < Q_TILES:
        if cos is not None:
            heads = tile * ROWS + member
            real = heads < HEADS
            first, second = _loaded(q + token * STRIDE_Q, heads, real, HALF, PADDED, REST)
            angles, others = cos + token * STRIDE_COS, sin + token * STRIDE_SIN
            first, second = _turned(first, second, angles, others, q_norm, eps, HALF, PADDED, q.dtype.element_ty)
            column = tl.arange(0, PADDED)[None, :]
            places = out + token * (HEADS * 2 * HALF) + heads[:, None] * (2 * HALF) + column
            stored = real[:, None] & (column < HALF)
            tl.store(places, first.to(out.dtype.element_ty), mask=stored)
            tl.store(places + HALF, second.to(out.dtype.element_ty), mask=stored)
    else:
        slot = tl.load(slots + token)
        if (slot >= 0) & (slot < num_slots):
            row = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * (KV_HEADS * (HALF + REST))
            place = slot // BLOCK_SIZE * stride_scales + slot % BLOCK_SIZE
            if tile < Q_TILES + KV_TILES:
                heads = (tile - Q_TILES) * ROWS + member
                real = heads < KV_HEADS
                first, second = _loaded(k + token * STRIDE_K, heads, real, HALF, PADDED, REST)
                if cos is not None:
                    angles, others = cos + token * STRIDE_COS, sin + token * STRIDE_SIN
                    first, second = _turned(
                        first, second, angles, others, k_norm, eps, HALF, PADDED, k.dtype.element_ty
                    )
                _store_rounded(
                    first, second, k_cache + row, k_scales + place, heads, real, HALF, PADDED, REST, BLOCK_SIZE
                )
            else:
                heads = (tile - Q_TILES - KV_TILES) * ROWS + member
                real = heads < KV_HEADS
                first, second = _loaded(v + token * STRIDE_V, heads, real, HALF, PADDED, REST)
                _store_rounded(
                    first, second, v_cache + row, v_scales + place, heads, real, HALF, PADDED, REST, BLOCK_SIZE
                )


def write_quantized(data: Tensor, scales: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Rounds k, v [T, H, D] of a float type with dense heads and writes them, with their scales, to slots [T] int64 of
    a layer; a slot of -1, or outside of the cache, is skipped.

    data: [N, L, 2, S, H, D] int8 and scales: [N, L, 2, H, S] float32, of `PagedCache.quantized`. Raises ValueError if
    data, k and v do not fit.
    """
    _launch(data, scales, layer, (None, k, v), (None, None), (None, None, 0.0), slots, None)


def rope_and_write_quantized(
    data: Tensor,
    scales: Tensor,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor],
    slots: Tensor,
    norms: tuple[Tensor | None, Tensor | None, float],
) -> Tensor:
    """Writes rotate(rms_norm(k)), rotated in float32 and rounded once, and v, as `write_quantized`; returns
    rotate(rms_norm(q)), new contiguous [T, Hq, D].

    rotary: cosines and sines [T, D / 2] float32. norms: weights [D] of queries and keys, None for no norm, and eps.
    Raises ValueError for an odd D, or as `write_quantized`.
    """
    if q.shape[2] % 2:
        raise ValueError(f"q: expected an even head dim, got {described(q)}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(data, scales, layer, (q, k, v), rotary, norms, slots, out)
    return out


def _launch(
    data: Tensor,
    scales: Tensor,
    layer: int,
    rows: tuple[Tensor | None, Tensor, Tensor],
    rotary: tuple[Tensor | None, Tensor | None],
    norms: tuple[Tensor | None, Tensor | None, float],
    slots: Tensor,
    out: Tensor | None,
) -> None:
    """Launches the kernel. rows: q (None if keys are not rotated), k, v; rotary: (None, None) then. out: for rotated
    queries. Raises ValueError if data and rows do not fit."""
    q, k, v = rows
    cos, sin = rotary
    num_tokens, kv_heads, dim = k.shape
    if data.dtype is not torch.int8 or data.shape[4:] != k.shape[1:] or v.shape != k.shape:
        raise ValueError(f"data: expected [N, L, 2, S, {kv_heads}, {dim}] torch.int8, got {described(data)}")
    if num_tokens == 0:
        return
    half = (dim + 1) // 2
    padded = next_power_of_2(half)
    num_heads = 0 if q is None else q.shape[1]
    most = next_power_of_2(max(num_heads, kv_heads))
    tile = max(1, min(most, _TILE // padded))
    tiles = cdiv(num_heads, tile) + 2 * cdiv(kv_heads, tile)
    planes = [data[:, layer, x] for x in (0, 1)] + [scales[:, layer, x] for x in (0, 1)]
    _write_kernel[(num_tokens, tiles)](
        *(q, k, v, cos, sin, *norms, out, *planes, slots, data.shape[0] * data.shape[3]),
        *(data.stride(0), scales.stride(0)),
        STRIDE_Q=0 if q is None else q.stride(0),
        STRIDE_K=k.stride(0),
        STRIDE_V=v.stride(0),
        STRIDE_COS=0 if cos is None else cos.stride(0),
        STRIDE_SIN=0 if sin is None else sin.stride(0),
        BLOCK_SIZE=data.shape[3],
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HALF=half,
        REST=dim - half,
        PADDED=padded,
        ROWS=tile,
        num_warps=4 if tile * padded > 256 else 1,
    )
