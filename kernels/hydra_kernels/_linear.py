"""What linears of float and of quantised weights share: the end of a tile, split inputs, and checks of arguments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import FLOATS, check_rows, check_vector
from hydra_kernels.activation import ACTIVATIONS, activate

GROUP = 8  # tiles of rows that follow each other before the next columns: their weights are still in L2
_JOIN_COLUMNS = 256
_JOIN_WARPS = 2


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
) -> None:
    """Stores act(sums + bias) + residual, sums [R, C]. ACT, bias and residual may be None."""
    inside = column < N
    mask = (row < num_rows)[:, None] & inside[None, :]
    wide = row.to(tl.int64)[:, None]
    if bias is not None:
        sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACT is not None:
        sums = activate(sums, ACT)
    if residual is not None:
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
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Grid (N / COLUMNS, num_rows): adds the splits in their order."""
    row = tl.program_id(1) + tl.arange(0, 1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([1, COLUMNS], tl.float32)
    for split in range(SPLITS):
        place = (split * num_rows + row).to(tl.int64)[:, None] * N + column[None, :]
        sums += tl.load(partial + place, mask=(column < N)[None, :], other=0.0)
    finish_tile(sums, bias, residual, out, row, column, num_rows, N, ACT, STRIDE_RESIDUAL)


def join_splits(partial: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, act: str | None) -> None:
    """partial [splits, M, N] float32 -> act(their sum + bias) + residual into out [M, N]."""
    splits, num_rows, num_out = partial.shape
    _join_splits_kernel[(triton.cdiv(num_out, _JOIN_COLUMNS), num_rows)](
        *(partial, bias, residual, out, num_rows),
        N=num_out,
        STRIDE_RESIDUAL=0 if residual is None else residual.stride(0),
        ACT=act,
        SPLITS=splits,
        COLUMNS=_JOIN_COLUMNS,
        num_warps=_JOIN_WARPS,
    )


def checked_output(
    x: Tensor,
    num_out: int,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """The result of a linear of x [M, K], which is checked already, not yet written."""
    if act != "none" and act not in ACTIVATIONS:
        raise ValueError(f"act: expected one of none, {', '.join(ACTIVATIONS)}, got {act!r}")
    dtype = x.dtype if out_dtype is None else out_dtype
    if dtype not in FLOATS:
        raise ValueError(f"out_dtype: expected a float type, got {dtype}")
    if bias is not None:
        wanted = torch.float32 if bias.dtype is torch.float32 else x.dtype
        check_vector("bias", bias, num_out, wanted, x.device)
    out = torch.empty((x.shape[0], num_out), dtype=dtype, device=x.device)
    if residual is not None:
        check_rows("residual", residual, out)
    return out
