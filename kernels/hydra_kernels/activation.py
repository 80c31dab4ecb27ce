"""Activations, the gated one between the two linears of an MLP, and gates of attention heads. Bound by memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import check_heads, check_rows, described
from hydra_kernels._common import row_launch
from hydra_kernels._launch import Launch, cached_launch
from hydra_kernels._sizes import cdiv

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu")
_COLUMNS = 1024  # per program: 16 bytes of gate and of up per thread
_WARPS = 4


@triton.jit
def activate(x: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    """Applies ACT, one of ACTIVATIONS, to float32 x. gelu_tanh uses (1 + tanh(y)) / 2 = sigmoid(2 y)."""
    if ACT == "silu":
        share = tl.sigmoid(x)
    elif ACT == "quick_gelu":
        share = tl.sigmoid(1.702 * x)
    elif ACT == "gelu_tanh":
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return x * share


@triton.jit
def _act_and_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    ACT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Stores round(act(gate)) * up. Grid (T, F / COLUMNS). Width and stride are constants, so that the compiler knows
    the alignment of widths like 3420."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < WIDTH
    gate = tl.load(gate_up + row * STRIDE_ROW + column, mask=mask, other=0.0)
    up = tl.load(gate_up + row * STRIDE_ROW + WIDTH + column, mask=mask, other=0.0)
    activated = activate(gate.to(tl.float32), ACT).to(gate.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (activated * up.to(tl.float32)).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])  # changes between steps: nothing is compiled while serving
def _sigmoid_mul_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    stride_token: tl.tensor,
    stride_gate: tl.tensor,
    HEADS: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    STRIDE_GATE_HEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Stores x * sigmoid(gate) of ROWS heads. Row r is head r % HEADS of token r // HEADS. Grid (T * H / ROWS,)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    mask = (row < num_rows) & (column < COLUMNS)
    token, head = row // HEADS, row % HEADS
    value = tl.load(x + token * stride_token + head * STRIDE_HEAD + column, mask=mask, other=0.0)
    opened = tl.load(gate + token * stride_gate + head * STRIDE_GATE_HEAD + column, mask=mask, other=0.0)
    result = value.to(tl.float32) * tl.sigmoid(opened.to(tl.float32))
    tl.store(out + row * COLUMNS + column, result.to(out.dtype.element_ty), mask=mask)


def act_and_mul(gate_up: Tensor, act: str) -> Tensor:
    """Returns round(act(gate)) * up, new [T, F], for gate_up [T, 2 * F] = [gate | up], rows at any stride.

    act: silu x * sigmoid(x); gelu x * Phi(x); gelu_tanh its tanh approximation; quick_gelu x * sigmoid(1.702 x).
    """
    check_rows("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: expected [T, 2 * F], got {described(gate_up)}")
    if act not in ACTIVATIONS:
        raise ValueError(f"act: expected one of {', '.join(ACTIVATIONS)}, got {act!r}")
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_rows, width))
    if out.numel():
        grid = num_rows, cdiv(width, _COLUMNS), 1
        _act_and_mul_launches(act, width, gate_up.stride(0))(_act_and_mul_kernel, grid, gate_up, out)
    return out


@cached_launch
def _act_and_mul_launches(act: str, width: int, stride: int) -> Launch:
    return Launch(ACT=act, WIDTH=width, STRIDE_ROW=stride, COLUMNS=_COLUMNS, num_warps=_WARPS)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Returns x * sigmoid(gate), rounded once, new and contiguous. x, gate: [T, H, D], tokens and heads at any
    stride."""
    check_heads("x", x)
    check_heads("gate", gate, x)
    if gate.shape != x.shape:
        raise ValueError(f"gate: expected {list(x.shape)} like x, got {described(gate)}")
    out = x.new_empty(x.shape)
    if out.numel():
        num_rows = x.shape[0] * x.shape[1]
        tile = row_launch(x.shape[2])
        _sigmoid_mul_kernel[(cdiv(num_rows, tile.rows),)](
            *(x, gate, out, num_rows, x.stride(0), gate.stride(0)),
            HEADS=x.shape[1],
            STRIDE_HEAD=x.stride(1),
            STRIDE_GATE_HEAD=gate.stride(1),
            COLUMNS=x.shape[2],
            ROWS=tile.rows,
            PADDED=tile.columns,
            num_warps=tile.warps,
        )
    return out
