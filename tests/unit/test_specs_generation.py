"""Sampling defaults from generation_config.json and from what the operator puts over it; every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.core.request import SamplingParams
from hydra_engine.errors import CheckpointError, ConfigError, HydraError
from hydra_engine.models.specs.generation import default_sampling

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


def chosen(tmp_path: Path, file: Any, override: Any = None, **options: Any) -> dict[str, Any]:
    if file is not None:
        text = file if isinstance(file, str) else json.dumps(file)
        (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    text = json.dumps(override) if isinstance(override, dict) else override
    return default_sampling(tmp_path, text, **options).chosen


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
    assert all(word in message for word in words) and "\n" not in message and len(message) < 200, message


def test_what_a_request_gives_wins_and_the_rest_is_the_default() -> None:
    defaults = SamplingParams(temperature=0.2, top_p=0.5, max_tokens=9)
    assert defaults.asked(top_p=1.0, seed=3) == SamplingParams(temperature=0.2, seed=3)
    assert defaults.asked(max_tokens=20).max_tokens == 20
    assert defaults.asked(min_tokens=20).min_tokens == 20  # more than the default, which yields
