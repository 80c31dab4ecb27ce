"""Random checkpoints of the models that ship without weights, for peers, which need a file."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers

from tools.miniatures.base import write_random


def make_shape_checkpoint(source: Path, directory: Path, *, seed: int) -> None:
    """Writes the model of a folder without weights in bfloat16, tensor by tensor, with `source`'s other files."""
    config = transformers.AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    shutil.copytree(source, directory, dirs_exist_ok=True)
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)  # in transformers' form of today, which the writer of GGUF files reads
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    write_random(directory / "model.safetensors", shapes, seed)
