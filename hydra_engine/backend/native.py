"""`Ops` on the native extension. Importing this needs hydra_engine._C; `select.py` asks first.

Only names what does what: matrix products and norms are in native_linear.py, caches and attention in native_cache.py
and native_attention.py, recurrent states in native_delta.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import native_attention, native_cache, native_delta, native_linear
from hydra_engine.backend.base import Activation, AttentionPlan, OpChoice, PackedLinear, PagedCache
from hydra_engine.backend.reference import ALL_OPS
from hydra_engine.backend.reference_sampling import sample

_COPIES = ("write_cache", "merge_image_tokens", "gather_cache", "copy_blocks")
_MATRIX_PRODUCTS = ("linear", "attention_paged", "attention_packed")


class NativeOps:
    """`Ops` of backend/base.py."""

    name = "native"
    deterministic = True

    rms_norm = staticmethod(native_linear.rms_norm)
    add_rms_norm = staticmethod(native_linear.add_rms_norm)
    layer_norm = staticmethod(native_linear.layer_norm)
    act_and_mul = staticmethod(native_linear.act_and_mul)
    rotate = staticmethod(native_linear.rotate)
    gated_rms_norm = staticmethod(native_delta.gated_rms_norm)
    sigmoid_mul = staticmethod(native_delta.sigmoid_mul)
    plan_states = staticmethod(native_delta.plan_states)
    plan_decode_states = staticmethod(native_delta.plan_decode_states)
    causal_conv = staticmethod(native_delta.causal_conv)
    delta_rule = staticmethod(native_delta.delta_rule)
    plan_attention = staticmethod(native_attention.plan_attention)
    plan_decode = staticmethod(native_attention.plan_decode)
    plan_packed = staticmethod(native_attention.plan_packed)
    attention_packed = staticmethod(native_attention.attention_packed)
    sample = staticmethod(sample)

    def __init__(self) -> None:
        self._descs = native_cache.CacheDescs()

    def choices(self) -> tuple[OpChoice, ...]:
        return tuple(OpChoice(op, *_choice(op, _C.isa())) for op in ALL_OPS)

    # ---- linear algebra

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return native_linear.pack_linear(weight, bias)

    def linear(
        self,
        x: Tensor,
        weight: PackedLinear,
        *,
        act: Activation = "none",
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        assert isinstance(weight, native_linear.NativeLinear)
        return native_linear.linear(x, weight, act=act, residual=residual, out_dtype=out_dtype)

    # ---- caches

    def write_cache(self, cache: PagedCache, layer: int, rows: Sequence[Tensor], slots: Tensor) -> None:
        native_cache.write_cache(self._descs.of(cache), cache, layer, rows, slots)

    def rope_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: PagedCache,
        layer: int,
        slots: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        desc = self._descs.of(cache)
        return native_cache.rope_and_write(desc, q, k, v, cos, sin, cache, layer, slots, q_norm, k_norm, eps)

    def merge_image_tokens(
        self,
        hidden: Tensor,
        rows: Tensor,
        cache: PagedCache,
        slots: Tensor,
        plane: int = 0,
        *,
        accumulate: bool = False,
    ) -> None:
        native_cache.merge_image_tokens(self._descs.of(cache), hidden, rows, cache, slots, plane, accumulate)

    def gather_cache(self, cache: PagedCache, layer: int, index: int, slots: Tensor) -> Tensor:
        return native_cache.gather_cache(self._descs.of(cache), cache, layer, index, slots)

    def copy_blocks(self, source: PagedCache, target: PagedCache, pairs: Tensor) -> None:
        native_cache.copy_blocks(self._descs.of(source), self._descs.of(target), source, target, pairs)

    # ---- attention

    def attention_paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        return native_attention.attention_paged(self._descs.of(cache), q, cache, layer, plan, scale)


def _choice(op: str, level: str) -> tuple[str, str]:
    """(implementation, reason) on a processor of this level."""
    if op in _COPIES:
        return "native", "copies bytes, the same on every processor"
    if level == "amx" and op not in _MATRIX_PRODUCTS:
        return "native-avx512bf16", "the processor has AVX-512 with BF16; AMX only multiplies matrices"
    return f"native-{level}", f"the processor's best level is {level}"
