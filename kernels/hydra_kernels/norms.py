"""RMSNorm and LayerNorm over the last dimension, also after a residual addition, and RMSNorm with a gate.

Rounding is that of transformers: RMSNorm rounds the normalised value to the dtype before the weight (LlamaRMSNorm), but
not before a wider weight (float32 for 16-bit values); LayerNorm rounds once at the end. Sums are float32. A program
holds whole rows in registers, so every row is read once and depends on itself alone. Bound by memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import check_heads, check_rows, check_vector, described
from hydra_kernels._common import dependent_launch, launch_dependents, row_launch, wait_for_previous
from hydra_kernels._launch import Launch, cached_launch
from hydra_kernels._sizes import cdiv
from hydra_kernels.activation import activate


@triton.jit
def _added(value: tl.tensor, place: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Returns value + the value at `place`, rounded to the dtype of both, and stores it there."""
    total = value.to(tl.float32) + tl.load(place, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(value.dtype)
    tl.store(place, rounded, mask=mask)
    return rounded


@triton.jit(do_not_specialize=["num_rows"])  # changes between steps: nothing is compiled while serving
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    stride_token: tl.tensor,
    stride_residual: tl.tensor,
    stride_gate: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    STRIDE_GATE_HEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Stores the RMSNorm of ROWS rows; row r is head r % HEADS of token r // HEADS. With a `residual` the rows are
    first added to it, in place; with a `gate` the result is multiplied by silu(gate). Both may be None."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    mask = (row < num_rows) & (column < COLUMNS)
    scale = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    value = tl.load(x + row // HEADS * stride_token + row % HEADS * STRIDE_HEAD + column, mask=mask, other=0.0)
    if residual is not None:
        value = _added(value, residual + row * stride_residual + column, mask)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / COLUMNS + eps)
    normed = wide * factor
    if weight.dtype.element_ty == x.dtype.element_ty:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    result = (normed * scale).to(out.dtype.element_ty)
    if gate is not None:
        place = gate + row // HEADS * stride_gate + row % HEADS * STRIDE_GATE_HEAD + column
        opened = activate(tl.load(place, mask=mask, other=0.0).to(tl.float32), "silu")
        result = (result.to(tl.float32) * opened).to(out.dtype.element_ty)
    tl.store(out + row * COLUMNS + column, result, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    stride_row: tl.tensor,
    stride_residual: tl.tensor,
    eps: tl.tensor,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Stores the LayerNorm of ROWS rows. With a `residual`, which may be None, they are first added to it, in place."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    inside = column < COLUMNS
    mask = (row < num_rows) & inside
    value = tl.load(x + row * stride_row + column, mask=mask, other=0.0)
    if residual is not None:
        value = _added(value, residual + row * stride_residual + column, mask)
    wide = value.to(tl.float32)
    mean = tl.sum(wide, axis=1, keep_dims=True) / COLUMNS
    centred = tl.where(inside, wide - mean, 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / COLUMNS + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * COLUMNS + column, (centred * factor * scale + shift).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns round(x / sqrt(mean(x^2) + eps)) * weight over the last dimension, new, contiguous, of x's shape and
    dtype.

    x: [T, C] or [T, H, D], tokens and heads at any stride; weight: [C] or [D] of x's dtype or float32; if it is wider
    than x, only the product is rounded.
    """
    if x.dim() == 3:
        check_heads("x", x)
    else:
        check_rows("x", x)
    return _rms_norm(x, None, weight, None, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place, rounded to the dtype; returns rms_norm(residual, weight, eps), new and contiguous.

    x, residual: [T, C], rows at any stride; weight: [C] of their dtype or float32.
    """
    check_rows("x", x)
    check_rows("residual", residual, x)
    return _rms_norm(x, residual, weight, None, eps)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Returns rms_norm(x) * silu(gate), new and contiguous; rms_norm(x) and the product are rounded, silu(gate) is not.

    x, gate: [T, H, D], tokens and heads at any stride; weight: [D] of their dtype.
    """
    check_heads("x", x)
    check_heads("gate", gate, x)
    if gate.shape != x.shape:
        raise ValueError(f"gate: expected {list(x.shape)} like x, got {described(gate)}")
    check_vector("weight", weight, x.shape[2], x.dtype, x.device)
    return _rms_norm(x, None, weight, gate, eps)


def _rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    """Launches the kernel of the three functions above. Checks only the weight; they check the rest."""
    wanted = torch.float32 if weight.dtype is torch.float32 else x.dtype
    check_vector("weight", weight, x.shape[-1], wanted, x.device)
    out = x.new_empty(x.shape)
    heads, stride_head = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    if out.numel():
        num_rows = x.shape[0] * heads
        tile = row_launch(x.shape[-1])
        launches = _rms_launches(x.shape[-1], heads, stride_head, 0 if gate is None else gate.stride(1), x.device)
        launches(
            *(_rms_norm_kernel, (cdiv(num_rows, tile.rows), 1, 1)),
            *(x, residual, weight, gate, out, num_rows),
            x.stride(0),
            0 if residual is None else residual.stride(0),
            0 if gate is None else gate.stride(0),
            eps,
        )
    return out


@cached_launch
def _rms_launches(columns: int, heads: int, stride_head: int, stride_gate_head: int, device: torch.device) -> Launch:
    """Constants and options of `_rms_norm_kernel`. stride_head, stride_gate_head: of x and gate, 0 if none."""
    tile = row_launch(columns)
    return Launch(
        HEADS=heads,
        STRIDE_HEAD=stride_head,
        STRIDE_GATE_HEAD=stride_gate_head,
        COLUMNS=columns,
        ROWS=tile.rows,
        PADDED=tile.columns,
        num_warps=tile.warps,
        **dependent_launch(device),
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Returns (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, rounded once, new [T, C].

    x: [T, C], rows at any stride; weight, bias: [C] of x's dtype. The variance is computed from centred values, not
    from a difference of squares.
    """
    check_rows("x", x)
    return _layer_norm(x, None, weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place, rounded to the dtype; returns layer_norm(residual, weight, bias, eps), new
    and contiguous.

    x, residual: [T, C], rows at any stride; weight, bias: [C] of their dtype.
    """
    check_rows("x", x)
    check_rows("residual", residual, x)
    return _layer_norm(x, residual, weight, bias, eps)


def _layer_norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Launches the kernel of the two functions above. Checks only weight and bias; they check the rest."""
    check_vector("weight", weight, x.shape[1], x.dtype, x.device)
    check_vector("bias", bias, x.shape[1], x.dtype, x.device)
    out = x.new_empty(x.shape)
    if x.numel():
        tile = row_launch(x.shape[1])
        grid = cdiv(x.shape[0], tile.rows), 1, 1
        launches = _layer_norm_launches(x.shape[1])
        stride = 0 if residual is None else residual.stride(0)
        launches(_layer_norm_kernel, grid, x, residual, weight, bias, out, x.shape[0], x.stride(0), stride, eps)
    return out


@cached_launch
def _layer_norm_launches(columns: int) -> Launch:
    tile = row_launch(columns)
    return Launch(COLUMNS=columns, ROWS=tile.rows, PADDED=tile.columns, num_warps=tile.warps)
