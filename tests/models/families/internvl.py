"""InternVL in the shared parity tests, in transformers' layout and in OpenGVLab's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests.models.families.base import FamilyCase, Inputs, Media
from tools.miniatures.base import MIXTURE, REFERENCE


class TileInputs(Inputs):
    """Inputs with the number of tiles of each picture, which the model does not take."""

    num_tiles: list[int]


def inputs(model_dir: Path, media: Sequence[Media]) -> Inputs:
    processor = GotOcr2ImageProcessorPil.from_pretrained(model_dir)
    processed = processor(list(media), crop_to_patches=True, return_tensors="pt")
    values = TileInputs(pixel_values=processed["pixel_values"])
    values.num_tiles = processed["num_patches"].tolist()
    return values


def features(model: Any, values: Inputs) -> list[tuple[Tensor, ...]]:
    assert isinstance(values, TileInputs)
    tiles = model.get_image_features(**values).pooler_output  # [tiles, tokens, C]
    return [(rows.flatten(0, 1),) for rows in tiles.split(values.num_tiles)]


VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama-rms-qk-norm-inner-layer": {
        "text": {"model_type": "llama", "num_key_value_heads": 4},
        "vision": {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False, "use_mask_token": True},
        "vision_feature_layer": -2,
    },
    "qwen3-tied-odd-final-norm": {
        "text": {
            "model_type": "qwen3",
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 22,
        },
        "vision": {
            "hidden_size": 44,
            "image_size": [33, 33],
            "patch_size": [4, 4],
            "use_mean_pooling": False,
            "hidden_act": "quick_gelu",
        },
        "downsample_ratio": 0.25,
        "tie_word_embeddings": True,
    },
    "qwen3-moe": {"text": {"model_type": "qwen3_moe", **MIXTURE, "norm_topk_prob": True, "mlp_only_layers": [0]}},
}
INTERNVL = FamilyCase(
    family="internvl",
    variants=VARIANTS,
    sizes=((80, 60), (28, 28), (31, 90)),
    extreme=((1, 1), (1, 200)),
    inputs=inputs,
    features=features,
)
INTERNVL_CHAT = FamilyCase(
    family="internvl_chat",
    variants={
        "internlm2": {},
        "internlm2-biased-rms-qk-norm-inner-layer": {
            "text": {"num_key_value_heads": 1, "attention_bias": True},
            "vision": {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False},
            "vision_feature_layer": -2,
        },
        "qwen2": {"text": {"model_type": "qwen2"}},
        "qwen3-tied": {"text": {"model_type": "qwen3"}, "tie_word_embeddings": True, "downsample_ratio": 0.25},
    },
    sizes=INTERNVL.sizes,
    extreme=INTERNVL.extreme,
    inputs=inputs,
    features=features,
    reference=REFERENCE,
    quick=False,
)
