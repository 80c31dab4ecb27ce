"""GGUF files in real engines: the same answers as from the directory that they were made from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engine.conftest import EngineFactory, picture
from tests.gguf_files import write_gguf
from tools.miniatures import make_tiny

ASKED = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_same_answers_as_from_the_directory(make_engine: EngineFactory, tiny_model: Path, tmp_path: Path) -> None:
    """Uses the file's own template and tokenizer, and its mmproj for pictures; in a process of its own."""
    text, mmproj = write_gguf(tiny_model, tmp_path / "files")
    engine, origin = make_engine(model=text, mmproj=str(mmproj), processes=True), make_engine()
    assert engine.model_name == str(text)
    for images in (None, picture(3), [picture(4, 90, 30), picture(5)]):
        question = "Hello, wörld! 123\n\n  what?"
        answer, expected = (one.generate(question, images, **ASKED) for one in (engine, origin))
        assert answer.token_ids == expected.token_ids
        assert answer.text == expected.text
        assert answer.usage == expected.usage


@pytest.mark.slow
def test_internvl_answers_alike_where_its_template_knows_text_only(make_engine: EngineFactory, tmp_path: Path) -> None:
    """Files of published models are like this: made from checkpoints without a template for pictures."""
    directory, plain = tmp_path / "origin", tmp_path / "plain"
    make_tiny("internvl", directory, seed=7)
    shutil.copytree(directory, plain)
    turn = "'<|' + message['role'] + '|>' + message['content'] + '<|end|>'"
    turns = f"{{{{ '<s>' }}}}{{% for message in messages %}}{{{{ {turn} }}}}{{% endfor %}}"
    (plain / "chat_template.jinja").write_text(turns + "{{ '<|assistant|>' }}")
    text, mmproj = write_gguf(plain, tmp_path / "files")
    engine, origin = make_engine(model=text, mmproj=str(mmproj)), make_engine(model=directory)
    for images in (None, [picture(4, 90, 30), picture(5)]):
        answer, expected = (one.generate("What is this, \n 2?", images, **ASKED) for one in (engine, origin))
        assert answer.token_ids == expected.token_ids
        assert answer.usage == expected.usage


@pytest.mark.slow
def test_a_quantised_model_says_the_same_alone_and_among_others(
    make_engine: EngineFactory, tiny_model: Path, tmp_path: Path
) -> None:
    text, mmproj = write_gguf(tiny_model, tmp_path / "files", "Q8_0")
    engine = make_engine(model=text, mmproj=str(mmproj))
    questions = [f"What is number {index}? " * (index + 1) for index in range(4)]
    alone = [engine.generate(question, picture(3), **ASKED).token_ids for question in questions]
    handles = [engine.submit(question, picture(3), **ASKED) for question in questions]
    assert [handle.result().token_ids for handle in handles] == alone
