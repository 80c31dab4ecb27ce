"""Shared parts of the linears: products of few rows, the epilogue of a tile, the split-K join, and argument checks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import FLOATS, check_rows, check_vector, described
from hydra_kernels._common import dot, wait_for_previous
from hydra_kernels._launch import Launch, cached_launch
from hydra_kernels._sizes import cdiv
from hydra_kernels.activation import ACTIVATIONS, activate

GROUP = 8  # tiles of rows that run before the next columns, while their weights are in L2
_JOIN_COLUMNS = 256
_JOIN_WARPS = 2


_EACH = tl.constexpr(8)  # values of a row per thread


@triton.jit
def _normed(
    values: tl.tensor, squares: tl.tensor, norm: tl.tensor, k: tl.tensor, K: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns (values [R, DEPTH] times the norm's weights at inputs `k`, in float32; `squares` [R, DEPTH / _EACH] plus
    sums of _EACH squares of values)."""
    wide = values.to(tl.float32)
    squares += tl.sum(tl.reshape(wide * wide, [squares.shape[0], squares.shape[1], _EACH]), axis=2)
    return wide * tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32), squares


@triton.jit
def few_rows_sums(
    x: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    weight: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    num_rows: tl.tensor,
    first: tl.tensor,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
) -> tl.tensor:
    """Returns x [num_rows, K] @ weight[column]^T over inputs first to first + SPAN: [ROWS, C] float32, ROWS 1 or a
    tile.

    The weights of the last DEPTH inputs are loaded before the wait for the previous kernel, and multiplied at the end,
    so that the order of sums is fixed. From 64 columns on the product is transposed, with outputs as the tensor cores'
    rows: then both operands come from shared memory.

    column: [C], rows of the weight [N, K]; inside: [C], False for those to skip, whose sums are 0. norm: [K] or None.
    The one row of x is normed with these weights; then the span must be all of K. x is read once: its root mean square
    divides the sums at the end.
    """
    LAST: tl.constexpr = (SPAN - 1) // DEPTH * DEPTH
    SWAPPED: tl.constexpr = column.shape[0] >= 64
    row = tl.arange(0, ROWS)
    tokens = x + row.to(tl.int64)[:, None] * STRIDE_X
    alive = (row < num_rows)[:, None]
    source = weight + column.to(tl.int64)[:, None] * K
    k_last = first + LAST + tl.arange(0, DEPTH)[None, :]
    ahead = tl.load(source + k_last, mask=inside[:, None] & (k_last < K), other=0.0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    last_values = tl.load(tokens + k_last, mask=alive & (k_last < K), other=0.0)
    if ROWS == 1:  # bound by memory: tensor cores would not help
        if norm is not None:
            squares = tl.zeros([1, DEPTH // _EACH], tl.float32)
        products = tl.zeros([column.shape[0], DEPTH], tl.float32)
        for start in tl.range(0, LAST, DEPTH, num_stages=STAGES):
            k = first + start + tl.arange(0, DEPTH)[None, :]
            piece = tl.load(source + k, mask=inside[:, None] & (k < K), other=0.0, eviction_policy="evict_first")
            values = tl.load(tokens + k, mask=k < K, other=0.0).to(tl.float32)
            if norm is not None:
                values, squares = _normed(values, squares, norm, k, K)
            products += piece.to(tl.float32) * values
        last_values = last_values.to(tl.float32)
        if norm is not None:
            last_values, squares = _normed(last_values, squares, norm, k_last, K)
        products += ahead.to(tl.float32) * last_values
        sums = tl.sum(products, axis=1)[None, :]
        if norm is not None:
            sums *= tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
    else:
        if SWAPPED:
            sums = tl.zeros([column.shape[0], ROWS], tl.float32)
        else:
            sums = tl.zeros([ROWS, column.shape[0]], tl.float32)
        for start in tl.range(0, LAST, DEPTH, num_stages=STAGES):
            k = first + start + tl.arange(0, DEPTH)[None, :]
            values = tl.load(tokens + k, mask=alive & (k < K), other=0.0)
            piece = tl.load(source + k, mask=inside[:, None] & (k < K), other=0.0, eviction_policy="evict_first")
            if SWAPPED:
                sums = dot(piece, tl.trans(values), sums, DTYPE)
            else:
                sums = dot(values, tl.trans(piece), sums, DTYPE)
        if SWAPPED:
            sums = tl.trans(dot(ahead, tl.trans(last_values), sums, DTYPE))
        else:
            sums = dot(last_values, tl.trans(ahead), sums, DTYPE)
    return sums


@triton.jit
def finish_tile(
    sums: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    N: tl.constexpr,
    ACT: tl.constexpr,
    STRIDE_RESIDUAL: tl.constexpr,
    ROUNDED: tl.constexpr = False,
) -> None:
    """Stores act(sums + bias) + residual, sums [R, C], at rows and columns of `out` that are within num_rows and N.
    ACT, bias and residual may be None. ROUNDED: rounds to the output dtype before the residual is added."""
    inside = column < N
    mask = (row < num_rows)[:, None] & inside[None, :]
    wide = row.to(tl.int64)[:, None]
    if bias is not None:
        sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACT is not None:
        sums = activate(sums, ACT)
    if residual is not None:
        if ROUNDED:
            sums = sums.to(out.dtype.element_ty).to(tl.float32)
        sums += tl.load(residual + wide * STRIDE_RESIDUAL + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + wide * N + column[None, :], sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _join_splits_kernel(
    partial: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    N: tl.constexpr,
    STRIDE_RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    ROUNDED: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Adds the splits of a row's columns in order and stores them by `finish_tile`. Grid (N / COLUMNS, num_rows)."""
    row = tl.program_id(1) + tl.arange(0, 1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([1, COLUMNS], tl.float32)
    for split in range(SPLITS):
        place = (split * num_rows + row).to(tl.int64)[:, None] * N + column[None, :]
        sums += tl.load(partial + place, mask=(column < N)[None, :], other=0.0)
    finish_tile(sums, bias, residual, out, row, column, num_rows, N, ACT, STRIDE_RESIDUAL, ROUNDED)


def join_splits(
    partial: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    act: str | None,
    *,
    rounded: bool = False,
) -> None:
    """Writes act(sum of partial + bias) + residual to out [M, N]. partial: [splits, M, N] float32, added in order.
    rounded: rounds to out's dtype before the residual is added."""
    splits, num_rows, num_out = partial.shape
    launches = _join_launches(num_out, 0 if residual is None else residual.stride(0), act, rounded, splits)
    grid = cdiv(num_out, _JOIN_COLUMNS), num_rows, 1
    launches(_join_splits_kernel, grid, partial, bias, residual, out, num_rows)


@cached_launch
def _join_launches(num_out: int, stride_residual: int, act: str | None, rounded: bool, splits: int) -> Launch:
    return Launch(
        N=num_out,
        STRIDE_RESIDUAL=stride_residual,
        ACT=act,
        ROUNDED=rounded,
        SPLITS=splits,
        COLUMNS=_JOIN_COLUMNS,
        num_warps=_JOIN_WARPS,
    )


def check_weight(weight: Tensor, x: Tensor) -> None:
    """Raises ValueError unless the weight is a contiguous [N, K] of the dtype and on the device of x [M, K]."""
    num_in = x.shape[1]
    if weight.dim() != 2 or weight.shape[1] != num_in or not weight.is_contiguous() or weight.dtype is not x.dtype:
        raise ValueError(f"weight: expected contiguous [N, {num_in}] {x.dtype}, got {described(weight)}")
    if weight.device != x.device:
        raise ValueError(f"weight: expected a tensor on {x.device} like x, got {described(weight)}")


def check_bias(bias: Tensor | None, num_out: int, x: Tensor) -> None:
    """Raises ValueError unless the bias is None, or contiguous [num_out] of x's dtype or float32 on x's device."""
    if bias is not None:
        wanted = torch.float32 if bias.dtype is torch.float32 else x.dtype
        check_vector("bias", bias, num_out, wanted, x.device)


def checked_output(
    x: Tensor,
    num_out: int,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Allocates the result of a linear of x [M, K]: contiguous [M, num_out] of `out_dtype`, by default x's. Raises
    ValueError for a wrong bias, residual, act or out_dtype."""
    if act != "none" and act not in ACTIVATIONS:
        raise ValueError(f"act: expected one of none, {', '.join(ACTIVATIONS)}, got {act!r}")
    dtype = x.dtype if out_dtype is None else out_dtype
    if dtype not in FLOATS:
        raise ValueError(f"out_dtype: expected a float type, got {dtype}")
    check_bias(bias, num_out, x)
    out = x.new_empty((x.shape[0], num_out), dtype=dtype)
    if residual is not None:
        check_rows("residual", residual, out)
    return out
