"""Text configs as they are found in checkpoints: names of text models, what they leave out, rotary settings."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.base import LanguageSpec
from hydra_engine.models.specs.decoder import DECODERS, build_language, special_tokens
from hydra_engine.models.specs.fields import Fields

Json = dict[str, Any]

# As published; rotary settings and sizes as in the model's config.json.
QWEN3_8B: Json = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B: Json = {
    **QWEN3_8B,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
QWEN2_5_VL_7B: Json = {  # flat, with the tower's config beside
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
SMALL: Json = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "head_dim": 32,
    "max_position_embeddings": 128,
}


def built(config: Json, *, nested: bool = False) -> LanguageSpec:
    tie = bool(config.get("tie_word_embeddings", False))
    return build_language(Fields(config, "config.json"), tie_embeddings=tie, nested=nested, mrope=True)


def refusal(config: Json) -> str:
    with pytest.raises(CheckpointError) as caught:
        built(config)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_published_qwen3() -> None:
    spec = built(QWEN3_8B)
    assert (spec.head_dim, spec.qk_norm, spec.attention_bias, spec.output_bias) == (128, True, False, False)
    assert (spec.max_position, spec.rope_theta, spec.rope_sections) == (40960, 1e6, None)
    assert spec.num_parameters() == 8_190_735_360
    assert built(QWEN3_06B).num_parameters() == 596_049_920


def test_published_qwen3_moe() -> None:
    sizes = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    heads = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    spec = built({**QWEN3_8B, "model_type": "qwen3_moe", **heads, **sizes})
    assert spec.num_parameters() == 30_532_122_624
    assert 3.3e9 < spec.num_parameters() - spec.num_unread_parameters(1) < 3.4e9  # of which a token passes these


def test_published_flat_qwen2_5_vl() -> None:
    spec = built(QWEN2_5_VL_7B)
    assert (spec.rope_sections, spec.max_position) == ((16, 24, 24), 128000)
    assert spec.rope_axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert spec.attention_bias and not spec.output_bias and not spec.qk_norm
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert spec.num_parameters() == 7_615_616_512  # Qwen2.5 7B


FLAT = {"qwen2_vl", "qwen2_5_vl"}  # whole models, whose configs leave nothing out


@pytest.mark.parametrize("model_type", sorted(DECODERS.keys() - FLAT))
def test_what_nested_configs_leave_out_is_what_transformers_assumes(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    spec = built({"model_type": model_type}, nested=True)
    assert (spec.hidden_size, spec.num_layers) == (config.hidden_size, config.num_hidden_layers)
    assert (spec.num_heads, spec.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert spec.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert spec.vocab_size == config.vocab_size
    if (mixture := spec.mixture) is None:
        assert spec.intermediate_size == config.intermediate_size
    else:
        assert (mixture.num_experts, mixture.num_chosen) == (config.num_experts, config.num_experts_per_tok)
        assert mixture.num_inner == config.moe_intermediate_size
        assert mixture.renormalise == getattr(config, "norm_topk_prob", True)
        assert mixture.shared == hasattr(config, "shared_expert_intermediate_size")
        assert len(spec.mixture_layers) == spec.num_layers
    assert (spec.rms_eps, spec.rope_theta) == (config.rms_norm_eps, config.rope_parameters["rope_theta"])
    window = getattr(config, "sliding_window", None)
    assert spec.max_position == min(config.max_position_embeddings, window or config.max_position_embeddings)
    bos, _, eos = special_tokens(None, Fields({}, "config.json"), Fields({"model_type": model_type}, "text_config"))
    end = getattr(config, "eos_token_id", None)
    assert bos == getattr(config, "bos_token_id", None)
    assert eos == (() if end is None else (end,))


def test_biases() -> None:
    for model_type in ("llama", "qwen3", "qwen3_vl_text"):
        plain = built({**SMALL, "model_type": model_type, "rope_scaling": {"mrope_section": [8, 4, 4]}})
        spec = built(
            {**SMALL, "model_type": model_type, "attention_bias": True, "rope_scaling": {"mrope_section": [8, 4, 4]}}
        )
        assert spec.attention_bias and spec.output_bias
        assert spec.num_parameters() - plain.num_parameters() == 2 * (8 * 32 + 64)
    assert "biases" in refusal({**SMALL, "model_type": "mistral", "attention_bias": True})
    assert "biases" in refusal({**SMALL, "mlp_bias": True})


def test_windows_bound_the_context_where_they_are_used() -> None:
    assert built({**SMALL, "sliding_window": 32}).max_position == 128
    assert built({**SMALL, "sliding_window": 32, "use_sliding_window": True}).max_position == 32
    sections = {"mrope_section": [8, 4, 4]}
    spec = built({**SMALL, "model_type": "qwen3_vl_text", "rope_scaling": sections, "use_sliding_window": True})
    assert spec.max_position == 128  # its text model knows no windows


def test_yarn_reaches_further() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    spec = built({**SMALL, "rope_scaling": yarn})
    assert spec.max_position == 512
    assert spec.rope_parameters["attention_factor"] == pytest.approx(1.1386294)
    derived = built({**SMALL, "max_position_embeddings": 512, "rope_scaling": {**yarn, "factor": None}})
    assert derived.rope_parameters == spec.rope_parameters and derived.max_position == 512
    assert built({**SMALL, "rope_scaling": {**yarn, "attention_factor": 2}}).rope_parameters["attention_factor"] == 2


def test_dynamic_scaling_is_the_default_as_far_as_contexts_go() -> None:
    spec = built({**SMALL, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 7.0})
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 7.0} and spec.max_position == 128


def test_sections() -> None:
    vl = {**SMALL, "model_type": "qwen3_vl_text"}
    spec = built({**vl, "rope_parameters": {"mrope_section": [8, 4, 4], "mrope_interleaved": True}})
    assert (spec.rope_sections, spec.rope_axes) == ((8, 4, 4), (0, 1, 2) * 4 + (0,) * 4)
    assert built({**vl, "head_dim": 128}).rope_sections == (24, 20, 20)
    assert "has 20 pairs, but a head turns 16" in refusal({**vl, "rope_scaling": {"mrope_section": [8, 4, 8]}})
    for wrong in ([8, 8], [8, 4, 4.0], [20, -2, -2], "xyz", [True, 8, 7]):
        assert "mrope_section in rope_scaling of config.json must be" in refusal(
            {**vl, "rope_scaling": {"mrope_section": wrong}}
        )
    runs = {"mrope_section": [8, 4, 4], "mrope_interleaved": False}
    assert "mrope_interleaved" in refusal({**vl, "rope_scaling": runs})
    assert not built({**SMALL, "model_type": "qwen2_vl_text", "rope_scaling": runs}).rope_axes[1]
    assert built({**SMALL, "model_type": "qwen2"}).rope_sections is None


def test_sections_are_of_the_pairs_that_turn() -> None:
    config = {**SMALL, "model_type": "qwen3_5_text", "head_dim": 256, "full_attention_interval": 2}
    assert built(config).rope_sections == (11, 11, 10) and built(config).rope_axes[:3] == (0, 1, 2)
    half = {"partial_rotary_factor": 0.5, "mrope_section": [24, 20, 20]}
    assert built({**config, "rope_parameters": half}).rope_sections == (24, 20, 20)
    assert "has 32 pairs, but a head turns 64" in refusal({**config, "rope_parameters": {"partial_rotary_factor": 0.5}})


def test_a_model_of_one_axis_does_not_read_sections() -> None:
    rope = {"mrope_section": [99], "rope_theta": 7.0}
    config = {**SMALL, "model_type": "qwen3_5_text", "full_attention_interval": 2, "rope_parameters": rope}
    spec = build_language(Fields(config, "config.json"), tie_embeddings=False, nested=False)
    assert (spec.rope_sections, spec.rope_theta, spec.rotary_dim) == (None, 7.0, 8)


def test_a_dense_type_with_experts_is_refused() -> None:
    config = {**SMALL, "model_type": "qwen3_5_text", "num_experts": 128}
    assert "num_experts in config.json must be absent: qwen3_5_text is a dense text model type" in refusal(config)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported; supported are default, linear"),
        ({"rope_type": "yarn", "factor": -1.0}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rotary_settings_that_cannot_be_followed_are_refused(rope: Json, words: str) -> None:
    assert words in refusal({**SMALL, "rope_parameters": rope})
