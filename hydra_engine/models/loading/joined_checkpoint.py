"""A checkpoint whose vision tower is stored elsewhere, as that of LLaVA-1.5 in its authors' layout: the one folder's
tensors, and those of the tower from another."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from torch import Tensor

from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.config.hub_cache import cached_snapshot
from hydra_engine.errors import CheckpointError
from hydra_engine.models.loading.checkpoint import Checkpoint, StoredTensor
from hydra_engine.models.loading.open_checkpoint import open_checkpoint

TOWER = "vision_tower."  # how the canonical names of its tensors begin
_RENAMES = (("vision_model.", TOWER), ("embeddings.", f"{TOWER}embeddings."), ("encoder.", f"{TOWER}encoder."))


class JoinedCheckpoint:
    """The tensors of `files`, and those of `tower` that are a tower's. It owns both and closes them."""

    def __init__(self, files: Checkpoint, tower: Checkpoint) -> None:
        self._files, self._tower = files, tower
        own = {name: entry for name, entry in tower.entries.items() if name.startswith(TOWER)}
        self.entries: dict[str, StoredTensor] = {**own, **files.entries}
        self._elsewhere = own.keys() - files.entries.keys()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str) -> Tensor | QuantizedWeight:
        return (self._tower if name in self._elsewhere else self._files).read(name)

    def close(self) -> None:
        self._files.close()
        self._tower.close()


def join_tower(files: Checkpoint, model_dir: Path, tower: str) -> Checkpoint:
    """Joins the weights of the tower of that hub id, unless `files` has a tower. Closes `files` if it raises."""
    if any(name.startswith(TOWER) for name in files.entries):
        return files
    try:
        folder = tower_folder(model_dir, tower)
        if folder is None:
            raise CheckpointError(
                f"the weights hold no vision tower, and {tower[:80]!r} is not in the Hugging Face cache; put its "
                f"safetensors into the folder {_last(tower)[:80]!r} of the model directory, where save_pretrained of "
                "CLIPVisionModel writes them"
            )
        try:
            return JoinedCheckpoint(files, open_checkpoint(folder, _RENAMES))
        except CheckpointError as error:
            raise CheckpointError(f"the vision tower {tower[:80]!r} cannot be read: {error.message}") from error
    except BaseException:
        files.close()
        raise


def tower_folder(model_dir: Path, tower: str) -> Path | None:
    """The folder of a tower's files: a subfolder of the model's with weights in it, else the hub's cache."""
    from huggingface_hub.errors import HFValidationError

    folder = model_dir / _last(tower)
    if any(folder.glob("*.safetensors")):
        return folder
    try:
        return cached_snapshot(tower, None)
    except HFValidationError:  # a path on its authors' machine
        return None


def _last(tower: str) -> str:
    return tower.rsplit("/", 1)[-1]
