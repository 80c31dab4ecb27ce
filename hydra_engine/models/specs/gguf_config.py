"""Converts the settings of GGUF files to the files of a Hugging Face directory of the same model: config.json,
generation_config.json and the processors' settings, from which the families' specs are built.

Input is a text model and, for pictures, its mmproj: a file with the vision tower and the projector. Values that neither
file has are those of the family's published checkpoints. Does not know tokenizers or weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.fields import MAX_LAYERS, Fields, TrackedFields
from hydra_engine.models.specs.gguf_file import GgufHeader, GgufTensor

JsonFiles = dict[str, dict[str, Any]]

_TEXT_ALONE = {  # architecture -> model_type without pictures, with which positions are equal on all axes
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2vl": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3vl": ("qwen3", "Qwen3ForCausalLM"),
    "qwen35": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3vlmoe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen35moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
}
_HYBRID = ("qwen35", "qwen35moe")
_WITH_PICTURES = {  # architecture and projector -> model_type
    ("llama", "mlp"): "llava",
    ("qwen2vl", "qwen2vl_merger"): "qwen2_vl",
    ("qwen2vl", "qwen2.5vl_merger"): "qwen2_5_vl",
    ("qwen3vl", "qwen3vl_merger"): "qwen3_vl",
    ("qwen35", "qwen3vl_merger"): "qwen3_5",
    ("qwen3vlmoe", "qwen3vl_merger"): "qwen3_vl_moe",
    ("qwen35moe", "qwen3vl_merger"): "qwen3_5_moe",
    ("qwen2", "internvl"): "internvl",
    ("qwen3", "internvl"): "internvl",
    ("qwen3moe", "internvl"): "internvl",
}
_TEXT_TYPES = {  # where it is not that of the text model alone
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
_ARCHITECTURES = {
    "llava": "LlavaForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
PICTURE_TOKENS = ("<|image_pad|>", "<image>")
_TILE_TOKENS = ("<IMG_CONTEXT>",)  # InternVL's, whose vocabularies have Qwen's besides
_VIDEO_TOKENS = ("<|video_pad|>",)
# Control tokens that end an answer, whichever of them a file calls its own, as llama.cpp has it.
_ENDS = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"}
CONTROL = 3  # of tokenizer.ggml.token_type
_PROJECTORS = ("clip.projector_type", "clip.vision.projector_type")  # the second in files of several modalities
UNREAD = "gguf_unread"  # of config.json: names of unknown settings
# Settings of an architecture that change nothing in what it computes.
_LABELS = {
    "vocab_size",
    "feed_forward_length",
    "tensor_data_layout",
    "n_deepstack_layers",
    "attention.layer_norm_epsilon",
}
# Settings that change what a layer computes, and the values with which they do not.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.kv_lora_rank"), (0,)),
    **dict.fromkeys(("attention.temperature_scale", "attention.temperature_length", "use_parallel_residual"), (0,)),
    **dict.fromkeys(("attention.output_scale", "attention.shared_kv_layers"), (0,)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count", "expert_weights_scale"), (0, 1)),
    "expert_gating_func": (0, 1),  # softmax
    "attention.causal": (1,),
}
# Types of tensors that stay quantised: bits, inputs of a group, bytes of its scale and offset as they are kept, with
# its share of the scales of its block.
_QUANTIZED = {
    "Q4_0": (4, 32, 2),
    "Q4_1": (4, 32, 8),
    "Q4_K": (4, 32, 2.5),
    "Q5_0": (8, 32, 2),
    "Q5_1": (8, 32, 8),
    "Q5_K": (6, 32, 2.5),
    "Q6_K": (6, 16, 1.125),
    "Q8_0": (8, 32, 2),
}


def describe(text: GgufHeader, mmproj: GgufHeader | None, rope_factors: tuple[float, ...] = ()) -> JsonFiles:
    """Returns the JSON files by name. `rope_factors`: the values of rope_freqs.weight. Raises CheckpointError naming
    the file and the setting."""
    architecture = text.settings.text("general.architecture")
    if architecture not in _TEXT_ALONE:
        advice = "; give the text model as MODEL and this file with --mmproj" if architecture == "clip" else ""
        raise CheckpointError(
            f"{text.path.name} is of architecture {architecture[:40]!r}; supported are {', '.join(_TEXT_ALONE)}{advice}"
        )
    settings = TrackedFields(text.settings.values, text.settings.where)
    language = _language(text._replace(settings=settings), architecture, rope_factors)
    unread = [name for name in settings.unread(f"{architecture}.") if name.partition(".")[2] not in _LABELS]
    kept = _quantization(text.tensors.values())
    kept |= {UNREAD: unread} if unread else {}
    files = {"generation_config.json": _generation(text.settings)}
    if mmproj is None:
        model_type, name = _TEXT_ALONE[architecture]
        language.get("rope_parameters", {}).pop("mrope_section", None)
        return files | {"config.json": language | kept | {"model_type": model_type, "architectures": [name]}}
    model_type = _family(architecture, mmproj)
    check_width(mmproj, language["hidden_size"])
    text_type = _TEXT_TYPES.get(model_type, _TEXT_ALONE[architecture][0])
    tower, pictures = describe_tower(mmproj, model_type)
    top = {
        "model_type": model_type,
        "architectures": [_ARCHITECTURES[model_type]],
        "text_config": language | {"model_type": text_type},
        "tie_word_embeddings": language["tie_word_embeddings"],
        **tower,
        **_placeholders(text.settings, model_type),
        **kept,
    }
    files |= {"config.json": top, "preprocessor_config.json": pictures}
    if model_type in _TIMED:
        # Pixels of all frames in the published checkpoints; other types take those of pictures for each frame.
        shared = {name: value for name, value in pictures.items() if not name.endswith("_pixels")}
        files["video_preprocessor_config.json"] = shared | {"size": {"shortest_edge": 1 << 12, "longest_edge": 3 << 23}}
    return files


def _quantization(tensors: Iterable[GgufTensor]) -> dict[str, Any]:
    """Returns the quantization_config of the layers' matrices; empty if none is quantised."""
    matrices = [tensor for tensor in tensors if tensor.name.startswith("blk.") and len(tensor.shape) > 1]
    forms = {tensor.type.name: _QUANTIZED[tensor.type.name] for tensor in matrices if tensor.type.name in _QUANTIZED}
    if not forms:
        return {}
    counts = [math.prod(tensor.shape) for tensor in matrices]
    section = {
        "quant_method": "gguf",
        "bits": sorted({bits for bits, _, _ in forms.values()}),
        "bytes_per_weight": sum(map(_kept_bytes, matrices)) / sum(counts),
    }
    return {"quantization_config": section}


def _kept_bytes(matrix: GgufTensor) -> float:
    if matrix.type.name not in _QUANTIZED:
        return matrix.nbytes
    bits, group, scale_bytes = _QUANTIZED[matrix.type.name]
    return math.prod(matrix.shape) * (bits / 8 + scale_bytes / group)


def _placeholders(settings: Fields, model_type: str) -> dict[str, int]:
    """Returns the placeholder tokens of pictures and videos in prompts. A vocabulary without a picture token uses the
    unknown token, which no text produces if every byte has a token; the tokenizer calls it <image>."""
    if model_type == "internvl":
        return {"image_token_id": _token(settings, _TILE_TOKENS)}
    tokens = settings.get("tokenizer.ggml.tokens")
    unknown = special_token(settings, "unknown", len(tokens) if isinstance(tokens, list) else 0)
    found = {"image_token_id": _token(settings, PICTURE_TOKENS, next(iter(unknown), None))}
    return found if model_type == "llava" else found | {"video_token_id": _token(settings, _VIDEO_TOKENS)}


def _token(settings: Fields, names: tuple[str, ...], default: int | None = None) -> int:
    tokens = settings.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        found = next((name for name in names if name in tokens), None)
        if found is not None:
            return tokens.index(found)
    if default is None:
        raise CheckpointError(
            f"{settings.where} has no token {' or '.join(names)}, which stands for pictures or videos"
        )
    return default


def _family(architecture: str, mmproj: GgufHeader) -> str:
    if mmproj.settings.text("general.architecture") != "clip":
        raise CheckpointError(f"{mmproj.path.name} is not an mmproj file: it has no vision tower")
    # The first files of LLaVA do not say it.
    projector = next((mmproj.settings.text(name) for name in _PROJECTORS if name in mmproj.settings), "mlp")
    model_type = _WITH_PICTURES.get((architecture, projector))
    if model_type is None:
        pairs = ", ".join(f"{kind} with {text}" for text, kind in _WITH_PICTURES)
        raise CheckpointError(
            f"{mmproj.path.name} has a projector of type {projector[:40]!r} beside a text model of architecture "
            f"{architecture}; supported are {pairs}"
        )
    if "v.image_newline" in mmproj.tensors or "model.image_newline" in mmproj.tensors:
        raise CheckpointError(f"{mmproj.path.name} is of LLaVA 1.6; of LLaVA, only GGUF files of 1.5 are supported")
    return model_type


def _language(header: GgufHeader, architecture: str, rope_factors: tuple[float, ...]) -> dict[str, Any]:
    """Returns the text part of config.json, without its model_type."""
    settings = header.settings

    def named(name: str) -> str:
        return f"{architecture}.{name}"

    for name, neutral in _NEUTRAL.items():
        if settings.get(named(name)) not in (None, *neutral):
            raise settings.wrong_value(named(name), " or ".join(f"{value:g}" for value in neutral))
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{header.path.name} has no matrix token_embd.weight")
    hidden, heads = settings.integer(named("embedding_length")), settings.integer(named("attention.head_count"))
    head_dim = settings.integer(named("attention.key_length"), hidden // heads or 1)
    turning, hybrid = settings.integer(named("rope.dimension_count"), head_dim), architecture in _HYBRID
    if settings.integer(named("attention.value_length"), head_dim) != head_dim:
        raise settings.wrong_value(named("attention.value_length"), f"{head_dim}, the size of a key")
    if turning != head_dim and not hybrid:
        raise settings.wrong_value(named("rope.dimension_count"), f"{head_dim}, the size of a key")
    scale = settings.get(named("attention.scale")) or head_dim**-0.5
    if not isinstance(scale, float) or abs(scale * head_dim**0.5 - 1) > 1e-3:
        raise settings.wrong_value(named("attention.scale"), f"1 / sqrt({head_dim}), the size of a key")
    # Within a window every token sees all those before it.
    length, window = settings.integer(named("context_length")), settings.get(named("attention.sliding_window"))
    longest = min(length, settings.integer(named("attention.sliding_window"))) if window else length
    guessing = settings.integer(named("nextn_predict_layers"), 0, at_least=0)
    num_hidden = num_layers(header, named("block_count"), "blk.{}.attn_norm.weight", besides=guessing)
    rope = rope_parameters(settings, architecture, head_dim, rope_factors)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": num_hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": settings.integer(named("attention.head_count_kv"), heads),
        "head_dim": head_dim,
        "max_position_embeddings": longest,
        "rms_norm_eps": settings.number(named("attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope | ({"partial_rotary_factor": turning / head_dim} if hybrid else {}),
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        **(_delta_nets(settings, architecture, num_hidden) if hybrid else {}),
        **_inner_sizes(header, architecture, num_hidden),
    }


def _inner_sizes(header: GgufHeader, architecture: str, num_layers: int) -> dict[str, Any]:
    """Returns the sizes of the MLPs. Tensors tell which layers are mixtures of experts."""
    settings = header.settings

    def named(name: str) -> str:
        return f"{architecture}.{name}"

    num_experts = settings.integer(named("expert_count"), 0, at_least=0)
    if not architecture.endswith("moe"):
        if num_experts:
            raise CheckpointError(
                f"{header.path.name} is a mixture of experts of architecture {architecture}; supported are "
                f"{', '.join(name for name in _TEXT_ALONE if name.endswith('moe'))}"
            )
        return {"intermediate_size": settings.integer(named("feed_forward_length"))}
    dense = [index for index in range(num_layers) if f"blk.{index}.ffn_gate_inp.weight" not in header.tensors]
    inner = {"intermediate_size": settings.integer(named("feed_forward_length"))} if dense else {}
    # Files do not say how weights are divided, but for few; llama.cpp divides them by their sum.
    return inner | {
        "num_experts": num_experts,
        "num_experts_per_tok": settings.integer(named("expert_used_count")),
        "moe_intermediate_size": settings.integer(named("expert_feed_forward_length")),
        "shared_expert_intermediate_size": settings.integer(named("expert_shared_feed_forward_length"), 0, at_least=0),
        "norm_topk_prob": settings.flag(named("expert_weights_norm"), True),
        "mlp_only_layers": dense,
    }


def _delta_nets(settings: Fields, architecture: str, num_layers: int) -> dict[str, Any]:
    """Returns the delta-net settings. Older files have an interval of attention layers, newer ones a flag per layer."""
    taps, key_dim, key_heads, value_heads, width = (
        settings.integer(f"{architecture}.ssm.{name}")
        for name in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
    )
    which = settings.get(f"{architecture}.attention.recurrent_layers")
    kinds: dict[str, Any] = {"full_attention_interval": settings.integer(f"{architecture}.full_attention_interval", 4)}
    if isinstance(which, list):
        names = ["linear_attention" if is_delta else "full_attention" for is_delta in which]
        kinds = {"layer_types": names[:num_layers]}
    return kinds | {
        "linear_conv_kernel_dim": taps,
        "linear_key_head_dim": key_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": width // value_heads,
    }


def _dtype(header: GgufHeader) -> str:
    """Default dtype of activations: that of the first layer's plain matrices, else bfloat16."""
    names = ("blk.0.attn_q.weight", "blk.0.attn_qkv.weight", "token_embd.weight")
    kind = next(header.tensors[name] for name in names if name in header.tensors).type.name
    return {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


def _generation(settings: Fields) -> dict[str, Any]:
    """Returns the special tokens. Every control token that ends an answer counts as an end of sequence."""
    tokens, kinds = settings.get("tokenizer.ggml.tokens"), settings.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list):
        raise settings.missing_field("tokenizer.ggml.tokens")
    ends = [token for key in ("eos", "eot", "eom") for token in special_token(settings, key, len(tokens))]
    if isinstance(kinds, list):
        named = zip(tokens, kinds, strict=False)
        ends += [index for index, (token, kind) in enumerate(named) if kind == CONTROL and token in _ENDS]
    special = {"bos_token_id": "bos", "pad_token_id": "padding"}
    said = {name: key for name, key in special.items() if f"tokenizer.ggml.{key}_token_id" in settings}
    return {
        **{name: next(iter(special_token(settings, key, len(tokens))), -1) for name, key in said.items()},
        "eos_token_id": list(dict.fromkeys(ends)),
    }


def special_token(settings: Fields, key: str, num_tokens: int) -> tuple[int, ...]:
    """Returns the token id or an empty tuple. Ids outside the vocabulary mean none: converters write -1 as an unsigned
    number."""
    found = settings.integer(f"tokenizer.ggml.{key}_token_id", num_tokens, at_least=-1, at_most=2**32 - 1)
    return (found,) if 0 <= found < num_tokens else ()


_YARN = ("ext_factor", "attn_factor", "beta_fast", "beta_slow", "log_multiplier")
_SCALING = {
    *("type", "factor", "attn_factor", "original_context_length", *(f"yarn_{name}" for name in _YARN)),
    "finetuned",  # a label
}


# ---- rotary positions, as in llama.cpp's loader


def rope_parameters(settings: Fields, architecture: str, head_dim: int, divisors: tuple[float, ...]) -> dict[str, Any]:
    """Returns rope_parameters. `divisors`: the values of rope_freqs.weight, which divide the frequencies."""
    prefix = f"{architecture}.rope."
    _check_scaling(settings, f"{prefix}scaling.")
    theta = settings.number(f"{prefix}freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = settings.text(f"{prefix}scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise settings.wrong_value(f"{prefix}scaling.type", "none, linear or yarn")
    factor = 1.0 if kind == "none" else _factor(settings, prefix)
    magnitude = 1.0
    for name in ("attn_factor", "yarn_attn_factor"):
        magnitude *= settings.number(f"{prefix}scaling.{name}", 1.0)
    if kind == "yarn" and _is_ramped(settings, f"{prefix}scaling.yarn_ext_factor"):
        rope |= _yarn(settings, prefix, factor, magnitude)
    elif magnitude != 1:
        raise CheckpointError(
            f"{settings.where} has {prefix}scaling.attn_factor or yarn_attn_factor other than 1 beside rotary scaling "
            f"{kind}; supported are they beside yarn"
        )
    elif factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    if divisors:
        if rope["rope_type"] != "default":
            raise CheckpointError(
                f"{settings.where} scales rotary frequencies twice, by {prefix}scaling.factor and by rope_freqs.weight"
            )
        rope |= _llama3(settings, theta, head_dim, divisors)
    sections = settings.get(f"{prefix}dimension_sections")
    if isinstance(sections, list):
        rope["mrope_section"] = sections[:3]
    return rope


def _check_scaling(settings: Fields, prefix: str) -> None:
    """Refuses unknown keys: every key below `rope.scaling.` changes the answer."""
    names = [name for name in settings.values if name.startswith(prefix)]
    settings.get(*names)  # so that none of them counts as unread
    if unknown := [name for name in names if name.removeprefix(prefix) not in _SCALING]:
        raise CheckpointError(f"{settings.where} scales rotary positions by {unknown[0][:120]}, which is not supported")


def _factor(settings: Fields, prefix: str) -> float:
    """Returns the linear scaling factor, 1.0 if it is absent or 0."""
    for name in (f"{prefix}scaling.factor", f"{prefix}scale_linear"):
        if name in settings:
            return settings.number(name) if settings.get(name) != 0 else 1.0
    return 1.0


def _is_ramped(settings: Fields, name: str) -> bool:
    """True if pairs of high frequency are kept (YaRN's ramp); absent or negative values mean the type's default."""
    share = settings.get(name)
    if share is None or share == 1 or (isinstance(share, float) and share < 0):
        return True
    if share != 0:
        raise settings.wrong_value(name, "0 or 1")
    return False


def _yarn(settings: Fields, prefix: str, factor: float, magnitude: float) -> dict[str, Any]:
    scaling = f"{prefix}scaling."
    length = settings.integer(f"{prefix.removesuffix('rope.')}context_length")
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    rope["original_max_position_embeddings"] = settings.integer(f"{scaling}original_context_length", length)
    for name in ("beta_fast", "beta_slow"):
        if f"{scaling}yarn_{name}" in settings:
            rope[name] = settings.number(f"{scaling}yarn_{name}")
    share = settings.get(f"{scaling}yarn_log_multiplier") or 0.0
    if magnitude != 1 or share:
        if not isinstance(share, int | float) or not 0 <= share < math.inf:
            raise settings.wrong_value(f"{scaling}yarn_log_multiplier", "a number from 0")
        grown = 0.1 * math.log(factor) if factor > 1 else 0.0
        rope["attention_factor"] = magnitude * (1 + grown) / (1 + grown * share)
    return rope


def _llama3(settings: Fields, theta: float, head_dim: int, factors: tuple[float, ...]) -> dict[str, Any]:
    """Returns the parameters of the published Llama 3 models if they give these factors; the file has only the
    factors."""
    rope = {"rope_type": "llama3", "factor": max(factors), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    expected = llama3_factors(theta, head_dim, max(factors), 8192)
    if len(factors) != len(expected) or any(abs(a - b) > 1e-5 * b for a, b in zip(factors, expected, strict=True)):
        raise CheckpointError(
            f"{settings.where} scales rotary frequencies (rope_freqs.weight) in a way that is not Llama 3's"
        )
    return rope


def llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> list[float]:
    """Llama 3.1's divisors of the head_dim / 2 frequencies, with low and high factors of 1 and 4."""
    found = []
    for pair in range(0, head_dim, 2):
        length = 2 * math.pi * theta ** (pair / head_dim)
        smooth = (original / length - 1.0) / 3.0
        found.append(
            1.0 if length < original / 4 else factor if length > original else 1 / ((1 - smooth) / factor + smooth)
        )
    return found


# Pixels of a picture in the published checkpoints.
_PICTURE_PIXELS = {
    "qwen2_vl": (56 * 56, 3584 * 3584),
    "qwen2_5_vl": (56 * 56, 3584 * 3584),
    "qwen3_vl": (1 << 16, 1 << 24),
    "qwen3_5": (1 << 16, 1 << 24),
    "qwen3_vl_moe": (1 << 16, 1 << 24),
    "qwen3_5_moe": (1 << 16, 1 << 24),
}
_TIMED = {"qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe"}  # whose prompts have the times of a video's frames
_LAST = ("mm.2.weight", "mm.model.mlp.3.weight")  # of the projector


# ---- the vision tower and its pictures


def describe_tower(mmproj: GgufHeader, model_type: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tower's part of config.json, and preprocessor_config.json. Raises CheckpointError."""
    settings = mmproj.settings
    colours = {name: _colours(settings, f"clip.vision.{name}") for name in ("image_mean", "image_std")}
    if model_type == "llava":
        side = settings.integer("clip.vision.image_size")
        layers = settings.get("clip.vision.feature_layer") or [settings.integer("clip.vision.block_count")]
        top = {"vision_feature_layer": layers, "vision_feature_select_strategy": "default"}
        pictures: dict[str, Any] = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        return top | {"vision_config": _plain_tower(mmproj) | {"model_type": "clip_vision_model"}}, pictures | colours
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
