"""`Ops` on the native extension: caches, recurrent states, sampling, attention. Importing this needs hydra_engine._C;
`select.py` checks first.

Checks shapes, dtypes and strides, and passes addresses. The extension checks contents (slots, block ids, rows) before
anything is written; csrc/cpu decides how work is divided and which instructions run. Matrix products and norms are in
linear.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.base import (
    Adjustments,
    AttentionPlan,
    DeltaInputs,
    HeadNorms,
    MixedRows,
    OpChoice,
    PackedPlan,
    PagedCache,
    Rotary,
    SamplingTensors,
    Segments,
    StateCache,
    StateRows,
)
from hydra_engine.backend.cpu import linear as native_linear
from hydra_engine.backend.cpu.linear import DTYPE_CODES
from hydra_engine.backend.cpu.recording import RecordedDecode
from hydra_engine.backend.reference.ops import ALL_OPS, ComposedOps, ReferenceOps

_NO_ADDRESS = 0


def desc_arguments(cache: PagedCache) -> tuple[int, int, int, int, int, int, int, int]:
    """Returns the arguments of the extension's cache descriptor: address, N, L, X, S, H, D and the code of the
    `row_dtype`. Raises ValueError for a cache that `check_new_cache` refuses."""
    checks.check_new_cache(cache)
    data = cache.data
    num_blocks, num_layers, num_tensors, block_size, num_heads, head_dim = data.shape
    dtype = DTYPE_CODES[cache.row_dtype]
    return data.data_ptr(), num_blocks, num_layers, num_tensors, block_size, num_heads, head_dim, dtype


class CacheOps:
    """The cache ops of `Ops`. The descriptor of a cache (`_C.CacheDesc`) is made at first use and dropped with the
    cache's `data`."""

    def __init__(self) -> None:
        self._descs: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def desc(self, cache: PagedCache) -> Any:
        """Returns the descriptor of the cache, made at the first call. Raises ValueError as `desc_arguments`."""
        key = id(cache.data)
        entry = self._descs.get(key)
        if entry is None:
            # Removed when the tensor dies, so a reused id never finds the old descriptor.
            forget = weakref.ref(cache.data, lambda _: self._descs.pop(key, None))
            entry = self._descs[key] = forget, self._new_desc(cache)
        return entry[1]

    def _new_desc(self, cache: PagedCache) -> Any:
        """Makes the descriptor of a cache in host memory; overridden for a GPU's."""
        return _C.CacheDesc(*desc_arguments(cache), cache.scales is not None)

    def write_cache(self, cache: PagedCache, layer: int, rows: Sequence[Tensor], slots: Tensor) -> None:
        desc = self.desc(cache)
        tokens, strides = checks.check_write(cache, layer, rows, slots)
        second = (_NO_ADDRESS, 0) if len(rows) == 1 else (rows[1].data_ptr(), strides[1])
        desc.write(layer, rows[0].data_ptr(), strides[0], *second, slots.data_ptr(), tokens)

    def rope_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: Rotary,
        cache: PagedCache,
        layer: int,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        desc = self.desc(cache)
        q_stride, k_stride, v_stride, cos_stride, sin_stride = checks.check_rope(q, k, v, rotary, cache, layer, slots)
        tokens, num_heads, dim = shape = q.shape
        normed: tuple[int, int, float] | tuple[()] = ()
        if norms is not None:
            checks.check_head_norms(norms, dim, q.dtype)
            q_norm, k_norm = (_NO_ADDRESS if weight is None else weight.data_ptr() for weight in norms[:2])
            normed = q_norm, k_norm, norms.eps
        cos, sin = rotary
        out = q.new_empty(shape)
        heads = q.data_ptr(), q_stride, num_heads, k.data_ptr(), k_stride, v.data_ptr(), v_stride
        angles = cos.data_ptr(), cos_stride, sin.data_ptr(), sin_stride
        desc.rope_and_write(layer, *heads, *angles, slots.data_ptr(), tokens, out.data_ptr(), *normed)
        return out

    def merge_image_tokens(
        self, hidden: Tensor, rows: Tensor, cache: PagedCache, slots: Tensor, plane: int = 0
    ) -> None:
        desc = self.desc(cache)
        count = checks.check_merge(hidden, rows, cache, slots, plane)
        desc.merge(plane, slots.data_ptr(), rows.data_ptr(), count, hidden.data_ptr(), hidden.shape[0], plane > 0)

    def gather_cache(self, cache: PagedCache, layer: int, index: int, slots: Tensor) -> Tensor:
        """`Ops.gather_cache`; of a quantized cache in plain torch."""
        if cache.scales is not None:
            return ReferenceOps().gather_cache(cache, layer, index, slots)
        desc = self.desc(cache)
        count = checks.check_indices("slots", slots)
        shape = cache.data.shape
        out = cache.data.new_empty((count, shape[4], shape[5]))
        desc.gather(layer, index, slots.data_ptr(), count, out.data_ptr())
        return out

    def copy_blocks(self, source: PagedCache, target: PagedCache, pairs: Tensor) -> None:
        source_desc, target_desc = self.desc(source), self.desc(target)
        count = checks.check_copy(source, target, pairs)
        source_desc.copy_to(target_desc, pairs.data_ptr(), count)


_Rows = tuple[int, int, int, int, int, int, int, int, int]


class StateOps:
    """The ops of `Ops` on recurrent states: causal convolution, gated delta rule, and the gates after them."""

    @staticmethod
    def plan_states(rows: StateRows) -> StateRows:
        """Returns `rows`, unchecked: kernels read and check them when they run."""
        return rows

    @staticmethod
    def plan_decode_states(starts: Tensor, read_slots: Tensor, write_slots: Tensor) -> StateRows:  # noqa: ARG004
        """Raises ValueError: these ops check slots on the host."""
        raise ValueError("plan_decode_states: expected ops that plan on the device; these check slots on the host")

    @staticmethod
    def causal_conv(x: Tensor, weight: Tensor, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
        checks.check_conv(x, weight, cache, rows)
        out = x.new_empty(x.shape)
        _C.causal_conv(
            (x.data_ptr(), x.stride(0)),
            weight.data_ptr(),
            cache.conv.data_ptr(),
            _rows(rows, x.shape[0], cache.conv, layer),
            weight.shape[0],
            weight.shape[1],
            out.data_ptr(),
            DTYPE_CODES[x.dtype],
        )
        return out

    @staticmethod
    def delta_rule(inputs: DeltaInputs, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
        checks.check_delta(inputs, cache, rows)
        q, k, v, a, b, rates, shift = inputs
        out = v.new_empty(v.shape)
        _C.delta_rule(
            (q.data_ptr(), q.stride(0)),
            (k.data_ptr(), k.stride(0)),
            (v.data_ptr(), v.stride(0)),
            (a.data_ptr(), a.stride(0)),
            (b.data_ptr(), b.stride(0)),
            rates.data_ptr(),
            shift.data_ptr(),
            cache.recurrent.data_ptr(),
            _rows(rows, v.shape[0], cache.recurrent, layer),
            (q.shape[1], v.shape[1], q.shape[2], v.shape[2]),
            out.data_ptr(),
            DTYPE_CODES[v.dtype],
        )
        return out

    @staticmethod
    def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        strides, gate_strides = checks.check_gate(x, gate)
        checks.check_norm_weight(weight, x, wide=False)
        (tokens, heads, dim), dtype = x.shape, DTYPE_CODES[x.dtype]
        out = torch.empty((tokens, heads, dim), dtype=x.dtype)
        addresses = x.data_ptr(), strides, weight.data_ptr(), gate.data_ptr(), gate_strides, out.data_ptr()
        _C.gated_rms_norm(*addresses, tokens, heads, dim, eps, dtype)
        return out

    @staticmethod
    def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
        strides, gate_strides = checks.check_gate(x, gate)
        (tokens, heads, dim), dtype = x.shape, DTYPE_CODES[x.dtype]
        out = torch.empty((tokens, heads, dim), dtype=x.dtype)
        addresses = x.data_ptr(), strides, gate.data_ptr(), gate_strides, out.data_ptr()
        _C.sigmoid_mul(*addresses, tokens, heads, dim, dtype)
        return out


def _rows(rows: StateRows, tokens: int, states: Tensor, layer: int) -> _Rows:
    """The extension's argument for the rows of a step and where their states are: four addresses, B, T, N, L, layer."""
    return (
        rows.cu_q.data_ptr(),
        rows.starts.data_ptr(),
        rows.read_slots.data_ptr(),
        rows.write_slots.data_ptr(),
        rows.starts.shape[0],
        tokens,
        states.shape[0],
        states.shape[1],
        layer,
    )


class SamplingOps:
    """The sampling ops of `Ops`, multithreaded over rows (csrc/cpu/sampling), computed in float64.

    Logits are float32, or float64 where adjusted logits must not be rounded: `adjust_logits` and `score_tokens`
    accept either and return its dtype, `sample` accepts float64 if the columns of `sampling` are, `best_tokens` float32
    alone.
    """

    @staticmethod
    def best_tokens(logits: Tensor) -> Tensor:
        rows, columns = checks.check_logits(logits)
        tokens = torch.empty(rows, dtype=torch.int64)
        _C.best_of_rows(logits.data_ptr(), logits.stride(0), rows, columns, tokens.data_ptr())
        return tokens

    @staticmethod
    def sample(logits: Tensor, sampling: SamplingTensors) -> tuple[Tensor, Tensor]:
        rows, _ = checks.check_sample(logits, sampling)
        numbers = (sampling.temperatures, sampling.top_p, sampling.min_p, sampling.numbers)
        temperatures, top_p, min_p, drawn = (column.double().contiguous() for column in numbers)
        top_k = sampling.top_k.contiguous()
        tokens, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        columns = (temperatures, top_k, top_p, min_p, drawn, tokens, finite)
        _C.sample(*_described(logits), *(column.data_ptr() for column in columns))
        return tokens, finite

    @staticmethod
    def adjust_logits(logits: Tensor, adjustments: Adjustments) -> Tensor:
        checks.check_adjustments(logits, adjustments)
        begins, ends, ids, values, penalties, counted, counts, masked, masks = (
            part.contiguous() for part in adjustments
        )
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _C.adjust_logits(
            *_described(logits),
            begins.data_ptr(),
            ends.data_ptr(),
            ids.data_ptr(),
            values.data_ptr(),
            ids.shape[0],
            penalties.data_ptr(),
            counted.data_ptr(),
            counts.data_ptr(),
            counts.shape[0],
            masked.data_ptr(),
            masks.data_ptr(),
            masks.shape[0],
            out.data_ptr(),
        )
        return out

    @staticmethod
    def score_tokens(logits: Tensor, tokens: Tensor, num_top: Tensor, max_top: int) -> tuple[Tensor, Tensor]:
        rows, _ = checks.check_scores(logits, tokens, num_top)
        tokens, num_top = tokens.contiguous(), num_top.contiguous()
        numbers = torch.empty((rows, 3 + max_top), dtype=logits.dtype)
        places = torch.empty((rows, 1 + max_top), dtype=torch.int32)
        columns = (tokens.data_ptr(), num_top.data_ptr(), max_top, numbers.data_ptr(), places.data_ptr())
        _C.score_tokens(*_described(logits), *columns)
        return numbers, places


def _described(logits: Tensor) -> tuple[int, int, int, int, bool]:
    """The extension's arguments for logits: address, row stride, B, V, and True for float64."""
    return logits.data_ptr(), logits.stride(0), *logits.shape, logits.dtype is torch.float64


_COPIES = ("write_cache", "merge_image_tokens", "gather_cache", "copy_blocks")
_MATRIX_PRODUCTS = ("linear", "attention_paged", "attention_packed")


class NativeOps(CacheOps, StateOps, SamplingOps, ComposedOps):
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
    recorded = staticmethod(RecordedDecode)

    def choices(self) -> tuple[OpChoice, ...]:
        return tuple(OpChoice(op, *_choice(op, _C.isa())) for op in ALL_OPS)

    def plan_attention(self, cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        checks.check_plan_shapes(cu_q, num_context, block_tables)
        cu_q, num_context, block_tables = cu_q.contiguous(), num_context.contiguous(), block_tables.contiguous()
        batch, max_blocks = block_tables.shape
        native = _C.AttentionPlan(cu_q.data_ptr(), num_context.data_ptr(), block_tables.data_ptr(), batch, max_blocks)
        return AttentionPlan(cu_q, num_context, block_tables, native.max_q, native.max_context, native)

    def plan_decode(self, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        """Raises ValueError: these ops divide work on the host."""
        raise ValueError("plan_decode: expected ops that plan on the device; these divide work on the host")

    def plan_mixed(self, rows: MixedRows, num_tokens: int, max_prompts: int) -> AttentionPlan:
        """Raises ValueError: these ops divide work on the host."""
        raise ValueError("plan_mixed: expected ops that plan on the device; these divide work on the host")

    def attention_paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        desc, max_blocks = self.desc(cache), plan.block_tables.shape[1]
        tokens, num_heads, stride = checks.check_paged(q, cache, layer, max_blocks, plan.max_context)
        out = q.new_empty(q.shape)
        _C.attention_paged(plan.native, desc, layer, q.data_ptr(), stride, num_heads, tokens, out.data_ptr(), scale)
        return out

    def plan_packed(self, cu_seqlens: Tensor, max_length: int) -> PackedPlan:
        """Raises ValueError: these ops divide work on the host."""
        raise ValueError("plan_packed: expected ops that plan on the device; these divide work on the host")

    def attention_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments, scale: float) -> Tensor:
        """`Ops.attention_packed`. Raises ValueError for a `PackedPlan`."""
        if isinstance(cu_seqlens, PackedPlan):
            raise ValueError("cu_seqlens: expected numbers, got a plan of other ops")
        checks.check_packed(q, k, v, cu_seqlens)
        _, num_heads, dim = q.shape
        out = q.new_empty(q.shape)
        inputs = q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        _C.attention_packed(*inputs, out.data_ptr(), cu_seqlens, num_heads, dim, scale, DTYPE_CODES[q.dtype])
        return out


def _choice(op: str, level: str) -> tuple[str, str]:
    """Returns (implementation, reason) of an op on a CPU of instruction level `level`, a result of `_C.isa`."""
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
    """Names of the instruction sets that multiply quantised weights at this instruction level, as csrc/cpu/quantized
    chooses them."""
    features = _C.cpu_features()
    if level not in ("avx512", "avx512bf16", "amx") or "avx512_vnni" not in features:
        return "avx2" if level != "scalar" else level
    return "avx512_vnni, amx_int8 from 17 rows on" if level == "amx" and "amx_int8" in features else "avx512_vnni"
