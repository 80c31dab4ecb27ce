"""Random miniatures of Qwen2-VL and Qwen2.5-VL: patches of 4 pixels, windows of 3 by 3 tokens, M-RoPE."""

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
    PAD_ID,
    TEXT,
    TINY_VOCABULARY,
    TinyFamily,
    chat_template,
)

VISION_START, VISION_END, VIDEO_TOKEN = EXTRA_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_TEXT = {
    **{name: value for name, value in TEXT.items() if name != "head_dim"},
    "vocab_size": TINY_VOCABULARY + len(EXTRA_TOKENS),
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
}
_VISION: dict[str, Any] = {
    "depth": 3,
    "num_heads": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_VISION_2 = {**_VISION, "embed_dim": 48, "mlp_ratio": 2}
_VISION_2_5 = {
    **_VISION,
    "hidden_size": 48,
    "intermediate_size": 76,
    "window_size": 24,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
}
_PICTURE_SIZE = {"shortest_edge": 256, "longest_edge": 3072}  # pixels: 4 to 48 tokens
_FRAME_SIZE = {"shortest_edge": 128, "longest_edge": 1024}


def _config_2(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    settings = {**_TEXT, **text}
    return transformers.Qwen2VLConfig(
        vision_config={**_VISION_2, "hidden_size": settings["hidden_size"], **vision},
        text_config=settings,
        **{**_token_ids(), **overrides},
    )


def _config_2_5(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    settings = {**_TEXT, **text}
    return transformers.Qwen2_5_VLConfig(
        vision_config={**_VISION_2_5, "out_hidden_size": settings["hidden_size"], **vision},
        text_config=settings,
        **{**_token_ids(), **overrides},
    )


def _token_ids() -> dict[str, int]:
    start, end, video = range(TINY_VOCABULARY, TINY_VOCABULARY + len(EXTRA_TOKENS))
    return {
        "image_token_id": IMAGE_ID,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }


def _save_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    """The processor as a whole and its part for videos need torchvision to be made; their files do not."""
    patches = {
        "patch_size": config.vision_config.patch_size,
        "merge_size": config.vision_config.spatial_merge_size,
        "temporal_patch_size": config.vision_config.temporal_patch_size,
    }
    images = Qwen2VLImageProcessorPil(size=_PICTURE_SIZE, **patches)
    images.save_pretrained(directory)
    videos = {"video_processor_type": "Qwen2VLVideoProcessor", "size": _FRAME_SIZE, **patches}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(videos, indent=2))
    tokenizer.save_pretrained(directory)


_TEMPLATE = chat_template(
    image=f"{VISION_START}{IMAGE_TOKEN}{VISION_END}", video=f"{VISION_START}{VIDEO_TOKEN}{VISION_END}"
)
QWEN2_VL = TinyFamily(_config_2, _save_processor, EXTRA_TOKENS, _TEMPLATE)
QWEN2_5_VL = TinyFamily(_config_2_5, _save_processor, EXTRA_TOKENS, _TEMPLATE)
