"""Sizes of pictures and choice of frames in Qwen2-VL and Qwen2.5-VL, against transformers over thousands of cases."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as processors_resize

from hydra_engine.errors import InvalidImage
from hydra_engine.models.qwen_vl.geometry_spec import FRAMES, FrameSampling, PixelLimits, max_image_tokens, smart_resize
from hydra_engine.models.specs.base import VideoInfo


def test_sizes_are_those_of_the_processor() -> None:
    rng = random.Random(1)
    sides = [1, 2, 13, 14, 27, 28, 29, 41, 42, 43, 55, 56, 70, 98, 1000, 3584, 10000]
    taken = 0
    for index in range(20000):
        factor = rng.choice([28, 32, 8])
        least = rng.choice([1, 3136, factor**2, 4 * factor**2])
        limits = PixelLimits(least, least + rng.choice([0, 1000, 10 * factor**2, 1003520, 12845056]))
        drawn = (int(2 ** rng.uniform(0, 13)), int(2 ** rng.uniform(0, 13)))
        width, height = rng.choices(sides, k=2) if index % 2 else drawn
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(InvalidImage, match="too long"):
                smart_resize(width, height, factor, limits)
            continue
        taken += 1
        size = smart_resize(width, height, factor, limits)
        assert size[::-1] == processors_resize(height, width, factor, *limits), (width, height, factor, limits)
        assert (size[0] // factor) * (size[1] // factor) <= max_image_tokens(factor, limits), (
            width,
            height,
            factor,
            limits,
        )
    assert taken > 10000


def test_the_bound_on_tokens_is_reached() -> None:
    assert max_image_tokens(28, PixelLimits(3136, 12845056)) == 16384
    assert smart_resize(3584, 3584, 28, PixelLimits(3136, 12845056)) == (3584, 3584)
    thin = PixelLimits(1, 28 * 28)  # one row of blocks, as long as the aspect allows
    assert smart_resize(20000, 100, 28, thin)[0] // 28 == max_image_tokens(28, thin) == 14


def test_impossible_sizes() -> None:
    limits = PixelLimits(3136, 12845056)
    assert smart_resize(200, 1, 28, limits) == processors_resize(1, 200, 28, *limits)[::-1]
    with pytest.raises(InvalidImage) as caught:
        smart_resize(201, 1, 28, limits)
    assert caught.value.code == "image_aspect_ratio"
    with pytest.raises(InvalidImage, match="empty"):
        smart_resize(0, 5, 28, limits)


def sampling(**changes: Any) -> FrameSampling:
    settings = {"depth": 2, "fps": 2.0, "num_frames": None, "min_frames": 4, "max_frames": 768, "always": False}
    return FrameSampling(**{**settings, "limits": FRAMES, "total_tokens": None, **changes})


def test_sampled_frames_are_those_of_the_processor() -> None:
    """The processor takes a count between bounds, cut to whole temporal patches, and float32 steps; where rounding
    gives one step too many, that frame would lie behind the last one."""
    rng = random.Random(3)
    for _ in range(3000):
        total, fps, rate = int(2 ** rng.uniform(1, 14)), rng.choice([1, 23.976, 29.97, 60]), rng.choice([0.5, 1, 2, 4])
        count = math.floor(min(max(total / fps * rate, 4), 768, total) / 2) * 2
        expected = torch.arange(0, total, total / count).int().tolist()[:count]
        chosen = sampling(fps=rate, always=True).choose_frames(VideoInfo(64, 48, total, fps))
        assert list(chosen) == expected, (total, fps, rate)
        fixed = min(16, total // 2 * 2)
        expected = torch.arange(0, total, total / fixed).int().tolist()[:fixed]
        assert list(sampling(num_frames=16, always=True).choose_frames(VideoInfo(64, 48, total, fps))) == expected


@pytest.mark.parametrize(
    ("num_frames", "fps", "frames"),
    [
        (1, 30.0, (0,)),
        (2, 30.0, (0, 1)),
        (3, 30.0, (0, 1, 2)),  # four and fewer are all looked at
        (5, 2.0, (0, 1, 2, 3, 4)),  # not faster than two a second: all of them
        (5, 30.0, (0, 1, 2, 3)),
        (60, 24.0, (0, 15, 30, 45)),
    ],
)
def test_which_frames_are_looked_at(num_frames: int, fps: float, frames: tuple[int, ...]) -> None:
    assert sampling().choose_frames(VideoInfo(64, 48, num_frames, fps)) == frames


def test_long_videos_are_thinned_to_max_frames() -> None:
    chosen = sampling(max_frames=33).choose_frames(VideoInfo(64, 48, 1000, 1.0))
    assert len(chosen) == 32 and chosen[0] == 0 and chosen[-1] == 968
    assert sampling(num_frames=8).choose_frames(VideoInfo(64, 48, 7, 1.0)) == tuple(range(7))
    assert sampling(always=True).choose_frames(VideoInfo(64, 48, 1, 1.0)) == (0,)
