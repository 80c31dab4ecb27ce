"""Checks of a tokenizer.json before a tokenizer is built from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hydra_engine.errors import CheckpointError
from hydra_engine.preprocess.text.tokenizer_file import MAX_ADDED_TOKENS, MAX_STEPS, check_tokenizer_file

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


def check(**parts: Any) -> None:
    check_tokenizer_file(json.dumps({"model": {}, **parts}).encode())


def test_what_real_tokenizers_have_is_taken() -> None:
    added = [{"id": id, "content": f"<{id}>"} for id in range(MAX_ADDED_TOKENS)]
    spaced = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, SPACES, DOUBLE]}
    steps = [{**SPACES, "content": "  "}, {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}]
    check(added_tokens=added, normalizer=spaced, decoder={"type": "Sequence", "decoders": steps})


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"added_tokens": [{}] * (MAX_ADDED_TOKENS + 1)}, "added tokens; at most"),
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 7}}, "the normalizer .* more than 64 times"),
        ({"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 7}}, "the decoder .* more than 64 times"),
        ({"decoder": {**DOUBLE, "content": "a" * 65}}, "more than 64 times"),
        ({"decoder": {**DOUBLE, "pattern": {"Regex": "b*"}, "content": "a" * 64}}, "more than 64 times"),
        ({"decoder": {**DOUBLE, "pattern": {"Regex": "(a|a)*b"}, "content": ""}}, "is not a plain one"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{}] * (MAX_STEPS + 1)}}, "steps"),
        ({"model": []}, "not a tokenizer file"),
        ({"added_tokens": {}}, "not valid JSON"),
    ],
)
def test_what_none_has_is_refused(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        check(**parts)


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not valid JSON"):
        check_tokenizer_file(b'{"model":{},"decoder":' + b"[" * 10**6 + b"]" * 10**6 + b"}")
