"""LLaVA-NeXT in the shared parity tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from tests.models.families.base import FamilyCase, Inputs, Media
from tools.miniatures.base import REFERENCE


def inputs(model_dir: Path, media: Sequence[Media]) -> Inputs:
    processor = LlavaNextImageProcessorPil.from_pretrained(model_dir)
    return dict(processor(list(media), return_tensors="pt"))


def features(model: Any, values: Inputs) -> list[tuple[Tensor, ...]]:
    return [(rows,) for rows in model.get_image_features(**values).pooler_output]


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral-layer-list": {
        "text": {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": 4},
        "vision_feature_layer": [-2, 1],
        "multimodal_projector_bias": False,
    },
    "tied-odd": {
        "text": {
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 22,
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
        },
        "vision": {"hidden_size": 44, "num_attention_heads": 4, "image_size": 24, "patch_size": 7},
        "tie_word_embeddings": True,
        "image_grid_pinpoints": [[24, 24], [48, 72]],
    },
}
LLAVA_NEXT = FamilyCase(
    family="llava_next",
    variants=VARIANTS,
    sizes=((40, 30), (28, 56), (90, 31)),
    extreme=((1, 1), (2, 90), (90, 1)),
    inputs=inputs,
    features=features,
)
LLAVA_NEXT_ORIGINAL = FamilyCase(
    family="llava_llama_anyres",
    variants={"llama": {}},
    sizes=LLAVA_NEXT.sizes,
    extreme=LLAVA_NEXT.extreme,
    inputs=inputs,
    features=features,
    quick=False,
    reference=REFERENCE,
)
