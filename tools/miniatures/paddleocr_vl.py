"""Random PaddleOCR-VL checkpoints: a SigLIP tower for pictures of any size, M-RoPE, an ERNIE 4.5 decoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

from tools.miniatures.base import (
    IMAGE_ID,
    IMAGE_TOKEN,
    TEXT,
    TINY_VOCABULARY,
    TinyFamily,
    chat_template,
    write_processor,
)

_MARKS = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|video|>")
_TEXT = {
    **TEXT,
    "vocab_size": TINY_VOCABULARY + len(_MARKS),
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
}


def _build_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    start, end, video = range(TINY_VOCABULARY, TINY_VOCABULARY + len(_MARKS))
    ids = {"image_token_id": IMAGE_ID, "video_token_id": video}
    top = {**ids, "vision_start_token_id": start, "vision_end_token_id": end, "tie_word_embeddings": False, **overrides}
    return transformers.PaddleOCRVLConfig(text_config={**_TEXT, **text}, vision_config={**_VISION, **vision}, **top)


def _save_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    images = PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": 256, "longest_edge": 64 * 80},  # pixels: 4 to 80 tokens
        patch_size=config.vision_config.patch_size,
        merge_size=config.vision_config.spatial_merge_size,
    )
    write_processor(directory, tokenizer, "PaddleOCRVLProcessor", images, image_token=IMAGE_TOKEN)


PADDLEOCR_VL = TinyFamily(
    _build_config, _save_processor, _MARKS, chat_template(image=f"{_MARKS[0]}{IMAGE_TOKEN}{_MARKS[1]}")
)
