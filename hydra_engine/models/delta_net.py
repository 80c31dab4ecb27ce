"""A gated delta-net layer (qwen3_5_text): instead of keys and values, one state per request.

Knows its weights and the order of a token's numbers in the fused projection. Does not know who uses which place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydra_engine.models.inputs import States
from hydra_engine.models.layers import Linear, Weight
from hydra_engine.models.parameters import Scope
from hydra_engine.specs.base import DeltaShape


class DeltaNet:
    """`layer` counts the layers of this kind."""

    def __init__(self, scope: Scope, shape: DeltaShape, hidden_size: int, eps: float, layer: int) -> None:
        self._ops, self._shape, self._eps, self._layer = scope.ops, shape, eps, layer
        heads = shape.num_value_heads
        parts = {
            "in_proj_qkv": shape.num_channels,
            "in_proj_z": shape.value_width,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }
        self._cuts = list(parts.values())
        self._in = Linear(scope, parts, hidden_size, bias=False)
        self._taps = Weight(scope, "conv1d.weight", (shape.num_channels, 1, shape.num_taps))
        self._rates = Weight(scope, "A_log", (heads,), dtype=torch.float32)
        self._shift = Weight(scope, "dt_bias", (heads,), dtype=torch.float32)
        self._norm = Weight(scope, "norm.weight", (shape.value_dim,))
        self._out = Linear(scope, {"out_proj": hidden_size}, shape.value_width, bias=False)

    def __call__(self, x: Tensor, states: States) -> Tensor:
        """[T, C] -> [T, C]; moves the states of the step's rows on."""
        shape, ops = self._shape, self._ops
        qkv, z, b, a = self._in(x).split(self._cuts, dim=1)
        mixed = ops.causal_conv(qkv, self._taps.tensor.squeeze(1), states.cache, self._layer, states.rows)
        q, k, v = mixed.split((shape.key_width, shape.key_width, shape.value_width), dim=1)
        out = ops.delta_rule(  # [T, Hv, Dv]
            q.unflatten(1, (-1, shape.key_dim)),
            k.unflatten(1, (-1, shape.key_dim)),
            v.unflatten(1, (-1, shape.value_dim)),
            a,
            b,
            self._rates.tensor,
            self._shift.tensor,
            states.cache,
            self._layer,
            states.rows,
        )
        gate = z.unflatten(1, (-1, shape.value_dim))
        return self._out(ops.gated_rms_norm(out, self._norm.tensor, gate, self._eps).flatten(1))
