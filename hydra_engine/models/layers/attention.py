"""Attention modules: causal over a paged cache (decoders) and bidirectional over packed segments (vision towers).

Does not know blocks, batches or which rows are decodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hydra_engine.backend.base import DeferredNorm, HeadNorms, PagedCache, Rotary, Segments, StepInputs
from hydra_engine.models.layers.basic import Linear, RmsNorm, Weight
from hydra_engine.models.layers.vision_slices import Slices
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.specs.base import LanguageSpec


class PagedAttention:
    def __init__(self, scope: Scope, spec: LanguageSpec, layer: int) -> None:
        self._ops = scope.ops
        self._layer = layer
        self._width = spec.num_heads * spec.head_dim
        self._scale = spec.head_dim**-0.5
        query, key_value = self._width, spec.num_kv_heads * spec.head_dim
        parts = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
        self._qkv = Linear(scope, parts, spec.hidden_size, bias=spec.attention_bias)
        self.out = Linear(scope, {"o_proj": spec.hidden_size}, self._width, bias=spec.output_bias)
        self._eps = spec.rms_eps
        self._q_norm = Weight(scope, "q_norm.weight", (spec.head_dim,)) if spec.qk_norm else None
        self._k_norm = Weight(scope, "k_norm.weight", (spec.head_dim,)) if spec.qk_norm else None

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
        norms = None
        if self._q_norm is not None and self._k_norm is not None:
            norms = HeadNorms(self._q_norm.tensor, self._k_norm.tensor, self._eps)
        slots = step.slots
        q = self._ops.linear_rope_and_write(x, self._qkv.packed, rotary, cache, self._layer, slots, norms)  # [T, Hq, D]
        if rows is not None and not rows.shape[0]:
            return q[:0].view(0, self._width)
        mixed = self._ops.attention_paged(q, cache, self._layer, step.attention, self._scale).view(-1, self._width)
        return mixed if rows is None else mixed.index_select(0, rows)


_QK_NORM_EPS = 1e-6  # no config names it


class PackedAttention:
    """Bidirectional attention within packed segments: a row attends to all rows of its own segment.

    `qkv` names the checkpoint's input projections, one (fused) or three, with biases if `qkv_bias`; `out` names the
    output projection, which always has a bias. `qk_norm` names two RMS norms of whole queries and keys, applied before
    the split into heads; `out_scale` names a vector with a factor per output (layer scale)."""

    def __init__(
        self,
        scope: Scope,
        num_channels: int,
        num_heads: int,
        *,
        qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        out: str = "out_proj",
        qkv_bias: bool = True,
        qk_norm: tuple[str, str] | None = None,
        out_scale: str | None = None,
    ) -> None:
        self._ops = scope.ops
        self._num_channels = num_channels
        self._num_heads = num_heads
        self._scale = (num_channels // num_heads) ** -0.5
        parts = {name: 3 * num_channels // len(qkv) for name in qkv}
        self.project = Linear(scope, parts, num_channels, bias=qkv_bias)
        self._norms = tuple(RmsNorm(scope.child(name), num_channels, _QK_NORM_EPS) for name in qk_norm or ())
        self.out = Linear(scope, {out: num_channels}, num_channels, bias=True, scale=out_scale)

    def mix(self, projected: Tensor, cu_seqlens: Segments, rotary: Rotary | None, slices: Slices) -> Tensor:
        """Attention on the output of `project`, [P, 3 * C] -> [P, C], the input of `out`. `rotary` is applied to
        queries and keys, in one launch unless they are normalised."""
        q, k, v = projected.unflatten(1, (3, self._num_heads, -1)).unbind(1)  # each [P, H, D]
        if self._norms:
            q, k = (norm(part.flatten(1)).view(q.shape) for norm, part in zip(self._norms, (q, k), strict=True))
        if rotary is not None and self._norms:
            q, k = self._ops.rotate(q, *rotary), self._ops.rotate(k, *rotary)
        elif rotary is not None:
            heads = projected.unflatten(1, (3 * self._num_heads, -1))
            q, k = self._ops.rotate(heads[:, : 2 * self._num_heads], *rotary).chunk(2, dim=1)
        return slices.attention(self._attend, q, k, v, cu_seqlens).view(-1, self._num_channels)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments) -> Tensor:
        return self._ops.attention_packed(q, k, v, cu_seqlens, self._scale)
