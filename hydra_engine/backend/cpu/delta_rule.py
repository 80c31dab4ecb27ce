"""Recurrent states on the native extension: causal convolution, gated delta rule, and the gates after them.

Checks shapes, dtypes and strides, and passes addresses. The extension checks the contents of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.base import DeltaInputs, StateCache, StateRows
from hydra_engine.backend.cpu.linear import DTYPE_CODES

_Rows = tuple[int, int, int, int, int, int, int, int, int]


def plan_states(rows: StateRows) -> StateRows:
    """Returns `rows`: CPU kernels read them directly."""
    return rows


def plan_decode_states(starts: Tensor, read_slots: Tensor, write_slots: Tensor) -> StateRows:  # noqa: ARG001
    """Raises ValueError, as `NativeOps.plan_decode`: launches of these ops are never captured."""
    raise ValueError("plan_decode_states: expected ops that plan without contents; these check places before they run")


def causal_conv(x: Tensor, weight: Tensor, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
    checks.check_conv(x, weight, cache, rows)
    out = x.new_empty(x.shape)
    _C.causal_conv(
        (x.data_ptr(), x.stride(0)),
        weight.data_ptr(),
        cache.conv.data_ptr(),
        _rows(rows, x.shape[0], cache.conv, layer),
        weight.shape[0],
        weight.shape[1],
        out.data_ptr(),
        DTYPE_CODES[x.dtype],
    )
    return out


def delta_rule(inputs: DeltaInputs, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
    checks.check_delta(inputs, cache, rows)
    q, k, v, a, b, rates, shift = inputs
    out = v.new_empty(v.shape)
    _C.delta_rule(
        (q.data_ptr(), q.stride(0)),
        (k.data_ptr(), k.stride(0)),
        (v.data_ptr(), v.stride(0)),
        (a.data_ptr(), a.stride(0)),
        (b.data_ptr(), b.stride(0)),
        rates.data_ptr(),
        shift.data_ptr(),
        cache.recurrent.data_ptr(),
        _rows(rows, v.shape[0], cache.recurrent, layer),
        (q.shape[1], v.shape[1], q.shape[2], v.shape[2]),
        out.data_ptr(),
        DTYPE_CODES[v.dtype],
    )
    return out


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    strides, gate_strides = checks.check_gate(x, gate)
    checks.check_norm_weight(weight, x, wide=False)
    (tokens, heads, dim), dtype = x.shape, DTYPE_CODES[x.dtype]
    out = torch.empty((tokens, heads, dim), dtype=x.dtype)
    addresses = x.data_ptr(), strides, weight.data_ptr(), gate.data_ptr(), gate_strides, out.data_ptr()
    _C.gated_rms_norm(*addresses, tokens, heads, dim, eps, dtype)
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    strides, gate_strides = checks.check_gate(x, gate)
    (tokens, heads, dim), dtype = x.shape, DTYPE_CODES[x.dtype]
    out = torch.empty((tokens, heads, dim), dtype=x.dtype)
    addresses = x.data_ptr(), strides, gate.data_ptr(), gate_strides, out.data_ptr()
    _C.sigmoid_mul(*addresses, tokens, heads, dim, dtype)
    return out


def _rows(rows: StateRows, tokens: int, states: Tensor, layer: int) -> _Rows:
    return (
        rows.cu_q.data_ptr(),
        rows.starts.data_ptr(),
        rows.read_slots.data_ptr(),
        rows.write_slots.data_ptr(),
        rows.starts.shape[0],
        tokens,
        states.shape[0],
        states.shape[1],
        layer,
    )
