"""Decode steps of few rows without Python between their ops: native calls are recorded once and replayed.

Nothing is decided between the ops of a decoder: shapes, weights and memory are the same in every step with the same
number of rows. So the calls are recorded once per number of rows, over inputs and memory of their own; a step copies
its inputs there and replays them, with the same bits. Recordings of one object share their memory, since only one runs
at a time.
"""

from __future__ import annotations

import logging
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
from hydra_engine.backend.base import Decode, PagedCache, StateCache, StateRows, States, StepInputs
from hydra_engine.backend.cpu.linear import DTYPE_CODES, aligned

logger = logging.getLogger(__name__)

MAX_ROWS = 32  # with more rows, Python takes less than 1 % of a step
_HALVES = (torch.bfloat16, torch.float16)
_NEW = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)


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
    """The result of `Ops.recorded`: the decode step, recorded at the first call with a number of rows, and again if it
    comes with other angles or caches, else replayed.

    Calls `decode` itself for more than MAX_ROWS rows or none, and always once a recording has failed because torch
    computes a part. Logits are valid until the next call. Not thread-safe: only one lane may call it.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._memory = _Memory()
        self._recordings: dict[int, _StepRecording] = {}  # by the number of rows
        self._recordable = True

    def __call__(
        self, token_ids: Tensor, positions: Tensor, angles: Tensor, cache: PagedCache, step: StepInputs
    ) -> Tensor:
        rows = token_ids.shape[0]
        if not self._recordable or not 0 < rows <= MAX_ROWS:
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

        If torch would compute a part, nothing is kept, this object records no more, and the step runs unrecorded.
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

    def __init__(self, memory: _Memory) -> None:
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
        if func in _NEW:
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
        """Casts contiguous 16-bit floats to float32; a tensor of `dtype` is returned as it is. Raises
        _NotRecordableError for any other cast."""
        if dtype is tensor.dtype:
            return tensor
        if dtype is not torch.float32 or tensor.dtype not in _HALVES or not tensor.is_contiguous():
            raise _NotRecordableError(f"a cast from {tensor.dtype} to {dtype}")
        widened = self._memory.empty_like(torch.empty(tensor.shape, dtype=dtype))
        _C.widen(tensor.data_ptr(), DTYPE_CODES[tensor.dtype], tensor.numel(), widened.data_ptr())
        return widened

    def _joined(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Computes torch.cat of matrices [T, C] of one dtype along columns. Raises _NotRecordableError for any
        other."""
        first = parts[0]
        if dim != 1 or any(part.dim() != 2 or part.stride(1) != 1 or part.dtype is not first.dtype for part in parts):
            raise _NotRecordableError("a joint of other than columns")
        joined = self._memory.empty_like(first.new_empty((first.shape[0], sum(part.shape[1] for part in parts))))
        for place, part in zip(joined.split([part.shape[1] for part in parts], dim=1), parts, strict=True):
            size = part.itemsize
            strides = part.data_ptr(), part.stride(0) * size, place.data_ptr(), place.stride(0) * size
            _C.copy_columns(*strides, part.shape[1] * size, part.shape[0])
        return joined


class _Memory:
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
