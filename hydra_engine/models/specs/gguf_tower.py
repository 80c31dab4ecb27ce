"""Reads the settings of an mmproj file, the vision tower and projector of a GGUF model, and returns the vision_config
of config.json and the preprocessor_config.json of the same model in a Hugging Face directory.

Values that the file does not have are those of the family's published checkpoints. Does not know text models.
"""

from __future__ import annotations

from typing import Any

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.fields import MAX_LAYERS, Fields
from hydra_engine.models.specs.gguf_file import GgufHeader

# Pixels of a picture in the published checkpoints.
_PICTURE_PIXELS = {
    "qwen2_vl": (56 * 56, 3584 * 3584),
    "qwen2_5_vl": (56 * 56, 3584 * 3584),
    "qwen3_vl": (1 << 16, 1 << 24),
}
_LAST = ("mm.2.weight", "mm.model.mlp.3.weight")  # of the projector


def describe_tower(mmproj: GgufHeader, model_type: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tower's part of config.json, and preprocessor_config.json. Raises CheckpointError."""
    settings = mmproj.settings
    colours = {name: _colours(settings, f"clip.vision.{name}") for name in ("image_mean", "image_std")}
    if model_type == "llava":
        side = settings.integer("clip.vision.image_size")
        layers = settings.get("clip.vision.feature_layer") or [settings.integer("clip.vision.block_count")]
        top = {"vision_feature_layer": layers, "vision_feature_select_strategy": "default"}
        pictures: dict[str, Any] = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        return top | {"vision_config": _llava_tower(mmproj)}, pictures | colours
    if model_type == "internvl":
        side = settings.integer("clip.vision.image_size")
        top = {"downsample_ratio": 1 / settings.integer("clip.vision.projector.scale_factor")}
        pictures = {
            "size": {"height": side, "width": side},
            "min_patches": settings.integer("clip.vision.preproc_min_tiles", 1),  # older files do not say
            "max_patches": settings.integer("clip.vision.preproc_max_tiles", 12),
        }
        return top | {"vision_config": _intern_tower(mmproj)}, pictures | colours
    return {"vision_config": _qwen_tower(mmproj, model_type)}, _qwen_pictures(settings, model_type) | colours


def check_width(mmproj: GgufHeader, hidden_size: int) -> None:
    """Raises CheckpointError if the projector's output width is not the decoder's hidden size."""
    last = next((mmproj.tensors[name] for name in _LAST if name in mmproj.tensors), None)
    if last is not None and last.shape[0] != hidden_size:
        raise CheckpointError(
            f"{mmproj.path.name} makes features of {last.shape[0]} numbers, and the text model takes {hidden_size}; "
            f"give the mmproj of the same model"
        )


def num_layers(header: GgufHeader, name: str, tensor: str, besides: int = 0) -> int:
    """Returns the number of layers, less `besides` layers of another kind at the end. Raises CheckpointError if the
    last one has no tensor named `tensor`, so that no layers without weights are built."""
    count = header.settings.integer(name) - besides
    if tensor.format(count - 1) not in header.tensors:
        raise CheckpointError(
            f"{header.path.name} has no {tensor.format(count - 1)}, but {name} is {count + besides}; take a whole file"
        )
    if count > MAX_LAYERS:
        raise header.settings.wrong_value(name, f"at most {MAX_LAYERS + besides}")
    return count


def _llava_tower(mmproj: GgufHeader) -> dict[str, Any]:
    return _plain_tower(mmproj) | {"model_type": "clip_vision_model"}


def _plain_tower(mmproj: GgufHeader) -> dict[str, Any]:
    tower = mmproj.settings
    return _tower(mmproj) | {
        "intermediate_size": _inner_size(mmproj),
        "hidden_act": _activation(tower),
        "layer_norm_eps": tower.number("clip.vision.attention.layer_norm_epsilon", 1e-5),
        "image_size": tower.integer("clip.vision.image_size"),
        "num_hidden_layers": num_layers(mmproj, "clip.vision.block_count", "v.blk.{}.ln1.weight"),
        "num_attention_heads": tower.integer("clip.vision.attention.head_count"),
    }


def _intern_tower(mmproj: GgufHeader) -> dict[str, Any]:
    """Returns the settings of either InternViT: 300M has biases, 6B has RMS norms, also of queries and keys. Tensors
    distinguish them."""
    held = mmproj.tensors
    return _plain_tower(mmproj) | {
        "model_type": "internvl_vision",
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in held else "rms_norm",
        "attention_bias": "v.blk.0.attn_q.bias" in held,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in held,
    }


def _qwen_tower(mmproj: GgufHeader, model_type: str) -> dict[str, Any]:
    tower = mmproj.settings
    width = tower.integer("clip.vision.projection_dim")
    config = _tower(mmproj) | {
        "depth": num_layers(mmproj, "clip.vision.block_count", "v.blk.{}.ln1.weight"),
        "num_heads": tower.integer("clip.vision.attention.head_count"),
        "spatial_merge_size": tower.integer("clip.vision.spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "out_hidden_size": width,
    }
    inner = _inner_size(mmproj)
    if model_type == "qwen2_vl":
        size = config.pop("hidden_size")
        return config | {
            "embed_dim": size,
            "mlp_ratio": inner / size,
            "hidden_size": width,
            "hidden_act": _activation(tower),
        }
    config["intermediate_size"] = inner
    if model_type == "qwen2_5_vl":
        period = tower.integer("clip.vision.n_wa_pattern")
        full = list(range(period - 1, config["depth"], period))
        return config | {
            "hidden_act": _activation(tower),
            "fullatt_block_indexes": full,
            "window_size": tower.integer("clip.vision.window_size", 112),
            "tokens_per_second": 2,
        }
    positions = mmproj.tensors.get("v.position_embd.weight")
    if positions is None:
        raise CheckpointError(f"{mmproj.path.name} has no matrix v.position_embd.weight")
    deep = tower.get("clip.vision.is_deepstack_layers")
    if not isinstance(deep, list):
        raise tower.missing_field("clip.vision.is_deepstack_layers")
    return config | {
        "num_position_embeddings": positions.shape[0],
        "deepstack_visual_indexes": [index for index, is_deep in enumerate(deep) if is_deep],
        "hidden_act": "gelu_pytorch_tanh",
    }


def _tower(mmproj: GgufHeader) -> dict[str, Any]:
    tower = mmproj.settings
    return {
        "hidden_size": tower.integer("clip.vision.embedding_length"),
        "patch_size": tower.integer("clip.vision.patch_size"),
    }


def _colours(tower: Fields, name: str) -> list[float]:
    if name not in tower:
        raise tower.missing_field(name)
    return list(tower.numbers(name, (0.0, 0.0, 0.0)))


def _activation(tower: Fields) -> str:
    if tower.flag("clip.use_silu", False):
        return "silu"
    return "gelu" if tower.flag("clip.use_gelu", False) else "quick_gelu"


def _inner_size(mmproj: GgufHeader) -> int:
    """Inner size of the tower's MLPs, from a matrix: some converters write a wrong width into the settings."""
    up = mmproj.tensors.get("v.blk.0.ffn_up.weight")
    if up is None or len(up.shape) != 2:
        raise CheckpointError(f"{mmproj.path.name} has no matrix v.blk.0.ffn_up.weight")
    hidden = mmproj.settings.integer("clip.vision.embedding_length")
    return up.shape[0] if up.shape[1] == hidden else up.shape[1]


def _qwen_pictures(tower: Fields, model_type: str) -> dict[str, Any]:
    least, most = _PICTURE_PIXELS[model_type]
    return {
        "patch_size": tower.integer("clip.vision.patch_size"),
        "merge_size": tower.integer("clip.vision.spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "min_pixels": tower.integer("clip.vision.image_min_pixels", least),
        "max_pixels": tower.integer("clip.vision.image_max_pixels", most),
    }
