"""`Ops` on the native extension: caches, recurrent states, sampling, attention, recorded decode steps. Importing this
needs hydra_engine._C; `select.py` checks first.

Checks shapes, dtypes and strides, and passes addresses. The extension checks contents (slots, block ids, rows) before
anything is written; csrc/cpu decides how work is divided and which instructions run. Matrix products and norms are in
linear.py.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.base import (
    Adjustments,
    AttentionPlan,
    Decode,
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
    States,
    StepInputs,
)
from hydra_engine.backend.cpu import experts as native_experts
from hydra_engine.backend.cpu import linear as native_linear
from hydra_engine.backend.cpu.linear import DTYPE_CODES, aligned
from hydra_engine.backend.reference.ops import ALL_OPS, ComposedOps, ReferenceOps

logger = logging.getLogger(__name__)

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
    def plan_mixed_states(rows: StateRows, num_tokens: int) -> StateRows:  # noqa: ARG004
        """Raises ValueError: these ops check slots on the host."""
        raise ValueError("plan_mixed_states: expected ops that plan on the device; these check slots on the host")

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


# ---- decode steps of few rows without Python between their ops
#
# Nothing is decided between the ops of a decoder: shapes, weights and memory are the same in every step with the same
# number of rows. So native calls are recorded once per number of rows, over inputs and memory of their own; a step
# copies its inputs there and replays them, with the same bits. Recordings of one object share their memory, since only
# one runs at a time.

MAX_RECORDED_ROWS = 32  # with more rows, Python takes less than 1 % of a step
_HALF_TYPES = (torch.bfloat16, torch.float16)
_NEW_TENSORS = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)


class _StepRecording(NamedTuple):
    """A recording of native calls, with the tensors that they read and write, which must stay alive."""

    calls: _C.Recording
    angles: Tensor
    cache: PagedCache
    step: StepInputs
    inputs: tuple[Tensor, ...]  # copies of `_inputs`, which calls read
    result: Tensor

    def matches(self, angles: Tensor, cache: PagedCache, step: StepInputs) -> bool:
        """True if the recording was made with these very angles and caches, whose addresses it contains."""
        same = self.angles is angles and self.cache is cache
        return same and _state_cache(self.step) is _state_cache(step)


class RecordedDecode:
    """The result of `Ops.record_decode`: the decode step, recorded at the first call with a number of rows, and again
    if it comes with other angles or caches, else replayed.

    Calls `decode` itself for more than MAX_RECORDED_ROWS rows or none, and always once a recording has failed because
    torch computes a part. Logits are valid until the next call. Not thread-safe: only one lane may call it.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._memory = _RecordingMemory()
        self._recordings: dict[int, _StepRecording] = {}  # by the number of rows
        self._recordable = True

    def __call__(
        self, token_ids: Tensor, positions: Tensor, angles: Tensor, cache: PagedCache, step: StepInputs
    ) -> Tensor:
        rows = token_ids.shape[0]
        if not self._recordable or not 0 < rows <= MAX_RECORDED_ROWS:
            return self._decode(token_ids, positions, angles, cache, step)
        recording = self._recordings.get(rows)
        if recording is None or not recording.matches(angles, cache, step):
            return self._record(token_ids, positions, angles, cache, step)
        recording.calls.set_inputs([tensor.data_ptr() for tensor in _inputs(token_ids, positions, step)])
        recording.step.attention.native.become(step.attention.native)
        recording.calls.replay()
        return recording.result

    def _record(
        self, token_ids: Tensor, positions: Tensor, angles: Tensor, cache: PagedCache, step: StepInputs
    ) -> Tensor:
        """Runs the step on copies of its inputs while its calls are recorded. Returns its logits.

        If torch would compute a part, nothing is kept, this object records no more, and the whole step runs again.
        """
        inputs = tuple(tensor.clone() for tensor in _inputs(token_ids, positions, step))
        own_ids, own_positions, slots, *rows = inputs
        states = None
        if step.states is not None:
            states = States(step.states.cache, StateRows(step.states.rows.cu_q.clone(), *rows))
        plan = _C.AttentionPlan(0, 0, 0, 0, 0)
        plan.become(step.attention.native)
        own, calls = StepInputs(slots, replace(step.attention, native=plan), states), _C.Recording()
        for tensor in inputs:
            calls.add_input(tensor.data_ptr(), tensor.nbytes)
        calls.begin()
        try:
            with _Recorder(self._memory):
                result = self._decode(own_ids, own_positions, angles, cache, own)
        except _NotRecordableError as error:
            self._recordable = False
            logger.info("decodes run op by op: %s is none of the extension's ops", error)
        finally:
            calls.end()
        if not self._recordable:
            return self._decode(token_ids, positions, angles, cache, step)
        result = self._memory.reclaim(result)
        self._recordings[token_ids.shape[0]] = _StepRecording(calls, angles, cache, own, inputs, result)
        return result


def _inputs(token_ids: Tensor, positions: Tensor, step: StepInputs) -> tuple[Tensor, ...]:
    """The tensors that a replay copies because they differ from step to step, int64 [B] each: ids, positions, slots,
    and starts and slots of recurrent states. Raises ValueError for another shape or dtype."""
    inputs: tuple[Tensor, ...] = token_ids, positions, step.slots
    if step.states is not None:
        rows = step.states.rows
        inputs += rows.starts, rows.read_slots, rows.write_slots
    for tensor in inputs:
        checks.check_indices("inputs", tensor, token_ids.shape[0])
    return inputs


def _state_cache(step: StepInputs) -> StateCache | None:
    return None if step.states is None else step.states.cache


class _NotRecordableError(Exception):
    """Raised while recording if torch itself would compute something, which a replay would miss."""


class _Recorder(TorchDispatchMode):
    """A dispatch mode of torch, active while calls are recorded.

    New tensors get memory of the recording; views are left to torch; rows of tables (embeddings, angles), casts from 16
    bits to float32 and concatenations of columns (parts of a weight) are computed by the extension, and so recorded.
    Raises _NotRecordableError for everything else that torch would compute.
    """

    def __init__(self, memory: _RecordingMemory) -> None:
        super().__init__()
        self._memory = memory
        self._native: dict[Any, Callable[..., Tensor]] = {
            torch.ops.aten.index_select.default: self._taken,
            torch.ops.aten.to.dtype: self._widened,
            torch.ops.aten.cat.default: self._joined,
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: True would make the first step import torch._dynamo, which takes a second and is not used."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NEW_TENSORS:
            return self._memory.empty_like(func(*args, **(kwargs or {})))
        native = self._native.get(func)
        if native is not None:
            return native(*args, **(kwargs or {}))
        found = func(*args, **(kwargs or {})) if func.is_view else None
        first = found if isinstance(found, Tensor) or not found else found[0]
        # Some ops (reshape) return a view if they can, and compute otherwise.
        if first is None or first.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
            raise _NotRecordableError(str(func))
        return found

    def _taken(self, table: Tensor, dim: int, ids: Tensor) -> Tensor:
        """Computes `index_select` of rows of a contiguous matrix. Raises _NotRecordableError for any other."""
        if dim != 0 or table.dim() != 2 or not table.is_contiguous():
            raise _NotRecordableError("an index of other than rows")
        taken = self._memory.empty_like(table.new_empty((checks.check_indices("ids", ids), table.shape[1])))
        width = table.shape[1] * table.itemsize
        _C.copy_rows(table.data_ptr(), table.shape[0], width, ids.data_ptr(), len(ids), taken.data_ptr())
        return taken

    def _widened(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Casts contiguous 16-bit floats to float32; a tensor of `dtype` is returned unchanged. Raises
        _NotRecordableError for any other cast."""
        if dtype is tensor.dtype:
            return tensor
        if dtype is not torch.float32 or tensor.dtype not in _HALF_TYPES or not tensor.is_contiguous():
            raise _NotRecordableError(f"a cast from {tensor.dtype} to {dtype}")
        widened = self._memory.empty_like(torch.empty(tensor.shape, dtype=dtype))
        _C.widen(tensor.data_ptr(), DTYPE_CODES[tensor.dtype], tensor.numel(), widened.data_ptr())
        return widened

    def _joined(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Computes torch.cat along columns of matrices [T, C] of one dtype with dense rows. Raises _NotRecordableError
        for any other."""
        first = parts[0]
        if dim != 1 or any(part.dim() != 2 or part.stride(1) != 1 or part.dtype is not first.dtype for part in parts):
            raise _NotRecordableError("a joint of other than columns")
        joined = self._memory.empty_like(first.new_empty((first.shape[0], sum(part.shape[1] for part in parts))))
        for place, part in zip(joined.split([part.shape[1] for part in parts], dim=1), parts, strict=True):
            size = part.itemsize
            strides = part.data_ptr(), part.stride(0) * size, place.data_ptr(), place.stride(0) * size
            _C.copy_columns(*strides, part.shape[1] * size, part.shape[0])
        return joined


class _RecordingMemory:
    """An allocator of the tensors that recorded calls read and write. The memory of a freed tensor is used again by
    later ones, of other recordings too; none is returned to the system before this object dies."""

    def __init__(self) -> None:
        self._pieces: dict[int, Tensor] = {}  # by address
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by size, a power of two

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Allocates an uninitialised contiguous tensor of this shape and dtype."""
        size = 1 << max(tensor.nbytes - 1, 63).bit_length()
        free = self._free[size]
        if not free:
            piece = aligned(size)
            self._pieces[piece.data_ptr()] = piece
            free.append(piece)
        lent = np.asarray(_Lent(free.pop(), free))
        return torch.from_numpy(lent)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def reclaim(self, tensor: Tensor) -> Tensor:
        """Returns a tensor over the same bytes that does not keep them from reuse: its contents are valid until the
        next replay or recording. tensor: a result of `empty_like`."""
        piece = self._pieces[tensor.data_ptr()]
        return piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class _Lent:
    """Memory for a numpy array, which keeps this object alive; `piece` is appended to `home` when the last tensor over
    it is gone."""

    def __init__(self, piece: Tensor, home: list[Tensor]) -> None:
        self._piece, self._home = piece, home
        self.__array_interface__ = piece.numpy().__array_interface__

    def __del__(self) -> None:
        self._home.append(self._piece)


# ---- all ops

_COPIES = ("write_cache", "merge_image_tokens", "gather_cache", "copy_blocks")
_MATRIX_PRODUCTS = ("linear", "experts", "attention_paged", "attention_packed")


class NativeOps(CacheOps, StateOps, SamplingOps, ComposedOps):
    """`Ops` of backend/base.py on the native extension."""

    name = "native"
    deterministic = True

    pack_linear = staticmethod(native_linear.pack_linear)
    linear = staticmethod(native_linear.linear)
    pack_experts = staticmethod(native_experts.NativeExperts)
    route = staticmethod(native_experts.route)
    experts = staticmethod(native_experts.experts)
    rms_norm = staticmethod(native_linear.rms_norm)
    add_rms_norm = staticmethod(native_linear.add_rms_norm)
    layer_norm = staticmethod(native_linear.layer_norm)
    act_and_mul = staticmethod(native_linear.act_and_mul)
    rotate = staticmethod(native_linear.rotate)
    record_decode = staticmethod(RecordedDecode)

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
    if op == "route":
        return "native", "a few numbers of each token, the same on every processor"
    if level == "amx" and op not in _MATRIX_PRODUCTS:
        return "native-avx512bf16", "the processor has AVX-512 with BF16; AMX only multiplies matrices"
    if level == "avx512" and op not in _MATRIX_PRODUCTS:
        return "native-avx2", "without BF16 instructions only matrix products gain from AVX-512"
    reason = f"the processor's best level is {level}"
    if op in ("linear", "experts"):
        reason += f"; weights of 8 and 4 bits: {_quantized_products(level)}"
    return f"native-{level}", reason


def _quantized_products(level: str) -> str:
    """Names of the instruction sets that multiply quantised weights at this instruction level, as csrc/cpu/quantized
    chooses them."""
    features = _C.cpu_features()
    if level not in ("avx512", "avx512bf16", "amx") or "avx512_vnni" not in features:
        return "avx2" if level != "scalar" else level
    return "avx512_vnni, amx_int8 from 17 rows on" if level == "amx" and "amx_int8" in features else "avx512_vnni"
