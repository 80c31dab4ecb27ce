"""Pixels become numbers on the device exactly as transformers' processor makes them."""

from __future__ import annotations

import torch
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from hydra_engine.models.layers.vision import PixelNormaliser
from hydra_engine.models.specs.base import PreprocessSpec
from hydra_engine.models.specs.vision import CLIP_MEAN, CLIP_STD


def test_every_colour_is_normalised_bit_for_bit() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).repeat(28 * 28 * 3 // 256 + 1)[: 28 * 28 * 3].view(28, 28, 3)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    (expected,) = processor(Image.fromarray(pixels.numpy()), return_tensors="pt")["pixel_values"]
    normalise = PixelNormaliser(PreprocessSpec("bicubic", 1 / 255, CLIP_MEAN, CLIP_STD, "clip"), torch.device("cpu"))
    assert torch.equal(normalise(pixels), expected.permute(1, 2, 0))
