"""Decoders of the Llama kind (llama, mistral, qwen2): from the text part of config.json to a LanguageSpec.

Knows both generations of rotary settings and which fields transformers leaves out of a nested config because they equal
its defaults. Does not know about images.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.errors import CheckpointError
from hydra_engine.specs.base import DTYPE_BYTES, LanguageSpec
from hydra_engine.specs.fields import Fields

# Names of config.json -> names of `backend.base.Activation`.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True)
class DecoderDefaults:
    """transformers' defaults of one text model type; it writes a nested config without the fields that equal them."""

    intermediate_size: int
    num_kv_heads: int | None  # None: as many as query heads
    vocab_size: int
    max_position: int
    qkv_bias: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2


DECODERS = {
    "llama": DecoderDefaults(11008, None, 32000, 2048),
    "mistral": DecoderDefaults(14336, 8, 32000, 131072, sliding_window=4096),
    "qwen2": DecoderDefaults(22016, 32, 151936, 32768, qkv_bias=True, bos_token_id=None, eos_token_id=None),
}


def decoder_type(config: Fields) -> str:
    """model_type of a text config, checked to be one that `build_language` knows."""
    model_type = config.text("model_type", "llama")
    if model_type not in DECODERS:
        raise CheckpointError(
            f"text model type {model_type[:40]!r} is not supported; supported are {', '.join(sorted(DECODERS))}"
        )
    return model_type


def build_language(config: Fields, *, tie_embeddings: bool, nested: bool) -> LanguageSpec:
    """`nested` says that fields which equal transformers' defaults may be absent."""
    model_type = decoder_type(config)
    defaults = DECODERS[model_type]
    hidden = config.integer("hidden_size", 4096 if nested else None)
    num_heads = config.integer("num_attention_heads", 32 if nested else None)
    num_kv_heads = config.integer("num_key_value_heads", defaults.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
    head_dim = config.integer("head_dim", hidden // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd, rotary positions need an even one")
    if config.flag("mlp_bias", False) or (config.flag("attention_bias", False) and model_type != "qwen2"):
        raise CheckpointError(f"{model_type} checkpoints with biases in their linear layers are not supported")
    rope = rope_parameters(config)
    return LanguageSpec(
        num_layers=config.integer("num_hidden_layers", 32 if nested else None),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size", defaults.intermediate_size if nested else None),
        vocab_size=config.integer("vocab_size", defaults.vocab_size if nested else None),
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=float(str(rope["rope_theta"])),
        max_position=_max_position(config, defaults, model_type),
        tie_embeddings=tie_embeddings,
        attention_bias=defaults.qkv_bias,
        hidden_act=activation(config, "hidden_act", "silu"),
        rope_parameters=rope,
    )


def activation(config: Fields, name: str, default: str) -> str:
    value = config.text(name, default)
    if value not in ACTIVATIONS:
        raise config.wrong(name, f"one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[value]


def rope_parameters(config: Fields) -> dict[str, object]:
    """{"rope_type", "rope_theta", ...} from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    found = config.section_if_present("rope_parameters") or config.section_if_present("rope_scaling")
    values = found or Fields({}, config.where)
    kind = values.text("rope_type", values.text("type", "default"))
    if kind not in ROPE_FIELDS:
        raise CheckpointError(f"rope type {kind[:40]!r} is not supported; supported are {', '.join(ROPE_FIELDS)}")
    if values.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("partial_rotary_factor other than 1 is not supported")
    theta = values.number("rope_theta", config.number("rope_theta", 10000.0))
    parameters: dict[str, object] = {"rope_type": kind, "rope_theta": theta}
    for name in ROPE_FIELDS[kind]:
        if name == "original_max_position_embeddings" and name not in values:
            parameters[name] = config.number("max_position_embeddings")
        else:
            parameters[name] = values.number(name)
    return parameters


def _max_position(config: Fields, defaults: DecoderDefaults, model_type: str) -> int:
    """The longest context for which causal attention over everything is what the model computes."""
    longest = config.integer("max_position_embeddings", defaults.max_position)
    if model_type == "llama" or (model_type == "qwen2" and not config.flag("use_sliding_window", False)):
        return longest
    if "sliding_window" in config.values and config.get("sliding_window") is None:
        return longest
    return min(longest, config.integer("sliding_window", defaults.sliding_window or 4096))


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]


def special_tokens(generation: Fields | None, config: Fields, text: Fields) -> SpecialTokens:
    """generation_config.json decides, then the top level of config.json, then its text part with its defaults."""
    defaults = DECODERS[decoder_type(text)]
    fallback = {"bos_token_id": defaults.bos_token_id, "eos_token_id": defaults.eos_token_id, "pad_token_id": None}
    found: dict[str, tuple[int, ...]] = {}
    for name, default in fallback.items():
        ids: tuple[int, ...] = ()
        for source in (generation, config, text):
            ids = ids or (source.token_ids(name) if source is not None else ())
        if not ids and default is not None and name not in text.values:
            ids = (default,)
        found[name] = ids
    return SpecialTokens(
        bos_token_id=next(iter(found["bos_token_id"]), None),
        pad_token_id=next(iter(found["pad_token_id"]), None),
        eos_token_ids=found["eos_token_id"],
    )


def stored_dtype(config: Fields, text: Fields) -> str:
    value = config.get("dtype", "torch_dtype") or text.get("dtype", "torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"dtype {name[:40]!r} is not supported; supported are {', '.join(DTYPE_BYTES)}")
    return name
