"""Folders with SentencePiece's tokenizer.model alone, as InternLM2's and LLaVA's checkpoints were published."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.errors import CheckpointError
from hydra_engine.preprocess.text.tokenizer import load_tokenizer

PIECES = ["▁", *"abcinthe", "▁t", "he", "in", "▁the", "▁in", "▁a", "ca", "ab", "the", "[UNUSED_TOKEN_145]"]
BPE, IDENTITY = {3: 2}, {3: 0, 4: 0}  # model_type; no space in front of a text, none removed
SETTINGS: dict[str, Any] = {
    "added_tokens_decoder": {
        "277": {"content": "<|im_end|>", "special": True},
        "278": {"content": "<img>", "special": True},
    },
    "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
    "tokenizer_class": "InternLM2Tokenizer",
}


def message(*fields: tuple[int, Any]) -> bytes:
    """Writes protobuf's wire format: whole numbers below 128, floats, and bytes."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(bytes([number << 3, value]))
        elif isinstance(value, float):
            parts.append(bytes([number << 3 | 5]) + struct.pack("<f", value))
        else:
            length = len(value)
            size = bytes([length]) if length < 128 else bytes([length & 127 | 128, length >> 7])
            parts.append(bytes([number << 3 | 2]) + size + value)
    return b"".join(parts)


def write(
    folder: Path, trainer: Mapping[int, int] = BPE, normalizer: Mapping[int, Any] = IDENTITY, **settings: Any
) -> Path:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(piece, -float(index), 1) for index, piece in enumerate(PIECES)]
    model = message(*((1, message((1, text.encode()), (2, score), (3, kind))) for text, score, kind in pieces))
    model += message((2, message(*trainer.items())), (3, message(*normalizer.items())))
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS | settings))
    (folder / "config.json").write_text('{"model_type": "internvl_chat"}')
    return folder


def encode(text: str) -> list[int]:
    """Written after the definition of SentencePiece's BPE: of all neighbours that are a piece together, the first with
    the highest score merge, until there are none; characters without a piece are their bytes."""
    parts = list(text.replace(" ", "▁"))
    while True:
        found = [(PIECES.index(a + b), i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]
        if not found:
            break
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        id
        for part in parts
        for id in ([259 + PIECES.index(part)] if part in PIECES else [3 + byte for byte in part.encode()])
    ]


@pytest.mark.parametrize("prefix", [0, 1])
def test_texts_have_the_tokens_of_sentence_piece(tmp_path: Path, prefix: int) -> None:
    tokenizer = load_tokenizer(write(tmp_path, normalizer={**IDENTITY, 3: prefix}))
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(rng.choice(["the", "cab", "in", " ", "a", "é", "\n", "🙂"]) for _ in range(rng.randrange(1, 12)))
        ids = encode(" " * prefix + text)
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == text
    ids = tokenizer.encode("the<|im_end|>in<img>")
    assert ids == [1, *encode(" " * prefix + "the"), 277, *encode(" " * prefix + "in"), 278]
    assert tokenizer.special_ids == {0, 1, 2, 277, 278} and tokenizer.eos_ids == (2,)


def test_llamas_class_reads_the_same_file(tmp_path: Path) -> None:
    folder = write(tmp_path, normalizer={4: 0}, tokenizer_class="LlamaTokenizer", auto_map=None, legacy=False)
    assert load_tokenizer(folder).encode("the cab") == [1, *encode(" the cab")]


def test_openpangus_class_names_a_later_token_as_the_end(tmp_path: Path) -> None:
    """[unused10] is a piece of the file, and its text takes no tokens apart; a text never begins with <s>."""
    added = {"0": "<unk>", "1": "<s>", "2": "</s>", "277": "[unused10]"}
    folder = write(
        tmp_path,
        **{"tokenizer_class": "OpenPanguTokenizer", "eos_token": "[unused10]", "add_bos_token": False},
        auto_map={"AutoTokenizer": ["tokenization_openpangu.OpenPanguTokenizer", None]},
        added_tokens_decoder={id: {"content": text, "special": True} for id, text in added.items()},
    )
    (folder / "config.json").write_text('{"model_type": "openpangu_vl"}')
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<s>the[unused10]cab</s>") == [1, *encode("the"), 277, *encode("cab"), 2]
    assert tokenizer.eos_ids == (277,) and tokenizer.bos_token == "<s>"
    assert tokenizer.decode([277, *encode("the cab")], skip_special_tokens=True) == "the cab"


def test_llava_gets_a_token_for_pictures(tmp_path: Path) -> None:
    """LLaVA's own code puts features between texts; the id is the first one without an embedding."""
    folder = write(tmp_path, tokenizer_class="LlamaTokenizer", auto_map=None, added_tokens_decoder={})
    config = {"architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava", "vocab_size": 278}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).encode("the<image>in") == [1, *encode("the"), 278, *encode("in")]
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(CheckpointError, match=r"has 278 tokens, vocab_size in config\.json is 300"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trainer": {3: 1}}, "only BPE is supported"),
        ({"normalizer": {4: 1}}, "it normalises text"),
        ({"normalizer": {**IDENTITY, 2: b"rules"}}, "it normalises text"),
        (
            {"added_tokens_decoder": {"279": {"content": "<far>"}}},
            "adds token 279, but the tokens before it end at 277",
        ),
        ({"added_tokens_decoder": {"277": {"content": "the"}}}, "two of its tokens have one name"),
        (
            {"tokenizer_class": "QWenTokenizer"},
            "the tokenizer is a QWenTokenizer, whose code comes with the model and is not",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(write(tmp_path, **change))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = (write(tmp_path) / "tokenizer.model").read_bytes()
    for data in (b"", whole[:-9], b"\xff" * 20, b"\x0b" + whole):
        (tmp_path / "tokenizer.model").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"tokenizer\.model cannot be used"):
            load_tokenizer(tmp_path)
