"""The MLP of a layer that is a mixture of experts: a router, the experts, and a shared expert if there is one.

Slots are those of single experts, whatever a checkpoint's layout; a reader splits fused tensors. While a model loads,
the experts of one layer exist both packed and unpacked. All arithmetic is in the backend's ops.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from hydra_engine.backend.base import (
    Activation,
    DeferredNorm,
    PackedExperts,
    PackedLinear,
    Routes,
    apply_deferred_norm,
)
from hydra_engine.backend.quantized import QuantizedWeight, stacked
from hydra_engine.models.layers.basic import RmsNorm, quantized_weight
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.specs.base import Mixture

_GATE, _UP, _DOWN = "gate_proj.weight", "up_proj.weight", "down_proj.weight"


class MixtureMlp:
    """A mixture of experts, each a gated MLP, in place of a `GatedMlp`."""

    def __init__(self, scope: Scope, num_channels: int, mixture: Mixture, act: str) -> None:
        self._ops, self._mixture = scope.ops, mixture
        self._act = cast(Activation, act)
        self._router = Router(scope, num_channels, mixture)
        self._experts = Experts(scope, num_channels, mixture)

    def inner(self, x: Tensor | DeferredNorm) -> Tensor:
        """Returns the weighted sum of the outputs of the chosen experts, [T, C]. x: [T, C]."""
        x, ops = apply_deferred_norm(self._ops, x), self._ops
        (experts,) = self._experts.packed
        return ops.experts(x, self._router(x), experts, self._act)

    def finish(self, norm: RmsNorm, inner: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm(y), y), y = inner + residual; `residual` may be overwritten with y."""
        return norm.after_sum(inner, residual)


class Router:
    """The matrix whose products choose experts; its last row is the gate of a shared expert. It is never quantised:
    its products, unrounded, decide."""

    packed: tuple[PackedLinear]

    def __init__(self, scope: Scope, num_channels: int, mixture: Mixture) -> None:
        self._ops, self._mixture, self._dtype = scope.ops, mixture, scope.dtype
        counts = {"gate.weight": mixture.num_experts} | ({"shared_expert_gate.weight": 1} if mixture.shared else {})
        self._parts: dict[str, Tensor | None] = dict.fromkeys(counts)
        for name, count in counts.items():
            scope.declare(name, (count, num_channels), partial(self._fill, name), matrix=True)
        scope.register(self)

    def __call__(self, x: Tensor) -> Routes:
        """Routes tokens, x: [T, C]."""
        mixture, (weight,) = self._mixture, self.packed
        logits = self._ops.linear(x, weight, out_dtype=torch.float32)
        gate = logits[:, mixture.num_experts :] if mixture.shared else None
        logits = logits[:, : mixture.num_experts]
        return self._ops.route(logits, mixture.num_chosen, renormalise=mixture.renormalise, shared=gate)

    def _fill(self, name: str, weight: Tensor) -> None:
        self._parts[name] = weight
        parts = [part for part in self._parts.values() if part is not None]
        if len(parts) == len(self._parts):
            self._parts = dict.fromkeys(self._parts)
            self.packed = (self._ops.pack_linear(torch.cat(parts), rows=self._dtype),)


class Experts:
    """The packed experts of a layer, the shared one last."""

    packed: tuple[PackedExperts]

    def __init__(self, scope: Scope, num_channels: int, mixture: Mixture) -> None:
        self._ops, self._dtype, self._quantize = scope.ops, scope.dtype, scope.quantize
        self._gate_up: list[Tensor | QuantizedWeight | None] = [None] * mixture.num_held
        self._down: list[Tensor | QuantizedWeight | None] = [None] * mixture.num_held
        self._gates: dict[int, Tensor | QuantizedWeight] = {}  # gate or up, whichever came first
        inner, outer = (mixture.num_inner, num_channels), (num_channels, mixture.num_inner)
        scopes = scope.children("experts", mixture.num_experts, "num_experts", kind="experts")
        scopes += [scope.child("shared_expert")] if mixture.shared else []
        for expert, own in enumerate(scopes):
            for name, shape in ((_GATE, inner), (_UP, inner), (_DOWN, outer)):
                fill = partial(self._fill, expert, name)
                own.declare(name, shape, fill, fill_quantized=fill, matrix=True)
        scope.register(self)

    def _fill(self, expert: int, name: str, weight: Tensor | QuantizedWeight) -> None:
        """Keeps a matrix, quantised if the scope says so, until all have arrived and are packed."""
        kept = quantized_weight(weight, self._quantize)
        if name == _DOWN:
            self._down[expert] = kept
        elif (other := self._gates.pop(expert, None)) is None:
            self._gates[expert] = kept
        else:
            self._gate_up[expert] = self._joined(*((other, kept) if name == _UP else (kept, other)))
        gate_up = [weight for weight in self._gate_up if weight is not None]
        down = [weight for weight in self._down if weight is not None]
        if len(gate_up) == len(self._gate_up) and len(down) == len(self._down):
            self._gate_up, self._down = [None] * len(gate_up), [None] * len(down)
            self.packed = (self._ops.pack_experts(self._alike(gate_up), self._alike(down), self._dtype),)

    def _joined(self, gate: Tensor | QuantizedWeight, up: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        """Returns the matrix of both, [2F, C], gate first."""
        gate, up = self._alike([gate, up])
        if isinstance(gate, QuantizedWeight) and isinstance(up, QuantizedWeight):
            return stacked([gate, up])
        assert isinstance(gate, Tensor) and isinstance(up, Tensor)
        return torch.cat((gate, up))

    def _alike(self, weights: list[Tensor | QuantizedWeight]) -> list[Tensor | QuantizedWeight]:
        """Returns the weights in one format: their own, if it is the same; with offsets of zero beside others with
        offsets; else in the compute dtype."""
        if len({_format(weight) for weight in weights}) == 1:
            return weights
        widened = [_with_offsets(weight) for weight in weights]
        if len({_format(weight) for weight in widened}) == 1:
            return widened
        return [
            weight.dequantized(self._dtype) if isinstance(weight, QuantizedWeight) else weight for weight in weights
        ]


def _format(weight: Tensor | QuantizedWeight) -> object:
    return weight.dtype if isinstance(weight, Tensor) else weight.stack_key


def _with_offsets(weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
    """Returns a quantised weight with one level of scales with offsets, of zero if it has none."""
    if isinstance(weight, Tensor) or weight.offsets is not None or weight.block_scales is not None or weight.is_float:
        return weight
    return replace(weight, offsets=torch.zeros_like(weight.scales, dtype=torch.float32))
