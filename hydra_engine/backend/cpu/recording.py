"""Steps of few rows without Python between their ops: the native calls of the first one are kept and made again.

Nothing is decided between the ops of a decoder's layers: shapes, weights and memory are the same in every step of as
many rows. So the calls are recorded once for each number of rows, over inputs and memory of their own; a step copies
its inputs there and replays them, with the bits of the calls themselves. Recordings of one object share their memory,
for only one of them runs at a time.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_engine import _C
from hydra_engine.backend.base import LayersOf, PagedCache, Places, Rotary, StateCache, StateRows, States
from hydra_engine.backend.cpu.linear import aligned

logger = logging.getLogger(__name__)

MOST_ROWS = 32  # of more, Python is a hundredth of a step
_NEW = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)


class _Kept(NamedTuple):
    """A recording with what its calls read and write."""

    calls: _C.Recording
    cache: PagedCache
    places: Places
    inputs: tuple[Tensor, ...]  # as `_inputs` gives them
    result: Tensor

    def is_of(self, cache: PagedCache, places: Places) -> bool:
        return self.cache is cache and _state_cache(self.places) is _state_cache(places)


class RecordedLayers:
    """`Ops.layers_of_decodes` of backend/base.py. For one lane."""

    def __init__(self, layers: LayersOf) -> None:
        self._layers = layers
        self._memory = _Memory()
        self._kept: dict[int, _Kept] = {}  # by the number of rows
        self._recordable = True

    def __call__(self, hidden: Tensor, rotary: Rotary, cache: PagedCache, places: Places) -> Tensor:
        rows = hidden.shape[0]
        if not self._recordable or not 0 < rows <= MOST_ROWS:
            return self._layers(hidden, rotary, cache, places)
        kept = self._kept.get(rows)
        if kept is None or not kept.is_of(cache, places):
            return self._record(hidden, rotary, cache, places)
        for own, tensor in zip(kept.inputs, _inputs(hidden, rotary, places), strict=True):
            own.copy_(tensor)
        kept.places.attention.native.become(places.attention.native)
        kept.calls.replay()
        return kept.result

    def _record(self, hidden: Tensor, rotary: Rotary, cache: PagedCache, places: Places) -> Tensor:
        inputs = tuple(tensor.clone() for tensor in _inputs(hidden, rotary, places))
        own_hidden, cos, sin, slots, *rows = inputs
        states = None if places.states is None else States(places.states.cache, StateRows(*rows))
        plan = _C.AttentionPlan(0, 0, 0, 0, 0)
        plan.become(places.attention.native)
        own, calls = Places(slots, replace(places.attention, native=plan), states), _C.Recording()
        calls.begin()
        try:
            with _Recorder(self._memory):
                result = self._layers(own_hidden, (cos, sin), cache, own)
        except _NotRecordableError as error:
            self._recordable = False
            logger.info("decodes run op by op: %s is none of the extension's ops", error)
        finally:
            calls.end()
        if not self._recordable:
            return self._layers(hidden, rotary, cache, places)
        self._kept[hidden.shape[0]] = _Kept(calls, cache, own, inputs, result)
        return result


def _inputs(hidden: Tensor, rotary: Rotary, places: Places) -> tuple[Tensor, ...]:
    """What differs from step to step, but for the plan."""
    if places.states is None:
        return hidden, *rotary, places.slots
    rows = places.states.rows
    return hidden, *rotary, places.slots, rows.cu_q, rows.starts, rows.reads, rows.writes


def _state_cache(places: Places) -> StateCache | None:
    return None if places.states is None else places.states.cache


class _NotRecordableError(Exception):
    """Torch would compute something, which a replay would leave out."""


class _Recorder(TorchDispatchMode):
    """Gives new tensors their memory; lets views pass, joins columns (a weight of several forms gives its parts one by
    one), and refuses what else torch would compute."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As torch asks; True would have the first step import torch._dynamo, which takes a second and is not used."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NEW:
            return self._memory.like(func(*args, **(kwargs or {})))
        if func is torch.ops.aten.cat.default:
            return self._joined(*args)
        if not func.is_view:
            raise _NotRecordableError(str(func))
        return func(*args, **(kwargs or {}))

    def _joined(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """torch.cat of matrices [T, C] of one dtype along their columns."""
        first = parts[0]
        if dim != 1 or any(part.dim() != 2 or part.stride(1) != 1 or part.dtype is not first.dtype for part in parts):
            raise _NotRecordableError("a joint of other than columns")
        joined = self._memory.like(first.new_empty((first.shape[0], sum(part.shape[1] for part in parts))))
        for place, part in zip(joined.split([part.shape[1] for part in parts], dim=1), parts, strict=True):
            size = part.itemsize
            strides = part.data_ptr(), part.stride(0) * size, place.data_ptr(), place.stride(0) * size
            _C.copy_columns(*strides, part.shape[1] * size, part.shape[0])
        return joined


class _Memory:
    """Of tensors inside a recording: what one of them no longer needs the next one gets, as in the steps themselves."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by size, a power of two

    def like(self, tensor: Tensor) -> Tensor:
        size = 1 << max(tensor.nbytes - 1, 63).bit_length()
        free = self._free[size]
        lent = np.asarray(_Lent(free.pop() if free else aligned(size), free))
        return torch.from_numpy(lent)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class _Lent:
    """Memory that numpy keeps this object for; given back when the last tensor over it has died."""

    def __init__(self, piece: Tensor, home: list[Tensor]) -> None:
        self._piece, self._home = piece, home
        self.__array_interface__ = piece.numpy().__array_interface__

    def __del__(self) -> None:
        self._home.append(self._piece)
