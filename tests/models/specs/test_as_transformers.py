"""Meaning of a config.json that leaves a field out, says null, or says a thing twice: that of transformers' config
classes."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import huggingface_hub
import pytest
import transformers

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.decoder import DECODERS, build_language, special_tokens
from hydra_engine.models.specs.fields import Fields

Json = dict[str, Any]

SECTIONS = {"qwen2_vl_text": [2, 3, 3], "qwen2_5_vl_text": [2, 3, 3], "qwen3_vl_text": [4, 2, 2]}
MODEL_TYPES = sorted(DECODERS.keys() - {"qwen2_vl", "qwen2_5_vl"})  # those are names of whole models
NULLABLE = (
    *("num_key_value_heads", "head_dim", "sliding_window", "use_sliding_window", "layer_types", "rope_scaling"),
    *("rope_parameters", "partial_rotary_factor", "bos_token_id", "eos_token_id", "pad_token_id", "hidden_act"),
    *("num_attention_heads", "num_hidden_layers", "rms_norm_eps", "attention_bias", "max_position_embeddings"),
)


ROPE = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings")


def config_of(model_type: str) -> Json:
    small: Json = {
        **{"model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 100, "max_position_embeddings": 128},
        **{"head_dim": 16, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 4},
    }
    return small | ({"rope_parameters": {"mrope_section": SECTIONS[model_type]}} if model_type in SECTIONS else {})


def theirs(config: Json) -> Json | None:
    """None where transformers refuses it."""
    values = copy.deepcopy(config)
    try:
        made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    except (TypeError, ValueError, KeyError, huggingface_hub.errors.StrictDataclassError):
        return None
    rope, window = made.rope_parameters, getattr(made, "sliding_window", None)
    ends = getattr(made, "eos_token_id", None)
    return {
        "heads": (made.num_attention_heads, made.num_key_value_heads),
        "head_dim": getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads,
        "layers": made.num_hidden_layers,
        "kinds": made.layer_types if model_type_is_hybrid(config) else None,
        "rope": {name: rope[name] for name in ROPE if name in rope},
        "turning": rope.get("partial_rotary_factor", 1.0),
        "longest": min(made.max_position_embeddings, window or made.max_position_embeddings),
        "begin": getattr(made, "bos_token_id", None),
        "pad": made.pad_token_id,
        "ends": ends if isinstance(ends, list) else [] if ends is None else [ends],
    }


def ours(config: Json) -> Json:
    fields = Fields(copy.deepcopy(config), "config.json")
    spec = build_language(fields, tie_embeddings=False, nested=True)
    begin, pad, ends = special_tokens(None, Fields({}, "config.json"), fields)
    rope, kinds = spec.rope_parameters, {"delta": "linear_attention", "attention": "full_attention"}
    return {
        "heads": (spec.num_heads, spec.num_kv_heads),
        "head_dim": spec.head_dim,
        "layers": spec.num_layers,
        "kinds": [kinds[kind] for kind in spec.layer_kinds] or None,
        "rope": {name: rope[name] for name in ROPE if name in rope},
        "turning": (spec.rotary_dim or spec.head_dim) / spec.head_dim,
        "longest": spec.max_position,
        "begin": begin,
        "pad": pad,
        "ends": list(ends),
    }


def model_type_is_hybrid(config: Json) -> bool:
    return DECODERS[config["model_type"]].hybrid


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_null_is_what_transformers_takes_it_for(model_type: str) -> None:
    taken = set()
    for name in NULLABLE:
        config = config_of(model_type) | {name: None}
        if (expected := theirs(config)) is not None and not (name == "rope_parameters" and model_type in SECTIONS):
            assert ours(config) == expected, name
            taken.add(name)
    assert {"num_key_value_heads", "rope_scaling", "partial_rotary_factor", "pad_token_id"} <= taken | {
        "num_key_value_heads" if model_type in ("mistral", "qwen3_5_text") or "moe" in model_type else ""
    }


def test_heads_that_nobody_counts_are_as_many_as_query_heads() -> None:
    """The value is null; a missing field has the class's default instead."""
    config = config_of("qwen2") | {"num_key_value_heads": None}
    assert build_language(Fields(config, "c"), tie_embeddings=False, nested=True).num_kv_heads == 4
    del config["num_key_value_heads"]
    with pytest.raises(CheckpointError, match="4 attention heads cannot share 32"):
        build_language(Fields(config, "c"), tie_embeddings=False, nested=True)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_rotary_settings_that_are_there_twice(model_type: str) -> None:
    """`rope_scaling` added to a config with `rope_parameters`, a base in either or beside them, `type` or `rope_type`:
    every type with every other, the rest drawn at random."""
    draws, sections = random.Random(model_type), SECTIONS.get(model_type)

    def section(kind: str | None) -> Json:
        scaled = kind in ("yarn", "linear", "llama3")
        values: Json = {} if kind is None else {draws.choice(("type", "rope_type")): kind}
        values |= {"factor": draws.choice((2.0, 4.0))} if scaled else {}
        values |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
        if kind in ("yarn", "llama3") and draws.random() < 0.7:
            values["original_max_position_embeddings"] = draws.choice((32, 64))
        values |= {"rope_theta": draws.choice((1e5, 5e5))} if draws.random() < 0.5 else {}
        values |= {"partial_rotary_factor": 0.5} if model_type_is_hybrid(config) and draws.random() < 0.3 else {}
        return values | ({} if sections is None else {"mrope_section": sections})

    kinds = ("default", "yarn", "linear", "llama3", None, *(["mrope"] if model_type.startswith("qwen2_") else []))
    compared = 0
    for first, second in itertools.product((*kinds, "absent"), repeat=2):
        if sections is not None and first == second == "absent":
            continue
        config = config_of(model_type)
        config.pop("rope_parameters", None)
        for name, kind in (("rope_parameters", first), ("rope_scaling", second)):
            config |= {} if kind == "absent" else {name: section(kind)}
        config |= {"rope_theta": draws.choice((2e4, 3580165449.0))} if draws.random() < 0.5 else {}
        config |= {"original_max_position_embeddings": 48} if draws.random() < 0.2 else {}
        if model_type_is_hybrid(config) and draws.random() < 0.5:
            config["partial_rotary_factor"] = draws.choice((0.25, 0.5, 1.0, None))
        expected = theirs(config)
        if expected is None:
            continue
        # Set beside the section, the original length reaches transformers' dictionary when a model is built.
        if "original_max_position_embeddings" in config and "original_max_position_embeddings" in expected["rope"]:
            expected["rope"]["original_max_position_embeddings"] = 48
        found = ours(config)
        assert (found["rope"], found["turning"]) == (expected["rope"], expected["turning"]), config
        compared += 1
    assert compared > 24


def test_a_base_that_does_not_count_is_named(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of("qwen3") | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    yarn = {"rope_type": "yarn", "factor": 4.0}
    ours(config | {"rope_scaling": yarn | {"rope_theta": 1e6}})
    ours(config | {"rope_scaling": yarn, "rope_theta": 1e6})
    assert not caplog.records
    ours(config | {"rope_scaling": yarn})
    (record,) = caplog.records
    assert "rope_theta is 10000 and not 1000000.0; move it into rope_scaling" in record.getMessage()


def test_rotary_settings_of_single_layer_types_are_refused() -> None:
    config = config_of("qwen3") | {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}}
    with pytest.raises(
        CheckpointError, match=r"rope_parameters of config.json has settings for layers of type full_att"
    ):
        ours(config)
