"""The gated activation between the two linears of an MLP: act(gate) * up. Bound by memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import check_rows, described

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu")
_COLUMNS = 1024  # of one program: one 16-byte piece of gate and of up per thread
_WARPS = 4


@triton.jit
def _activate(x: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    """In float32. The tanh approximation uses (1 + tanh(y)) / 2 = sigmoid(2 y)."""
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
    """Width and stride are constants so that the compiler knows the alignment of widths like 3420."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < WIDTH
    gate = tl.load(gate_up + row * STRIDE_ROW + column, mask=mask, other=0.0)
    up = tl.load(gate_up + row * STRIDE_ROW + WIDTH + column, mask=mask, other=0.0)
    activated = _activate(gate.to(tl.float32), ACT).to(gate.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (activated * up.to(tl.float32)).to(out.dtype.element_ty), mask=mask)


def act_and_mul(gate_up: Tensor, act: str) -> Tensor:
    """round(act(gate)) * up for gate_up [T, 2 * F] = [gate | up], rows at any stride -> new [T, F].

    act: silu x * sigmoid(x); gelu x * Phi(x); gelu_tanh its tanh approximation; quick_gelu x * sigmoid(1.702 x).
    """
    check_rows("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: expected [T, 2 * F], got {described(gate_up)}")
    if act not in ACTIVATIONS:
        raise ValueError(f"act: expected one of {', '.join(ACTIVATIONS)}, got {act!r}")
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _act_and_mul_kernel[(num_rows, triton.cdiv(width, _COLUMNS))](
            gate_up, out, ACT=act, WIDTH=width, STRIDE_ROW=gate_up.stride(0), COLUMNS=_COLUMNS, num_warps=_WARPS
        )
    return out
