"""Random checkpoints of SmolVLM and its forerunner Idefics3: a SigLIP tower over tiles, pixel shuffle, a Llama decoder.

The file of SmolVLM's processor is written by hand, because its class insists on a video processor, which needs
torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tools.miniatures.base import BOS_ID, EOS_ID, IMAGE_ID, PAD_ID, TEXT, TinyFamily

SIDE = 28  # of a tile, pixels
MAX_TILES = 4  # along the longer edge
MARKS = (
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, MAX_TILES + 1) for column in range(1, MAX_TILES + 1)),
)
VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 7,
}


IDEFICS3_MARKS = (*MARKS, "<end_of_utterance>")


def _build_config(
    config_class: Any, num_marks: int, text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Any:
    words = {**TEXT, "vocab_size": TEXT["vocab_size"] + num_marks, "max_position_embeddings": 1024, **text}
    top = {"image_token_id": IMAGE_ID, "scale_factor": 2, "pad_token_id": PAD_ID, **overrides}
    config = config_class(vision_config={**VISION, **vision}, text_config={"model_type": "llama", **words}, **top)
    config.bos_token_id, config.eos_token_id = BOS_ID, EOS_ID
    return config


def _save_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    side = config.vision_config.image_size
    images = SmolVLMImageProcessorPil(
        size={"longest_edge": MAX_TILES * side}, max_image_size={"longest_edge": side}
    ).to_dict()
    rows = (side // config.vision_config.patch_size // config.scale_factor) ** 2
    values = {"processor_class": "SmolVLMProcessor", "image_processor": images, "image_seq_len": rows}
    tokenizer.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps(values, default=str))


def _save_idefics3_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    side = config.vision_config.image_size
    transformers.Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": MAX_TILES * side}, max_image_size={"longest_edge": side}
        ),
        tokenizer=tokenizer,
        image_seq_len=(side // config.vision_config.patch_size // config.scale_factor) ** 2,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(directory)


SMOLVLM = TinyFamily(
    partial(_build_config, transformers.SmolVLMConfig, len(MARKS)), _save_processor, extra_tokens=MARKS
)
IDEFICS3 = TinyFamily(
    partial(_build_config, transformers.Idefics3Config, len(IDEFICS3_MARKS)),
    _save_idefics3_processor,
    extra_tokens=IDEFICS3_MARKS,
)
