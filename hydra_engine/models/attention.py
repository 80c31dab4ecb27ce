"""Attention modules: causal over a paged cache (decoders) and bidirectional over packed segments (vision towers).

Know how a fused projection is cut into heads. Do not know blocks, batches or which rows are decodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hydra_engine.backend.base import PagedCache
from hydra_engine.models.inputs import LanguageInput
from hydra_engine.models.layers import Linear
from hydra_engine.models.parameters import Scope
from hydra_engine.specs.base import LanguageSpec


class PagedAttention:
    def __init__(self, scope: Scope, spec: LanguageSpec, layer: int) -> None:
        self._ops = scope.ops
        self._layer = layer
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self._split = (-1, sum(self._heads), spec.head_dim)
        self._width = spec.num_heads * spec.head_dim
        self._scale = spec.head_dim**-0.5
        query, key_value = self._width, spec.num_kv_heads * spec.head_dim
        parts = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
        self._qkv = Linear(scope, parts, spec.hidden_size, bias=spec.attention_bias)
        self._out = Linear(scope, {"o_proj": spec.hidden_size}, self._width, bias=False)

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
        q, k, v = self._qkv(x).view(self._split).split(self._heads, dim=1)
        q = self._ops.rope_and_write(q, k, v, cos, sin, cache, self._layer, batch.slots)  # [T, Hq, D]
        if rows is not None and not rows.shape[0]:
            return x[:0]
        mixed = self._ops.attention_paged(q, cache, self._layer, batch.attention, self._scale).view(-1, self._width)
        return self._out(mixed if rows is None else mixed.index_select(0, rows))


class PackedAttention:
    """All heads read all rows of their own segment; as in CLIP, every projection has a bias."""

    def __init__(self, scope: Scope, num_channels: int, num_heads: int) -> None:
        self._ops = scope.ops
        self._num_channels = num_channels
        self._split = (-1, 3, num_heads, num_channels // num_heads)
        self._scale = (num_channels // num_heads) ** -0.5
        parts = {"q_proj": num_channels, "k_proj": num_channels, "v_proj": num_channels}
        self._qkv = Linear(scope, parts, num_channels, bias=True)
        self._out = Linear(scope, {"out_proj": num_channels}, num_channels, bias=True)

    def __call__(self, x: Tensor, residual: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
        """attention(x) + residual, both [P, C]"""
        q, k, v = self._qkv(x).view(self._split).unbind(1)  # each [P, H, D]
        mixed = self._ops.attention_packed(q, k, v, cu_seqlens, self._scale)
        return self._out(mixed.view(-1, self._num_channels), residual=residual)
