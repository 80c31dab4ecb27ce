"""Random LLaVA-1.5 checkpoints: a miniature, and three for benchmarks."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from tools.miniatures.base import (
    BOS_ID,
    EOS_ID,
    GPTQ_GROUP,
    IMAGE_ID,
    IMAGE_TOKEN,
    PAD_ID,
    TEXT,
    TinyFamily,
    save_processor,
    set_aside,
    write_random,
)

VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
    "projection_dim": 48,
}
_BENCH_TEXT = {
    "vocab_size": 32064,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
_BENCH_VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
_SMALL_TEXT = {
    **_BENCH_TEXT,
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_SMALL_VISION = {
    **_BENCH_VISION,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 224,
    "projection_dim": 384,
}
_LARGE_TEXT = {
    **_BENCH_TEXT,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
}
_BENCH_SIZES = {
    "0.5b": (_BENCH_TEXT, _BENCH_VISION),
    "50m": (_SMALL_TEXT, _SMALL_VISION),
    "7b": (_LARGE_TEXT, _BENCH_VISION),
}
BENCH_SIZES = tuple(_BENCH_SIZES)
BF16, GPTQ, Q4_K = FORMS = ("bf16", "gptq", "gguf-q4_k")
_QUANTIZED = re.compile(r"language_model\..*_proj\.weight")
_SAVED_NAMES = (  # in memory -> on disk
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.vision_tower.", "vision_tower."),
)


def _build_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    top: dict[str, Any] = {
        "image_token_index": IMAGE_ID,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        **overrides,
    }
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**{**VISION, **vision}),
        text_config=transformers.LlamaConfig(**{**TEXT, **text}),
        **top,
    )


def _save_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    side = config.vision_config.image_size
    transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side}),
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        image_token=IMAGE_TOKEN,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(directory)


LLAVA = TinyFamily(_build_config, _save_processor)

# ---- liuhaotian's own layout

TOWER = "tiny-clip"  # the tower's name, and the folder with its config.json
_ORIGINAL_NAMES = (  # as transformers saves them -> as liuhaotian does
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("multi_modal_projector.linear_1.", "model.mm_projector.0."),
    ("multi_modal_projector.linear_2.", "model.mm_projector.2."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("vision_tower.", "model.vision_tower.vision_tower.vision_model."),
    ("image_newline", "model.image_newline"),
)


def _save_padded(directory: Path, config: Any, tokenizer: Any) -> None:
    side = config.vision_config.image_size
    images = LlavaImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}, do_pad=True
    )
    images.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def save_original(directory: Path, config: Any, tokenizer: Any, **named: Any) -> None:
    """Writes what is saved so far again as liuhaotian does; `named` are further fields of config.json."""
    origin, tensors = set_aside(directory)
    save = _save_padded if named["image_aspect_ratio"] == "pad" else named.pop("save")
    save(origin, config, tokenizer)
    tokenizer.save_pretrained(directory)
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in _ORIGINAL_NAMES:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        renamed[name] = tensor
    save_file(renamed, directory / "model.safetensors")
    feature = {"default": "patch", "full": "cls_patch"}[config.vision_feature_select_strategy]
    text = config.text_config.to_dict() | {"architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava_llama"}
    text |= {"mm_projector_type": "mlp2x_gelu", "mm_vision_tower": f"someone/{TOWER}", "torch_dtype": "float32"}
    text |= {"mm_vision_select_layer": config.vision_feature_layer, "mm_vision_select_feature": feature, **named}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    (directory / "config.json").write_text(json.dumps(text))
    (directory / TOWER).mkdir()
    (directory / TOWER / "config.json").write_text(json.dumps(config.vision_config.to_dict()))


LLAVA_ORIGINAL = TinyFamily(
    _build_config, lambda *saved: save_original(*saved, image_aspect_ratio="pad", image_grid_pinpoints=None)
)

# ---- larger ones for benchmarks


def make_bench_checkpoint(directory: Path, *, seed: int = 0, size: str = "0.5b", form: str = BF16) -> int:
    """LLaVA; returns the number of parameters. Of about 0.5 billion: a CLIP-L/336 tower over a decoder of 0.2. Of about
    7 billion: the same tower over one of 6.7. Of about 50 million: a CLIP-S/224 tower over one of 27, for loads of many
    requests on a few cores. `form`: all in bfloat16, or the decoder's layers in GPTQ, or the decoder alone in GGUF.

    Written tensor by tensor: the model is described on the meta device and never exists in memory.
    """
    config = _build_config(*_BENCH_SIZES[size], {})
    with torch.device("meta"):
        described = transformers.LlavaForConditionalGeneration(config)
    shapes = {_saved_name(name): tuple(tensor.shape) for name, tensor in described.named_parameters()}
    num_parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    directory.mkdir(parents=True, exist_ok=True)
    if form == Q4_K:
        from tools.miniatures.gguf_text import write_random_text  # `gguf` is needed for this alone

        with tempfile.TemporaryDirectory() as described_in:
            _describe(Path(described_in), config)
            write_random_text(directory / "model.gguf", Path(described_in), shapes, seed)
        return num_parameters
    if form == GPTQ:
        settings = {"bits": 4, "group_size": GPTQ_GROUP, "desc_act": False, "sym": True}
        config.quantization_config = {"quant_method": "gptq", **settings}
    _describe(directory, config)
    in_4_bits = [name for name in shapes if form == GPTQ and _QUANTIZED.match(name)]
    write_random(directory / "model.safetensors", shapes, seed, in_4_bits)
    return num_parameters


def _describe(directory: Path, config: Any) -> None:
    """Writes the files besides the weights."""
    config.architectures = ["LlavaForConditionalGeneration"]
    config.dtype = "bfloat16"
    config.save_pretrained(directory)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(directory)
    save_processor(directory, config, LLAVA)


def _saved_name(name: str) -> str:
    for in_memory, on_disk in _SAVED_NAMES:
        if name.startswith(in_memory):
            return on_disk + name.removeprefix(in_memory)
    return name
