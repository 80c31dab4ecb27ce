"""The safetensors files of a model directory: one file, or shards with an index, and the generations of tensor names.

An index takes precedence: files that it does not list are not opened; of a tensor in several files the listed one
counts; an unlisted tensor is read only if a model needs it and exactly one file has it. Never unpickles. Does not know
models.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from torch import Tensor

from hydra_engine.errors import CheckpointError
from hydra_engine.models.loading.checkpoint import StoredTensor, list_names
from hydra_engine.models.loading.parameters import Renames
from hydra_engine.models.loading.safetensors_file import FLOATS, SafetensorsFile, TensorEntry
from hydra_engine.models.specs.fields import read_json

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
        return self._files[self.stored[name].file].read(self._stored_names[name])

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
