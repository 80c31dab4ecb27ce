"""Mixtures of experts on a CUDA device: the matrices of all experts behind one another, multiplied by Triton kernels
that read routes on the device. Capturable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.base import Activation, PackedExperts, Routes
from hydra_engine.backend.quantized import QuantizedWeight
from hydra_kernels.experts import Matrices, grouped_experts, route_tokens, stack
from hydra_kernels.quantized_linear import pack


class CudaExperts:
    """`PackedExperts` on the weights' device. `dtype`: of x; None if it may have any compute dtype."""

    def __init__(
        self,
        gate_up: Sequence[Tensor | QuantizedWeight],
        down: Sequence[Tensor | QuantizedWeight],
        rows: torch.dtype | None = None,
    ) -> None:
        self.num_in, self.num_inner = checks.check_expert_weights(gate_up, down)
        self.num_experts = len(down)
        self.gate_up, self.down = _stacked(gate_up, rows), _stacked(down, rows)
        dtypes = [part.dtype for part in (self.gate_up, self.down) if isinstance(part, Tensor)]
        self.dtype = dtypes[0] if dtypes else None
        self.has_been_used = False

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(part) for part in (self.gate_up, self.down))


def _stacked(weights: Sequence[Tensor | QuantizedWeight], rows: torch.dtype | None) -> Matrices:
    """Copies weights of one format behind one another, in their kernel's layout. rows: dtype of x."""
    plain = [weight.detach() for weight in weights if isinstance(weight, Tensor)]
    if plain:
        stacked = torch.empty((len(plain), *plain[0].shape), dtype=rows or plain[0].dtype, device=plain[0].device)
        for target, weight in zip(stacked, plain, strict=True):
            target.copy_(weight)
        return stacked
    flat = [weight.flatten_scales() for weight in weights if isinstance(weight, QuantizedWeight)]
    return stack([pack(weight.values, weight.scales, weight.offsets, weight.num_bits) for weight in flat])


def _nbytes(matrices: Matrices) -> int:
    parts = (matrices,) if isinstance(matrices, Tensor) else (matrices.words, matrices.scales, matrices.offsets)
    return sum(part.nbytes for part in parts if part is not None)


def route(logits: Tensor, k: int, *, renormalise: bool, shared: Tensor | None = None) -> Routes:
    """Implements `Ops.route`."""
    checks.check_route(logits, k, shared)
    return Routes(*route_tokens(logits, k, renormalise=renormalise, shared=shared))


def experts(x: Tensor, routes: Routes, experts: PackedExperts, act: Activation, *, deterministic: bool) -> Tensor:
    """Implements `Ops.experts`. deterministic: a row's result does not depend on the number of rows. Else the first use
    also launches the kernels for few and for many rows, so that a warm-up compiles both."""
    assert isinstance(experts, CudaExperts)
    checks.check_experts(x, routes, experts, experts.dtype or x.dtype)
    given = x, *routes, experts.gate_up, experts.down, act
    if deterministic:
        return grouped_experts(*given, many=True)
    if not experts.has_been_used:
        experts.has_been_used = True
        for many in (False, True):
            grouped_experts(*given, many=many)
    return grouped_experts(*given)
