"""GGUF files of miniatures in the layout of llama.cpp's convert_hf_to_gguf.py (and, for LLaVA's tower, of its
convert_image_encoder_to_gguf.py), written with the `gguf` package.

Changes of layout, and names in tools/miniatures/gguf_text.py, are spelled out once more, so that the engine's table has
something to be wrong against. A matrix is stored as `kind`; the others in float32, as the converter does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_engine.models.loading.safetensors_checkpoint import SafetensorsCheckpoint

gguf = pytest.importorskip("gguf", reason="writes the files of these tests")
from tools.miniatures.gguf_text import Kind, finish, renamed, text_name, text_writer  # noqa: E402, which needs it

PROJECTORS = {
    **{"llava": "mlp", "internvl": "internvl", "qwen2_vl": "qwen2vl_merger"},
    **{"qwen2_5_vl": "qwen2.5vl_merger", "qwen3_vl": "qwen3vl_merger", "qwen3_5": "qwen3vl_merger"},
    **{"qwen3_vl_moe": "qwen3vl_merger", "qwen3_5_moe": "qwen3vl_merger"},
}
_FUSED = (
    "qwen3_vl",
    "qwen3_5",
    "qwen3_vl_moe",
    "qwen3_5_moe",
)  # queries, keys and values of their towers stay one matrix
_QWEN_TOWER = [
    (r"blocks\.(\d+)\.attn\.qkv\.(\w+)", r"v.blk.\1.attn_qkv.\2"),
    (r"blocks\.(\d+)\.attn\.proj\.(\w+)", r"v.blk.\1.attn_out.\2"),
    (r"blocks\.(\d+)\.norm([12])\.(\w+)", r"v.blk.\1.ln\2.\3"),
    (r"blocks\.(\d+)\.mlp\.(?:linear_)?fc1\.(\w+)", r"v.blk.\1.ffn_up.\2"),
    (r"blocks\.(\d+)\.mlp\.(?:linear_)?fc2\.(\w+)", r"v.blk.\1.ffn_down.\2"),
    (r"blocks\.(\d+)\.mlp\.(gate|up|down)_proj\.(\w+)", r"v.blk.\1.ffn_\2.\3"),
    (r"merger\.(?:ln_q|norm)\.(\w+)", r"v.post_ln.\1"),
    (r"merger\.(?:mlp\.0|linear_fc1)\.(\w+)", r"mm.0.\1"),
    (r"merger\.(?:mlp\.2|linear_fc2)\.(\w+)", r"mm.2.\1"),
    (r"patch_embed\.proj\.(\w+)", r"v.patch_embd.\1"),
    (r"pos_embed\.weight", "v.position_embd.weight"),
]
_CLIP_TOWER = [  # as the older script calls them: the two matrices of an MLP the other way round
    (r"vision_tower\.embeddings\.class_embedding", "v.class_embd"),
    (r"vision_tower\.embeddings\.patch_embedding\.weight", "v.patch_embd.weight"),
    (r"vision_tower\.embeddings\.position_embedding\.weight", "v.position_embd.weight"),
    (r"vision_tower\.pre_layrnorm\.(\w+)", r"v.pre_ln.\1"),
    (r"vision_tower\.encoder\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(\w+)", r"v.blk.\1.attn_\2.\3"),
    (r"vision_tower\.encoder\.layers\.(\d+)\.self_attn\.out_proj\.(\w+)", r"v.blk.\1.attn_out.\2"),
    (r"vision_tower\.encoder\.layers\.(\d+)\.layer_norm([12])\.(\w+)", r"v.blk.\1.ln\2.\3"),
    (r"vision_tower\.encoder\.layers\.(\d+)\.mlp\.fc1\.(\w+)", r"v.blk.\1.ffn_down.\2"),
    (r"vision_tower\.encoder\.layers\.(\d+)\.mlp\.fc2\.(\w+)", r"v.blk.\1.ffn_up.\2"),
    (r"multi_modal_projector\.linear_1\.(\w+)", r"mm.0.\1"),
    (r"multi_modal_projector\.linear_2\.(\w+)", r"mm.2.\1"),
]
_INTERN_TOWER = [  # layer scales and positions get .weight, and dimensions of 1 stay
    (r"vision_tower\.embeddings\.cls_token", "v.class_embd"),
    (r"vision_tower\.embeddings\.position_embeddings", "v.position_embd.weight"),
    (r"vision_tower\.embeddings\.patch_embeddings\.projection\.(\w+)", r"v.patch_embd.\1"),
    (r"vision_tower\.encoder\.layer\.(\d+)\.attention\.([qkv])_proj\.(\w+)", r"v.blk.\1.attn_\2.\3"),
    (r"vision_tower\.encoder\.layer\.(\d+)\.attention\.([qk])_norm\.weight", r"v.blk.\1.attn_\2_norm.weight"),
    (r"vision_tower\.encoder\.layer\.(\d+)\.attention\.projection_layer\.(\w+)", r"v.blk.\1.attn_out.\2"),
    (r"vision_tower\.encoder\.layer\.(\d+)\.layernorm_before\.(\w+)", r"v.blk.\1.ln1.\2"),
    (r"vision_tower\.encoder\.layer\.(\d+)\.layernorm_after\.(\w+)", r"v.blk.\1.ln2.\2"),
    (r"vision_tower\.encoder\.layer\.(\d+)\.lambda_([12])", r"v.blk.\1.ls\2.weight"),
    (r"vision_tower\.encoder\.layer\.(\d+)\.mlp\.fc1\.(\w+)", r"v.blk.\1.ffn_up.\2"),
    (r"vision_tower\.encoder\.layer\.(\d+)\.mlp\.fc2\.(\w+)", r"v.blk.\1.ffn_down.\2"),
    (r"multi_modal_projector\.layer_norm\.(\w+)", r"mm.model.mlp.0.\1"),
    (r"multi_modal_projector\.linear_1\.(\w+)", r"mm.model.mlp.1.\1"),
    (r"multi_modal_projector\.linear_2\.(\w+)", r"mm.model.mlp.3.\1"),
]


def write_gguf(model_dir: Path, out: Path, kind: Kind = "F32") -> tuple[Path, Path | None]:
    """The text model and, of a model with pictures, the mmproj."""
    config = json.loads((model_dir / "config.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    with SafetensorsCheckpoint(model_dir) as checkpoint:
        tensors = with_experts({name: checkpoint.read(name) for name in checkpoint.entries})
    text = _write_text(out / "model.gguf", config, model_dir, tensors, kind)
    if config["model_type"] not in PROJECTORS:
        return text, None
    return text, _write_tower(out / "mmproj-model.gguf", config, model_dir, tensors, kind)


def with_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, all experts of a layer in one: experts.gate_proj [E, F, C], up_proj and down_proj [E, C, F]."""
    found: dict[str, Tensor] = {}
    single: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if expert := re.fullmatch(r"(.*experts\.)(\d+)\.(\w+)\.weight", name):
            single.setdefault(expert[1] + expert[3], {})[int(expert[2])] = tensor
        elif name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            found |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            found[name] = tensor
    return found | {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in single.items()}


def add_tensor(writer: Any, name: str, tensor: Tensor, kind: Kind) -> None:
    """Matrices as `kind`, where their rows are whole blocks; kernels of convolutions and vectors in float32."""
    array = tensor.float().contiguous().numpy()
    number = gguf.GGMLQuantizationType[kind]
    fits = (array.ndim == 2 or "_exps." in name) and array.shape[-1] % gguf.GGML_QUANT_SIZES[number][0] == 0
    exact = ("position_embd", "ffn_gate_inp", "conv1d")
    if not fits or kind == "F32" or any(part in name for part in exact):
        writer.add_tensor(name, array)
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, number), raw_dtype=number)


def rotated(tensor: Tensor, heads: int) -> Tensor:
    """The converter's `permute`: of a head's rows, those that turn together come to lie side by side."""
    shape = tensor.shape
    return tensor.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def of_delta_nets(name: str, tensor: Tensor, text: dict[str, Any]) -> Tensor:
    """The converter's changes by the name in GGUF: value heads from (key head, one of it) to (one of it, key head)."""
    if name.endswith("norm.weight") and "ssm_norm" not in name:
        return tensor + 1
    tensor = -tensor.exp() if "ssm_a" in name and "alpha" not in name else tensor
    tensor = tensor.squeeze(1) if "conv1d" in name else tensor
    key_heads, value_heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    dim = text["linear_value_head_dim"]
    if "ssm_out" in name:
        return tensor.unflatten(1, (key_heads, -1, dim)).transpose(1, 2).flatten(1)
    if not any(part in name for part in ("attn_qkv", "attn_gate", "ssm_a", "ssm_beta", "ssm_dt", "conv1d")):
        return tensor
    size = dim if any(part in name for part in ("attn_qkv", "attn_gate", "conv1d")) else 1
    first, values = tensor[: -size * value_heads], tensor[-size * value_heads :]
    values = values.unflatten(0, (key_heads, -1, size)).transpose(0, 1).flatten(0, 2)
    return torch.cat([first, values])


def _write_text(path: Path, config: dict[str, Any], model_dir: Path, tensors: dict[str, Tensor], kind: Kind) -> Path:
    text = config.get("text_config", config)
    writer = text_writer(path, config, model_dir)
    for name, tensor in tensors.items():
        new = text_name(name)
        if new is None:
            continue
        for part, heads in ((".attn_q.", "num_attention_heads"), (".attn_k.", "num_key_value_heads")):
            if writer.arch == "llama" and part in new:
                tensor = rotated(tensor, text[heads])
        if writer.arch.startswith("qwen35"):
            new, tensor = new.replace("ffn_norm", "post_attention_norm"), of_delta_nets(new, tensor, text)
        add_tensor(writer, new, tensor, kind)
    finish(writer)
    return path


def _write_tower(path: Path, config: dict[str, Any], model_dir: Path, tensors: dict[str, Tensor], kind: Kind) -> Path:
    tower, family = config["vision_config"], config["model_type"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", PROJECTORS[family])
    patch_size = tower["patch_size"]
    writer.add_uint32("clip.vision.patch_size", patch_size[0] if isinstance(patch_size, list) else patch_size)
    files = (model_dir / "preprocessor_config.json", model_dir / "processor_config.json")
    settings = json.loads(next(file for file in files if file.is_file()).read_text())
    settings = settings.get("image_processor", settings)
    writer.add_array("clip.vision.image_mean", settings["image_mean"])
    writer.add_array("clip.vision.image_std", settings["image_std"])
    if family == "llava":
        _describe_clip(writer, config)
        found = _clip_tensors(tensors, config)
    elif family == "internvl":
        _describe_intern(writer, config, settings["max_patches"])
        found = ((new, tensor) for name, tensor in tensors.items() if (new := renamed(name, _INTERN_TOWER)))
    else:
        _describe_qwen(writer, config)
        found = _qwen_tensors(tensors, config)
    for name, tensor in found:
        add_tensor(writer, name, tensor, kind)
    finish(writer)
    return path


def _describe_clip(writer: Any, config: dict[str, Any]) -> None:
    tower, layer = config["vision_config"], _feature_layer(config)
    writer.add_uint32("clip.vision.image_size", tower["image_size"])
    writer.add_uint32("clip.vision.embedding_length", tower["hidden_size"])
    writer.add_uint32("clip.vision.feed_forward_length", tower["intermediate_size"])
    writer.add_uint32("clip.vision.attention.head_count", tower["num_attention_heads"])
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", tower["layer_norm_eps"])
    writer.add_uint32("clip.vision.block_count", layer)
    writer.add_array("clip.vision.feature_layer", [layer])
    writer.add_bool("clip.use_gelu", tower["hidden_act"] == "gelu")


def _feature_layer(config: dict[str, Any]) -> int:
    return config["vision_config"]["num_hidden_layers"] + 1 + config["vision_feature_layer"]


def _clip_tensors(tensors: dict[str, Tensor], config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        new = renamed(name, _CLIP_TOWER)
        layer = re.match(r"v\.blk\.(\d+)", new or "")
        if new is not None and (layer is None or int(layer[1]) < _feature_layer(config)):
            yield new, tensor


def _describe_intern(writer: Any, config: dict[str, Any], max_tiles: int) -> None:
    tower = config["vision_config"]
    writer.add_uint32("clip.vision.projection_dim", config["text_config"]["hidden_size"])
    writer.add_uint32("clip.vision.image_size", tower["image_size"][0])
    writer.add_uint32("clip.vision.embedding_length", tower["hidden_size"])
    writer.add_uint32("clip.vision.feed_forward_length", tower["intermediate_size"])
    writer.add_uint32("clip.vision.block_count", tower["num_hidden_layers"])
    writer.add_uint32("clip.vision.attention.head_count", tower["num_attention_heads"])
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", tower["layer_norm_eps"])
    writer.add_bool("clip.use_gelu", tower["hidden_act"] == "gelu")
    writer.add_uint32("clip.vision.projector.scale_factor", int(1.0 / config["downsample_ratio"]))
    writer.add_uint32("clip.vision.preproc_max_tiles", max_tiles)


def _describe_qwen(writer: Any, config: dict[str, Any]) -> None:
    tower = config["vision_config"]
    writer.add_uint32("clip.vision.projection_dim", config["text_config"]["hidden_size"])
    writer.add_uint32("clip.vision.embedding_length", tower.get("embed_dim") or tower["hidden_size"])
    writer.add_uint32("clip.vision.feed_forward_length", tower.get("intermediate_size") or tower["hidden_size"])
    writer.add_uint32("clip.vision.block_count", tower["depth"])
    writer.add_uint32("clip.vision.attention.head_count", tower["num_heads"])
    if config["model_type"] == "qwen2_5_vl":
        writer.add_bool("clip.use_silu", True)
        writer.add_uint32("clip.vision.n_wa_pattern", tower["fullatt_block_indexes"][0] + 1)
    if config["model_type"] in _FUSED:
        writer.add_bool("clip.use_gelu", True)
        writer.add_uint32("clip.vision.spatial_merge_size", tower["spatial_merge_size"])
        deep = [index in tower.get("deepstack_visual_indexes", ()) for index in range(tower["depth"])]
        writer.add_array("clip.vision.is_deepstack_layers", deep)


def _qwen_tensors(tensors: dict[str, Tensor], config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        stem = re.sub(r"^(?:model\.)?visual\.", "", name)
        deep = re.fullmatch(r"deepstack_merger_list\.(\d+)\.(norm|linear_fc1|linear_fc2)\.(\w+)", stem)
        new = renamed(stem, _QWEN_TOWER) if stem != name else None
        if deep:
            layer = config["vision_config"]["deepstack_visual_indexes"][int(deep[1])]
            yield f"v.deepstack.{layer}.{deep[2].removeprefix('linear_')}.{deep[3]}", tensor
        elif new is not None and ".attn_qkv." in new and config["model_type"] not in _FUSED:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                yield new.replace("qkv", part), rows
        elif new == "v.patch_embd.weight":
            yield new, tensor[:, :, 0]
            yield f"{new}.1", tensor[:, :, 1]
        elif new is not None:
            yield new, tensor
