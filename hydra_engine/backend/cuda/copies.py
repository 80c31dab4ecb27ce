"""Asynchronous copies (`CudaDevice.send` and `fetch`) and marks.

All arrays of a call are packed into one buffer, each at a multiple of 16 bytes, so that one copy moves them all and
each can be viewed as its type. Copies start from pinned memory, since the driver waits for any other. Works on the
calling thread's current stream. Does not know lanes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend.checks import described
from hydra_engine.backend.device import Mark
from hydra_engine.errors import BackendError

Array = npt.NDArray[np.generic]

ALIGNMENT = 16  # bytes
NUM_BUFFERS = 8  # copies of one thread in flight before the next one waits: two steps with four each
MIN_BUFFER = 1 << 16
MAX_STAGED = 64 << 20  # bytes; larger copies are not staged and wait, since pinned memory is scarce

_DTYPES = {
    np.dtype(name): getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}


class Part(NamedTuple):
    """The place of an array or tensor in a buffer; offset in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """Offset of the first byte after it."""
        return self.offset + prod(self.shape) * self.dtype.itemsize


def layout(items: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> tuple[list[Part], int]:
    """Places parts of these shapes and dtypes in a buffer, each at a multiple of ALIGNMENT. Returns them with the size
    of the buffer in bytes."""
    kinds = list(items)
    sizes = (prod(shape) * dtype.itemsize for shape, dtype in kinds)
    offsets = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    return [Part(offset, *kind) for offset, kind in zip(offsets, kinds, strict=False)], offsets[-1]


def layout_of(arrays: Sequence[Array]) -> tuple[list[Part], int]:
    """Places of the arrays in one packed buffer, and its size in bytes. Raises ValueError for a dtype that is not in
    _DTYPES."""
    for index, array in enumerate(arrays):
        if array.dtype not in _DTYPES:
            wanted = ", ".join(str(dtype) for dtype in _DTYPES)
            raise ValueError(f"arrays[{index}]: expected one of {wanted}, got {array.dtype}")
    return layout((array.shape, _DTYPES[array.dtype]) for array in arrays)


def fill(memory: npt.NDArray[np.uint8], parts: Sequence[Part], arrays: Sequence[Array]) -> None:
    """Copies arrays, of any strides, to their places in a buffer of bytes. parts: from `layout_of`."""
    for part, array in zip(parts, arrays, strict=True):
        memory[part.offset : part.end].view(array.dtype).reshape(array.shape)[...] = array


def views(memory: Tensor, parts: Sequence[Part]) -> tuple[Tensor, ...]:
    """The parts of a buffer uint8 [bytes], as tensors that share its memory."""
    return tuple(memory[part.offset : part.end].view(part.dtype).view(part.shape) for part in parts)


class _Buffer:
    """A pinned buffer, empty at first. done: the event after the last copy from it; None before the first."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.done: torch.cuda.Event | None = None


class Sender(threading.local):
    """A ring of pinned buffers for each thread. A buffer is reused once the copy from it is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = [_Buffer() for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def send(self, arrays: Sequence[Array]) -> tuple[Tensor, ...]:
        """Implements `Device.send`: starts one copy of all arrays on the current stream. They may be changed
        afterwards.

        Waits if the copies of the thread's last NUM_BUFFERS calls are all in flight, and for more than MAX_STAGED
        bytes, which are copied array by array. Raises ValueError for a dtype that is not in _DTYPES.
        """
        parts, num_bytes = layout_of(arrays)
        if num_bytes > MAX_STAGED:
            return tuple(torch.from_numpy(np.array(array)).to(self._device) for array in arrays)
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if num_bytes:
            buffer = self._buffer(num_bytes)
            fill(buffer.memory.numpy(), parts, arrays)
            target.copy_(buffer.memory[:num_bytes], non_blocking=True)
            if buffer.done is None:
                buffer.done = torch.cuda.Event()
            buffer.done.record(torch.cuda.current_stream(self._device))
        return views(target, parts)

    def _buffer(self, num_bytes: int) -> _Buffer:
        """The next buffer of the ring, with at least `num_bytes`. Waits for the last copy from it."""
        buffer = self._ring[self._turn]
        self._turn = (self._turn + 1) % NUM_BUFFERS
        if buffer.done is not None:
            buffer.done.synchronize()
        if buffer.memory.shape[0] < num_bytes:
            size = max(MIN_BUFFER, 1 << (num_bytes - 1).bit_length())
            buffer.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return buffer


class CudaFetch:
    """`Fetch` of backend/device.py: copies to pinned memory, started on the calling thread's current stream. Raises
    ValueError for a dtype that is not in _DTYPES."""

    def __init__(self, device: torch.device, tensors: Sequence[Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            if tensor.dtype not in _DTYPES.values():
                raise ValueError(f"tensors[{index}]: expected a type that numpy has, got {described(tensor)}")
        parts, num_bytes = layout((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        self._device = device
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=num_bytes > 0)
        self._copies = views(memory, parts)
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(device))

    def result(self) -> tuple[Array, ...]:
        """Waits for the copies and returns them. Raises BackendError if the device failed, or if an earlier kernel met
        a slot or row out of range."""
        try:
            self._done.synchronize()
            _C.cuda_check_faults(self._device.index)
        except (RuntimeError, ValueError) as error:
            raise failure(self._device, error) from error
        return tuple(copy.numpy() for copy in self._copies)


class CudaMark:
    """`Mark` of backend/device.py: a timing event on the calling thread's current stream.

    A waiting thread sleeps: such waits are long, and work in flight after the mark hides a late wake-up.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._event.record(torch.cuda.current_stream(device))

    def is_done(self) -> bool:
        """True if the device has reached the mark. Raises BackendError if it failed."""
        try:
            return self._event.query()
        except RuntimeError as error:
            raise failure(self._device, error) from error

    def wait(self) -> None:
        """Sleeps until the device has reached the mark. Raises BackendError if it failed."""
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise failure(self._device, error) from error

    def seconds_since(self, earlier: Mark) -> float:
        """Device seconds from `earlier` to this mark; both must be done. Raises BackendError if the device failed."""
        assert isinstance(earlier, CudaMark)
        try:
            return earlier._event.elapsed_time(self._event) / 1000
        except RuntimeError as error:
            raise failure(self._device, error) from error


def failure(device: torch.device, error: Exception) -> BackendError:
    """The error to raise if a device failed or reports a fault, with the first line of `error`, at most 160 characters.
    After most CUDA errors the process cannot use the device."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return BackendError(f"the device {device} failed: {lines[0][:160]}")
