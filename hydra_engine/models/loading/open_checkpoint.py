"""Which format a checkpoint has, by what its folder and its config.json hold."""

from __future__ import annotations

from pathlib import Path

from hydra_engine.models.loading.checkpoint import Checkpoint
from hydra_engine.models.loading.gguf_checkpoint import GgufCheckpoint, has_gguf
from hydra_engine.models.loading.parameters import Renames
from hydra_engine.models.loading.quantized_checkpoint import QuantizedCheckpoint
from hydra_engine.models.loading.safetensors_checkpoint import SafetensorsCheckpoint
from hydra_engine.models.specs.quantization import Quantization


def open_checkpoint(model_dir: Path, renames: Renames = (), quantization: Quantization | None = None) -> Checkpoint:
    """`renames` lead from the names in safetensors files to canonical ones; `quantization` as config.json says."""
    if has_gguf(model_dir):
        return GgufCheckpoint(model_dir)
    files = SafetensorsCheckpoint(model_dir, renames)
    if quantization is None:
        return files
    try:
        return QuantizedCheckpoint(files, quantization)
    except BaseException:
        files.close()
        raise
