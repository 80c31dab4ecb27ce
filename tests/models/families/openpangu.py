"""openPangu-VL-7B against the model written out in tools/miniatures/openpangu.py, in float64; pictures and frames are
cut by transformers' processor of Qwen2-VL, from which the published one derives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.models.families.base import Clip, FamilyCase, Inputs, Media
from tests.models.families.qwen2_vl import sampled
from tools.miniatures.openpangu import VISION_END, VISION_START, OpenPanguVLForConditionalGeneration

SIZES = ((40, 32), (24, 61), (70, 50))
EXTREME = ((1, 1), (400, 2))
CLIPS = (((30, 22), 1, 2.0), ((24, 44), 9, 24.0))


def inputs(model_dir: Path, media: Sequence[Media]) -> Inputs:
    settings = json.loads((model_dir / "preprocessor_config.json").read_text())
    found: Inputs = {}
    pictures = [_enlarged(one) for one in media if isinstance(one, Image.Image)]
    if pictures:
        found |= _cut(settings, pictures, settings["min_pixels"], settings["max_pixels"])
    clips = [_video(settings, one) for one in media if isinstance(one, Clip)]
    if clips:
        found["pixel_values_videos"] = torch.cat([one["pixel_values"] for one in clips])
        found["video_grid_thw"] = torch.tensor(
            [[len(one["image_grid_thw"]), *one["image_grid_thw"][0, 1:].tolist()] for one in clips]
        )
    return found


def load(model_dir: Path, dtype: torch.dtype) -> OpenPanguVLForConditionalGeneration:
    wide = torch.float64 if dtype == torch.float32 else dtype
    return OpenPanguVLForConditionalGeneration.from_pretrained(model_dir, dtype=wide).eval()


def features(model: Any, values: Inputs) -> list[tuple[Tensor, ...]]:
    return [(one,) for one in model.features(values["pixel_values"].to(model.dtype), values["image_grid_thw"])]


def _enlarged(image: Image.Image) -> Image.Image:
    width, height = image.size
    if min(width, height) > 28:
        return image
    if width >= height:
        return image.resize((int(56 * 1.0 / height * width), 56))
    return image.resize((56, int(56 * 1.0 / width * height)))


def _cut(settings: Any, pictures: Sequence[Image.Image], least: int, most: int) -> Inputs:
    """Rows of patches one picture deep."""
    size = {"shortest_edge": least, "longest_edge": most}
    sides = {name: settings[name] for name in ("patch_size", "merge_size")}
    processor = Qwen2VLImageProcessorPil(size=size, temporal_patch_size=1, **sides)
    return dict(processor(list(pictures), return_tensors="pt"))


def _video(settings: Any, clip: Clip) -> Inputs:
    frames = sampled(clip, 1)
    least, most = settings["any_res_min_frame_pixels"], settings["any_res_max_frame_pixels"]
    limits = (
        max(min(settings[f"any_res_{edge}_video_total_pixels"] // len(frames), most), least) for edge in ("min", "max")
    )
    return _cut(settings, frames, *limits)


OPENPANGU = FamilyCase(
    family="openpangu_vl",
    variants={
        "plain": {},
        "split-gated": {
            "text": {
                "bias": False,
                "num_key_value_heads": 4,
                "rope_scaling": {"type": "mrope", "mrope_section": [2, 4, 2], "mrope_interleaved": False},
            },
            "vision": {
                **{"split": True, "hidden_act": "silu", "window_size": 16, "fullatt_block_indexes": []},
                **{"mm_unit_vision_select_layer": [-1, -2, -4], "temporal_patch_size": 1},
            },
        },
        "last-layer": {"vision": {"mm_unit_vision_select_layer": [-1], "window_size": 160, "patch_size": 8}},
    },
    sizes=SIZES,
    extreme=EXTREME,
    inputs=inputs,
    features=features,
    clips=CLIPS,
    around=(VISION_START, VISION_END),
    quick=False,
    load=load,
)
