"""Decoders of the Llama kind and qwen3_5's hybrid one: from the text part of config.json to a LanguageSpec.

Knows the text models inside vision-language models, by the names that configs give them, and the fields that
transformers leaves out of a nested config because they equal its defaults. `rope.py` reads rotary settings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.base import DTYPE_BYTES, DeltaShape, LanguageSpec, LayerKind, Mixture
from hydra_engine.models.specs.fields import ELSEWHERE, MAX_LAYERS, Fields
from hydra_engine.models.specs.rope import Sections, rope_settings

LAYER_KINDS: dict[str, LayerKind] = {"linear_attention": "delta", "full_attention": "attention"}
INTERVAL = 4  # every fourth layer is attention where a config does not say
# Names of config.json -> names of `backend.base.Activation`.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
MAX_EXPERTS = 4096  # of a layer; more would be built before weights are read
MAX_HEAD_DIM = 2048  # a table of rotary positions is made before weights are read


@dataclass(frozen=True, slots=True)
class MixtureDefaults:
    """transformers' defaults of a mixture of experts. `renormalise`: value of norm_topk_prob; None: the type has no
    such field, and divides. `num_shared_inner`: inner width of a shared expert, 0 without one. `sparse`: every layer is
    a mixture, else decoder_sparse_step and mlp_only_layers say which."""

    num_experts: int
    num_chosen: int
    num_inner: int
    renormalise: bool | None = None
    num_shared_inner: int = 0
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class DecoderDefaults:
    """transformers' defaults of one text model type (it writes a nested config without the fields that equal them), and
    the type's fixed properties.

    `biases`: "qkv" has biases of queries, keys and values only; "option": all four projections, if attention_bias is
    set. `windowed`: sliding_window applies "always", if use_sliding_window is set ("option"), or "never".
    `rotary_share`: rotated fraction of a head, if a config may set it. `hybrid`: most layers are delta nets, attention
    is gated, norms are centred at zero."""

    intermediate_size: int
    num_kv_heads: int | None  # None: as many as query heads
    vocab_size: int
    max_position: int
    hidden_size: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    head_dim: int | None = None  # None: hidden_size / num_heads
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_sections: Sections | None = None
    rope_interleaved: bool = False
    biases: Literal["none", "qkv", "option"] = "none"
    qk_norm: bool = False
    windowed: Literal["always", "option", "never"] = "never"
    rotary_share: float | None = None
    hybrid: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    mixture: MixtureDefaults | None = None


_QWEN2 = DecoderDefaults(22016, 32, 151936, 32768, biases="qkv", windowed="option")
_QWEN2_VL = DecoderDefaults(
    29568,
    8,
    152064,
    32768,
    hidden_size=8192,
    num_layers=80,
    num_heads=64,
    rms_eps=1e-5,
    rope_theta=1e6,
    rope_sections=(16, 24, 24),
    biases="qkv",
    windowed="option",
    bos_token_id=151643,
    eos_token_id=151645,
)
_QWEN3 = DecoderDefaults(22016, 32, 151936, 32768, head_dim=128, biases="option", qk_norm=True, windowed="option")
_QWEN3_VL = replace(
    _QWEN3,
    max_position=128000,
    rope_theta=5e5,
    rope_sections=(24, 20, 20),
    rope_interleaved=True,
    windowed="never",
)
_QWEN3_5 = DecoderDefaults(
    12288,
    4,
    248320,
    32768,
    num_heads=16,
    head_dim=256,
    biases="option",
    qk_norm=True,
    rope_sections=(11, 11, 10),
    rope_interleaved=True,
    rotary_share=0.25,
    hybrid=True,
)
_QWEN3_MOE = replace(
    _QWEN3,
    intermediate_size=6144,
    num_kv_heads=4,
    head_dim=None,
    hidden_size=2048,
    num_layers=24,
    mixture=MixtureDefaults(128, 8, 768, renormalise=False),
)
_QWEN3_VL_MOE = replace(
    _QWEN3_VL,
    intermediate_size=5632,
    num_kv_heads=16,
    head_dim=None,
    hidden_size=2048,
    num_layers=24,
    num_heads=16,
    mixture=MixtureDefaults(60, 4, 1408),
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    num_kv_heads=2,
    hidden_size=2048,
    num_layers=40,
    mixture=MixtureDefaults(256, 8, 512, num_shared_inner=512, sparse=True),
)
# The text models of vision-language models go by a name of their own; older configs are flat, under the whole model's.
DECODERS = {
    "llama": DecoderDefaults(11008, None, 32000, 2048, biases="option", bos_token_id=1, eos_token_id=2),
    "mistral": DecoderDefaults(14336, 8, 32000, 131072, windowed="always", bos_token_id=1, eos_token_id=2),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_text": _QWEN3_VL,
    "qwen3_vl_moe_text": _QWEN3_VL_MOE,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
}


def decoder_type(config: Fields) -> str:
    """Returns model_type of a text config. Raises CheckpointError if `build_language` does not know it."""
    model_type = config.text("model_type", "llama")
    if model_type not in DECODERS:
        raise CheckpointError(
            f"text model type {model_type[:40]!r} is not supported; supported are {', '.join(sorted(DECODERS))}"
            + ELSEWHERE
        )
    return model_type


def build_language(config: Fields, *, tie_embeddings: bool, nested: bool, mrope: bool = False) -> LanguageSpec:
    """Builds the decoder's spec. `nested`: fields that equal transformers' defaults may be absent. `mrope`: the model
    gives tokens positions on three axes, if its text type has sections for them."""
    model_type = decoder_type(config)
    defaults = DECODERS[model_type]
    num_layers = config.integer("num_hidden_layers", defaults.num_layers if nested else None, at_most=MAX_LAYERS)
    mixture, mixture_layers = mixture_of_experts(config, defaults.mixture, model_type, num_layers)
    hidden = config.integer("hidden_size", defaults.hidden_size if nested else None)
    num_heads = config.integer("num_attention_heads", defaults.num_heads if nested else None)
    shared = None if config.is_null("num_key_value_heads") else defaults.num_kv_heads
    num_kv_heads = config.integer("num_key_value_heads", shared or num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
    head_dim = config.integer("head_dim", defaults.head_dim or hidden // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd, rotary positions need an even one")
    if head_dim > MAX_HEAD_DIM:
        raise CheckpointError(f"head_dim {head_dim} is larger than {MAX_HEAD_DIM}, which no decoder's is")
    qkv_bias, output_bias = _biases(config, defaults, model_type)
    max_position = config.integer("max_position_embeddings", defaults.max_position)
    rope = rope_settings(
        config,
        head_dim=head_dim,
        theta=defaults.rope_theta,
        sections=defaults.rope_sections,
        interleaved=defaults.rope_interleaved,
        max_position=max_position,
        share=defaults.rotary_share,
        mrope=mrope,
    )
    inner = defaults.intermediate_size if nested else None
    return LanguageSpec(
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size", inner) if len(mixture_layers) < num_layers else 0,
        vocab_size=config.integer("vocab_size", defaults.vocab_size if nested else None),
        rms_eps=config.number("rms_norm_eps", defaults.rms_eps),
        rope_theta=rope.theta,
        max_position=_window(config, defaults, max(max_position, rope.stretched)),
        tie_embeddings=tie_embeddings,
        attention_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=defaults.qk_norm,
        hidden_act=activation(config, "hidden_act", "silu"),
        rope_parameters=rope.parameters,
        rope_sections=rope.sections,
        rope_axes=rope.axes,
        rotary_dim=rope.rotary_dim if rope.rotary_dim < head_dim else None,
        output_gate=defaults.hybrid,
        centred_norms=defaults.hybrid,
        delta=delta_shape(config) if defaults.hybrid else None,
        layer_kinds=layer_kinds(config, num_layers) if defaults.hybrid else (),
        mixture=mixture,
        mixture_layers=mixture_layers,
    )


def _biases(config: Fields, defaults: DecoderDefaults, model_type: str) -> tuple[bool, bool]:
    """Returns two flags: biases of queries, keys and values, and bias of the output projection."""
    biased = config.flag("attention_bias", False)
    if config.flag("mlp_bias", False) or (biased and defaults.biases == "none"):
        raise CheckpointError(
            f"{model_type} checkpoints with these biases in their linear layers are not supported{ELSEWHERE}"
        )
    if defaults.biases == "qkv":
        return True, False
    return biased, biased


def activation(config: Fields, name: str, default: str) -> str:
    value = config.text(name, default)
    if value not in ACTIVATIONS:
        raise config.wrong_value(name, f"one of {', '.join(sorted(ACTIVATIONS))}", ELSEWHERE)
    return ACTIVATIONS[value]


def _window(config: Fields, defaults: DecoderDefaults, longest: int) -> int:
    """Longest context that fits the sliding window: up to it, full causal attention is exact."""
    windowed = defaults.windowed == "option" and config.flag("use_sliding_window", False)
    if not windowed and defaults.windowed != "always":
        return longest
    if config.is_null("sliding_window"):
        return longest
    return min(longest, config.integer("sliding_window", 4096))


def special_tokens(
    generation: Fields | None, config: Fields, text: Fields
) -> tuple[int | None, int | None, tuple[int, ...]]:
    """Returns (BOS, padding, all EOS). generation_config.json takes precedence, then the top level of config.json, then
    its text part and its defaults. -1 means none and ends the search."""

    def token_ids(name: str, default: int | None) -> tuple[int, ...]:
        for source in (generation, config, text):
            if source is not None and (ids := source.token_ids(name)) is not None:
                return ids
        return () if default is None or name in text.values else (default,)

    defaults = DECODERS[decoder_type(text)]
    bos = next(iter(token_ids("bos_token_id", defaults.bos_token_id)), None)
    pad = next(iter(token_ids("pad_token_id", None)), None)
    return bos, pad, token_ids("eos_token_id", defaults.eos_token_id)


def stored_dtype(config: Fields, text: Fields) -> str:
    value = config.get("dtype", "torch_dtype") or text.get("dtype", "torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"dtype {name[:40]!r} is not supported; supported are {', '.join(DTYPE_BYTES)}")
    return name


def layer_kinds(config: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    """Reads layer_types, or full_attention_interval if there is none."""
    names = config.get("layer_types")
    if names is None:
        interval = config.integer("full_attention_interval", INTERVAL)
        names = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)]
    if not isinstance(names, list) or len(names) != num_layers or any(name not in LAYER_KINDS for name in names):
        raise config.wrong_value("layer_types", f"a list of {num_layers} times linear_attention or full_attention")
    kinds = tuple(LAYER_KINDS[name] for name in names)
    if "attention" not in kinds:
        raise config.wrong_value("layer_types", "a list with at least one full_attention: the KV cache counts tokens")
    return kinds


def delta_shape(config: Fields) -> DeltaShape:
    """Reads the delta-net shape. Defaults are those of Qwen3_5TextConfig."""
    shape = DeltaShape(
        num_key_heads=config.integer("linear_num_key_heads", 16),
        num_value_heads=config.integer("linear_num_value_heads", 32),
        key_dim=config.integer("linear_key_head_dim", 128),
        value_dim=config.integer("linear_value_head_dim", 128),
        num_taps=config.integer("linear_conv_kernel_dim", 4, at_least=2),
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise CheckpointError(
            f"{shape.num_value_heads} value heads of linear attention cannot share {shape.num_key_heads} key heads"
        )
    if not config.flag("attn_output_gate", True):
        raise config.wrong_value("attn_output_gate", "true: this text model type gates what attention gives")
    return shape


def mixture_of_experts(
    config: Fields, defaults: MixtureDefaults | None, model_type: str, num_layers: int
) -> tuple[Mixture | None, frozenset[int]]:
    """Reads the shape of the mixtures of experts and which layers are mixtures; None without such layers."""
    if defaults is None:
        if config.get("num_experts"):
            raise config.wrong_value("num_experts", f"absent: {model_type} is a dense text model type", ELSEWHERE)
        return None, frozenset()
    layers = frozenset(range(num_layers)) if defaults.sparse else _sparse_layers(config, num_layers)
    return (_mixture_shape(config, defaults), layers) if layers else (None, layers)


def _mixture_shape(config: Fields, defaults: MixtureDefaults) -> Mixture:
    """Reads the shape. transformers 5 calls num_experts num_local_experts in some types."""
    name = next((name for name in ("num_local_experts", "num_experts") if name in config), "num_experts")
    num_experts = config.integer(name, defaults.num_experts, at_least=2, at_most=MAX_EXPERTS)
    num_chosen = config.integer("num_experts_per_tok", defaults.num_chosen, at_most=num_experts)
    num_inner = config.integer("moe_intermediate_size", defaults.num_inner)
    shared = 0
    if defaults.num_shared_inner:
        shared = config.integer("shared_expert_intermediate_size", defaults.num_shared_inner)
        if shared != num_inner:
            raise config.wrong_value(
                "shared_expert_intermediate_size",
                f"{num_inner}, as moe_intermediate_size: a shared expert of another width is not supported",
                ELSEWHERE,
            )
    renormalise = defaults.renormalise is None or config.flag("norm_topk_prob", defaults.renormalise)
    return Mixture(num_experts, num_chosen, num_inner, renormalise, shared > 0)


def _sparse_layers(config: Fields, num_layers: int) -> frozenset[int]:
    step, dense = config.integer("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise config.wrong_value("mlp_only_layers", "a list of layers, counted from 0")
    return frozenset(index for index in range(num_layers) if (index + 1) % step == 0 and index not in dense)
