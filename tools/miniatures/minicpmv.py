"""Random MiniCPM-V 4.6 checkpoints over plain decoders, or over the released ones' hybrid (qwen3_5_text)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.minicpmv4_6.configuration_minicpmv4_6 import MiniCPMV4_6Config
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

from tools.miniatures.base import IMAGE_TOKEN, TEXT, TINY_VOCABULARY, TinyFamily, chat_template, extra_id

# The picture's opening mark is the word that other families have as its placeholder.
MARKS: dict[str, Any] = {
    "image_start_token": IMAGE_TOKEN,
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
PLACEHOLDERS: dict[str, Any] = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
EXTRA = (*PLACEHOLDERS.values(), *(mark for mark in MARKS.values() if mark != IMAGE_TOKEN))
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 42,
    "patch_size": 4,
}
PROCESSOR = {"max_slice_nums": 4, "scale_resolution": 48}


def _build_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """`overrides` may have a `text_type`, the decoder's."""
    top = {name: value for name, value in overrides.items() if name != "text_type"}
    decoder = {**TEXT, "vocab_size": TINY_VOCABULARY + len(EXTRA), **text}
    return MiniCPMV4_6Config(
        vision_config={**VISION, **vision},
        text_config={"model_type": overrides.get("text_type", "qwen2"), **decoder},
        **{
            "image_token_id": extra_id(MINICPMV, PLACEHOLDERS["image_token"]),
            "video_token_id": extra_id(MINICPMV, PLACEHOLDERS["video_token"]),
            "insert_layer_id": 1,
            **top,
        },
    )


def _save_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    """Writes the files of MiniCPMV4_6Processor, which itself needs torchvision. Its mode makes as many tokens as the
    model."""
    tokenizer.save_pretrained(directory)
    transformers.PreTrainedTokenizerFast.from_pretrained(directory, **MARKS, **PLACEHOLDERS).save_pretrained(directory)
    rounds = config.merger_times + (config.downsample_mode != "4x")
    settings = {**PROCESSOR, "patch_size": config.vision_config.patch_size, "downsample_mode": f"{4**rounds}x"}
    images = MiniCPMV4_6ImageProcessorPil(**settings).to_dict()
    files = {
        "image_processor": images,
        "processor_class": "MiniCPMV4_6Processor",
        "video_processor": {**settings, "max_num_frames": 3, "video_processor_type": "MiniCPMV4_6VideoProcessor"},
    }
    (directory / "processor_config.json").write_text(json.dumps(files, indent=2))


MINICPMV = TinyFamily(
    _build_config,
    _save_processor,
    extra_tokens=EXTRA,
    template=chat_template(PLACEHOLDERS["image_token"], PLACEHOLDERS["video_token"]),
)
