"""`Ops` on the native extension. Importing this needs hydra_engine._C; `select.py` asks first.

Only dispatches: matrix products and norms are in linear.py, caches and attention in cache.py and attention.py,
recurrent states in delta_rule.py.
"""

from __future__ import annotations

from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend.base import AttentionPlan, OpChoice, PagedCache
from hydra_engine.backend.cpu import attention as native_attention
from hydra_engine.backend.cpu import delta_rule as native_delta
from hydra_engine.backend.cpu import linear as native_linear
from hydra_engine.backend.cpu.cache import CacheOps
from hydra_engine.backend.reference.ops import ALL_OPS
from hydra_engine.backend.reference.sampling import sample

_COPIES = ("write_cache", "merge_image_tokens", "gather_cache", "copy_blocks")
_MATRIX_PRODUCTS = ("linear", "attention_paged", "attention_packed")


class NativeOps(CacheOps):
    """`Ops` of backend/base.py."""

    name = "native"
    deterministic = True

    pack_linear = staticmethod(native_linear.pack_linear)
    linear = staticmethod(native_linear.linear)
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

    def choices(self) -> tuple[OpChoice, ...]:
        return tuple(OpChoice(op, *_choice(op, _C.isa())) for op in ALL_OPS)

    def attention_paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        return native_attention.attention_paged(self.desc(cache), q, cache, layer, plan, scale)


def _choice(op: str, level: str) -> tuple[str, str]:
    """(implementation, reason) on a processor of this level."""
    if op in _COPIES:
        return "native", "copies bytes, the same on every processor"
    if level == "amx" and op not in _MATRIX_PRODUCTS:
        return "native-avx512bf16", "the processor has AVX-512 with BF16; AMX only multiplies matrices"
    return f"native-{level}", f"the processor's best level is {level}"
