"""GGUF files in real engines: the same answers as from the directory that they were made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import EngineFactory, picture
from tests.gguf_files import write_gguf

ASKED = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def test_the_same_answers_as_from_the_directory(
    make_engine: EngineFactory, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the file's own template and tokenizer, and what its mmproj says of pictures; in a process of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text, mmproj = write_gguf(tiny_model, tmp_path / "files")
    engine, origin = make_engine(model=text, mmproj=str(mmproj), processes=True), make_engine()
    assert engine.model_name == str(text)
    for images in (None, picture(3), [picture(4, 90, 30), picture(5)]):
        question = "Hello, wörld! 123\n\n  what?"
        answer, expected = (one.generate(question, images, **ASKED) for one in (engine, origin))
        assert answer.token_ids == expected.token_ids
        assert answer.text == expected.text
        assert answer.usage == expected.usage
