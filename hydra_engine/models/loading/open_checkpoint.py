"""Which format a checkpoint has, by what its folder holds."""

from __future__ import annotations

from pathlib import Path

from hydra_engine.models.loading.checkpoint import Checkpoint
from hydra_engine.models.loading.parameters import Renames
from hydra_engine.models.loading.safetensors_checkpoint import SafetensorsCheckpoint


def open_checkpoint(model_dir: Path, renames: Renames = ()) -> Checkpoint:
    """`renames` lead from the names in files to canonical ones."""
    return SafetensorsCheckpoint(model_dir, renames)
