"""Qwen2-VL and Qwen2.5-VL in the shared parity tests, videos included.

transformers' video processor needs torchvision, which is not here. What it does is written out below, over frames that
Pillow resizes like pictures: which frames, their size, how frames become patches, and how many seconds a patch is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from tests.models.families.base import Clip, FamilyCase, Inputs, Media
from tools.miniatures.qwen2_vl import VISION_END, VISION_START


def inputs(model_dir: Path, media: Sequence[Media]) -> Inputs:
    pictures = [one for one in media if isinstance(one, Image.Image)]
    clips = [one for one in media if isinstance(one, Clip)]
    found: Inputs = {}
    if pictures:
        processor = Qwen2VLImageProcessorPil.from_pretrained(model_dir)
        found |= processor(pictures, return_tensors="pt")
    if clips:
        processed = [_video(model_dir, one) for one in clips]
        found["pixel_values_videos"] = torch.tensor(np.concatenate([patches for patches, _, _ in processed]))
        found["video_grid_thw"] = torch.tensor([grid for _, grid, _ in processed])
        if json.loads((model_dir / "config.json").read_text())["model_type"] == "qwen2_5_vl":
            found["second_per_grid_ts"] = torch.tensor([seconds for _, _, seconds in processed])
    return found


def features(model: Any, values: Inputs) -> list[tuple[Tensor, ...]]:
    found: list[tuple[Tensor, ...]] = []
    if "pixel_values" in values:
        rows = model.get_image_features(values["pixel_values"], values["image_grid_thw"]).pooler_output
        found += [(one,) for one in rows]
    if "pixel_values_videos" in values:
        rows = model.get_video_features(values["pixel_values_videos"], values["video_grid_thw"]).pooler_output
        found += [(one,) for one in rows]
    return found


def _video(model_dir: Path, clip: Clip) -> tuple[np.ndarray, tuple[int, int, int], float]:
    """Patches [P, values], their grid, and the seconds from one temporal patch to the next."""
    settings = json.loads((model_dir / "video_preprocessor_config.json").read_text())
    patch, merge, depth = (settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
    frames = sampled(clip, depth)
    width, height = frames[0].size
    limits = settings["size"]
    size = smart_resize(height, width, patch * merge, limits["shortest_edge"], limits["longest_edge"])
    normal = Qwen2VLImageProcessorPil()
    stack = [np.asarray(frame.resize(size[::-1], Image.Resampling.BICUBIC)).transpose(2, 0, 1) for frame in frames]
    values = np.stack(
        [normal.normalize(normal.rescale(one, 1 / 255), normal.image_mean, normal.image_std) for one in stack]
    )
    while len(values) % depth:
        values = np.concatenate([values, values[-1:]])
    grid = (len(values) // depth, size[0] // patch, size[1] // patch)
    rows = [
        values[t * depth : (t + 1) * depth, :, y : y + patch, x : x + patch].transpose(1, 0, 2, 3).reshape(-1)
        for t in range(grid[0])
        for by in range(0, size[0], patch * merge)
        for bx in range(0, size[1], patch * merge)
        for y in range(by, by + patch * merge, patch)
        for x in range(bx, bx + patch * merge, patch)
    ]
    seconds = depth / (len(frames) / len(clip.frames) * clip.fps)
    return np.stack(rows).astype(np.float32), grid, seconds


def sampled(clip: Clip, depth: int) -> list[Image.Image]:
    """Frames at two a second at most, but four where there are as many; whole temporal patches if any is left out."""
    total = len(clip.frames)
    if clip.fps <= 2 or total <= 4:
        return list(clip.frames)
    count = math.floor(min(max(total / clip.fps * 2, 4), total) / depth) * depth
    return [clip.frames[index] for index in torch.arange(0, total, total / count).int().tolist()]


VISION_TOKENS = (VISION_START, VISION_END)
SIZES = ((40, 32), (24, 61), (70, 50))  # 20, 24 and 40 tokens
EXTREME = ((1, 1), (400, 2))
# No temporal position passes the largest row or column: behind longer videos transformers 5.23 places text differently
# when it generates and when it computes a prompt.
CLIPS = (
    ((30, 22), 1, 2.0),
    ((120, 30), 5, 1.7),
    ((24, 44), 9, 24.0),
)

# Logits of a tied head grow with its width; at 16 channels they are as large as those of the other variants.
NARROW = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}

QWEN2_VL = FamilyCase(
    family="qwen2_vl",
    variants={
        "plain": {},
        "tied-mha": {
            "text": {
                **NARROW,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 0, 2]},
            },
            "vision": {"embed_dim": 60, "mlp_ratio": 3, "hidden_act": "gelu_pytorch_tanh"},
            "tie_word_embeddings": True,
        },
        "single-frames": {
            "vision": {"temporal_patch_size": 1, "spatial_merge_size": 1, "patch_size": 8, "num_heads": 2}
        },
    },
    sizes=SIZES,
    extreme=EXTREME,
    inputs=inputs,
    features=features,
    clips=CLIPS,
    around=VISION_TOKENS,
)
QWEN2_5_VL = FamilyCase(
    family="qwen2_5_vl",
    variants={
        "plain": {},
        "tied-mha": {
            "text": {
                **NARROW,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]},
            },
            "vision": {"hidden_size": 60, "window_size": 16, "fullatt_block_indexes": [], "tokens_per_second": 1},
            "tie_word_embeddings": True,
        },
        "wide-windows": {
            "vision": {
                "window_size": 160,
                "hidden_size": 40,
                "num_heads": 2,
                "intermediate_size": 51,
                "fullatt_block_indexes": [0, 2],
                "hidden_act": "gelu",
            }
        },
    },
    sizes=SIZES,
    extreme=EXTREME,
    inputs=inputs,
    features=features,
    clips=CLIPS,
    around=VISION_TOKENS,
    quick=False,
)
