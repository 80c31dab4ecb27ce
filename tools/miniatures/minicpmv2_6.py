"""Random MiniCPM-V 2.6 checkpoints in the published layout, which transformers has no class for: its Qwen2 decoder and
SigLIP tower, and a resampler around torch's attention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import save_torch_model
from torch import empty, nn

from tools.miniatures.base import IMAGE_TOKEN, TEXT, TINY_VOCABULARY, TinyFamily, chat_template

PLACEHOLDER = "<unk>"
MARKS = {
    "im_start": IMAGE_TOKEN,
    "im_end": "</image>",
    "slice_start": "<slice>",
    "slice_end": "</slice>",
    "im_id_start": "<image_id>",
    "im_id_end": "</image_id>",
    "unk": PLACEHOLDER,
}
EXTRA = tuple(mark for mark in MARKS.values() if mark != IMAGE_TOKEN)
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 42,
    "patch_size": 4,
    "model_type": "siglip_vision_model",
}
# The resampler's heads have 128 values each.
DECODER = {"hidden_size": 256, "num_hidden_layers": 2, "head_dim": None}
OWN = {"version": 2.6, "query_num": 16, "drop_vision_last_layer": False, "use_image_id": True, "scale_resolution": 48}


class PublishedConfig(transformers.Qwen2Config):
    """The decoder's fields at the top, as published."""

    model_type = "minicpmv"


class Resampler(nn.Module):
    def __init__(self, num_queries: int, width: int, num_in: int) -> None:
        super().__init__()
        self.query = nn.Parameter(empty(num_queries, width))
        self.kv_proj = nn.Linear(num_in, width, bias=False) if num_in != width else nn.Identity()
        self.attn = nn.MultiheadAttention(width, width // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(empty(width, width))


class PublishedModel(nn.Module):
    """The parts of a checkpoint by their published names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        tower = transformers.SiglipVisionConfig(**config.vision_config)
        tower.num_hidden_layers -= config.drop_vision_last_layer
        self.config = config
        self.llm = transformers.Qwen2ForCausalLM(config)
        self.vpm = transformers.SiglipVisionModel(tower)
        del self.vpm.head
        self.resampler = Resampler(config.query_num, config.hidden_size, tower.hidden_size)
        self.generation_config = self.llm.generation_config

    def get_output_embeddings(self) -> Any:
        return self.llm.get_output_embeddings()

    def get_input_embeddings(self) -> Any:
        return self.llm.get_input_embeddings()

    def save_pretrained(self, directory: Path, max_shard_size: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_torch_model(self, directory, max_shard_size=max_shard_size)
        self.config.save_pretrained(directory)


def _build_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    decoder = {**TEXT, **DECODER, "vocab_size": TINY_VOCABULARY + len(EXTRA), **text}
    top = {**OWN, "architectures": ["MiniCPMV"], **overrides}
    fields = {name: value for name, value in {**decoder, **top}.items() if value is not None}
    return PublishedConfig(**{"vision_config": {**VISION, **vision}, **fields})


def _save_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    tokenizer.save_pretrained(directory)
    settings = {
        "image_processor_type": "MiniCPMVImageProcessor",
        "processor_class": "MiniCPMVProcessor",
        "max_slice_nums": 4,
        "scale_resolution": config.scale_resolution,
        "patch_size": config.vision_config["patch_size"],
        "use_image_id": config.use_image_id,
        "image_feature_size": config.query_num,
        "slice_mode": True,
        "norm_mean": [0.5, 0.5, 0.5],
        "norm_std": [0.5, 0.5, 0.5],
        "version": 2.6,
        **MARKS,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))


MINICPMV_2_6 = TinyFamily(
    _build_config,
    _save_processor,
    extra_tokens=EXTRA,
    template=chat_template(PLACEHOLDER),
    build_model=PublishedModel,
)
