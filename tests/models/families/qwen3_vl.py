"""Qwen3-VL and Qwen3.5 in the shared parity tests, videos included.

transformers' video processor resizes with torchvision, which is not here. Frames are chosen, sized and cut into patches
by its class; Pillow resizes them, as it does pictures.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_utils import VideoMetadata

from tests.models.families.base import Clip, FamilyCase, Inputs, Media
from tools.miniatures.qwen3_vl import VISION_END, VISION_START

# The module itself: the package offers a stand-in where torchvision is missing.
videos = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")


def inputs(model_dir: Path, media: Sequence[Media]) -> Inputs:
    pictures = [one for one in media if isinstance(one, Image.Image)]
    clips = [one for one in media if isinstance(one, Clip)]
    found: Inputs = {}
    if pictures:
        found |= Qwen2VLImageProcessorPil.from_pretrained(model_dir)(pictures, return_tensors="pt")
    if clips:
        settings = json.loads((model_dir / "video_preprocessor_config.json").read_text())
        processed = [_video(videos.Qwen3VLVideoProcessor(**settings), one) for one in clips]
        found["pixel_values_videos"] = torch.cat([patches for patches, _ in processed])
        found["video_grid_thw"] = torch.tensor([grid for _, grid in processed])
    return found


def features_3_5(model: Any, values: Inputs) -> list[tuple[Tensor, ...]]:
    found: list[tuple[Tensor, ...]] = []
    for kind, get in (("image", model.get_image_features), ("video", model.get_video_features)):
        if (grid := values.get(f"{kind}_grid_thw")) is not None:
            pixels = values["pixel_values" if kind == "image" else "pixel_values_videos"]
            found += [(rows,) for rows in get(pixels, grid).pooler_output]
    return found


def features(model: Any, values: Inputs) -> list[tuple[Tensor, ...]]:
    found: list[tuple[Tensor, ...]] = []
    if "pixel_values" in values:
        found += _planes(model.get_image_features(values["pixel_values"], values["image_grid_thw"]))
    if "pixel_values_videos" in values:
        found += _planes(model.get_video_features(values["pixel_values_videos"], values["video_grid_thw"]))
    return found


def _planes(output: Any) -> list[tuple[Tensor, ...]]:
    """Older versions leave the further planes in one piece for all pictures."""
    counts = [len(rows) for rows in output.pooler_output]
    further = [plane.split(counts) if isinstance(plane, Tensor) else plane for plane in output.deepstack_features]
    return list(zip(output.pooler_output, *further, strict=True))


def _video(processor: Any, clip: Clip) -> tuple[Tensor, tuple[int, int, int]]:
    """Patches [P, values] and their grid."""
    metadata = VideoMetadata(total_num_frames=len(clip.frames), fps=clip.fps)
    frames = [clip.frames[index] for index in processor.sample_frames(metadata)]
    geometry = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    width, height = frames[0].size
    high, wide = videos.smart_resize(
        len(frames),
        height,
        width,
        temporal_factor=processor.temporal_patch_size,
        factor=processor.patch_size * processor.merge_size,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
    )
    normal = Qwen2VLImageProcessorPil()
    stack = []
    for frame in frames:
        pixels = np.asarray(frame.resize((wide, high), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
        stack.append(normal.normalize(normal.rescale(pixels, 1 / 255), processor.image_mean, processor.image_std))
    patches, *grid = processor.patchify(torch.tensor(np.stack(stack))[None], *geometry)
    return patches[0].float(), tuple(grid)


QWEN3_VL = FamilyCase(
    family="qwen3_vl",
    variants={
        "plain": {},
        "tied-mha": {
            "text": {
                "head_dim": 24,
                "num_key_value_heads": 4,
                "attention_bias": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 5, 4]},
            },
            "vision": {"hidden_size": 60, "num_position_embeddings": 120, "deepstack_visual_indexes": [3, 0, 1]},
            "tie_word_embeddings": True,
        },
        "one-plane": {
            "text": {
                "num_hidden_layers": 3,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "rope_theta": 1e5,
                    "original_max_position_embeddings": 256,
                    "mrope_section": [4, 2, 2],
                },
            },
            "vision": {
                "depth": 2,
                "num_heads": 2,
                "deepstack_visual_indexes": [],
                "hidden_act": "gelu",
                "temporal_patch_size": 1,
            },
        },
        "wide-merge": {
            "vision": {
                "spatial_merge_size": 4,
                "patch_size": 2,
                "temporal_patch_size": 3,
                "num_position_embeddings": 9,
                "deepstack_visual_indexes": [1],
            },
        },
    },
    sizes=((40, 32), (24, 61), (70, 50)),
    extreme=((1, 1), (400, 2)),
    inputs=inputs,
    features=features,
    clips=(((90, 60), 3, 24.0), ((5, 24), 13, 3.3)),
    around=(VISION_START, VISION_END),
)
QWEN3_5 = FamilyCase(
    family="qwen3_5",
    variants={
        "hybrid": {},
        "tied-mha": {
            "text": {
                "layer_types": ["full_attention", "linear_attention", "full_attention"],
                "num_hidden_layers": 3,
                "hidden_size": 32,  # logits of a tied head grow with its width
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "attention_bias": True,
                "linear_num_value_heads": 8,
                "linear_value_head_dim": 20,
                "linear_conv_kernel_dim": 3,
                # transformers' own sections and share, of heads as published.
                "head_dim": 256,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "vision": {"hidden_size": 60, "num_position_embeddings": 120, "hidden_act": "gelu"},
            "tie_word_embeddings": True,
        },
        "wide-merge": {
            "text": {
                "num_hidden_layers": 2,
                "full_attention_interval": 2,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "rope_theta": 1e5,
                    "original_max_position_embeddings": 256,
                    "partial_rotary_factor": 0.75,
                    "mrope_section": [1, 3, 2],
                },
            },
            "vision": {
                "spatial_merge_size": 4,
                "patch_size": 2,
                "temporal_patch_size": 3,
                "num_position_embeddings": 9,
                "num_heads": 2,
            },
        },
    },
    sizes=QWEN3_VL.sizes,
    extreme=QWEN3_VL.extreme,
    inputs=inputs,
    features=features_3_5,
    clips=QWEN3_VL.clips,
    around=QWEN3_VL.around,
)
# Towers and positions are those of the dense families; what differs is the decoder's layers.
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    family="qwen3_vl_moe",
    variants={
        "plain": {},
        "dense-layers": {
            "text": {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_key_value_heads": 4},
            "tie_word_embeddings": True,
        },
    },
    quick=False,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    family="qwen3_5_moe",
    variants={
        "hybrid": {"text": {"num_experts": 6}},
        "tied": {
            "text": {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2, "num_experts": 5},
            "tie_word_embeddings": True,
        },
    },
    quick=False,
)
