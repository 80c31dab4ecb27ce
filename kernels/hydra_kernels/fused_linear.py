"""Products of few rows fused with the next op: a gated activation, or rotation and the write into a cache.

The next op needs two outputs of the product at once: gate and up of one column, or both halves of a rotary pair. A
program computes such pairs as neighbouring columns of one tile, so programs need not communicate. The product is
rounded to the dtype as if it had been stored; all else is as in the ops that are fused. Bound by memory: each weight is
read once.

The RMSNorm before a single row can be fused too: x @ W^T of normed x is (x * norm) @ W^T divided by the root mean
square of x, which every program computes while it reads x. The normed x is not rounded then. Several rows are normed by
a launch of their own: each warp of a program would norm all of them, which takes longer than reading the weights.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import check_rows, check_vector, described
from hydra_kernels._common import (
    DOT_DTYPE,
    LinearLaunch,
    capability_of,
    dependent_launch,
    launch_dependents,
    pairs_launch,
)
from hydra_kernels._launch import Launch, cached_launch
from hydra_kernels._linear import check_bias, check_weight, few_rows_sums
from hydra_kernels._sizes import cdiv
from hydra_kernels.activation import ACTIVATIONS, activate
from hydra_kernels.linear import MAX_SMALL_ROWS


@triton.jit
def _pairs(
    x: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    num_rows: tl.tensor,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns x @ weight[column]^T + bias, rounded to x's dtype, at even and at odd indices of `column` [2 * PAIRS]:
    two tensors [ROWS, PAIRS] float32. `inside`: columns that exist. x is normed if there is a `norm` (ROWS is 1
    then)."""
    SPAN: tl.constexpr = (K + DEPTH - 1) // DEPTH * DEPTH
    sums = few_rows_sums(
        x, norm, eps, weight, column, inside, num_rows, 0, K, STRIDE_X, ROWS, DEPTH, SPAN, STAGES, DTYPE, PDL
    )
    if bias is not None:
        sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    rounded = sums.to(x.dtype.element_ty).to(tl.float32)
    return tl.split(tl.reshape(rounded, [ROWS, PAIRS, 2]))


@triton.jit(do_not_specialize=["num_rows"])
def _gated_linear_kernel(
    x: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    ACT: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Stores PAIRS columns of `gated_linear`'s result. Grid (WIDTH / PAIRS,)."""
    launch_dependents(PDL)
    begin = tl.program_id(0) * PAIRS
    each = tl.arange(0, 2 * PAIRS)
    place = begin + each // 2
    column = place + each % 2 * WIDTH
    gate, up = _pairs(
        x, norm, eps, weight, bias, column, place < WIDTH, num_rows, K, STRIDE_X, ROWS, PAIRS, DEPTH, STAGES, DTYPE, PDL
    )
    activated = activate(gate, ACT).to(x.dtype.element_ty).to(tl.float32)
    row = tl.arange(0, ROWS)[:, None]
    target = begin + tl.arange(0, PAIRS)[None, :]
    mask = (row < num_rows) & (target < WIDTH)
    tl.store(out + row.to(tl.int64) * WIDTH + target, (activated * up).to(out.dtype.element_ty), mask=mask)


# Slots are views of a larger buffer, at any multiple of 8 bytes.
@triton.jit(do_not_specialize=["num_rows", "num_slots"], do_not_specialize_on_alignment=["slots"])
def _rope_linear_kernel(
    x: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    num_rows: tl.tensor,
    num_slots: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    STRIDE_COS: tl.constexpr,
    STRIDE_SIN: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Computes PAIRS rotary pairs of one head for `rope_linear`; the grid numbers heads of queries, then keys, then
    values. Grid (heads * tiles of PAIRS in HALF,).

    Keys and values of rows whose slot is not in the cache are not written; queries always are.
    """
    launch_dependents(PDL)
    TILES: tl.constexpr = (HALF + PAIRS - 1) // PAIRS
    head = tl.program_id(0) // TILES
    begin = tl.program_id(0) % TILES * PAIRS
    each = tl.arange(0, 2 * PAIRS)
    place = begin + each // 2
    column = head * (2 * HALF) + place + each % 2 * HALF
    first, second = _pairs(
        x, norm, eps, weight, bias, column, place < HALF, num_rows, K, STRIDE_X, ROWS, PAIRS, DEPTH, STAGES, DTYPE, PDL
    )
    row = tl.arange(0, ROWS)
    wide = row.to(tl.int64)[:, None]
    target = begin + tl.arange(0, PAIRS)[None, :]
    mask = (row < num_rows)[:, None] & (target < HALF)
    if head < HEADS + KV_HEADS:
        c = tl.load(cos + wide * STRIDE_COS + target, mask=mask, other=0.0)
        s = tl.load(sin + wide * STRIDE_SIN + target, mask=mask, other=0.0)
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    first = first.to(q.dtype.element_ty)
    second = second.to(q.dtype.element_ty)
    if head < HEADS:
        out = q + (wide * HEADS + head) * (2 * HALF) + target
        tl.store(out, first, mask=mask)
        tl.store(out + HALF, second, mask=mask)
    else:
        slot = tl.load(slots + row, mask=row < num_rows, other=-1)
        kept = mask & ((slot >= 0) & (slot < num_slots))[:, None]
        rows = (slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot)[:, None]
        if head < HEADS + KV_HEADS:
            out = k_cache + rows + (head - HEADS) * STRIDE_HEAD + target
            tl.store(out, first, mask=kept)
            tl.store(out + HALF, second, mask=kept)
        else:
            out = v_cache + rows + (head - HEADS - KV_HEADS) * STRIDE_HEAD + target
            tl.store(out, first, mask=kept)
            tl.store(out + HALF, second, mask=kept)


def can_norm(x: Tensor) -> bool:
    """True if `gated_linear` and `rope_linear` can norm x [M, K] themselves: M is at most 1."""
    return x.shape[0] <= 1


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Returns act(gate) * up, new contiguous [M, F], with (gate, up) = x @ weight^T + bias.

    x: [M, K], M at most 16, rows at any stride; weight: [2 * F, K] contiguous of x's dtype, gate first; bias: [2 * F]
    of x's dtype or float32; act: one of `activation.ACTIVATIONS`. gate, up, act(gate) and the result are rounded to x's
    dtype. norm: [K] of x's dtype or float32: x becomes rms_norm(x, norm, eps), not rounded, which needs `can_norm(x)`;
    None: no norm.
    """
    _check_product(x, weight, bias, norm)
    if act not in ACTIVATIONS:
        raise ValueError(f"act: expected one of {', '.join(ACTIVATIONS)}, got {act!r}")
    if weight.shape[0] % 2:
        raise ValueError(f"weight: expected [2 * F, K], got {described(weight)}")
    (num_rows, num_in), width = x.shape, weight.shape[0] // 2
    out = x.new_empty((num_rows, width))
    if out.numel():
        launch = pairs_launch(num_rows, 2 * width, width, num_in, x.dtype, capability_of(x.device))
        launches = _gated_launches(width, act, num_in, x.stride(0), launch, x.device)
        grid = cdiv(width, launch.columns), 1, 1
        launches(_gated_linear_kernel, grid, x, norm, eps, weight, bias, out, num_rows)
    return out


def rope_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Computes queries, keys and values, rotates queries and keys, writes keys and values to the cache, returns
    queries.

    x: [M, K], M at most 16, rows at any stride; weight: [(Hq + 2 Hkv) * D, K] contiguous of x's dtype; bias: of x's
    dtype or float32; cos, sin: [M, D/2] float32, rows at any stride; slots: [M] int64: rows with -1, or a slot outside
    of the cache, write no keys and values; k_cache, v_cache: [N, S, Hkv, D] of x's dtype, as in `decode_attention`;
    norm, eps: as in `gated_linear`. The product is rounded; pairs (i, i + D/2) are rotated in float32 and rounded.
    Returns a new contiguous [M, Hq, D].
    """
    _check_product(x, weight, bias, norm)
    if k_cache.dim() != 4 or k_cache.dtype is not x.dtype or k_cache.device != x.device or k_cache.stride(3) != 1:
        raise ValueError(f"k_cache: expected [N, S, Hkv, D] {x.dtype} on {x.device}, got {described(k_cache)}")
    if v_cache.shape != k_cache.shape or v_cache.stride() != k_cache.stride() or v_cache.dtype is not k_cache.dtype:
        raise ValueError(f"v_cache: expected what k_cache is, {described(k_cache)}, got {described(v_cache)}")
    (num_rows, num_in), (num_blocks, block_size, num_kv_heads, dim) = x.shape, k_cache.shape
    num_heads = weight.shape[0] // dim - 2 * num_kv_heads
    if dim % 2 or num_heads < 1 or weight.shape[0] != (num_heads + 2 * num_kv_heads) * dim:
        raise ValueError(
            f"weight: expected outputs of whole heads of an even {dim}, with {num_kv_heads} of keys and as many of "
            f"values, got {described(weight)}"
        )
    check_vector("slots", slots, num_rows, torch.int64, x.device)
    for name, angles in (("cos", cos), ("sin", sin)):
        check_rows(name, angles)
        if angles.shape != (num_rows, dim // 2) or angles.dtype is not torch.float32 or angles.device != x.device:
            raise ValueError(f"{name}: expected [{num_rows}, {dim // 2}] float32, got {described(angles)}")
    q = x.new_empty((num_rows, num_heads, dim))
    if num_rows:
        launch = pairs_launch(num_rows, weight.shape[0], dim // 2, num_in, x.dtype, capability_of(x.device))
        heads = num_heads + 2 * num_kv_heads
        stride_block, stride_slot, stride_head, _ = k_cache.stride()
        shape = num_heads, num_kv_heads, dim // 2, block_size
        strides = stride_head, cos.stride(0), sin.stride(0)
        launches = _rope_launches(shape, strides, num_in, x.stride(0), launch, x.device)
        launches(
            *(_rope_linear_kernel, (heads * cdiv(dim // 2, launch.columns), 1, 1)),
            *(x, norm, eps, weight, bias, cos, sin, slots, q, k_cache, v_cache),
            *(num_rows, num_blocks * block_size, stride_block, stride_slot),
        )
    return q


@cached_launch
def _gated_launches(
    width: int, act: str, num_in: int, stride: int, launch: LinearLaunch, device: torch.device
) -> Launch:
    return Launch(WIDTH=width, ACT=act, **_constants(num_in, stride, launch, device))


@cached_launch
def _rope_launches(
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    num_in: int,
    stride: int,
    launch: LinearLaunch,
    device: torch.device,
) -> Launch:
    """Constants and options of `_rope_linear_kernel`. shape: query heads, KV heads, half a head dim, slots of a block.
    strides: between heads of the caches, rows of cos, rows of sin; `stride`: rows of x."""
    names = "HEADS", "KV_HEADS", "HALF", "BLOCK_SIZE", "STRIDE_HEAD", "STRIDE_COS", "STRIDE_SIN"
    return Launch(**dict(zip(names, (*shape, *strides), strict=True)), **_constants(num_in, stride, launch, device))


def _check_product(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None) -> None:
    """Raises ValueError for a wrong dtype or shape, more than 16 rows, or a norm with more than one row."""
    check_rows("x", x)
    check_weight(weight, x)
    check_bias(bias, weight.shape[0], x)
    if norm is not None:
        if not can_norm(x):
            raise ValueError(f"x: expected one row where there is a norm, got {described(x)}")
        check_vector("norm", norm, x.shape[1], torch.float32 if norm.dtype is torch.float32 else x.dtype, x.device)
    if x.shape[0] > MAX_SMALL_ROWS:
        raise ValueError(f"x: expected at most {MAX_SMALL_ROWS} rows, got {x.shape[0]}")


def _constants(num_in: int, stride: int, launch: LinearLaunch, device: torch.device) -> dict[str, Any]:
    """Constants that both kernels share, and launch options. stride: between rows of x. `launch.columns`: pairs."""
    return {
        "K": num_in,
        "STRIDE_X": stride,
        "ROWS": launch.rows,
        "PAIRS": launch.columns,
        "DEPTH": launch.depth,
        "STAGES": launch.stages,
        "DTYPE": DOT_DTYPE,
        "num_warps": launch.warps,
        **dependent_launch(device),
    }
