"""Limits on a tokenizer.json, checked before a tokenizer is built from it: the number of added tokens, and how much
text a decoder makes of a token, since streams decode on the event loop.

Parses the file without building its parts. Does not know tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hydra_engine.errors import CheckpointError

MAX_ADDED_TOKENS = 1 << 16
MAX_GROWTH = 64  # factor on a text's length by all steps of a decoder or normalizer
MAX_STEPS = 64
MAX_STEPS_BYTES = 4 << 20  # per part; SentencePiece's normalizer has a table
_MAX_REGEX = 64  # characters in a decoder
_INNER = ("decoders", "normalizers", "pretokenizers")
_NAME = "tokenizer.json"


class _File(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw(b"null")
    added_tokens: msgspec.Raw = msgspec.Raw(b"null")
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")


class _Added(msgspec.Struct, array_like=False):
    """An entry whose contents are ignored; entries are counted."""


def check_tokenizer_file(data: bytes) -> None:
    """Raises CheckpointError if `data` is no tokenizer.json or exceeds a limit."""
    if data.lstrip()[:1] == b"[":
        raise CheckpointError(f"{_NAME} is not a JSON object")
    try:
        file = msgspec.json.decode(data, type=_File)
        if bytes(file.model)[:1] != b"{":
            raise CheckpointError(f"{_NAME} is not a tokenizer file")
        added = msgspec.json.decode(file.added_tokens, type=list[_Added] | None) or []
        steps = {name: list(_steps(name, getattr(file, name))) for name in ("normalizer", "pre_tokenizer", "decoder")}
    except (msgspec.MsgspecError, RecursionError):
        raise CheckpointError(f"{_NAME} is not valid JSON of a tokenizer") from None
    if len(added) > MAX_ADDED_TOKENS:
        raise CheckpointError(f"{_NAME} has {len(added)} added tokens; at most {MAX_ADDED_TOKENS} are taken")
    for name in ("normalizer", "decoder"):
        growth = 1.0
        for step in steps[name]:
            growth *= _growth(step)
        if growth > MAX_GROWTH:
            raise CheckpointError(f"the {name} of {_NAME} could make more than {MAX_GROWTH} times a text of it")
    for step in steps["decoder"]:
        regex = _pattern(step).get("Regex", "")
        if not isinstance(regex, str) or len(regex) > _MAX_REGEX or "(" in regex:
            raise CheckpointError(f"the decoder of {_NAME} has a regular expression that is not a plain one")


def _steps(name: str, raw: msgspec.Raw) -> Iterator[dict[str, Any]]:
    """Yields the steps in order, with sequences flattened. Raises CheckpointError above a limit."""
    if len(bytes(raw)) > MAX_STEPS_BYTES:
        raise CheckpointError(f"the {name} of {_NAME} has more than {MAX_STEPS_BYTES >> 20} MiB")
    waiting, count = [msgspec.json.decode(raw)], 0
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        count += 1
        if count > MAX_STEPS:
            raise CheckpointError(f"the {name} of {_NAME} has more than {MAX_STEPS} steps")
        inner = next((step[key] for key in _INNER if isinstance(step.get(key), list)), None)
        if inner is None:
            yield step
        else:
            waiting += inner[::-1]


def _growth(step: dict[str, Any]) -> float:
    """An upper bound of the step's factor on a text's length; for an inserted text, that of one character."""
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = _pattern(step), str(step.get("content", ""))
        length = len(pattern["String"]) if isinstance(pattern.get("String"), str) else 0
        return max(1.0, len(content) / length if length else len(content) + 1)
    if kind == "Prepend":
        return 1.0 + len(str(step.get("prepend", "")))
    return 1.0


def _pattern(step: dict[str, Any]) -> dict[str, Any]:
    pattern = step.get("pattern")
    return pattern if isinstance(pattern, dict) else {}
