"""Random ERNIE-4.5-VL checkpoints: a mixture of experts, of which text and pictures have their own, and M-RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import Ernie4_5_VLMoeImageProcessorPil

from tools.miniatures.base import (
    IMAGE_ID,
    IMAGE_TOKEN,
    TEXT,
    TINY_VOCABULARY,
    TinyFamily,
    chat_template,
    write_processor,
)

_NAMES = ("image_start_token", "image_end_token", "video_start_token", "video_end_token", "video_token")
_MARKS = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|VIDEO_START|>", "<|VIDEO_END|>", "<|video|>")
_TEXT = {
    **{name: value for name, value in TEXT.items() if name != "head_dim"},
    "vocab_size": TINY_VOCABULARY + len(_MARKS),
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    "tie_word_embeddings": False,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": [48, 32],
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 48,
    "num_heads": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_merge_size": 2,
    "intermediate_size": 80,
}


def _build_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    ids = {f"{name}_id": TINY_VOCABULARY + index for index, name in enumerate(_NAMES)}
    top = {**ids, "image_token_id": IMAGE_ID, "tie_word_embeddings": False, **overrides}
    return transformers.Ernie4_5_VLMoeConfig(text_config={**_TEXT, **text}, vision_config={**_VISION, **vision}, **top)


def _save_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    images = Ernie4_5_VLMoeImageProcessorPil(
        size={"shortest_edge": 256, "longest_edge": 64 * 80},  # pixels: 4 to 80 tokens
        patch_size=config.vision_config.patch_size,
        merge_size=config.vision_config.spatial_merge_size,
    )
    marks = dict(zip(_NAMES, _MARKS, strict=True))
    write_processor(directory, tokenizer, "Ernie4_5_VLMoeProcessor", images, image_token=IMAGE_TOKEN, **marks)


ERNIE4_5_VL_MOE = TinyFamily(
    _build_config,
    _save_processor,
    _MARKS,
    chat_template(image=f"{_MARKS[0]}{IMAGE_TOKEN}{_MARKS[1]}"),
    says_marks=False,  # marks of a prompt go to the experts of pictures, marks of an answer to those of text
)
