"""A hub id in a real engine: from the cache's links, in the instance's own process too, under its own name."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from hydra_engine import Engine
from hydra_engine.errors import CheckpointError
from tests.config.hub import Hub, fill_cache
from tests.engine.conftest import EngineFactory, picture
from tests.gguf_files import write_gguf

NAME = "acme/tiny-vlm"


def test_the_same_answer_as_from_the_folder(
    make_engine: EngineFactory, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    fill_cache(tmp_path, NAME, tiny_model, revision="v2")
    # A process of its own does not know this test's cache: it gets the folder.
    engine = make_engine(model=NAME, revision="v2", processes=True)
    assert engine.model_name == engine.summary.model == NAME
    asked = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    assert engine.generate("Hello", **asked).token_ids == make_engine().generate("Hello", **asked).token_ids


@pytest.mark.slow
def test_a_gguf_id_is_fetched_and_answers_with_a_picture(
    make_engine: EngineFactory, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text, mmproj = write_gguf(tiny_model, tmp_path / "files")
    assert mmproj is not None
    files = {"tiny-F32.gguf": text, "tiny-Q8_0.gguf": text, "mmproj-F32.gguf": mmproj}
    with Hub(f"{NAME}-GGUF", {name: path.read_bytes() for name, path in files.items()}).serving() as hub:
        hub.answer_here(monkeypatch)
        engine = make_engine(model=f"{NAME}-GGUF:f32", download=True, processes=True)
    assert engine.model_name == f"{NAME}-GGUF:f32"
    assert [line for line in hub.asked if line.startswith("GET /acme") and "Q8_0" in line] == []
    asked = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    answers = [one.generate("What is it?", picture(3), **asked).token_ids for one in (engine, make_engine())]
    assert answers[0] == answers[1]


def test_nothing_is_started_for_one_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    before = threading.active_count()
    with pytest.raises(CheckpointError, match="`hf download acme/none` fetches it"):
        Engine("acme/none")
    assert threading.active_count() == before
