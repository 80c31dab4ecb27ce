"""A safetensors file: its header checked to the last byte, its tensors read one at a time.

Every error is a `CheckpointError` that names the file and, if there is one, the tensor. Reads instead of mapping, so a
file that shrinks later is an error and not a crash. Does not know what the tensors mean.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hydra_engine.core.model_folder import open_weights
from hydra_engine.errors import CheckpointError

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = FLOATS | {
    **{"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8},
    **{"I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
}
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **{"U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32},
    **{"U64": 64, "I64": 64, "F64": 64, "C64": 64},
}
MAX_HEADER_BYTES = 16 << 20  # a hundred thousand tensors; the format allows 100 MB


class TensorEntry(NamedTuple):
    file: str
    dtype: str  # as in the header: "BF16"
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class SafetensorsFile:
    """An open safetensors file. Use it as a context manager or call `close`."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file = open_weights(path)
        try:
            self.entries = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read(self, name: str) -> Tensor:
        """Reads a tensor in the stored dtype, into new memory."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {name} in {self.name} is stored as {entry.dtype}; supported are {', '.join(DTYPES)}"
            )
        buffer = torch.empty(entry.nbytes, dtype=torch.uint8)
        if not self._read_into(entry.begin, buffer.numpy().data):
            raise CheckpointError(f"{self.name} ended while tensor {name} was read; the file is truncated")
        return buffer.view(DTYPES[entry.dtype]).view(entry.shape)

    def _read_into(self, offset: int, view: memoryview) -> bool:
        """Returns False if the file ends first."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            except OSError as error:
                reason = error.strerror or type(error).__name__
                raise CheckpointError(f"{self.name} cannot be read: {reason}") from None
            if not count:
                return False
            done += count
        return True

    def _read_header(self) -> dict[str, TensorEntry]:
        num_bytes = os.fstat(self._file.fileno()).st_size
        prefix = bytearray(8)
        if num_bytes < 8 or not self._read_into(0, memoryview(prefix)):
            raise CheckpointError(f"{self.name} is too short to be a safetensors file")
        header_bytes = int.from_bytes(prefix, "little")
        if 8 + header_bytes > num_bytes:
            raise CheckpointError(f"{self.name} is truncated or not a safetensors file: its header does not fit")
        if header_bytes > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.name} has a header of more than {MAX_HEADER_BYTES >> 20} MiB")
        text = bytearray(header_bytes)
        self._read_into(8, memoryview(text))
        try:
            header = json.loads(text)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.name} is not a safetensors file: its header is not JSON")
        self.metadata = header.pop("__metadata__", {})
        start = 8 + header_bytes
        entries = {name: self._entry(name, value, start) for name, value in header.items()}
        self._check_layout(entries, start, num_bytes)
        return entries

    def _entry(self, name: str, value: Any, start: int) -> TensorEntry:
        try:
            dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
            fits = whole and (end - begin) * 8 == math.prod(shape) * _BITS[dtype]
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise CheckpointError(f"the header of {self.name} describes tensor {name[:120]} wrongly")
        return TensorEntry(self.name, dtype, tuple(shape), start + begin, start + end)

    def _check_layout(self, entries: dict[str, TensorEntry], start: int, num_bytes: int) -> None:
        """Raises CheckpointError unless tensors are contiguous, without holes or overlaps, up to the last byte of the
        file."""
        position = start
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != position:
                raise CheckpointError(f"tensor {name[:120]} in {self.name} overlaps another or leaves a hole")
            if entry.end > num_bytes:
                short = entry.end - num_bytes
                raise CheckpointError(f"{self.name} is truncated: tensor {name[:120]} misses {short} bytes or more")
            position = entry.end
        if position != num_bytes:
            raise CheckpointError(f"{self.name} has {num_bytes - position} bytes that belong to no tensor")
