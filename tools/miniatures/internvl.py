"""Random InternVL checkpoints: small tiles, up to six of a picture, over a decoder of any kind that InternVL has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tools.miniatures.base import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    TEXT,
    TINY_VOCABULARY,
    TinyFamily,
    chat_template,
    extra_id,
)

MAX_TILES = 6
_CONTEXT = "<IMG_CONTEXT>"
_EXTRA_TOKENS = ("<img>", "</img>", _CONTEXT, "<video>")
_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
    "attention_bias": True,
}


def _build_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """`text` may choose another decoder by its model_type."""
    vocabulary = TINY_VOCABULARY + len(_EXTRA_TOKENS)
    decoder = {"model_type": "qwen2", **TEXT, "vocab_size": vocabulary, **text}
    top: dict[str, Any] = {
        "image_token_id": extra_id(INTERNVL, _CONTEXT),
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        **overrides,
    }
    return transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(**{**_VISION, **vision}),
        text_config=transformers.AutoConfig.for_model(**decoder),
        **top,
    )


def _save_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    """`crop_to_patches` stays off, as published checkpoints have it; their processor turns it on."""
    height, width = config.vision_config.image_size
    GotOcr2ImageProcessorPil(
        size={"height": height, "width": width},
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
        max_patches=MAX_TILES,
    ).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


INTERNVL = TinyFamily(
    _build_config, _save_processor, extra_tokens=_EXTRA_TOKENS, template=chat_template(image=f"{_CONTEXT}\\n")
)
