"""Linears: act(x @ W^T + bias) + residual in one launch, for few tokens and for any number.

`small_linear` is for decode steps and bound by memory: each weight is read once, 16 bytes at a time. `invariant_linear`
computes a row in the same order in every step, so its bits do not depend on the other rows of the call. Weights keep
their layout, [N, K] for N outputs and K inputs. Sums, bias, activation and residual are float32, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import check_rows
from hydra_kernels._common import (
    DOT_DTYPE,
    LinearLaunch,
    capability_of,
    dependent_launch,
    dot,
    launch_dependents,
    num_sms_of,
    small_launch,
    tiled_launch,
)
from hydra_kernels._launch import Launch, cached_launch
from hydra_kernels._linear import GROUP, check_weight, checked_output, few_rows_sums, finish_tile, join_splits
from hydra_kernels._sizes import cdiv

MAX_SMALL_ROWS = 16


@triton.jit(do_not_specialize=["num_rows"])
def _small_linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    STRIDE_RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Stores a tile of `small_linear`'s result, summed over one span of inputs. Grid (N / COLUMNS, K / SPAN). With
    several spans (split-K) `out` is [splits, num_rows, N] float32, and ACT, bias and residual are None."""
    launch_dependents(PDL)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    first = split * SPAN
    sums = few_rows_sums(
        x, None, 0.0, weight, column, column < N, num_rows, first, K, STRIDE_X, ROWS, DEPTH, SPAN, STAGES, DTYPE, PDL
    )
    target = out + split.to(tl.int64) * num_rows * N
    row = tl.arange(0, ROWS)
    finish_tile(sums, bias, residual, target, row, column, num_rows, N, ACT, STRIDE_RESIDUAL, ROUNDED)


@triton.jit(do_not_specialize=["num_rows"])
def _tiled_linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    STRIDE_RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """Stores tiles of `invariant_linear`'s result: program i of n has tiles i, i + n, .. Grid (n,), for any n.

    `num_rows` is the only parameter that depends on the step, and is not specialised for, so that every step runs the
    same machine code.
    """
    tiles_down = tl.cdiv(num_rows, ROWS)
    tiles_across = tl.cdiv(N, COLUMNS)
    for tile in range(tl.program_id(0), tiles_down * tiles_across, tl.num_programs(0)):
        group = tile // (GROUP * tiles_across)
        height = tl.minimum(tiles_down - group * GROUP, GROUP)
        place = tile % (GROUP * tiles_across)
        row = (group * GROUP + place % height) * ROWS + tl.arange(0, ROWS)
        column = (place // height) * COLUMNS + tl.arange(0, COLUMNS)
        tokens = x + row.to(tl.int64)[:, None] * STRIDE_X
        source = weight + column.to(tl.int64)[:, None] * K
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, K, DEPTH, num_stages=STAGES):
            k = start + tl.arange(0, DEPTH)[None, :]
            values = tl.load(tokens + k, mask=(row < num_rows)[:, None] & (k < K), other=0.0)
            piece = tl.load(source + k, mask=(column < N)[:, None] & (k < K), other=0.0)
            sums = dot(values, tl.trans(piece), sums, DTYPE)
        finish_tile(sums, bias, residual, out, row, column, num_rows, N, ACT, STRIDE_RESIDUAL)


def small_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: str = "none",
    out_dtype: torch.dtype | None = None,
    *,
    rounded: bool = False,
) -> Tensor:
    """Returns act(x @ weight^T + bias) + residual, new contiguous [M, N].

    x: [M, K], M at most 16, rows at any stride; weight: [N, K] contiguous of x's dtype; bias: [N] of x's dtype or
    float32; residual: [M, N] of the result's dtype, rows at any stride; act: "none" or one of `activation.ACTIVATIONS`;
    out_dtype: a float type, x's by default. rounded: rounds the product before the residual is added, as if it had been
    stored. A row of the result depends on that row of x and residual, and on whether M is 1.
    """
    out = _checked(x, weight, bias, residual, act, out_dtype)
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    if num_rows > MAX_SMALL_ROWS:
        raise ValueError(f"x: expected at most {MAX_SMALL_ROWS} rows, got {num_rows}")
    if out.numel() == 0:
        return out
    name = None if act == "none" else act
    launch = small_launch(num_rows, num_out, num_in, x.dtype, capability_of(x.device))
    stride_residual = 0 if residual is None else residual.stride(0)
    if launch.splits == 1:
        _small(x, weight, (bias, residual, out), launch, name, stride_residual, rounded=rounded)
        return out
    partial = x.new_empty((launch.splits, num_rows, num_out), dtype=torch.float32)
    _small(x, weight, (None, None, partial), launch, None, 0)
    join_splits(partial, bias, residual, out, name, rounded=rounded)
    return out


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: str = "none",
    out_dtype: torch.dtype | None = None,
    *,
    num_sms: int | None = None,
) -> Tensor:
    """Returns act(x @ weight^T + bias) + residual as `small_linear`, for any M, never rounded before the residual: row
    i depends on row i of x and of the residual alone.

    Tiles and the order of sums follow from N, K, the dtype and the kind of GPU. num_sms: the most programs, by default
    the SMs of the GPU; it changes no bit.
    """
    out = _checked(x, weight, bias, residual, act, out_dtype)
    if out.numel() == 0:
        return out
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    launch = tiled_launch(num_out, x.dtype, capability_of(x.device))
    tiles = cdiv(num_rows, launch.rows) * cdiv(num_out, launch.columns)
    _tiled_linear_kernel[(min(tiles, num_sms or num_sms_of(x.device)),)](
        *(x, weight, bias, residual, out, num_rows),
        N=num_out,
        K=num_in,
        STRIDE_X=x.stride(0),
        STRIDE_RESIDUAL=0 if residual is None else residual.stride(0),
        ACT=None if act == "none" else act,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        DEPTH=launch.depth,
        GROUP=GROUP,
        STAGES=launch.stages,
        DTYPE=DOT_DTYPE,
        num_warps=launch.warps,
    )
    return out


def _small(
    x: Tensor,
    weight: Tensor,
    end: tuple[Tensor | None, Tensor | None, Tensor],
    launch: LinearLaunch,
    act: str | None,
    stride_residual: int,
    *,
    rounded: bool = False,
) -> None:
    """Launches the kernel of `small_linear`. end = (bias, residual, out); with several splits (None, None, partial
    sums)."""
    num_out, num_in = weight.shape
    strides = x.stride(0), stride_residual
    launches = _small_launches(num_out, num_in, strides, act, rounded, launch, x.device)
    launches(_small_linear_kernel, (cdiv(num_out, launch.columns), launch.splits, 1), x, weight, *end, x.shape[0])


@cached_launch
def _small_launches(
    num_out: int,
    num_in: int,
    strides: tuple[int, int],
    act: str | None,
    rounded: bool,
    launch: LinearLaunch,
    device: torch.device,
) -> Launch:
    """Constants and options of `_small_linear_kernel` for a layer. strides: between rows of x, and of the residual.
    rounded: the product is rounded before the residual is added."""
    return Launch(
        N=num_out,
        K=num_in,
        STRIDE_X=strides[0],
        STRIDE_RESIDUAL=strides[1],
        ACT=act,
        ROUNDED=rounded,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        DEPTH=launch.depth,
        SPAN=cdiv(num_in, launch.splits * launch.depth) * launch.depth,
        STAGES=launch.stages,
        DTYPE=DOT_DTYPE,
        num_warps=launch.warps,
        **dependent_launch(device),
    )


def _checked(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Allocates the result, [M, N]. Raises ValueError for a wrong argument."""
    check_rows("x", x)
    check_weight(weight, x)
    return checked_output(x, weight.shape[0], bias, residual, act, out_dtype)
