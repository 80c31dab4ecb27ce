"""The measurement at start on an emulated device: all of it but the kernels and what time passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hydra_engine.backend.base import Backend
from hydra_engine.backend.cuda import attention_timing
from hydra_engine.backend.cuda.attention_choice import AUTO, Heads, Shapes, Tower
from hydra_engine.backend.select import create_backend
from tests.emulated.conftest import assert_clean
from tests.emulated.streams import Streams

SHAPES = Shapes(Heads(4, 2, 64, 16), Tower(2, 80, 32, 16))


def backend(folder: Path) -> Backend:
    with torch.inference_mode():
        return create_backend("cuda", torch.bfloat16, attention=AUTO, shapes=SHAPES, profiles=folder)


def test_a_start_measures_and_the_next_one_does_not(
    streams: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's kernels are not there, and say so; nothing is faster than Triton where nothing takes time."""
    (note,) = backend(tmp_path).notes
    for part in ("decodes triton", "prompts triton", "pictures triton", "windows triton", "captured pictures triton"):
        assert part in note
    assert "cudnn: " in note and "flashinfer: the package is not installed" in note
    assert "triton-tma 1.00" in note
    assert len([*tmp_path.glob("attention-*.json")]) == 1
    monkeypatch.delattr(attention_timing, "measure")
    again = backend(tmp_path)
    assert again.notes == (note,)
    (packed,) = (choice for choice in again.ops.choices() if choice.op == "attention_packed")
    assert packed.implementation == "triton" and "captured windows triton" in packed.reason
    assert_clean(streams)
