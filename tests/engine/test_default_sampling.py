"""generation_config.json of a real checkpoint, in a real engine: requests that say nothing, and files of nonsense."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hydra_engine import Engine, SamplingParams
from hydra_engine.errors import CheckpointError, ConfigError
from tests.engine.conftest import EngineFactory
from tools.miniatures import make_tiny

Authored = Callable[..., Path]


@pytest.fixture
def authored(tiny_model: Path, tmp_path: Path) -> Authored:
    """The miniature with these in its generation_config.json, or with that text for the file."""

    def make(text: str | None = None, **values: Any) -> Path:
        directory = tmp_path / "model"
        shutil.copytree(tiny_model, directory, copy_function=os.link)
        file = directory / "generation_config.json"
        shipped = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.unlink(missing_ok=True)
        file.write_text(text if text is not None else json.dumps(shipped | values), encoding="utf-8")
        return directory

    return make


def test_requests_that_say_nothing_are_sampled_as_the_authors_say(
    make_engine: EngineFactory, authored: Authored
) -> None:
    engine = make_engine(model=authored(do_sample=False, max_new_tokens=12, repetition_penalty=10.0))
    asked = {"temperature": 0, "max_tokens": 12, "repetition_penalty": 10.0}
    assert engine.default_sampling_params == SamplingParams(**asked)
    expected = engine.generate("Hello", ignore_eos=True, **asked).token_ids
    assert len(expected) == 12
    for _ in range(2):
        assert engine.generate("Hello", ignore_eos=True).token_ids == expected
    conversation = [{"role": "user", "content": "Hello"}]
    assert engine.chat(conversation, ignore_eos=True).token_ids == expected
    *_, last = engine.stream("Hello", ignore_eos=True)
    assert last.result is not None and last.result.token_ids == expected
    # What a caller says wins, and a whole SamplingParams says all but how many tokens.
    assert len(engine.generate("Hello", max_tokens=15, ignore_eos=True).token_ids) == 15
    plain = engine.generate("Hello", sampling=SamplingParams(temperature=0, ignore_eos=True))
    assert plain.token_ids != expected and len(plain.token_ids) == 12
    hot = [engine.generate("Hello", temperature=2.0, ignore_eos=True, seed=seed).token_ids for seed in range(4)]
    assert len({*hot, expected}) > 2


def test_rules_of_tokens_give_the_tokens_of_transformers(
    make_engine: EngineFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens that never come, that do not come first, that come last; what is not followed is said once."""
    directory = tmp_path / "llama"
    make_tiny("llama", directory, seed=3)
    ids = [1, 90, 17, 201, 33, 33, 8, 150, 77]
    file, said = directory / "generation_config.json", {"do_sample": False, "max_new_tokens": 7}
    plain = generated(directory, file, said, ids)
    rules = {
        **{"suppress_tokens": plain[:1], "begin_suppress_tokens": [plain[1], 44], "bad_words_ids": [[plain[3]]]},
        **{"forced_eos_token_id": 2, "min_new_tokens": 6, "no_repeat_ngram_size": 0, "typical_p": 0.9},
    }
    expected = generated(directory, file, said | rules, ids)
    assert expected[-1] == 2 and len({*plain[:2], plain[3]} & {*expected}) == 0
    file.write_text(json.dumps(said | rules | {"max_time": 5.0}))
    engine = make_engine(model=directory)
    assert list(engine.generate(ids).token_ids) == expected
    assert list(engine.generate(ids, max_tokens=3).token_ids) == [*expected[:2], 2]
    assert list(engine.generate(ids, allowed_token_ids=plain[:1], max_tokens=3).token_ids) == plain[:1] * 3
    warnings = [record.getMessage() for record in caplog.records if "generation settings" in record.getMessage()]
    assert warnings == [
        "the model's generation settings max_time are not followed; answers may differ from those of transformers"
    ]


def generated(directory: Path, file: Path, values: dict[str, Any], ids: list[int]) -> list[int]:
    file.write_text(json.dumps(values))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.generate(torch.tensor([ids]), eos_token_id=2)[0, len(ids) :].tolist()


@pytest.mark.parametrize("override", ['{"temperature": 0.5}', {"temperature": 0.5}])
def test_the_override_wins_as_text_and_as_a_dict(
    authored: Authored, override: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_start", _nothing)
    directory = authored(do_sample=False, top_k=4)
    with Engine(directory, override_generation_config=override) as engine:
        assert engine.default_sampling_params == SamplingParams(temperature=0.5, top_k=4)
    with Engine(directory, generation_config="none") as engine:
        assert engine.default_sampling_params == SamplingParams()


async def _nothing(engine: Engine, progress: bool | None) -> None:
    """Stands in for loading the model."""


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"temperature": "hot"}', "temperature"), ('{"top_p": 7}', "top_p"), ("{nonsense", "not valid JSON")],
)
def test_nonsense_in_the_file_starts_nothing(authored: Authored, text: str, words: str) -> None:
    directory, before = authored(text), threading.active_count()
    with pytest.raises(CheckpointError, match=words) as caught:
        Engine(directory)
    assert "generation_config.json" in caught.value.message and caught.value.exit_code == 3
    assert threading.active_count() == before


def test_an_unknown_source_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="generation_config must be auto or none"):
        Engine(tiny_model, generation_config="sometimes")
