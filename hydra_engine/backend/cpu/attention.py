"""Attention on the native extension: the plan of a step, paged (causal) and packed (bidirectional) attention.

Knows tensors: checks shapes, dtypes and strides and passes addresses. How work is cut and which instructions run is
decided in csrc/cpu/attention.
"""

from __future__ import annotations

from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.base import AttentionPlan, PackedPlan, PagedCache, Segments
from hydra_engine.backend.cpu.linear import DTYPE_CODES


def plan_attention(cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
    max_q, max_context = checks.check_plan(cu_q, num_context, block_tables)
    cu_q, num_context, block_tables = cu_q.contiguous(), num_context.contiguous(), block_tables.contiguous()
    batch, max_blocks = block_tables.shape
    native = _C.AttentionPlan(cu_q.data_ptr(), num_context.data_ptr(), block_tables.data_ptr(), batch, max_blocks)
    return AttentionPlan(cu_q, num_context, block_tables, max_q, max_context, native)


def plan_decode(num_context: Tensor, block_tables: Tensor) -> AttentionPlan:  # noqa: ARG001
    raise ValueError("plan_decode: expected ops that plan without contents; these cut their work by them")


def attention_paged(
    desc: _C.CacheDesc, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float
) -> Tensor:
    max_blocks = plan.block_tables.shape[1]
    tokens, num_heads, stride = checks.check_paged(q, cache, layer, max_blocks, plan.max_context)
    out = q.new_empty(q.shape)
    _C.attention_paged(plan.native, desc, layer, q.data_ptr(), stride, num_heads, tokens, out.data_ptr(), scale)
    return out


def plan_packed(cu_seqlens: Tensor, max_length: int) -> PackedPlan:  # noqa: ARG001
    raise ValueError("plan_packed: expected ops that plan without contents; these cut their work by them")


def attention_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments, scale: float) -> Tensor:
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
