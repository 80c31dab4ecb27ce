"""Random InternVL checkpoints: small tiles, up to six of a picture, over a decoder of any kind that InternVL has; in
transformers' layout, and in OpenGVLab's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
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
    set_aside,
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


# ---- OpenGVLab's own layout

_PUBLISHED_NAMES = (  # as transformers saves them -> as OpenGVLab does
    (r"^(vision_tower\.embeddings\.)cls_token", r"\1class_embedding"),
    (r"^(vision_tower\.embeddings\.)patch_embeddings\.projection", r"\1patch_embedding"),
    (r"^(vision_tower\.embeddings\.)position_embeddings", r"\1position_embedding"),
    (r"^(vision_tower\.encoder\.)layer\.", r"\1layers."),
    (r"^(vision_tower\..*)attention\.projection_layer", r"\1attn.proj"),
    (r"^(vision_tower\..*)attention\.", r"\1attn."),
    (r"^(vision_tower\..*)layernorm_before", r"\1norm1"),
    (r"^(vision_tower\..*)layernorm_after", r"\1norm2"),
    (r"^(vision_tower\..*)lambda_", r"\1ls"),
    (r"^vision_tower\.", "vision_model."),
    (r"^multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^multi_modal_projector\.linear_2", "mlp1.3"),
)
_INTERNLM2_NAMES = (
    (r"model\.embed_tokens", "model.tok_embeddings"),
    (r"lm_head", "output"),
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.o_proj", "attention.wo"),
    (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.up_proj", "feed_forward.w3"),
    (r"mlp\.down_proj", "feed_forward.w2"),
)
_QKV = re.compile(r"(.*)(?:self_attn|attention)\.([qkv])_proj(.*)")


def _build_published(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """A model_type internlm2 is Llama's in transformers' layout; config.json gets its name back."""
    kind = text.get("model_type", "internlm2")
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    decoder = {"model_type": "llama", "rope_parameters": dynamic} if kind == "internlm2" else {"model_type": kind}
    config = _build_config({**text, **decoder}, vision, overrides)
    config.published_decoder = kind
    return config


def _save_published(directory: Path, config: Any, tokenizer: Any) -> None:
    """Writes what is saved so far again as OpenGVLab does."""
    origin, tensors = set_aside(directory)
    _save_processor(origin, config, tokenizer)
    tokenizer.save_pretrained(directory)
    internlm2 = config.published_decoder == "internlm2"
    save_file(published_tensors(tensors, config.text_config, internlm2=internlm2), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(_published_config(config, internlm2=internlm2), indent=1))


def published_tensors(tensors: Mapping[str, Tensor], text: Any, *, internlm2: bool) -> dict[str, Tensor]:
    """The tensors of transformers' layout by the names of OpenGVLab's; queries, keys and values of the tower, and of
    InternLM2 by key-value head, in one."""
    renamed: dict[str, Tensor] = {}
    apart: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        in_tower = name.startswith("vision_tower.")
        if (in_tower or internlm2) and (match := _QKV.fullmatch(name)) is not None:
            apart.setdefault((match[1], match[3]), {})[match[2]] = tensor
            continue
        for pattern, new in (*_PUBLISHED_NAMES, *(_INTERNLM2_NAMES if internlm2 and not in_tower else ())):
            name = re.sub(pattern, new, name)
        renamed[name] = tensor
    for (module, leaf), parts in apart.items():
        if module.startswith("vision_tower."):
            place = module.replace("vision_tower.encoder.layer.", "vision_model.encoder.layers.") + "attn.qkv"
            renamed[place + leaf] = torch.cat([parts[name] for name in "qkv"])
        else:
            heads = [parts[name].unflatten(0, (text.num_key_value_heads, -1, text.head_dim)) for name in "qkv"]
            renamed[f"{module}attention.wqkv{leaf}"] = torch.cat(heads, dim=1).flatten(0, 2).contiguous()
    return renamed


def _published_config(config: Any, *, internlm2: bool) -> dict[str, Any]:
    vision, text = config.vision_config, config.text_config.to_dict()
    theta = text.pop("rope_parameters", {}).get("rope_theta", 1e4)
    text |= {
        "rope_theta": theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "model_type": config.published_decoder,
    }
    if internlm2:
        text |= {"architectures": ["InternLM2ForCausalLM"], "bias": text.pop("attention_bias")}
        text |= {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
        text.pop("head_dim")
    return {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "downsample_ratio": config.downsample_ratio,
        "dynamic_image_size": True,
        "force_image_size": vision.image_size[0],
        "llm_config": text,
        "max_dynamic_patch": MAX_TILES,
        "min_dynamic_patch": 1,
        "ps_version": "v2",
        "select_layer": config.vision_feature_layer,
        "template": "internlm2-chat",
        "torch_dtype": "float32",
        "use_thumbnail": True,
        "vision_config": {
            "model_type": "intern_vit_6b",
            "hidden_act": vision.hidden_act,
            "hidden_size": vision.hidden_size,
            "image_size": vision.image_size[0],
            "intermediate_size": vision.intermediate_size,
            "layer_norm_eps": vision.layer_norm_eps,
            "norm_type": vision.norm_type,
            "num_attention_heads": vision.num_attention_heads,
            "num_hidden_layers": vision.num_hidden_layers,
            "patch_size": vision.patch_size[0],
            "qk_normalization": vision.use_qk_norm,
            "qkv_bias": vision.attention_bias,
        },
    }


INTERNVL_CHAT = TinyFamily(
    _build_published, _save_published, extra_tokens=_EXTRA_TOKENS, template=chat_template(image=f"{_CONTEXT}\\n")
)
