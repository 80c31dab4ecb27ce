"""Full attention of qwen3_5_text: causal over the paged cache, a gate per output, rotary positions for part of a head.

The backend's `rope_and_write` turns pairs (i, i + D/2) of whole heads. Heads of queries and keys are stored here in an
order in which the pairs that turn are such pairs; the others turn by angle 0. Scalar products do not care about order.
Does not know blocks or batches.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hydra_engine.backend.base import PackedLinear, PagedCache
from hydra_engine.models.inputs import LanguageInput
from hydra_engine.models.layers import Linear
from hydra_engine.models.parameters import Scope
from hydra_engine.specs.base import LanguageSpec


class GatedAttention:
    """`layer` counts the layers that have keys and values."""

    packed: PackedLinear

    def __init__(self, scope: Scope, spec: LanguageSpec, layer: int) -> None:
        self._ops, self._layer, self._head_dim, self._eps = scope.ops, layer, spec.head_dim, spec.rms_eps
        self._has_bias = spec.attention_bias
        self._scale = spec.head_dim**-0.5
        width, key_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_heads)
        self._order = paired_order(spec.head_dim, spec.rotary_dim or spec.head_dim).to(scope.device)
        self._arrived: dict[str, Tensor] = {}
        outputs = {"q_proj": 2 * width, "k_proj": key_width, "v_proj": key_width}
        shapes: dict[str, tuple[int, ...]]
        shapes = {f"{name}.weight": (count, spec.hidden_size) for name, count in outputs.items()}
        if self._has_bias:
            shapes |= {f"{name}.bias": (count,) for name, count in outputs.items()}
        self._num_parts = len(shapes)
        for name, shape in shapes.items():
            scope.want(name, shape, partial(self._fill, name))
        self._norms: dict[str, Tensor] = {}
        for name in ("q_norm", "k_norm"):
            scope.want(f"{name}.weight", (spec.head_dim,), partial(self._fill_norm, name), dtype=torch.float32)
        scope.hold(self)
        self._out = Linear(scope, {"o_proj": spec.hidden_size}, width, bias=spec.output_bias)

    def __call__(
        self,
        x: Tensor,  # [T, C]
        cos: Tensor,  # [T, D/2] float32
        sin: Tensor,
        cache: PagedCache,
        batch: LanguageInput,
        rows: Tensor | None = None,
    ) -> Tensor:
        """[T, C], or only the given rows of it: the keys and values of all rows are written in any case."""
        ops = self._ops
        projected = ops.linear(x, self.packed).unflatten(1, (-1, self._head_dim))
        q, k, v, gate = projected.split(self._heads, dim=1)
        q, k = (ops.rms_norm(part, self._norms[name], self._eps) for part, name in ((q, "q_norm"), (k, "k_norm")))
        q = ops.rope_and_write(q, k, v, cos, sin, cache, self._layer, batch.slots)
        if rows is not None and not rows.shape[0]:
            return x[:0]
        mixed = ops.attention_paged(q, cache, self._layer, batch.attention, self._scale)
        if rows is not None:
            mixed, gate = mixed.index_select(0, rows), gate.index_select(0, rows)
        return self._out(ops.sigmoid_mul(mixed, gate).flatten(1))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + sum(weight.nbytes for weight in self._norms.values())

    def _fill(self, name: str, tensor: Tensor) -> None:
        self._arrived[name] = tensor
        if len(self._arrived) == self._num_parts:
            bias = self._stacked("bias") if self._has_bias else None
            self.packed = self._ops.pack_linear(self._stacked("weight"), bias)
            self._arrived.clear()

    def _stacked(self, kind: str) -> Tensor:
        """Queries, keys, values, gates. In the checkpoint every head's query is followed by its gate."""
        q, k, v = (
            self._arrived[f"{name}.{kind}"].unflatten(0, (-1, self._head_dim))
            for name in ("q_proj", "k_proj", "v_proj")
        )
        pairs = q.unflatten(0, (-1, 2))
        q, gate = pairs[:, 0], pairs[:, 1]
        return torch.cat([part.flatten(0, 1) for part in (q[:, self._order], k[:, self._order], v, gate)])

    def _fill_norm(self, name: str, tensor: Tensor) -> None:
        """Stored as the difference from 1."""
        self._norms[name] = (1.0 + tensor)[self._order]


def paired_order(head_dim: int, rotary_dim: int) -> Tensor:
    """[D] int64: of the first `rotary_dim` numbers, i turns with i + rotary_dim / 2; here they stand D/2 apart."""
    half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    places = torch.arange(head_dim)
    turning, still = places[:rotary_dim], places[rotary_dim:]
    return torch.cat((turning[:half], still[:rest], turning[half:], still[rest:]))
