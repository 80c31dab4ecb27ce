"""Tokenizers from the settings of GGUF files give the ids of the tokenizer.json that the file was made from."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.fields import Fields
from hydra_engine.preprocess.text.gguf_tokenizer import tokenizer_files

CORPUS = [
    "the quick brown fox jumps over the lazy dog, isn't it? I'm sure they'll say WE'VE seen 12 345 6789 of them",
    "naïve café Über straße ελληνικά русский текст 日本語の文章 한국어 हिन्दी العربية 😀🚀👩‍👩‍👧",
    "def f(x):\n\treturn x ** 2  # comment\n\n\nif __name__ == '__main__':\n    print(f(3.14), '\\n')\r\n",
] * 20
HARD = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n \t\r\n  x",
    "Hello, world!",
    " leading and trailing ",
    "DON'T don't we'VE I'm it's 'tis",
    "1 12 123 1234 12345 3.14159 1,000,000",
    "ＡＢＣ ①②③ ½ cafe\u0301 café ﬁ",
    "日本語の文章です。漢字とかな",
    "👩‍👩‍👧‍👦 🏳️‍🌈 😀😀",
    "\u0000\u0001\u007f\u00a0\u2028\ufeff",
    "def f(x):\n    return x\n\n\n\tpass",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<think>a</think> <think> b <|im_end|><|im_end|>",
    "<|im_start| > <|im|> <s>no</s>",
    "....!!!???  --- ___ ***",
    "the" * 40 + " " * 37 + "the",
]
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_BESIDES = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "qwen35": rf"{_MARKED}|\p{{N}}|{_BESIDES}",
    "qwen2": rf"{_ENDINGS}|\p{{N}}|{_REST}",
    "llama-bpe": rf"{_ENDINGS}|\p{{N}}{{1,3}}|{_REST}",
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_level(rule: str) -> Tokenizer:
    """A tokenizer like the published ones of Qwen2, Qwen3.5, Llama 3 and GPT-2, with a small vocabulary."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=rule == "llama-bpe"))
    if rule.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    split = SPLITS.get(rule)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, whole])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
    return with_special_tokens(tokenizer)


def sentence_piece() -> Tokenizer:
    """A tokenizer like the published ones of Llama 2 and LLaVA-1.5."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=first, limit_alphabet=120)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Trained bytes are words of the vocabulary, not marks that are found in texts.
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [one for one in described["added_tokens"] if not one["content"].startswith("<0x")]
    return with_special_tokens(Tokenizer.from_str(json.dumps(described)))


def with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>", "<image>")]
    )
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    return tokenizer


def settings_of(tokenizer: Tokenizer, rule: str | None) -> dict[str, Any]:
    """Settings that llama.cpp's converter writes for it; `rule` None: SentencePiece."""
    described = json.loads(tokenizer.to_str())
    size = tokenizer.get_vocab_size() + 3
    tokens, kinds = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for token, index in described["model"]["vocab"].items():
        is_byte = rule is None and re.fullmatch("<0x..>", token)
        tokens[index], kinds[index] = token, BYTE if is_byte else NORMAL
    for added in described["added_tokens"]:
        kind = CONTROL if added["special"] else USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], kind
    found: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in described["model"]["merges"]]
    if rule is not None:
        joined = [" ".join(pair) for pair in merges]
        return found | {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": rule,
            "tokenizer.ggml.merges": joined,
            "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
            "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        }
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    kinds[0] = UNKNOWN
    return found | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [float(-ranks.get(token, 1_000_000)) for token in tokens],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def built(settings: dict[str, Any], *, pictures: bool = True) -> Tokenizer:
    files = tokenizer_files(Fields(settings, "model.gguf"), pictures=pictures)
    return Tokenizer.from_str(json.dumps(files["tokenizer.json"]))


@pytest.mark.parametrize("rule", ["qwen2", "qwen35", "llama-bpe", "gpt-2"])
def test_byte_level_ids_and_texts_are_those_of_the_origin(rule: str) -> None:
    origin = byte_level(rule)
    tokenizer = built(settings_of(origin, rule))
    for text in HARD:
        ids = origin.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == origin.decode(ids, skip_special_tokens=skip)


def test_sentence_piece_ids_and_texts_are_those_of_the_origin() -> None:
    origin = sentence_piece()
    tokenizer = built(settings_of(origin, None))
    for text in HARD:
        ids = origin.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        assert tokenizer.decode(ids) == origin.decode(ids)
    assert tokenizer.encode("hi").ids[0] == 1  # BOS, where the file does not say otherwise


def test_bos_is_put_before_texts_as_the_file_or_its_kind_says() -> None:
    settings = settings_of(byte_level("llama-bpe"), "llama-bpe")
    bos = settings["tokenizer.ggml.bos_token_id"]
    assert built(settings).encode("hi").ids[0] == bos
    assert built(settings | {"tokenizer.ggml.add_bos_token": False}).encode("hi").ids[0] != bos
    assert built(settings | {"tokenizer.ggml.pre": "qwen2"}).encode("hi").ids[0] != bos


def test_a_vocabulary_without_pictures_calls_its_unknown_token_one() -> None:
    settings = settings_of(sentence_piece(), None)
    tokens = settings["tokenizer.ggml.tokens"]
    tokens[tokens.index("<image>")] = "<other>"
    assert built(settings).encode("a<image>b<unk>", add_special_tokens=False).ids.count(0) == 1
    alone = built(settings, pictures=False)
    assert alone.encode("a<image>b<unk>", add_special_tokens=False).ids.count(0) == 1
    assert alone.id_to_token(0) == "<unk>"


def test_unused_ids_have_no_name() -> None:
    settings = settings_of(byte_level("gpt-2"), "gpt-2")
    last = len(settings["tokenizer.ggml.tokens"]) - 1
    assert built(settings).id_to_token(last) is None


def test_the_chat_template_is_the_files() -> None:
    settings = settings_of(byte_level("gpt-2"), "gpt-2")
    assert "chat_template.jinja" not in tokenizer_files(Fields(settings, "model.gguf"), pictures=False)
    files = tokenizer_files(Fields(settings | {"tokenizer.chat_template": "{{ 1 }}"}, "model.gguf"), pictures=False)
    assert files["chat_template.jinja"] == "{{ 1 }}"
    assert files["tokenizer_config.json"]["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "must be gpt2 or llama, not 't5'"),
        ({"tokenizer.ggml.pre": "dbrx"}, "tokenizer.ggml.pre in model.gguf must be one of default, gpt-2, qwen2"),
        ({"tokenizer.ggml.tokens": None}, "model.gguf has no field tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens in model.gguf must be a list of texts"),
        ({"tokenizer.ggml.token_type": [1]}, "one for each token"),
        ({"tokenizer.ggml.merges": ["abc"]}, "pairs of tokens with a space between them"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores in model.gguf must be"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": ["x"] * 708}, "tokenizer.ggml.scores in"),
        ({"tokenizer.ggml.bos_token_id": -4}, "must be a whole number from -1"),
        ({"tokenizer.ggml.bos_token_id": "<s>"}, "must be a whole number from -1"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, Any], message: str) -> None:
    settings = settings_of(byte_level("qwen2"), "qwen2") | change
    with pytest.raises(CheckpointError, match=re.escape(message)):
        tokenizer_files(Fields(settings, "model.gguf"), pictures=False)
