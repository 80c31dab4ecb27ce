"""The safetensors files of a model directory: one file, or shards with an index, and the generations of tensor names.

A file's header is checked to the last byte, its tensors are read one at a time. Every error is a `CheckpointError` that
names the file and, if there is one, the tensor. Reads instead of mapping, so a file that shrinks later is an error and
not a crash. Never unpickles.

An index takes precedence: files that it does not list are not opened; of a tensor in several files the listed one
counts; an unlisted tensor is read only if a model needs it and exactly one file has it. Does not know models.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from hydra_engine.core.model_folder import open_weights
from hydra_engine.errors import CheckpointError
from hydra_engine.models.loading.checkpoint import StoredTensor, TensorEntry, list_names
from hydra_engine.models.loading.fused_experts import is_fused, split_experts
from hydra_engine.models.loading.parameters import Renames
from hydra_engine.models.specs.fields import read_json

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

    def read(self, name: str, entry: TensorEntry) -> Tensor:
        """Reads a tensor, or a part of one, in the stored dtype, into new memory."""
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {name} in {self.name} is stored as {entry.dtype}; supported are {', '.join(DTYPES)}"
            )
        buffer = torch.empty(entry.nbytes, dtype=torch.uint8)
        if not self._read_into(entry.begin, buffer.numpy().data):
            raise CheckpointError(f"{self.name} ended while tensor {name} was read; the file is truncated")
        values = buffer.view(DTYPES[entry.dtype])
        if entry.columns is None:
            return values.view(entry.shape)
        first, width = entry.columns
        return values.view(entry.shape[1], width)[:, first : first + entry.shape[0]].T.contiguous()

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


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

logger = logging.getLogger(__name__)


class SafetensorsCheckpoint:
    """The open weights files of a directory. `renames` map names in files to canonical names."""

    def __init__(self, model_dir: Path, renames: Renames = ()) -> None:
        self._files: dict[str, SafetensorsFile] = {}
        self._stored_names: dict[str, str] = {}  # canonical name -> name in its file
        self.stored: dict[str, TensorEntry] = {}  # by canonical name
        self._unlisted: set[str] = set()  # canonical names that the index does not have
        self._misplaced: set[str] = set()  # canonical names that are not where the index says
        try:
            if (model_dir / SINGLE).exists():
                self._open(model_dir, [SINGLE])
                self._collect(dict.fromkeys(self._files[SINGLE].entries, SINGLE), renames)
            elif (model_dir / INDEX).exists():
                self._collect(self._open_shards(model_dir), renames)
            else:
                raise _no_weights(model_dir)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    @property
    def entries(self) -> dict[str, StoredTensor]:
        return {name: self.described(name) for name in self.stored}

    def described(self, name: str) -> StoredTensor:
        entry, misplaced = self.stored[name], name in self._misplaced
        spare = misplaced or name in self._unlisted
        return StoredTensor(entry.shape, entry.nbytes, spare=spare, misplaced=(name,) if misplaced else ())

    def check_places(self) -> None:
        """Raises CheckpointError if a tensor is in another file than the index says; for callers that read all
        tensors."""
        if self._misplaced:
            raise CheckpointError(f"{INDEX} and the files disagree about where to find {list_names(self._misplaced)}")

    def read(self, name: str) -> Tensor:
        entry = self.stored[name]
        if entry.dtype not in FLOATS:
            raise CheckpointError(
                f"tensor {name} in {entry.file} is stored as {entry.dtype}; supported are {', '.join(FLOATS)}, and "
                "other types where config.json has a quantization_config"
            )
        return self.read_stored(name)

    def stored_name(self, name: str) -> str:
        return self._stored_names[name]

    def read_stored(self, name: str) -> Tensor:
        """Reads a tensor, integers and 8-bit floats (parts of quantised weights) included."""
        entry = self.stored[name]
        return self._files[entry.file].read(self._stored_names[name], entry)

    def split_experts(self) -> None:
        """Replaces tensors that hold all experts of a layer by entries of single experts, named as in checkpoints that
        store those. Raises CheckpointError for tensors that do not fit together."""
        for fused, name, entry in [*split_experts(self.stored)]:
            if name in self.stored:
                raise CheckpointError(f"tensor {name[:120]} is in the checkpoint twice, alone and in {fused[:120]}")
            self.stored[name] = entry
            stored = self._stored_names[fused]
            self._stored_names[name] = stored[: stored.rindex("experts.")] + name[name.rindex("experts.") :]
            for marked in (self._unlisted, self._misplaced):
                if fused in marked:
                    marked.add(name)
        for fused in [name for name in self.stored if is_fused(name)]:
            del self.stored[fused]
            self._unlisted.discard(fused)
            self._misplaced.discard(fused)

    def _open(self, model_dir: Path, names: Iterable[str]) -> None:
        for name in names:
            self._files[name] = SafetensorsFile(model_dir / name)

    def _open_shards(self, model_dir: Path) -> dict[str, str]:
        """Opens the shards of the index and returns the file of each tensor it lists."""
        listed_files = {
            name: str(file) for name, file in read_json(model_dir, INDEX).section("weight_map").values.items()
        }
        names = sorted(set(listed_files.values()))
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{INDEX} names files outside the model directory")
        # Path.exists raises for a name that is too long to be a file's.
        missing = [name for name in names if not os.path.exists(model_dir / name)]
        if missing:
            raise CheckpointError(f"{INDEX} names files that are missing: {list_names(missing)}")
        if others := {path.name for path in model_dir.glob("model*.safetensors")} - set(names):
            logger.warning("%s does not name these files, which are not read: %s", INDEX, list_names(others))
        self._open(model_dir, names)
        return listed_files

    def _collect(self, listed_files: Mapping[str, str], renames: Renames) -> None:
        held: dict[str, list[str]] = {}  # tensor -> files
        for file in self._files.values():
            for stored in file.entries:
                held.setdefault(stored, []).append(file.name)
        # Those first that the index lists: of two generations of a name its one counts.
        for stored in sorted(held, key=lambda name: name not in listed_files):
            files, expected = held[stored], listed_files.get(stored)
            name = canonical_name(stored, renames)
            if name in self.stored:
                if expected is None:
                    continue
                raise CheckpointError(f"tensor {name[:120]} is in the checkpoint twice")
            self.stored[name] = self._files[expected if expected in files else files[0]].entries[stored]
            self._stored_names[name] = stored
            if expected is None:
                self._unlisted.add(name)
            if expected not in files and (expected is not None or len(files) > 1):
                self._misplaced.add(name)


def canonical_name(name: str, renames: Renames) -> str:
    for old, new in renames:
        if name.startswith(old):
            return new + name.removeprefix(old)
        if old.startswith("."):
            name = name.replace(old, new, 1)
    return name


def _no_weights(model_dir: Path) -> CheckpointError:
    if any(next(model_dir.glob(pattern), None) for pattern in _PICKLED):
        return CheckpointError(
            "the weights are pickle files, which can run code when opened; convert them to safetensors first, for "
            "example with save_pretrained of transformers"
        )
    if other := next(iter(sorted(path.name for path in model_dir.glob("*.safetensors"))), None):
        return CheckpointError(
            f"the model directory has neither {SINGLE} nor {INDEX}, but {other[:120]}; if that holds all weights, "
            f"rename it to {SINGLE}"
        )
    return CheckpointError(
        f"the model directory has neither {SINGLE} nor {INDEX}; --load-format random draws weights from a seed instead"
    )
