"""From a checkpoint directory to a model's slots, one tensor at a time.

Knows the file layouts (one file, shards with an index) and the generations of tensor names; compares everything before
it reads anything. Never unpickles. Does not know layers: a slot takes its tensor and packs it.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from hydra_engine.errors import CheckpointError
from hydra_engine.models.loading.parameters import Renames
from hydra_engine.models.loading.safetensors_file import SafetensorsFile, TensorEntry
from hydra_engine.models.specs.fields import read_json
from hydra_engine.models.vlm import VisionLanguageModel

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHARD = re.compile(r"^model-\d+-of-\d+\.safetensors$")
_SHOWN = 8  # names per complaint; the log has all of them


class Checkpoint:
    """The weights files of a directory, open. `renames` lead from the names in files to canonical ones."""

    def __init__(self, model_dir: Path, renames: Renames = ()) -> None:
        self._files: dict[str, SafetensorsFile] = {}
        self._stored_names: dict[str, str] = {}  # canonical name -> name in its file
        self.entries: dict[str, TensorEntry] = {}  # by canonical name
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

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def read(self, name: str) -> Tensor:
        return self._files[self.entries[name].file].read(self._stored_names[name])

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
                if name in self.entries:
                    raise CheckpointError(f"tensor {name[:120]} is in the checkpoint twice")
                self.entries[name] = entry
                self._stored_names[name] = stored


def canonical_name(name: str, renames: Renames) -> str:
    for old, new in renames:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def fill_model(
    model: VisionLanguageModel,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    check_finite: bool = True,
) -> None:
    """Reads in the order of the model's layers, so that what is fused is complete at once. Reports bytes as stored."""
    check_names(model, checkpoint.entries)
    slots = {name: slot for name, slot in model.slots.items() if name in checkpoint.entries}
    total = sum(checkpoint.entries[name].nbytes for name in slots)
    done = 0
    for name, slot in slots.items():
        stored = checkpoint.read(name)
        target = slot.dtype or dtype
        tensor = stored.to(device=device, dtype=target)
        if check_finite and not all_finite(tensor):
            if all_finite(stored):
                raise CheckpointError(f"tensor {name} holds values that {str(target).removeprefix('torch.')} cannot")
            raise CheckpointError(f"tensor {name} holds values that are not finite (NaN or infinity)")
        slot.fill(tensor)
        done += checkpoint.entries[name].nbytes
        if progress is not None:
            progress(done, total)


def check_names(model: VisionLanguageModel, entries: dict[str, TensorEntry]) -> None:
    """One error for everything that is missing, surplus or of another shape than config.json says."""
    slots, unneeded = model.slots, model.unneeded
    missing = [name for name, slot in slots.items() if name not in entries and not slot.optional]
    surplus = [name for name in entries if name not in slots and not name.startswith(unneeded)]
    misshaped = [
        f"{name} is {list(entries[name].shape)} instead of {list(slot.shape)}"
        for name, slot in slots.items()
        if name in entries and entries[name].shape != slot.shape
    ]
    problems = {"missing": missing, "not expected": surplus, "of the wrong shape": misshaped}
    complaints = [f"{what}: {listed(names)}" for what, names in problems.items() if names]
    if complaints:
        for what, names in problems.items():
            for name in names:
                logger.error("weights: %s: %s", what, name)
        raise CheckpointError(f"the weights do not fit config.json; {'; '.join(complaints)}")


def all_finite(tensor: Tensor) -> bool:
    """NaN passes through minimum and maximum, infinities are one of them; far cheaper than a mask."""
    return all(math.isfinite(float(extreme)) for extreme in torch.aminmax(tensor))


def listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(name[:120] for name in ordered[:_SHOWN])
    return shown + (f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else "")


def _no_weights(model_dir: Path) -> CheckpointError:
    if any(next(model_dir.glob(pattern), None) for pattern in _PICKLED):
        return CheckpointError(
            "the weights are pickle files, which can run code when opened; convert them to safetensors first, for "
            "example with save_pretrained of transformers"
        )
    return CheckpointError(
        f"the model directory has neither {SINGLE} nor {INDEX}; --load-format random draws weights from a seed instead"
    )
