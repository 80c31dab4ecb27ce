"""Random Idefics3 checkpoints: SmolVLM's forerunner, of the same parts, whose own processor is not tied to videos."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from tools.miniatures.base import BOS_ID, EOS_ID, IMAGE_ID, PAD_ID, TEXT, TinyFamily
from tools.miniatures.smolvlm import MARKS, MAX_TILES, VISION

_MARKS = (*MARKS, "<end_of_utterance>")


def _build_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    words = {**TEXT, "vocab_size": TEXT["vocab_size"] + len(_MARKS), "max_position_embeddings": 1024, **text}
    top = {"image_token_id": IMAGE_ID, "scale_factor": 2, "pad_token_id": PAD_ID, **overrides}
    config = transformers.Idefics3Config(
        vision_config={**VISION, **vision}, text_config={"model_type": "llama", **words}, **top
    )
    config.bos_token_id, config.eos_token_id = BOS_ID, EOS_ID
    return config


def _save_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    side = config.vision_config.image_size
    transformers.Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": MAX_TILES * side}, max_image_size={"longest_edge": side}
        ),
        tokenizer=tokenizer,
        image_seq_len=(side // config.vision_config.patch_size // config.scale_factor) ** 2,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(directory)


IDEFICS3 = TinyFamily(_build_config, _save_processor, extra_tokens=_MARKS)
