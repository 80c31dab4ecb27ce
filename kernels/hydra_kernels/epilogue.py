"""The epilogue of a matrix product that was computed elsewhere: act(product + bias) + residual. Bound by memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import FLOATS, check_rows, check_vector
from hydra_kernels._launch import Launch, cached_launch
from hydra_kernels._sizes import cdiv
from hydra_kernels.activation import ACTIVATIONS, activate

_COLUMNS = 1024  # per program: 16 bytes of a 16-bit row per thread
_WARPS = 4


@triton.jit
def _finish_kernel(
    product: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    ACT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE_PRODUCT: tl.constexpr,
    STRIDE_RESIDUAL: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Stores act(product + bias) + residual of some columns of a row. Grid (T, WIDTH / COLUMNS). ACT, bias and residual
    may be None."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < WIDTH
    value = tl.load(product + row * STRIDE_PRODUCT + column, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    if ACT is not None:
        value = activate(value, ACT)
    if residual is not None:
        value += tl.load(residual + row * STRIDE_RESIDUAL + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=mask)


def finish(
    product: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns act(product + bias) + residual in float32, rounded once: new contiguous [T, N].

    product: [T, N], rows at any stride; bias: [N] of any float type; residual: [T, N] of the result's dtype, rows at
    any stride; act: "none" or one of `activation.ACTIVATIONS`; out_dtype: a float type, the product's by default.
    """
    check_rows("product", product)
    dtype = product.dtype if out_dtype is None else out_dtype
    if dtype not in FLOATS:
        raise ValueError(f"out_dtype: expected a float type, got {dtype}")
    if act != "none" and act not in ACTIVATIONS:
        raise ValueError(f"act: expected none, {', '.join(ACTIVATIONS)}, got {act!r}")
    num_rows, width = product.shape
    if bias is not None:
        check_vector("bias", bias, width, bias.dtype if bias.dtype in FLOATS else dtype, product.device)
    out = product.new_empty((num_rows, width), dtype=dtype)
    if residual is not None:
        check_rows("residual", residual, out)
    if out.numel():
        launches = _launches(act, width, product.stride(0), 0 if residual is None else residual.stride(0))
        launches(_finish_kernel, (num_rows, cdiv(width, _COLUMNS), 1), product, bias, residual, out)
    return out


@cached_launch
def _launches(act: str, width: int, stride: int, stride_residual: int) -> Launch:
    return Launch(
        ACT=None if act == "none" else act,
        WIDTH=width,
        STRIDE_PRODUCT=stride,
        STRIDE_RESIDUAL=stride_residual,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
