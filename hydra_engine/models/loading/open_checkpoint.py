"""Opens a checkpoint in the format that its folder and its config.json indicate."""

from __future__ import annotations

from pathlib import Path

from hydra_engine.errors import CheckpointError
from hydra_engine.models.loading.checkpoint import Checkpoint
from hydra_engine.models.loading.gguf_checkpoint import GgufCheckpoint, has_gguf
from hydra_engine.models.loading.parameters import Renames
from hydra_engine.models.loading.quantized_checkpoint import QuantizedCheckpoint
from hydra_engine.models.loading.safetensors_checkpoint import SafetensorsCheckpoint
from hydra_engine.models.specs.quantization import Quantization

_QUANTIZED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax")  # ends of names


def open_checkpoint(model_dir: Path, renames: Renames = (), quantization: Quantization | None = None) -> Checkpoint:
    """Opens a checkpoint. `renames` map names in safetensors files to canonical names; `quantization` is the scheme of
    config.json."""
    if has_gguf(model_dir):
        return GgufCheckpoint(model_dir)
    files = SafetensorsCheckpoint(model_dir, renames)
    try:
        files.split_experts()
        if quantization is None:
            _check_plain(files)
            return files
        return QuantizedCheckpoint(files, quantization)
    except BaseException:
        files.close()
        raise


def _check_plain(files: SafetensorsCheckpoint) -> None:
    if part := next((name for name in files.stored if name.endswith(_QUANTIZED)), None):
        raise CheckpointError(
            f"the weights are quantised (tensor {files.stored_name(part)[:120]}), but config.json has no "
            "quantization_config that says how; take the config.json that belongs to them"
        )
