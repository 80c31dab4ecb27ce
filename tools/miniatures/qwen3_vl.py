"""Random miniatures of Qwen3-VL and Qwen3.5: patches of 4 pixels, 5 by 5 learned positions. Qwen3-VL has two further
planes of features, Qwen3.5 three delta nets before each layer of attention."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tools.miniatures.base import (
    BOS_ID,
    EOS_ID,
    IMAGE_ID,
    IMAGE_TOKEN,
    MIXTURE,
    PAD_ID,
    TEXT,
    TINY_VOCABULARY,
    TinyFamily,
    chat_template,
)

VISION_START, VISION_END, VIDEO_TOKEN = EXTRA_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_TEXT: dict[str, Any] = {
    **TEXT,
    "vocab_size": TINY_VOCABULARY + len(EXTRA_TOKENS),
    "num_hidden_layers": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 3,
    "patch_size": 4,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
# Two pairs of a head turn by time, one by row, one by column; the other half of a head does not.
_TEXT_3_5: dict[str, Any] = {
    **_TEXT,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_VISION_3_5 = {name: value for name, value in _VISION.items() if name != "deepstack_visual_indexes"}
_NORMAL: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_PICTURE_SIZE = {"shortest_edge": 256, "longest_edge": 3072}  # pixels: 4 to 48 tokens
_VIDEO_SIZE = {"shortest_edge": 1024, "longest_edge": 6144}  # of all frames


def _build_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    return _config(transformers.Qwen3VLConfig, {**_TEXT, **text}, {**_VISION, **vision}, overrides)


def _build_config_3_5(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    return _config(transformers.Qwen3_5Config, {**_TEXT_3_5, **text}, {**_VISION_3_5, **vision}, overrides)


def _build_config_moe(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    return _config(transformers.Qwen3VLMoeConfig, {**_TEXT, **MIXTURE, **text}, {**_VISION, **vision}, overrides)


def _build_config_3_5_moe(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    decoder = {**_TEXT_3_5, **MIXTURE, **text}
    decoder.setdefault("shared_expert_intermediate_size", decoder["moe_intermediate_size"])
    return _config(transformers.Qwen3_5MoeConfig, decoder, {**_VISION_3_5, **vision}, overrides)


def _config(build: Any, decoder: dict[str, Any], tower: dict[str, Any], overrides: Mapping[str, Any]) -> Any:
    start, end, video = range(TINY_VOCABULARY, TINY_VOCABULARY + len(EXTRA_TOKENS))
    top = {
        "image_token_id": IMAGE_ID,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        **overrides,
    }
    return build(vision_config={"out_hidden_size": decoder["hidden_size"], **tower}, text_config=decoder, **top)


def _save_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    """The processor as a whole and its part for videos need torchvision to be made; their files do not."""
    patches = {
        "patch_size": config.vision_config.patch_size,
        "merge_size": config.vision_config.spatial_merge_size,
        "temporal_patch_size": config.vision_config.temporal_patch_size,
    }
    Qwen2VLImageProcessorPil(size=_PICTURE_SIZE, **_NORMAL, **patches).save_pretrained(directory)
    videos = {"video_processor_type": "Qwen3VLVideoProcessor", "size": _VIDEO_SIZE, **_NORMAL, **patches}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(videos, indent=2))
    tokenizer.save_pretrained(directory)


_TEMPLATE = chat_template(
    image=f"{VISION_START}{IMAGE_TOKEN}{VISION_END}", video=f"{VISION_START}{VIDEO_TOKEN}{VISION_END}"
)
QWEN3_VL = TinyFamily(_build_config, _save_processor, EXTRA_TOKENS, _TEMPLATE)
QWEN3_5 = TinyFamily(_build_config_3_5, _save_processor, EXTRA_TOKENS, _TEMPLATE)
QWEN3_VL_MOE = TinyFamily(_build_config_moe, _save_processor, EXTRA_TOKENS, _TEMPLATE)
QWEN3_5_MOE = TinyFamily(_build_config_3_5_moe, _save_processor, EXTRA_TOKENS, _TEMPLATE)
