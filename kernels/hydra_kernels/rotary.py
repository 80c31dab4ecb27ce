"""Rotary embedding of queries and keys of vision towers, without a cache. Bound by memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import check_heads, described
from hydra_kernels._launch import Launch, cached_launch
from hydra_kernels._sizes import cdiv, next_power_of_2

_ELEMENTS = 2048  # per program, of both halves
_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])  # changes between steps: nothing is compiled while serving
def _rotate_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    stride_token: tl.tensor,
    STRIDE_COS: tl.constexpr,
    STRIDE_SIN: tl.constexpr,
    HEADS: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Rotates ROWS heads; row r is head r % HEADS of token r // HEADS. Strides like 40 are constants, so that their
    alignment is known."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    mask = (row < num_rows) & (column < HALF)
    token = row // HEADS
    source = x + token * stride_token + row % HEADS * STRIDE_HEAD + column
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(cos + token * STRIDE_COS + column, mask=mask, other=0.0)
    sine = tl.load(sin + token * STRIDE_SIN + column, mask=mask, other=0.0)
    target = out + row * (2 * HALF) + column
    tl.store(target, (first * cosine - second * sine).to(out.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (second * cosine + first * sine).to(out.dtype.element_ty), mask=mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns [x1 * cos - x2 * sin | x2 * cos + x1 * sin] with halves x = [x1 | x2], in float32, rounded once.

    x: [T, H, D], tokens and heads at any stride, so queries and keys of a fused projection take one call; cos, sin: [T,
    D / 2] float32 with dense rows. The result is new and contiguous, [T, H, D].
    """
    check_heads("x", x)
    num_tokens, num_heads, dim = x.shape
    if dim % 2:
        raise ValueError(f"x: expected an even head dim for rotation, got {dim}")
    half = dim // 2
    for name, angles in (("cos", cos), ("sin", sin)):
        dense = half == 1 or angles.stride(-1) == 1
        if angles.shape != (num_tokens, half) or angles.dtype is not torch.float32 or angles.device != x.device:
            dense = False
        if not dense:
            raise ValueError(
                f"{name}: expected [{num_tokens}, {half}] torch.float32 on {x.device} with dense rows, "
                f"got {described(angles)}"
            )
    out = x.new_empty(x.shape)
    num_rows = num_tokens * num_heads
    if num_rows:
        strides = cos.stride(0), sin.stride(0), x.stride(1)
        rows, launches = _launches(num_heads, half, strides)
        launches(_rotate_kernel, (cdiv(num_rows, rows), 1, 1), x, cos, sin, out, num_rows, x.stride(0))
    return out


@cached_launch
def _launches(num_heads: int, half: int, strides: tuple[int, int, int]) -> tuple[int, Launch]:
    """Returns (rows per program, launch of `_rotate_kernel`). strides: between rows of cos, of sin, and heads of x."""
    padded = next_power_of_2(half)
    rows = max(1, _ELEMENTS // (2 * padded))
    return rows, Launch(
        STRIDE_COS=strides[0],
        STRIDE_SIN=strides[1],
        HEADS=num_heads,
        STRIDE_HEAD=strides[2],
        HALF=half,
        ROWS=rows,
        PADDED=padded,
        num_warps=_WARPS,
    )
