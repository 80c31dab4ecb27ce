"""The header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): settings and tensor table,
checked to the last tensor's last byte.

Every error is a `CheckpointError` that names the file. All counts and offsets are checked against the file's size
before use, so a hostile file costs at most the memory of a header. Does not know what settings or names mean.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hydra_engine.core.model_folder import open_weights
from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.fields import Fields

MAX_HEADER_BYTES = 64 << 20
_CHUNK = 8 << 20  # of a header, read at once
_MAX_VALUES = 1 << 22  # of all arrays: tokens and merges are some hundred thousand
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20


class TensorType(NamedTuple):
    """A block format: `num_values` numbers of a row in `num_bytes` bytes."""

    name: str
    num_values: int
    num_bytes: int


# By the numbers of ggml_type. Those that can be read; of the others only the names, for complaints.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
_OTHERS = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_LENGTH = struct.Struct("<Q")  # of a text
# struct's letters for the numbers of gguf_metadata_value_type.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GgufTensor(NamedTuple):
    name: str
    type: TensorType
    shape: tuple[int, ...]  # rows first, as torch has it
    begin: int  # bytes from the start of the file
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class GgufHeader(NamedTuple):
    path: Path
    settings: Fields
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufHeader:
    """Reads the header. Raises CheckpointError if it is damaged."""
    try:
        with open_weights(path) as file:
            return _read(path, _Cursor(path.name, file))
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or type(error).__name__}") from None


def _read(path: Path, cursor: _Cursor) -> GgufHeader:
    if cursor.read(4) != b"GGUF":
        raise CheckpointError(f"{path.name} is not a GGUF file: it does not begin with GGUF")
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        raise CheckpointError(
            f"{path.name} has big-endian numbers; convert it for this machine, which is little-endian"
        )
    if version not in (2, 3):
        raise CheckpointError(f"{path.name} is GGUF of version {version}; supported are 2 and 3")
    num_tensors, num_settings = cursor.number("Q"), cursor.number("Q")
    settings: dict[str, Any] = {}
    for _ in range(num_settings):  # each takes bytes of the header, which end
        name = cursor.text()
        if name in settings:
            raise CheckpointError(f"{path.name} has the setting {name[:120]} twice")
        settings[name] = cursor.value(cursor.number("I"))
    fields = Fields(settings, path.name)
    found = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = fields.integer("general.alignment", 32)
    if alignment > _MAX_ALIGNMENT:
        raise fields.wrong_value("general.alignment", f"at most {_MAX_ALIGNMENT}")
    data = -(-cursor.position // alignment) * alignment
    tensors = {tensor.name: tensor._replace(begin=data + tensor.begin, end=data + tensor.end) for tensor in found}
    if len(tensors) != len(found):
        raise CheckpointError(f"{path.name} has tensors of the same name")
    _check_places(path.name, tensors, cursor.file_bytes)
    return GgufHeader(path, fields, tensors)


def _tensor(cursor: _Cursor) -> GgufTensor:
    """Reads one entry of the tensor table; its offset is relative to the data section."""
    name, num_dims = cursor.text(), cursor.number("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise CheckpointError(f"tensor {name[:120]} in {cursor.name} has {num_dims} dimensions")
    shape = tuple(reversed([cursor.number("Q") for _ in range(num_dims)]))
    number, offset = cursor.number("I"), cursor.number("Q")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        supported = ", ".join(known.name for known in TENSOR_TYPES.values())
        raise CheckpointError(
            f"tensor {name[:120]} in {cursor.name} is stored as {_OTHERS.get(number, f'type {number}')}; "
            f"supported are {supported}"
        )
    if min(shape) < 1 or shape[-1] % kind.num_values:
        raise CheckpointError(f"tensor {name[:120]} in {cursor.name} cannot be {list(shape)} of {kind.name}")
    nbytes = math.prod(shape) // kind.num_values * kind.num_bytes
    return GgufTensor(name, kind, shape, offset, offset + nbytes)


def _check_places(file: str, tensors: dict[str, GgufTensor], num_bytes: int) -> None:
    """Raises CheckpointError unless all tensors are inside the file and do not overlap."""
    position = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin < position:
            raise CheckpointError(f"tensor {tensor.name[:120]} in {file} overlaps another")
        if tensor.end > num_bytes:
            short = tensor.end - num_bytes
            raise CheckpointError(f"{file} is truncated: tensor {tensor.name[:120]} misses {short} bytes or more")
        position = tensor.end


class _Cursor:
    """A reader of a header in pieces, which never reads beyond the end of the file."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        self.name = name
        self._file = file
        self.file_bytes = os.fstat(file.fileno()).st_size
        self._bytes = b""
        self._num_values = 0  # in arrays
        self.position = 0

    def read(self, count: int) -> bytes:
        begin = self._advance(count)
        return self._bytes[begin : begin + count]

    def number(self, letter: str) -> int:
        begin = self._advance(struct.calcsize(f"<{letter}"))  # before the bytes are named, which it may replace
        value: int = struct.unpack_from(f"<{letter}", self._bytes, begin)[0]
        return value

    def text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        found = []
        try:
            for _ in range(count):
                begin = self._advance(8)
                (size,) = _LENGTH.unpack_from(self._bytes, begin)
                begin = self._advance(size)
                found.append(self._bytes[begin : begin + size].decode())
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.name} is damaged: a text in its header is not UTF-8") from None
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        return self._scalars(kind, 1)[0]

    def _array(self, kind: int, count: int) -> list[Any]:
        self._num_values += count
        if self._num_values > _MAX_VALUES and count <= self.file_bytes:
            raise CheckpointError(f"{self.name} has arrays of more than {_MAX_VALUES} values together")
        if kind == _STRING:
            if count * 8 > self.file_bytes - self.position:
                raise self._truncated()
            return self._texts(count)
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        letter = _SCALARS.get(kind)
        if letter is None:
            raise CheckpointError(f"{self.name} is damaged: a setting has the unknown type {kind}")
        begin = self._advance(count * struct.calcsize(f"<{letter}"))
        values = struct.unpack_from(f"<{count}{letter}", self._bytes, begin)
        return [_shortest(value) for value in values] if kind == _FLOAT32 and count <= _MAX_DIMS else list(values)

    def _advance(self, count: int) -> int:
        """Reads the next `count` bytes into the buffer and returns their offset."""
        begin, end = self.position, self.position + count
        if end > len(self._bytes):
            if end > self.file_bytes:
                raise self._truncated()
            if end > MAX_HEADER_BYTES:
                raise CheckpointError(f"{self.name} has a header of more than {MAX_HEADER_BYTES >> 20} MiB")
            wanted = min(max(end, len(self._bytes) + _CHUNK), self.file_bytes)
            self._bytes += self._file.read(wanted - len(self._bytes))
            if end > len(self._bytes):
                raise self._truncated()
        self.position = end
        return begin

    def _truncated(self) -> CheckpointError:
        return CheckpointError(f"{self.name} is truncated or damaged: it ends within its header")


def _shortest(value: float) -> float:
    """Shortest decimal that rounds to this float32, which is the number that was meant."""
    if not math.isfinite(value):
        return value
    short = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((number for number in short if struct.unpack("<f", struct.pack("<f", number))[0] == value), value)
