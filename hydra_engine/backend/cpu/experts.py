"""Mixtures of experts of the native extension: the choice of experts, and their outputs.

All matrices of a kind lie behind one another in one piece of memory. Checks shapes and dtypes, and passes addresses, as
linear.py does; csrc/cpu/experts divides the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.base import Activation, PackedExperts, Routes
from hydra_engine.backend.cpu.linear import (
    DTYPE_CODES,
    Form,
    NativeLinear,
    NativeQuantizedLinear,
    activation_code,
    aligned,
)
from hydra_engine.backend.quantized import QuantizedWeight

_FLOAT_FIELDS = 4  # of the form of floats; that of quantised weights has more


class NativeExperts:
    """`PackedExperts` in the layouts of `NativeLinear` or `NativeQuantizedLinear`.

    data: the packed bytes of all gate_up and of all down matrices, uint8 each. forms: of one matrix of each. `dtype`:
    of x; None if it may have any compute dtype.
    """

    def __init__(
        self,
        gate_up: Sequence[Tensor | QuantizedWeight],
        down: Sequence[Tensor | QuantizedWeight],
        rows: torch.dtype | None = None,
    ) -> None:
        checks.check_expert_weights(gate_up, down)
        self._keep(len(down), _packed(gate_up, rows), _packed(down, rows))

    @classmethod
    def from_packed(cls, num_experts: int, forms: Sequence[Form], data: Sequence[Tensor]) -> NativeExperts:
        """Returns experts over bytes that were packed before, without a copy.

        forms, data: as in the packed experts, data possibly longer. Raises ValueError as `NativeLinear.from_packed`.
        """
        result = cls.__new__(cls)
        gate_up, down = (_restored(num_experts, *part) for part in zip(forms, data, strict=True))
        result._keep(num_experts, gate_up, down)
        return result

    def _keep(self, num_experts: int, gate_up: _Matrices, down: _Matrices) -> None:
        self.num_experts = num_experts
        self.num_in, self.num_inner = down.first.num_out, down.first.num_in
        self.forms = gate_up.first.form, down.first.form
        self.data = gate_up.data, down.data
        dtypes = [part.first.dtype for part in (gate_up, down) if isinstance(part.first, NativeLinear)]
        self.dtype = dtypes[0] if dtypes else None
        self.handle = _C.PackedExperts(gate_up.first.handle, down.first.handle, num_experts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.data)


class _Matrices(NamedTuple):
    """Packed weights of one form in equal parts of `data`, and the first of them."""

    data: Tensor
    first: NativeLinear | NativeQuantizedLinear


class _Parts:
    """An allocator of `count` equal parts of one piece of memory."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._left: list[Tensor] = []

    def __call__(self, num_bytes: int) -> Tensor:
        if not self._left:
            self.data = aligned(num_bytes * self._count)
            self._left = [self.data[part * num_bytes :][:num_bytes] for part in reversed(range(self._count))]
        return self._left.pop()


def _packed(weights: Sequence[Tensor | QuantizedWeight], rows: torch.dtype | None) -> _Matrices:
    """Packs weights of one format."""
    parts = _Parts(len(weights))
    packed = [
        NativeQuantizedLinear(weight, None, parts)
        if isinstance(weight, QuantizedWeight)
        else NativeLinear(weight, None, rows, parts)
        for weight in weights
    ]
    return _Matrices(parts.data, packed[0])


def _restored(count: int, form: Form, data: Tensor) -> _Matrices:
    """Returns `count` weights of this form in equal parts of `data`."""
    kind = NativeLinear if len(form) == _FLOAT_FIELDS else NativeQuantizedLinear
    num_bytes = kind.from_packed(form, data, None).data.nbytes
    kind.from_packed(form, data[(count - 1) * num_bytes :], None)  # raises ValueError if the last one is not there
    return _Matrices(data[: count * num_bytes], kind.from_packed(form, data, None))


def route(logits: Tensor, k: int, *, renormalise: bool, shared: Tensor | None = None) -> Routes:
    """`Ops.route`."""
    rows, columns = checks.check_route(logits, k, shared)
    chosen = k if shared is None else k + 1
    experts = torch.empty((rows, chosen), dtype=torch.int32)
    weights = torch.empty((rows, chosen), dtype=torch.float32)
    gates = (0, 0) if shared is None else (shared.data_ptr(), shared.stride(0))
    results = experts.data_ptr(), weights.data_ptr()
    sizes = logits.data_ptr(), logits.stride(0), *gates, rows, columns, k
    _C.route(*sizes, renormalise, DTYPE_CODES[logits.dtype], *results)
    return Routes(experts, weights)


def experts(x: Tensor, routes: Routes, experts: PackedExperts, act: Activation) -> Tensor:
    """`Ops.experts`."""
    assert isinstance(experts, NativeExperts)
    rows, chosen, stride = checks.check_experts(x, routes, experts, experts.dtype or x.dtype)
    out = torch.empty((rows, experts.num_in), dtype=x.dtype)
    addresses = routes.experts.data_ptr(), routes.weights.data_ptr(), chosen, out.data_ptr()
    code = activation_code(act)
    _C.experts(experts.handle, x.data_ptr(), stride, rows, *addresses, code, DTYPE_CODES[x.dtype])
    return out
