"""Random LLaVA-NeXT checkpoints: the tower and tokens of the LLaVA miniature, five canvases, two kinds of decoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from tools.miniatures.base import BOS_ID, EOS_ID, IMAGE_ID, IMAGE_TOKEN, PAD_ID, TEXT, TinyFamily
from tools.miniatures.llava import VISION, save_original

_TILES = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))  # rows and columns of each canvas


def _build_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """`text` may choose another decoder by its model_type."""
    tower = {**VISION, **vision}
    side = tower["image_size"]
    decoder = {"model_type": "llama", **TEXT, **text}
    top: dict[str, Any] = {
        "image_token_index": IMAGE_ID,
        "vision_feature_layer": -2,
        "image_grid_pinpoints": [[rows * side, columns * side] for rows, columns in _TILES],
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        **overrides,
    }
    return transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**tower),
        text_config=transformers.AutoConfig.for_model(**decoder),
        **top,
    )


def _save_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    side = config.vision_config.image_size
    transformers.LlavaNextProcessor(
        image_processor=LlavaNextImageProcessorPil(
            size={"shortest_edge": side},
            crop_size={"height": side, "width": side},
            image_grid_pinpoints=config.image_grid_pinpoints,
        ),
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        image_token=IMAGE_TOKEN,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(directory)


LLAVA_NEXT = TinyFamily(_build_config, _save_processor)


def _save_original(directory: Path, config: Any, tokenizer: Any) -> None:
    canvases = [[width, height] for height, width in config.image_grid_pinpoints]
    fields = {"image_aspect_ratio": "anyres", "mm_patch_merge_type": "spatial_unpad", "image_grid_pinpoints": canvases}
    save_original(directory, config, tokenizer, save=_save_processor, **fields)


LLAVA_NEXT_ORIGINAL = TinyFamily(_build_config, _save_original)
