"""Random checkpoints in Hugging Face's format, made without a hub: miniatures for tests, a larger one for benchmarks.

    python -m tools.miniatures --family llava DIR

Everything is drawn from a seed. Uses transformers to describe and save models, never to run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from tools.miniatures.adapted import ADAPTED
from tools.miniatures.base import MIXTURE, TEXT, TinyFamily, make_checkpoint
from tools.miniatures.ernie4_5_vl import ERNIE4_5_VL_MOE
from tools.miniatures.gemma3 import GEMMA3
from tools.miniatures.glm import GLM4V, GLM4V_MOE, GLM46V, GLM_OCR
from tools.miniatures.internvl import INTERNVL, INTERNVL_CHAT
from tools.miniatures.llava import LLAVA, LLAVA_ORIGINAL
from tools.miniatures.llava_next import LLAVA_NEXT, LLAVA_NEXT_ORIGINAL
from tools.miniatures.llava_siglip import LLAVA_ONEVISION, LLAVA_PHI3
from tools.miniatures.minicpmv import MINICPMV
from tools.miniatures.minicpmv2_6 import MINICPMV_2_6
from tools.miniatures.openpangu import OPENPANGU
from tools.miniatures.paddleocr_vl import PADDLEOCR_VL
from tools.miniatures.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from tools.miniatures.qwen3_vl import QWEN3_5, QWEN3_5_MOE, QWEN3_VL, QWEN3_VL_MOE
from tools.miniatures.smolvlm import IDEFICS3, SMOLVLM


def _text_only(model_type: str) -> TinyFamily:
    default = {**TEXT, **(MIXTURE if "moe" in model_type else {})}
    if model_type == "qwen3_5_moe_text":
        default["shared_expert_intermediate_size"] = MIXTURE["moe_intermediate_size"]
    return TinyFamily(
        lambda text, vision, overrides: transformers.AutoConfig.for_model(
            model_type, **{**default, **text, **vision, **overrides}
        ),
        lambda directory, _config, tokenizer: tokenizer.save_pretrained(directory),
        with_images=False,
    )


TINY: dict[str, TinyFamily] = {
    "llava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "llava_llama": LLAVA_ORIGINAL,
    "llava_llama_anyres": LLAVA_NEXT_ORIGINAL,
    "internvl": INTERNVL,
    "internvl_chat": INTERNVL_CHAT,
    "minicpmv": MINICPMV_2_6,
    "minicpmv4_6": MINICPMV,
    "openpangu_vl": OPENPANGU,
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "gemma3": GEMMA3,
    "smolvlm": SMOLVLM,
    "idefics3": IDEFICS3,
    "glm4v": GLM4V,
    "glm4v_moe": GLM4V_MOE,
    "glm46v": GLM46V,
    "glm_ocr": GLM_OCR,
    "paddleocr_vl": PADDLEOCR_VL,
    "ernie4_5_vl_moe": ERNIE4_5_VL_MOE,
    "llava_onevision": LLAVA_ONEVISION,
    "llava_phi3": LLAVA_PHI3,
    **ADAPTED,
    **{
        model_type: _text_only(model_type)
        for model_type in (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "qwen3_5_text",
            "qwen3_5_moe_text",
            "phi3",
        )
    },
}


def make_tiny(
    family: str,
    directory: Path,
    *,
    seed: int,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> None:
    """Writes a checkpoint of `family` (a key of TINY) with tokenizer and processor.

    `text` and `vision` replace fields of the decoder's and the tower's config, `overrides` those of the top level.
    Norms and biases are random too, so that a mistake in them shows.
    """
    make_checkpoint(
        TINY[family],
        directory,
        seed=seed,
        dtype=dtype,
        max_shard_size=max_shard_size,
        text=text or {},
        vision=vision or {},
        overrides=overrides,
    )


def build_config(
    family: str, *, text: Mapping[str, Any] | None = None, vision: Mapping[str, Any] | None = None, **overrides: Any
) -> Any:
    """The transformers config of a miniature."""
    return TINY[family].build_config(text or {}, vision or {}, overrides)
