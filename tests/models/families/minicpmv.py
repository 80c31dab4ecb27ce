"""MiniCPM-V 4.6 in the shared parity tests, over its released kind of decoder and plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
from transformers.video_utils import VideoMetadata

from tests.models.families.base import FamilyCase, Inputs, Media

# Three delta nets and an attention layer, as in the released decoder.
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


class Processed(Inputs):
    """Inputs of the model, and how many pictures of the tower belong to each picture."""

    counts: list[int]


def inputs(model_dir: Path, media: Sequence[Media]) -> Inputs:
    """The video processor's pixels need torchvision. Without stacked frames it does to every frame what the picture
    processor does to a picture; which frames it takes is asked of it."""
    processor = MiniCPMV4_6ImageProcessorPil.from_pretrained(model_dir)
    found = Processed()
    pictures = [one for one in media if isinstance(one, Image.Image)]
    if pictures:
        values = processor(pictures, return_tensors="pt")
        found |= {name: values[name] for name in ("pixel_values", "target_sizes")}
        found.counts = values["num_patches_per_image"]
    frames = [frame for one in media if not isinstance(one, Image.Image) for frame in sampled(model_dir, one)]
    if frames:
        values = processor(frames, return_tensors="pt")
        found |= {f"{name}_videos": values[name] for name in ("pixel_values", "target_sizes")}
    return found


def sampled(model_dir: Path, clip: Any) -> list[Image.Image]:
    settings, _ = MiniCPMV4_6VideoProcessor.get_video_processor_dict(model_dir)
    count = len(clip.frames)
    seen = VideoMetadata(total_num_frames=count, fps=clip.fps, duration=count / clip.fps)
    chosen = MiniCPMV4_6VideoProcessor(**settings).sample_frames(seen)
    return [clip.frames[index] for index in chosen]


def features(model: Any, values: Inputs) -> list[tuple[Tensor, ...]]:
    assert isinstance(values, Processed)
    rows = iter(model.get_image_features(values["pixel_values"], values["target_sizes"]).pooler_output)
    return [(torch.cat([next(rows) for _ in range(count)]),) for count in values.counts]


MINICPMV = FamilyCase(
    family="minicpmv4_6",
    reference_from="5.23",  # that of 5.17 raises RuntimeError in its own tower
    variants={
        "plain": {},
        "4x": {
            "downsample_mode": "4x",
            "text_type": "llama",
            "text": {"num_key_value_heads": 4, "num_hidden_layers": 2},
            "vision": {"hidden_act": "gelu", "image_size": 4},
        },
        "merged-twice-behind": {
            "downsample_mode": "4x",
            "merger_times": 2,
            "tie_word_embeddings": True,
            "text_type": "qwen3",
            "text": {"head_dim": 24, "num_key_value_heads": 1},
            "vision": {"num_attention_heads": 2, "image_size": 34},
        },
        "hybrid": {"text_type": "qwen3_5_text", "text": HYBRID},
        "hybrid-grouped": {
            "text_type": "qwen3_5_text",
            "text": {
                **HYBRID,
                "layer_types": ["full_attention", "linear_attention", "linear_attention"],
                "num_hidden_layers": 3,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 6,
                "linear_value_head_dim": 20,
                "linear_conv_kernel_dim": 3,
                "attention_bias": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
        },
    },
    sizes=((48, 48), (80, 60), (23, 70)),
    extreme=((1, 1), (90, 2)),
    inputs=inputs,
    features=features,
    clips=(((60, 50), 8, 1.5),),
)
