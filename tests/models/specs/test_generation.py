"""Sampling defaults from generation_config.json and from what the operator puts over it; every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.core.sampling import SamplingParams, TokenRules
from hydra_engine.errors import CheckpointError, ConfigError, HydraError
from hydra_engine.models.specs.generation import read_generation

QWEN = {  # as Qwen2-VL-2B-Instruct was published
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.0,
    "temperature": 0.01,
    "top_p": 0.001,
    "top_k": 1,
    "transformers_version": "4.37.0",
}


GENERATION_DEFAULTS: dict[str, Any] = {  # as transformers 4 wrote them into config.json
    **{"max_length": 20, "min_length": 0, "do_sample": False, "early_stopping": False, "num_beams": 1, "top_k": 50},
    **{"num_beam_groups": 1, "diversity_penalty": 0.0, "temperature": 1.0, "top_p": 1.0, "typical_p": 1.0},
    **{"repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None},
    **{"encoder_no_repeat_ngram_size": 0, "num_return_sequences": 1, "suppress_tokens": None, "epsilon_cutoff": 0.0},
    **{"forced_bos_token_id": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None},
    **{"guidance_scale": 1.0, "renormalize_logits": True, "remove_invalid_values": True, "use_cache": True},
}


def chosen(tmp_path: Path, file: Any, override: Any = None, **options: Any) -> dict[str, Any]:
    if file is not None:
        text = file if isinstance(file, str) else json.dumps(file)
        (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    text = json.dumps(override) if isinstance(override, dict) else override
    return read_generation(tmp_path, text, **options).sampling.non_default_fields


@pytest.mark.parametrize(
    ("file", "override", "expected"),
    [
        (None, None, {}),
        ({"eos_token_id": 2}, None, {}),
        (QWEN, None, {"temperature": 0.01, "top_p": 0.001, "top_k": 1}),
        ({"max_new_tokens": 32, "min_p": 0.1, "repetition_penalty": 1.05}, None, None),
        ({"do_sample": False, "temperature": 0.7, "top_k": 5}, None, {"temperature": 0.0, "top_k": 5}),
        ({"do_sample": None, "temperature": None, "top_k": None}, None, {}),
        (QWEN, {"top_p": 0.5}, {"temperature": 0.01, "top_p": 0.5, "top_k": 1}),
        (QWEN, {"temperature": 1, "top_p": 1, "top_k": 0}, {}),
        (QWEN, {"do_sample": False}, {"temperature": 0.0, "top_p": 0.001, "top_k": 1}),
        ({"do_sample": False}, {"temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": False}, {"do_sample": True}, {}),
        ({"do_sample": False}, {"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        (None, {"max_new_tokens": 7}, {"max_tokens": 7}),
    ],
)
def test_what_applies(tmp_path: Path, file: Any, override: Any, expected: dict[str, Any] | None) -> None:
    if expected is None:
        expected = {"max_tokens": 32, "min_p": 0.1, "repetition_penalty": 1.05}
    assert chosen(tmp_path, file, override) == expected


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ({"min_new_tokens": 4, "max_new_tokens": 9}, {"min_tokens": 4, "max_tokens": 9}),
        ({"min_new_tokens": 40, "max_new_tokens": 9}, {"max_tokens": 9}),
        ({"stop_strings": "###"}, {"stop": ("###",)}),
        ({"stop_strings": ["a", "b"]}, {"stop": ("a", "b")}),
    ],
)
def test_how_long_answers_are(tmp_path: Path, file: Any, expected: dict[str, Any]) -> None:
    assert chosen(tmp_path, file) == expected


@pytest.mark.parametrize(
    ("file", "override", "expected"),
    [
        ({"suppress_tokens": [5, 6, -1], "begin_suppress_tokens": [7]}, None, TokenRules((5, 6), (7,))),
        ({"suppress_tokens": None, "begin_suppress_tokens": [], "bad_words_ids": None}, None, TokenRules()),
        ({"bad_words_ids": [[9], [5], [2]], "suppress_tokens": [5], "eos_token_id": 2}, None, TokenRules((5, 9))),
        ({"forced_eos_token_id": 2}, None, TokenRules(last=(2,))),
        ({"forced_eos_token_id": [3, 2]}, None, TokenRules(last=(2,))),
        ({"suppress_tokens": [5]}, {"suppress_tokens": [6]}, TokenRules((6,))),
        ({"suppress_tokens": [5]}, {"suppress_tokens": []}, TokenRules()),
    ],
)
def test_what_is_said_of_tokens(tmp_path: Path, file: Any, override: Any, expected: TokenRules) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    text = None if override is None else json.dumps(override)
    assert read_generation(tmp_path, text).rules == expected
    assert read_generation(tmp_path, use_file=False).rules == TokenRules()


@pytest.mark.parametrize(
    ("file", "config", "expected"),
    [
        (QWEN, {}, ()),
        (QWEN, {"no_repeat_ngram_size": 3}, ()),  # of old files, where the other is there
        ({**dict.fromkeys(GENERATION_DEFAULTS), "max_length": None}, {}, ()),
        (GENERATION_DEFAULTS, {}, ()),
        ({"no_repeat_ngram_size": 3, "num_beams": 2}, {}, ("no_repeat_ngram_size", "num_beams")),
        ({"typical_p": 0.9, "epsilon_cutoff": 3e-4}, {}, ("typical_p", "epsilon_cutoff")),
        ({"typical_p": 0.9, "epsilon_cutoff": 3e-4, "do_sample": False}, {}, ()),
        ({"bad_words_ids": [[4], [5, 6]]}, {}, ("bad_words_ids",)),
        ({"max_length": 100}, {}, ("max_length",)),
        ({"max_length": 100}, {"text_config": {"max_position_embeddings": 128}}, ("max_length",)),
        ({"max_length": 128}, {"max_position_embeddings": 128}, ()),
        ({"max_length": 100, "max_new_tokens": 5}, {}, ()),
        ({"exponential_decay_length_penalty": [5, 1.1]}, {}, ("exponential_decay_length_penalty",)),
        ({"sequence_bias": [[[4], 2.0]], "forced_bos_token_id": 1}, {}, ("sequence_bias", "forced_bos_token_id")),
        (None, {"suppress_tokens": [5], "num_beams": 4, "max_length": 20}, ("num_beams", "suppress_tokens")),
        (None, {"text_config": {"no_repeat_ngram_size": 3}}, ("no_repeat_ngram_size",)),
    ],
)
def test_what_nobody_follows_is_named(tmp_path: Path, file: Any, config: Any, expected: tuple[str, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if file is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(file))
    assert read_generation(tmp_path).unfollowed == expected
    assert read_generation(tmp_path, use_file=False).unfollowed == ()


def test_without_the_file(tmp_path: Path) -> None:
    assert chosen(tmp_path, QWEN, use_file=False) == {}
    assert chosen(tmp_path, {"temperature": "hot"}, {"top_k": 3}, use_file=False) == {"top_k": 3}


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"temperature": "hot"}, ("temperature must be a number", "not 'hot'")),
        ({"temperature": -1}, ("temperature must be",)),
        ({"temperature": [0.5]}, ("temperature must be",)),
        ({"top_p": 7}, ("top_p must be", "not '7'")),
        ('{"top_p": NaN}', ("top_p must be",)),
        ({"top_k": 2.5}, ("top_k must be an integer",)),
        ({"top_k": True}, ("top_k must be",)),
        ({"min_p": "0.1"}, ("min_p must be",)),
        ({"repetition_penalty": 0}, ("repetition_penalty must be",)),
        ({"max_new_tokens": 0}, ("max_new_tokens must be an integer",)),
        ({"do_sample": "no"}, ("do_sample must be true or false", "not 'no'")),
        ({"suppress_tokens": ["a"]}, ("suppress_tokens must hold token ids",)),
        ({"forced_eos_token_id": -2}, ("forced_eos_token_id must hold token ids",)),
        ({"bad_words_ids": [5]}, ("bad_words_ids must be a list of lists of token ids",)),
        ({"bad_words_ids": [[5.0]]}, ("bad_words_ids must hold token ids",)),
        ({"min_new_tokens": -1}, ("min_new_tokens must be",)),
        ({"stop_strings": [""]}, ("stop_strings: each stop string must have",)),
        ({"stop_strings": 5}, ("stop_strings must be a string or a list of strings",)),
        ("{not JSON", ("not valid JSON",)),
        ("[1]", ("must hold a JSON object",)),
    ],
)
def test_nonsense_in_the_file_is_one_sentence_with_its_name_and_the_key(
    tmp_path: Path, file: Any, words: tuple[str, ...]
) -> None:
    refused(tmp_path, file, None, CheckpointError, ("generation_config.json", *words))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"temperature": "hot"}, ("temperature must be a number", "not 'hot'")),
        ({"max_new_tokens": -1}, ("max_new_tokens must be",)),
        ({"do_sample": 0}, ("do_sample must be true or false",)),
        ({"temprature": 1}, ("takes temperature, top_p", "not 'temprature'")),
        ("{", ("must be a JSON object such as",)),
        ("0.5", ("must be a JSON object such as",)),
        ("[" * 100_000, ("must be a JSON object such as",)),
    ],
)
def test_nonsense_in_the_override_too(tmp_path: Path, override: Any, words: tuple[str, ...]) -> None:
    refused(tmp_path, None, override, ConfigError, ("override_generation_config", *words))


def refused(tmp_path: Path, file: Any, override: Any, kind: type[HydraError], words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        chosen(tmp_path, file, override)
    message = caught.value.message
    assert all(word in message for word in words) and "\n" not in message and len(message) < 260, message


def test_what_a_request_gives_wins_and_the_rest_is_the_default() -> None:
    defaults = SamplingParams(temperature=0.2, top_p=0.5, max_tokens=9)
    assert defaults.with_fields(top_p=1.0, seed=3) == SamplingParams(temperature=0.2, seed=3)
    assert defaults.with_fields(max_tokens=20).max_tokens == 20
    assert defaults.with_fields(min_tokens=20).min_tokens == 20  # more than the default, which yields
    assert SamplingParams(min_tokens=5).with_fields(max_tokens=3) == SamplingParams(min_tokens=3, max_tokens=3)
