"""Mixtures of experts of the native extension: all matrices of a kind behind one another in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.cpu.linear import Form, NativeLinear, NativeQuantizedLinear, aligned
from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.backend.reference.experts import LinearExperts

_FLOAT_FIELDS = 4  # of the form of floats; that of quantised weights has more


class NativeExperts(LinearExperts):
    """`PackedExperts` in the layouts of `NativeLinear` or `NativeQuantizedLinear`.

    data: the packed bytes of all gate_up and of all down matrices, uint8 each. forms: of one matrix of each.
    """

    forms: tuple[Form, Form]
    data: tuple[Tensor, Tensor]

    def __init__(
        self,
        gate_up: Sequence[Tensor | QuantizedWeight],
        down: Sequence[Tensor | QuantizedWeight],
        rows: torch.dtype | None = None,
    ) -> None:
        checks.check_expert_weights(gate_up, down)
        self._keep(_packed(gate_up, rows), _packed(down, rows))

    @classmethod
    def from_packed(cls, num_experts: int, forms: Sequence[Form], data: Sequence[Tensor]) -> NativeExperts:
        """Returns experts over bytes that were packed before, without a copy.

        forms, data: as in the packed experts, data possibly longer. Raises ValueError as `NativeLinear.from_packed`.
        """
        result = cls.__new__(cls)
        gate_up, down = (_restored(num_experts, *part) for part in zip(forms, data, strict=True))
        result._keep(gate_up, down)
        return result

    def _keep(self, gate_up: _Matrices, down: _Matrices) -> None:
        super().__init__(gate_up.weights, down.weights)
        self.forms = gate_up.weights[0].form, down.weights[0].form
        self.data = gate_up.data, down.data


class _Matrices(NamedTuple):
    """Packed weights over equal parts of `data`."""

    data: Tensor
    weights: list[NativeLinear] | list[NativeQuantizedLinear]


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
    if isinstance(weights[0], QuantizedWeight):
        quantized = [NativeQuantizedLinear(weight, None, parts) for weight in weights]  # type: ignore[arg-type]
        return _Matrices(parts.data, quantized)
    packed = [NativeLinear(weight, None, rows, parts) for weight in weights]  # type: ignore[arg-type]
    return _Matrices(parts.data, packed)


def _restored(count: int, form: Form, data: Tensor) -> _Matrices:
    """Returns `count` weights of this form over equal parts of `data`."""
    kind = NativeLinear if len(form) == _FLOAT_FIELDS else NativeQuantizedLinear
    num_bytes = kind.from_packed(form, data, None).data.nbytes
    weights = [kind.from_packed(form, data[part * num_bytes :], None) for part in range(count)]
    return _Matrices(data[: count * num_bytes], weights)  # type: ignore[arg-type]
