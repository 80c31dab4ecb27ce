"""Makes the tokenizer.json of a folder that has SentencePiece's `tokenizer.model` alone, for Llama's tokenizer and for
InternLM2's and openPangu's, which treat text likewise and whose code, which comes with the checkpoints, is not run.
openPangu's also takes a text that is nothing but "(123,456)", three digits each, apart: here it merges as others do.

Reads the few fields of the file that matter in protobuf's wire format. `gguf_tokenizer.py` makes the rest, because
llama.cpp's files carry the same numbers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra_engine.core.model_folder import read_file
from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.fields import Fields, read_json_if_present
from hydra_engine.models.specs.gguf_config import CONTROL
from hydra_engine.preprocess.text.gguf_tokenizer import tokenizer_files

MODEL_FILE = "tokenizer.model"
OWN_CODE = ("InternLM2Tokenizer", "OpenPanguTokenizer")
SENTENCE_PIECE = (*OWN_CODE, "LlamaTokenizer", "LlamaTokenizerFast")  # classes whose tokenizer.model is read here
_SETTINGS = "tokenizer_config.json"
_BPE, _NORMAL, _USER_DEFINED = 2, 1, 4
_LLAVA, _IMAGE = "LlavaLlamaForCausalLM", "<image>"  # liuhaotian's LLaVA, whose own code puts pictures between texts
# What these tokenizers call the first three tokens, whatever the file does; a name of another token is that one's.
_NAMES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_IDS, _END = ("unknown", "bos", "eos"), 2


def write_tokenizer(folder: Path, target: Path) -> None:
    """Writes to `target` the tokenizer.json that `folder` lacks, and its settings without the class of a model's own
    code. Raises CheckpointError."""
    settings = read_json_if_present(folder, _SETTINGS) or Fields({}, _SETTINGS)
    config = read_json_if_present(folder, "config.json") or Fields({}, "config.json")
    num_rows = config.integer("vocab_size") if config.get("architectures") == [_LLAVA] else None
    (target / "tokenizer.json").write_text(json.dumps(_tokenizer(folder, settings, num_rows)), encoding="utf-8")
    kept = {name: settings.get(name) or text for name, text in _NAMES.items()}
    kept |= {name: value for name, value in settings.values.items() if name not in ("auto_map", *_NAMES)}
    if kept.get("tokenizer_class") in OWN_CODE:
        del kept["tokenizer_class"]
    (target / _SETTINGS).write_text(json.dumps(kept), encoding="utf-8")
    (target / "config.json").write_text(json.dumps(config.values), encoding="utf-8")


def _tokenizer(folder: Path, settings: Fields, num_rows: int | None) -> dict[str, Any]:
    """Returns the content of tokenizer.json. `num_rows`: the number of tokens behind which one for pictures is added;
    None: without."""
    tokens, scores, kinds, prefixed = _read_model(read_file(folder, MODEL_FILE) or b"")
    if len(tokens) <= _END:
        raise _broken("it has no vocabulary")
    added = _added_tokens(settings)
    names = [settings.token_text(name, text) for name, text in _NAMES.items()]
    taken = {*tokens[_END + 1 :], *(content for content, _ in added.values())}
    tokens[: _END + 1] = [token if name in taken else name for token, name in zip(tokens, names, strict=False)]
    for id, (content, special) in sorted(added.items()):
        if id > len(tokens):
            raise CheckpointError(f"{_SETTINGS} adds token {id}, but the tokens before it end at {len(tokens) - 1}")
        kind = CONTROL if special else _USER_DEFINED
        if id == len(tokens):
            tokens, scores, kinds = [*tokens, content], [*scores, 0.0], [*kinds, kind]
        else:
            tokens[id], kinds[id] = content, kind
    if num_rows is not None and _IMAGE not in tokens:
        if len(tokens) != num_rows:
            raise CheckpointError(f"{MODEL_FILE} has {len(tokens)} tokens, vocab_size in config.json is {num_rows}")
        tokens, scores, kinds = [*tokens, _IMAGE], [*scores, 0.0], [*kinds, CONTROL]
    if len(set(tokens)) < len(tokens):
        raise _broken(f"two of its tokens have one name, with those that {_SETTINGS} adds")
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        "add_space_prefix": prefixed,
        "add_bos_token": settings.flag("add_bos_token", True),
        **{f"{name}_token_id": tokens.index(text) for name, text in zip(_IDS, names, strict=True)},
    }
    named = Fields({f"tokenizer.ggml.{name}": value for name, value in values.items()}, MODEL_FILE)
    made: dict[str, Any] = tokenizer_files(named, pictures=False)["tokenizer.json"]
    return made


def _added_tokens(settings: Fields) -> dict[int, tuple[str, bool]]:
    """Id -> (text, whether it is special) of the tokens that are matched as written."""
    section = settings.section_if_present("added_tokens_decoder") or Fields({}, settings.where)
    added = {int(id): section.section(id) for id in section.values if id.isdecimal()}
    return {id: (token.text("content"), token.flag("special", False)) for id, token in added.items()}


def _read_model(data: bytes) -> tuple[list[str], list[float], list[int], bool]:
    """Returns the pieces with their scores and types, and whether a text gets a space in front. Raises CheckpointError
    for a model that is no BPE, or that changes the text before it is split."""
    tokens, scores, kinds = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for number, value in _fields(data):
            if number == 1:
                piece = dict(_fields(value))
                tokens.append(bytes(piece[1]).decode())
                scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
                kinds.append(piece.get(3, _NORMAL))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
    except (IndexError, KeyError, TypeError, ValueError, struct.error):
        raise _broken("it is not SentencePiece's format") from None
    if trainer.get(3, 1) != _BPE:
        raise _broken("only BPE is supported")
    if normalizer.get(2) or normalizer.get(4, 1):
        raise _broken("it normalises text, which is not supported")
    return tokens, scores, kinds, bool(normalizer.get(3, 1))


def _broken(why: str) -> CheckpointError:
    return CheckpointError(f"{MODEL_FILE} cannot be used: {why}; put the model's tokenizer.json beside it")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) of a message's fields: whole numbers, or bytes of fixed or stated length. Raises
    IndexError or ValueError for bytes that are no message."""
    place = 0
    while place < len(data):
        key, place = _whole_number(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _whole_number(data, place)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"wire type {kind}")
        length = {1: 8, 5: 4}.get(kind, 0)
        if kind == 2:
            length, place = _whole_number(data, place)
        if place + length > len(data):
            raise IndexError(place)
        yield key >> 3, data[place : place + length]
        place += length


def _whole_number(data: bytes, place: int) -> tuple[int, int]:
    """Returns the number at `place`, seven bits a byte, and the place behind it."""
    value = 0
    for index in range(10):
        value |= (data[place + index] & 127) << (7 * index)
        if data[place + index] < 128:
            return value, place + index + 1
    raise ValueError("a number of more than ten bytes")
