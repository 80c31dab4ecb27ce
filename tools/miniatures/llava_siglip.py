"""Random checkpoints of LLaVA's heirs on a SigLIP tower: LLaVA over Phi-3 with longrope, and LLaVA-OneVision.

OneVision's processor is written by hand, because its class insists on a video processor, which needs torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tools.miniatures.base import BOS_ID, EOS_ID, IMAGE_ID, IMAGE_TOKEN, PAD_ID, TEXT, TINY_VOCABULARY, TinyFamily

_VIDEO = "<video>"
_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
    "vision_use_head": False,
}
_TOP: dict[str, Any] = {
    "image_token_index": IMAGE_ID,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
_TILES = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))  # rows and columns of each canvas


def longrope(original: int) -> dict[str, Any]:
    """A Phi-3 decoder's fields: other factors for requests of more than `original` tokens."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.5 * (index + 1) for index in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original, **factors}
    return {**TEXT, "original_max_position_embeddings": original, "rope_parameters": rope}


def _phi3_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    return transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**{**_VISION, **vision}),
        text_config=transformers.Phi3Config(**{**longrope(384), **text}),
        **{**_TOP, **overrides},
    )


def _save_phi3_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    side = config.vision_config.image_size
    transformers.LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size={"height": side, "width": side}),
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        image_token=IMAGE_TOKEN,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(directory)


def _onevision_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    tower = {**_VISION, **vision}
    side = tower["image_size"]
    words = {**TEXT, "vocab_size": TINY_VOCABULARY + 1, **text}
    canvases = [[rows * side, columns * side] for rows, columns in _TILES]
    return transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**tower),
        text_config=transformers.Qwen2Config(**words),
        **{**_TOP, "video_token_index": TINY_VOCABULARY, "image_grid_pinpoints": canvases, **overrides},
    )


def _save_onevision_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    side = config.vision_config.image_size
    images = LlavaOnevisionImageProcessorPil(
        size={"height": side, "width": side}, image_grid_pinpoints=config.image_grid_pinpoints
    ).to_dict()
    values = {
        "processor_class": "LlavaOnevisionProcessor",
        "image_processor": images,
        "num_image_tokens": (side // config.vision_config.patch_size) ** 2,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "vision_aspect_ratio": config.vision_aspect_ratio,
    }
    tokenizer.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps(values, default=str))


LLAVA_PHI3 = TinyFamily(_phi3_config, _save_phi3_processor)
LLAVA_ONEVISION = TinyFamily(_onevision_config, _save_onevision_processor, extra_tokens=(_VIDEO,))
