"""Pixels become numbers on the device exactly as transformers' processor makes them."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.models.layers.vision import PixelRows, normalise_pixels
from hydra_engine.models.loading.parameters import Demands, Scope
from hydra_engine.models.specs.base import PreprocessSpec
from hydra_engine.models.specs.vision import CLIP_MEAN, CLIP_STD


def test_every_colour_is_normalised_bit_for_bit() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).repeat(28 * 28 * 3 // 256 + 1)[: 28 * 28 * 3].view(28, 28, 3)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    (expected,) = processor(Image.fromarray(pixels.numpy()), return_tensors="pt")["pixel_values"]
    spec = PreprocessSpec("bicubic", 1 / 255, CLIP_MEAN, CLIP_STD, "clip")
    assert torch.equal(normalise_pixels(pixels, spec), expected.permute(1, 2, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_patches_are_normalised_colours_and_zeros(dtype: torch.dtype) -> None:
    spec = PreprocessSpec("bicubic", 1 / 255, CLIP_MEAN, CLIP_STD, "clip")
    patches = torch.randint(256, (5, 4 * 4 * 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows = PixelRows(Scope(ReferenceOps(), dtype, torch.device("cpu"), Demands()), spec, 56)(patches)
    expected = normalise_pixels(patches.view(5, -1, 3), spec).to(dtype).flatten(1)
    assert rows.shape == (5, 56) and torch.equal(rows[:, :48], expected) and not rows[:, 48:].any()
