"""Makes the tokenizer files of a Hugging Face directory from GGUF settings: tokenizer.json, tokenizer_config.json and
the chat template.

Two kinds of vocabularies: byte-level BPE ("gpt2"), with merges and the name of a splitting rule in the file; and
SentencePiece's BPE ("llama"), whose merges follow from the scores of its tokens. Does not know models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.fields import Fields
from hydra_engine.models.specs.gguf_config import CONTROL, PICTURE_TOKENS, special_token

_UNKNOWN, _USER_DEFINED, _UNUSED = 2, 4, 5  # of tokenizer.ggml.token_type
_MAX_CUTS = 1 << 28  # sum of squared token lengths: about a second
_SPACE = "\u2581"  # SentencePiece's
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# Regular expression that splits text before merging, by tokenizer.ggml.pre; None is GPT-2's rule.
_SPLITS = {
    **dict.fromkeys(("default", "gpt-2"), None),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "pixtral"), _LLAMA3),
}


def tokenizer_files(settings: Fields, *, pictures: bool) -> dict[str, Any]:
    """Returns the files by name: JSON objects, and the chat template, if any, as text. `pictures`: the vocabulary gets
    a picture token if it has none (see `gguf_config.py`). Raises CheckpointError."""
    model = settings.text("tokenizer.ggml.model")
    tokens = _texts(settings, "tokenizer.ggml.tokens")
    kinds = settings.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise settings.wrong_value("tokenizer.ggml.token_type", f"{len(tokens)} numbers, one for each token")
    unknown = next(iter(special_token(settings, "unknown", len(tokens))), None)
    if pictures and unknown is not None and not any(name in tokens for name in PICTURE_TOKENS):
        tokens = [*tokens[:unknown], PICTURE_TOKENS[-1], *tokens[unknown + 1 :]]
    if model == "gpt2":
        tokenizer, begins = _byte_level(settings, tokens, kinds)
    elif model == "llama":
        tokenizer, begins = _sentence_piece(settings, tokens, kinds, unknown), True
    else:
        raise settings.wrong_value("tokenizer.ggml.model", "gpt2 or llama")
    tokenizer |= {"version": "1.0", "truncation": None, "padding": None}
    tokenizer["added_tokens"] = list(_added(tokens, kinds, unknown))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {name: special_token(settings, key, len(tokens)) for name, key in names.items()}
    config = {f"{name}_token": tokens[ids[0]] for name, ids in special.items() if ids}
    if "bos_token" in config and settings.flag("tokenizer.ggml.add_bos_token", begins):
        tokenizer["post_processor"] = _beginning_with(config["bos_token"], special["bos"][0])
    files: dict[str, Any] = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {**config, "clean_up_tokenization_spaces": False},
    }
    if "tokenizer.chat_template" in settings:
        files["chat_template.jinja"] = settings.text("tokenizer.chat_template")
    return files


def _byte_level(settings: Fields, tokens: list[str], kinds: list[int]) -> tuple[dict[str, Any], bool]:
    """Returns (tokenizer.json's parts, whether texts begin with BOS by default)."""
    rule = settings.text("tokenizer.ggml.pre", "default")
    if rule not in _SPLITS:
        raise settings.wrong_value("tokenizer.ggml.pre", f"one of {', '.join(_SPLITS)}")
    split = _SPLITS[rule]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split is None}
    steps = [{"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}] if split else []
    merges = _texts(settings, "tokenizer.ggml.merges") if "tokenizer.ggml.merges" in settings else []
    pairs = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise settings.wrong_value("tokenizer.ggml.merges", "pairs of tokens with a space between them")
    whole = split is _LLAMA3
    return {
        "normalizer": {"type": "NFC"} if split in (_QWEN2, _QWEN35) else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, to_bytes]},
        "decoder": to_bytes,
        "post_processor": None,
        "model": _bpe(tokens, kinds, pairs) | {"ignore_merges": whole},  # a word that is a token needs no merges
    }, whole


def _sentence_piece(settings: Fields, tokens: list[str], kinds: list[int], unknown: int | None) -> dict[str, Any]:
    scores = settings.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not isinstance(scores[0], float):
        raise settings.wrong_value("tokenizer.ggml.scores", f"{len(tokens)} numbers, one for each token")
    spaced = settings.flag("tokenizer.ggml.add_space_prefix", True)
    begin = [{"type": "Prepend", "prepend": _SPACE}] if spaced else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spaced else []
    model = _bpe(tokens, kinds, _merges(tokens, scores))
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*begin, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "post_processor": None,
        "model": model | {"unk_token": None if unknown is None else tokens[unknown], "byte_fallback": True},
    }


def _bpe(tokens: list[str], kinds: list[int], merges: list[list[str]]) -> dict[str, Any]:
    """The BPE model. Unused tokens, which pad a vocabulary, are left out."""
    vocabulary = {token: index for index, token in enumerate(tokens) if kinds[index] != _UNUSED}
    merges = [
        pair for pair in merges if pair[0] in vocabulary and pair[1] in vocabulary and "".join(pair) in vocabulary
    ]
    return {"type": "BPE", "dropout": None, "fuse_unk": True, "vocab": vocabulary, "merges": merges}


def _merges(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """The pairs of tokens that form a token, the most likely token first; for one token the pair with the lowest ids
    first."""
    ids = {token: index for index, token in enumerate(tokens)}
    if sum(len(token) ** 2 for token in ids) > _MAX_CUTS:
        raise CheckpointError("the tokens of the GGUF file are too long to find their merges")
    found: list[tuple[float, int, int, int]] = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], index, left, right))
    return [[tokens[left], tokens[right]] for *_, left, right in sorted(found)]


def _added(tokens: list[str], kinds: list[int], unknown: int | None) -> Iterator[dict[str, Any]]:
    """Yields the tokens that are matched in a text as written, before it is split."""
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (CONTROL, _UNKNOWN, _USER_DEFINED) or index == unknown:
            yield {
                **{"id": index, "content": token, "special": kind != _USER_DEFINED, "normalized": False},
                **{"single_word": False, "lstrip": False, "rstrip": False},
            }


def _beginning_with(token: str, token_id: int) -> dict[str, Any]:
    def sequence(name: str, type_id: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": type_id}}

    begin = [{"SpecialToken": {"id": token, "type_id": type_id}} for type_id in (0, 1)]
    return {
        "type": "TemplateProcessing",
        "single": [begin[0], sequence("A", 0)],
        "pair": [begin[0], sequence("A", 0), begin[1], sequence("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _texts(settings: Fields, name: str) -> list[str]:
    texts = settings.get(name)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise settings.missing_field(name) if texts is None else settings.wrong_value(name, "a list of texts")
    return texts
