"""Layers of qwen3_5_text: gated delta nets, which keep one state per request instead of keys and values, and full
attention, causal over the paged cache, with a gate per output and rotary positions for part of a head.

The backend's `rope_and_write` rotates pairs (i, i + D/2) of whole heads. Heads of queries and keys are therefore
permuted at load so that rotated pairs are D/2 apart; all other pairs rotate by angle 0. Scalar products do not depend
on the order. Does not know blocks, batches or which request has which state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydra_engine.backend.base import DeferredNorm, DeltaInputs, PagedCache, Rotary, StepInputs, apply_deferred_norm
from hydra_engine.models.layers.basic import Linear, Weight
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.specs.base import DeltaShape, LanguageSpec


class DeltaNet:
    """A gated delta net. `layer` is its index among the delta-net layers."""

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
        self.out = Linear(scope, {"out_proj": hidden_size}, shape.value_width, bias=False)

    def __call__(
        self, x: Tensor | DeferredNorm, rotary: Rotary, cache: PagedCache, step: StepInputs, rows: Tensor | None = None
    ) -> Tensor:
        """Returns the input of `out`, [T, Hv * Dv], or only the given rows of it; advances the states of all rows.
        Ignores `rotary` and `cache`, which attention layers need. Raises ValueError if the step has no states."""
        if step.states is None:
            raise ValueError("states: expected the states of the step's rows, which this model's layers keep")
        shape, ops, states = self._shape, self._ops, step.states
        qkv, z, b, a = self._in(apply_deferred_norm(ops, x)).split(self._cuts, dim=1)
        mixed = ops.causal_conv(qkv, self._taps.tensor.squeeze(1), states.cache, self._layer, states.rows)
        q, k, v = mixed.split((shape.key_width, shape.key_width, shape.value_width), dim=1)
        inputs = DeltaInputs(
            q.unflatten(1, (-1, shape.key_dim)),
            k.unflatten(1, (-1, shape.key_dim)),
            v.unflatten(1, (-1, shape.value_dim)),
            a,
            b,
            self._rates.tensor,
            self._shift.tensor,
        )
        out = ops.delta_rule(inputs, states.cache, self._layer, states.rows)  # [T, Hv, Dv]
        gate = z.unflatten(1, (-1, shape.value_dim))
        mixed = ops.gated_rms_norm(out, self._norm.tensor, gate, self._eps).flatten(1)
        return mixed if rows is None else mixed.index_select(0, rows)


class GatedAttention:
    """Causal attention with a sigmoid gate per output. `layer` is its index among the layers with keys and values."""

    def __init__(self, scope: Scope, spec: LanguageSpec, layer: int) -> None:
        self._ops, self._layer, self._head_dim, self._eps = scope.ops, layer, spec.head_dim, spec.rms_eps
        self._scale = spec.head_dim**-0.5
        width, key_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_heads)
        self._order = paired_order(spec.head_dim, spec.rotary_dim or spec.head_dim).to(scope.device)
        outputs = {"q_proj": 2 * width, "k_proj": key_width, "v_proj": key_width}
        self._qkv = Linear(scope, outputs, spec.hidden_size, bias=spec.attention_bias, arrange=self._arranged)
        self._q_norm, self._k_norm = (
            Weight(scope, f"{name}.weight", (spec.head_dim,), dtype=torch.float32, transform=self._from_difference)
            for name in ("q_norm", "k_norm")
        )
        self.out = Linear(scope, {"o_proj": spec.hidden_size}, width, bias=spec.output_bias)

    def __call__(
        self,
        x: Tensor | DeferredNorm,  # [T, C]
        rotary: Rotary,
        cache: PagedCache,
        step: StepInputs,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Returns the input of `out`, [T, Hq * D], or only the given rows of it. Keys and values of all rows are
        written in any case."""
        ops = self._ops
        projected = self._qkv(apply_deferred_norm(ops, x)).unflatten(1, (-1, self._head_dim))
        q, k, v, gate = projected.split(self._heads, dim=1)
        q, k = ops.rms_norm(q, self._q_norm.tensor, self._eps), ops.rms_norm(k, self._k_norm.tensor, self._eps)
        q = ops.rope_and_write(q, k, v, rotary, cache, self._layer, step.slots)
        if rows is not None and not rows.shape[0]:
            return q[:0].flatten(1)
        mixed = ops.attention_paged(q, cache, self._layer, step.attention, self._scale)
        if rows is not None:
            mixed, gate = mixed.index_select(0, rows), gate.index_select(0, rows)
        return ops.sigmoid_mul(mixed, gate).flatten(1)

    def _arranged(self, parts: list[Tensor]) -> Tensor:
        """Reorders outputs to queries, keys, values, gates. The checkpoint stores each head's gate after its query."""
        q, k, v = (part.unflatten(0, (-1, self._head_dim)) for part in parts)
        pairs = q.unflatten(0, (-1, 2))
        q, gate = pairs[:, 0], pairs[:, 1]
        return torch.cat([part.flatten(0, 1) for part in (q[:, self._order], k[:, self._order], v, gate)])

    def _from_difference(self, weight: Tensor) -> Tensor:
        """Adds 1 (the checkpoint stores weight - 1) and permutes to `_order`."""
        return (1.0 + weight)[self._order]


def paired_order(head_dim: int, rotary_dim: int) -> Tensor:
    """Permutation of a head, [D] int64, that moves the rotated pairs (i, i + rotary_dim / 2) to a distance of D/2."""
    half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    turning, still = torch.arange(head_dim).split((rotary_dim, head_dim - rotary_dim))
    return torch.cat((turning[:half], still[:rest], turning[half:], still[rest:]))
