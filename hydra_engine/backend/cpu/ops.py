"""`Ops` on the native extension. Importing this needs hydra_engine._C; `select.py` checks first.

Has attention; csrc/cpu/attention decides how its work is divided and which instructions run. Matrix products and norms
are in linear.py, caches in cache.py, recurrent states in delta_rule.py, sampling in
sampling.py.
"""

from __future__ import annotations

from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.base import AttentionPlan, MixedRows, OpChoice, PackedPlan, PagedCache, Segments
from hydra_engine.backend.composed import ComposedOps
from hydra_engine.backend.cpu import delta_rule as native_delta
from hydra_engine.backend.cpu import linear as native_linear
from hydra_engine.backend.cpu import sampling as native_sampling
from hydra_engine.backend.cpu.cache import CacheOps
from hydra_engine.backend.cpu.linear import DTYPE_CODES
from hydra_engine.backend.cpu.recording import RecordedDecode
from hydra_engine.backend.reference.ops import ALL_OPS

_COPIES = ("write_cache", "merge_image_tokens", "gather_cache", "copy_blocks")
_MATRIX_PRODUCTS = ("linear", "attention_paged", "attention_packed")


class NativeOps(CacheOps, ComposedOps):
    """`Ops` of backend/base.py on the native extension."""

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
    recorded = staticmethod(RecordedDecode)
    best_tokens = staticmethod(native_sampling.best_tokens)
    sample = staticmethod(native_sampling.sample)
    adjust_logits = staticmethod(native_sampling.adjust_logits)
    score_tokens = staticmethod(native_sampling.score_tokens)

    def choices(self) -> tuple[OpChoice, ...]:
        return tuple(OpChoice(op, *_choice(op, _C.isa())) for op in ALL_OPS)

    def plan_attention(self, cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        checks.check_plan_shapes(cu_q, num_context, block_tables)
        cu_q, num_context, block_tables = cu_q.contiguous(), num_context.contiguous(), block_tables.contiguous()
        batch, max_blocks = block_tables.shape
        native = _C.AttentionPlan(cu_q.data_ptr(), num_context.data_ptr(), block_tables.data_ptr(), batch, max_blocks)
        return AttentionPlan(cu_q, num_context, block_tables, native.max_q, native.max_context, native)

    def plan_decode(self, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        raise ValueError("plan_decode: expected ops that plan without contents; these cut their work by them")

    def plan_mixed(self, rows: MixedRows, num_tokens: int, max_prompts: int) -> AttentionPlan:
        raise ValueError("plan_mixed: expected ops that plan without contents; these cut their work by them")

    def attention_paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        desc, max_blocks = self.desc(cache), plan.block_tables.shape[1]
        tokens, num_heads, stride = checks.check_paged(q, cache, layer, max_blocks, plan.max_context)
        out = q.new_empty(q.shape)
        _C.attention_paged(plan.native, desc, layer, q.data_ptr(), stride, num_heads, tokens, out.data_ptr(), scale)
        return out

    def plan_packed(self, cu_seqlens: Tensor, max_length: int) -> PackedPlan:
        raise ValueError("plan_packed: expected ops that plan without contents; these cut their work by them")

    def attention_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments, scale: float) -> Tensor:
        if isinstance(cu_seqlens, PackedPlan):
            raise ValueError("cu_seqlens: expected numbers, got a plan of other ops")
        checks.check_packed(q, k, v, cu_seqlens)
        _, num_heads, dim = q.shape
        out = q.new_empty(q.shape)
        _C.attention_packed(
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            out.data_ptr(),
            cu_seqlens,
            num_heads,
            dim,
            scale,
            DTYPE_CODES[q.dtype],
        )
        return out


def _choice(op: str, level: str) -> tuple[str, str]:
    """Returns (implementation, reason) of an op on a CPU of this level."""
    if op in _COPIES:
        return "native", "copies bytes, the same on every processor"
    if level == "amx" and op not in _MATRIX_PRODUCTS:
        return "native-avx512bf16", "the processor has AVX-512 with BF16; AMX only multiplies matrices"
    if level == "avx512" and op not in _MATRIX_PRODUCTS:
        return "native-avx2", "without BF16 instructions only matrix products gain from AVX-512"
    reason = f"the processor's best level is {level}"
    if op == "linear":
        reason += f"; weights of 8 and 4 bits: {_quantized_products(level)}"
    return f"native-{level}", reason


def _quantized_products(level: str) -> str:
    """The instruction sets that csrc/cpu/quantized chooses."""
    features = _C.cpu_features()
    if level not in ("avx512", "avx512bf16", "amx") or "avx512_vnni" not in features:
        return "avx2" if level != "scalar" else level
    return "avx512_vnni, amx_int8 from 17 rows on" if level == "amx" and "amx_int8" in features else "avx512_vnni"
