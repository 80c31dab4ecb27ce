import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hydra_engine.errors import CheckpointError, InvalidRequest
from hydra_engine.preprocess.text.tokenizer import Tokenizer, load_tokenizer


def test_encodes_with_and_without_special_tokens_and_decodes_back(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("the cat 🎉", add_special_tokens=False)
    assert tokenizer.encode("the cat 🎉") == [tokenizer._tokenizer.bos_token_id, *plain]
    assert tokenizer.decode(plain) == "the cat 🎉"
    with_special = tokenizer.encode("<|user|>the cat</s>")
    assert tokenizer.decode(with_special) == "the cat"
    assert tokenizer.decode(with_special, skip_special_tokens=False) == "<s><|user|>the cat</s>"
    assert tokenizer.eos_ids == (tokenizer._backend.token_to_id("</s>"),)
    assert tokenizer.special_ids == {tokenizer._backend.token_to_id(t) for t in tokenizer.tokens(range(6))}


def test_long_and_short_texts_are_encoded_alike(tokenizer: Tokenizer) -> None:
    sentence = " the cat sat on the mat."
    assert tokenizer.encode(sentence * 200) == [0] + tokenizer.encode(sentence * 20, add_special_tokens=False) * 10


@pytest.mark.slow
def test_long_texts_leave_the_interpreter_to_other_threads(tokenizer: Tokenizer) -> None:
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    tokenizer.encode("the cat sat on the mat. " * 30_000)
    done.set()
    thread.join()
    assert ticks >= 10


def test_one_tokenizer_serves_many_threads(tokenizer: Tokenizer) -> None:
    text = "What is in this picture? 日本語 " * 20
    expected, failures = tokenizer.encode(text), []

    def work() -> None:
        for _ in range(50):
            if tokenizer.encode(text) != expected or tokenizer.decode(expected) != text:
                failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_texts_may_hold_any_character_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    text = "a\0b\x01\x7f\0\0"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    for text in ("a\ud800b", "\udfff" * 3000):
        with pytest.raises(InvalidRequest, match="Unicode"):
            tokenizer.encode(text)


def test_ids_outside_the_vocabulary_decode_to_nothing_or_are_refused(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""
    assert tokenizer.token_text(tokenizer.vocab_size + 5) == ""
    for wrong in ([-1], [1 << 40], ["a"]):
        with pytest.raises(InvalidRequest, match="token ids"):
            tokenizer.decode(wrong)


def test_token_texts_show_parts_of_characters_as_bytes(tokenizers: dict[str, Tokenizer]) -> None:
    byte_level = tokenizers["byte_level"]
    assert byte_level.token_text(byte_level._backend.token_to_id("Ġthe")) == " the"
    assert byte_level.token_text(byte_level._backend.token_to_id("<image>")) == "<image>"
    partial = byte_level._backend.token_to_id("Ł")  # the byte 0x9f
    assert byte_level.token_bytes(partial) == b"\x9f"
    assert byte_level.token_text(partial) == "bytes:\\x9f"
    pieces = tokenizers["sentencepiece_like"]
    assert pieces.token_text(pieces._backend.token_to_id("▁the")) == " the"
    assert pieces.token_text(pieces._backend.token_to_id("<0xE2>")) == "bytes:\\xe2"
    assert pieces.token_text(pieces._backend.token_to_id("<0x41>")) == "A"


def test_every_token_of_a_byte_level_text_spells_its_bytes(tokenizer: Tokenizer) -> None:
    text = "naïve 日本語 🎉\n\tstraße"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(id) for id in ids) == text.encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no tokenizer.json"),
        ("{", "tokenizer.json is not valid JSON"),
        ("[]", "tokenizer.json is not a JSON object"),
        ("{}", "tokenizer.json is not a tokenizer file"),
    ],
)
def test_a_broken_directory_is_named_by_file_never_by_path(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "field"), [("config.json", "model_type"), ("tokenizer_config.json", "tokenizer_class")]
)
def test_a_class_is_named_by_a_text(model_dir: Path, tmp_path: Path, file: str, field: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    for value in ({"a": 1}, 5, ["x"]):
        (tmp_path / file).write_text(json.dumps({field: value}))
        with pytest.raises(CheckpointError, match=f"{field} in config.json or tokenizer_config.json must be a text"):
            load_tokenizer(tmp_path)


def test_limits_stored_in_the_tokenizer_file_do_not_cut_prompts(model_dir: Path, tmp_path: Path) -> None:
    stored = json.loads((model_dir / "tokenizer.json").read_text())
    stored["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    assert len(load_tokenizer(tmp_path).encode("the cat sat on the mat")) > 4


def test_the_older_template_file_is_found(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    assert load_tokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(tmp_path).chat_template == "{{ messages }}"


@pytest.mark.slow
def test_the_whole_room_runs_without_torch(model_dir: Path) -> None:
    code = f"""
import sys, asyncio
from PIL import Image
from hydra_engine.preprocess import preprocessor
from hydra_engine.preprocess.media import fetch, images, media, opening
from hydra_engine.preprocess.text import writer
from hydra_engine.preprocess.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer({str(model_dir)!r})
tokenizer.apply_template([{{"role": "user", "content": "hi"}}], tokenizer.chat_template)
tokenizer.decode(tokenizer.encode("hi"))
assert "torch" not in sys.modules and "torchvision" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True, timeout=60)
