"""LLaVA-1.5 in the shared parity tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from tests.models.families.base import FamilyCase, Inputs, Media
from tools.miniatures.base import REFERENCE


def inputs(model_dir: Path, media: Sequence[Media]) -> Inputs:
    processor = CLIPImageProcessorPil.from_pretrained(model_dir)
    return {"pixel_values": processor(list(media), return_tensors="pt")["pixel_values"]}


def features(model: Any, values: Inputs) -> list[tuple[Tensor, ...]]:
    return [(rows,) for rows in model.get_image_features(values["pixel_values"]).pooler_output]


VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "tied-mha-full-last": {
        "text": {"num_key_value_heads": 4, "tie_word_embeddings": True},
        "tie_word_embeddings": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "odd-heads": {
        "text": {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 22},
        "vision": {"hidden_size": 44, "num_attention_heads": 4, "image_size": 30, "patch_size": 7},
    },
    "mqa-layer-list": {
        "text": {
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
        },
        "vision": {"hidden_act": "gelu"},
        "vision_feature_layer": [-2, 0, -1],
        "multimodal_projector_bias": False,
    },
    "llama3-rope": {
        "text": {
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        "vision_feature_layer": 1,
    },
}
LLAVA = FamilyCase(
    family="llava",
    variants=VARIANTS,
    sizes=((28, 28), (40, 30), (31, 77)),
    extreme=((1, 1), (90, 2)),
    inputs=inputs,
    features=features,
)


def padded_inputs(model_dir: Path, media: Sequence[Media]) -> Inputs:
    processor = LlavaImageProcessorPil.from_pretrained(model_dir)
    return {"pixel_values": processor(list(media), return_tensors="pt")["pixel_values"]}


LLAVA_ORIGINAL = FamilyCase(
    family="llava_llama",
    variants={"gqa": {}, "full-last": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}},
    sizes=((28, 28), (40, 31), (31, 78)),
    extreme=((1, 1), (90, 3)),
    inputs=padded_inputs,
    features=features,
    quick=False,
    reference=REFERENCE,
)
