"""OpenGVLab's own layout of InternVL: the bits of the same weights in transformers' layout, quantised and not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hydra_quantizer.writer import write_quantized
from tests.models.conftest import CheckpointFactory
from tests.models.test_write_quantized import SIZES, logits
from tools.miniatures.base import REFERENCE


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4", "written"])
def test_quantised_groups_are_taken_apart_like_others(
    checkpoint: CheckpointFactory, tmp_path: Path, quantization: str
) -> None:
    """InternLM2 stores queries, keys and values by key-value head; their rows are quantised before they are reordered
    in files that `hydra-engine quantize` wrote, and after it at a start."""
    published = checkpoint("internvl-chat-wide", "internvl_chat", text=SIZES, dtype="bfloat16")
    wanted = "int4" if quantization == "written" else quantization
    if quantization == "written":
        write_quantized(published, tmp_path / "out", wanted)
    actual = logits(tmp_path / "out") if quantization == "written" else logits(published, wanted)
    assert torch.equal(actual, logits(published / REFERENCE, wanted))
