"""Random miniatures of GLM-4.1V, GLM-4.6V and GLM-OCR: patches of 4 pixels, M-RoPE over half of a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

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
    write_processor,
)

_MARKS = ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|video|>")
_TEXT = {
    **{name: value for name, value in TEXT.items() if name not in ("bos_token_id", "head_dim")},
    "vocab_size": TINY_VOCABULARY + len(_MARKS),
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 2],
    },
}
_EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 48,
    "num_heads": 3,
    "image_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "intermediate_size": 80,
}
_PICTURE_SIZE = {"shortest_edge": 512, "longest_edge": 2 * 64 * 80}  # pixels of two frames: 4 to 80 tokens


def _builder(
    config_class: Any, **more: Any
) -> Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], Any]:
    def build(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
        settings = {**_TEXT, **more, **text}
        tower = {**_VISION, "out_hidden_size": settings["hidden_size"], **vision}
        names = ("image_start", "image_end", "video_start", "video_end", "video")
        ids = {f"{name}_token_id": TINY_VOCABULARY + index for index, name in enumerate(names)}
        top = {**ids, "image_token_id": IMAGE_ID, **overrides}
        config = config_class(text_config=settings, vision_config=tower, **top)
        config.bos_token_id, config.eos_token_id, config.pad_token_id = BOS_ID, EOS_ID, PAD_ID
        return config

    return build


def _writer(processor_class: str, images_class: Any) -> Callable[[Path, Any, Any], None]:
    def write(directory: Path, config: Any, tokenizer: Any) -> None:
        images = images_class(
            size=_PICTURE_SIZE,
            patch_size=config.vision_config.patch_size,
            merge_size=config.vision_config.spatial_merge_size,
            temporal_patch_size=config.vision_config.temporal_patch_size,
        )
        write_processor(directory, tokenizer, processor_class, images, image_token=IMAGE_TOKEN, video_token=_MARKS[-1])

    return write


_TEMPLATE = chat_template(image=f"{_MARKS[0]}{IMAGE_TOKEN}{_MARKS[1]}")
_write_46v = _writer("Glm46VProcessor", Glm46VImageProcessorPil)  # which GLM-OCR has too
GLM4V = TinyFamily(
    _builder(transformers.Glm4vConfig), _writer("Glm4vProcessor", Glm4vImageProcessorPil), _MARKS, _TEMPLATE
)
GLM4V_MOE = TinyFamily(
    _builder(transformers.Glm4vMoeConfig, **_EXPERTS),
    _writer("Glm4vProcessor", Glm4vImageProcessorPil),
    _MARKS,
    _TEMPLATE,
)
GLM46V = TinyFamily(_builder(transformers.Glm46VConfig), _write_46v, _MARKS, _TEMPLATE)
GLM_OCR = TinyFamily(_builder(transformers.GlmOcrConfig), _write_46v, _MARKS, _TEMPLATE)
