"""The safetensors files of a model directory: one file, or shards with an index, and the generations of tensor names.

Compares index and files before anything is read. Never unpickles. Does not know models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from torch import Tensor

from hydra_engine.errors import CheckpointError
from hydra_engine.models.loading.checkpoint import StoredTensor, listed
from hydra_engine.models.loading.parameters import Renames
from hydra_engine.models.loading.safetensors_file import FLOATS, SafetensorsFile, TensorEntry
from hydra_engine.models.specs.fields import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHARD = re.compile(r"^model-\d+-of-\d+\.safetensors$")


class SafetensorsCheckpoint:
    """The weights files of a directory, open. `renames` lead from the names in files to canonical ones."""

    def __init__(self, model_dir: Path, renames: Renames = ()) -> None:
        self._files: dict[str, SafetensorsFile] = {}
        self._stored_names: dict[str, str] = {}  # canonical name -> name in its file
        self.stored: dict[str, TensorEntry] = {}  # by canonical name
        try:
            if (model_dir / SINGLE).exists():
                self._open(model_dir, [SINGLE])
            elif (model_dir / INDEX).exists():
                self._open_shards(model_dir)
            else:
                raise _no_weights(model_dir)
            self._collect(renames)
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
        return {name: StoredTensor(entry.shape, entry.nbytes) for name, entry in self.stored.items()}

    def read(self, name: str) -> Tensor:
        entry = self.stored[name]
        if entry.dtype not in FLOATS:
            raise CheckpointError(
                f"tensor {name} in {entry.file} is stored as {entry.dtype}; supported are {', '.join(FLOATS)}, and "
                "other types where config.json has a quantization_config"
            )
        return self.read_stored(name)

    def stored_name(self, name: str) -> str:
        """In its file."""
        return self._stored_names[name]

    def read_stored(self, name: str) -> Tensor:
        """Also integers and 8-bit floats, which are parts of quantised weights."""
        return self._files[self.stored[name].file].read(self._stored_names[name])

    def _open(self, model_dir: Path, names: Iterable[str]) -> None:
        for name in names:
            self._files[name] = SafetensorsFile(model_dir / name)

    def _open_shards(self, model_dir: Path) -> None:
        index = read_json(model_dir, INDEX)
        files = {name: str(file) for name, file in index.section("weight_map").values.items()}
        names = sorted(set(files.values()))
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{INDEX} names files outside the model directory")
        missing = [name for name in names if not (model_dir / name).exists()]
        if missing:
            raise CheckpointError(f"{INDEX} names files that are missing: {listed(missing)}")
        extra = [p.name for p in model_dir.iterdir() if _SHARD.match(p.name) and p.name not in names]
        if extra:
            raise CheckpointError(f"{INDEX} does not name these files of the directory: {listed(extra)}")
        self._open(model_dir, names)
        held = {(name, file.name) for file in self._files.values() for name in file.entries}
        disagreeing = {name for name, _ in held ^ set(files.items())}
        if disagreeing:
            raise CheckpointError(f"{INDEX} and the files disagree about where to find {listed(disagreeing)}")

    def _collect(self, renames: Renames) -> None:
        for file in self._files.values():
            for stored, entry in file.entries.items():
                name = canonical_name(stored, renames)
                if name in self.stored:
                    raise CheckpointError(f"tensor {name[:120]} is in the checkpoint twice")
                self.stored[name] = entry
                self._stored_names[name] = stored


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
