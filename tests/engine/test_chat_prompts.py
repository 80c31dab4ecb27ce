"""Chats from end to end: the words that transformers generates, over tokenizer files that put BOS before every text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from hydra_engine import Engine
from hydra_engine.errors import InvalidRequest
from hydra_engine.models.loading.random_weights import randomise
from tests.preprocess.prompt_parity import draw, kinds_of
from tests.preprocess.published import CHECKPOINTS, write_checkpoint
from tools.miniatures import make_tiny

NUM_ANSWERS = 20
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llava")
    write_checkpoint(CHECKPOINTS["LLaVA-1.5"], directory)
    save_weights(directory)
    return directory


@pytest.mark.slow
def test_greedy_answers_of_a_llama_type_tokenizer_equal_transformers(
    model_dir: Path, make_engine: Callable[..., Engine]
) -> None:
    published = CHECKPOINTS["LLaVA-1.5"]
    model = transformers.AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32).eval()
    processor = transformers.AutoProcessor.from_pretrained(model_dir)
    rng = random.Random(0)
    kinds = [kind for kind in kinds_of(published) if kind != "continued"]
    chats = [draw(published, rng.choice(kinds), rng).messages for _ in range(NUM_ANSWERS)]
    engine = make_engine(model=model_dir)
    handles = [engine.submit(chat, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True) for chat in chats]
    for chat, handle in zip(chats, handles, strict=True):
        inputs = processor.apply_chat_template(
            chat, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        assert list(handle.result(60).token_ids) == generated(model, inputs), chat


def test_a_model_without_a_template_says_so_and_takes_raw_prompts(
    model_dir: Path, tmp_path: Path, make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in model_dir.iterdir():
        if path.name != CHECKPOINTS["LLaVA-1.5"].where:
            (bare / path.name).hardlink_to(path)
    engine = make_engine(model=bare)
    words = "the model has no chat template; give one with --chat-template FILE"
    assert any(record.getMessage().startswith(words) for record in caplog.records)
    with pytest.raises(InvalidRequest, match=words):
        engine.generate("hi", max_tokens=2)
    result = engine.generate("hi", raw=True, max_tokens=2, ignore_eos=True)
    assert result.usage.prompt_tokens == len(engine.frontend.preprocessor.tokenizer.encode("hi"))


def save_weights(directory: Path) -> None:
    """Random ones for the config that is there."""
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            randomise(name, parameter.data)
    model.save_pretrained(directory)


@torch.inference_mode()
def generated(model: Any, inputs: Any) -> list[int]:
    options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "min_new_tokens": 0, "eos_token_id": None}
    ids = model.generate(**inputs, **options)
    found: list[int] = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return found


def test_what_is_no_prompt_is_refused_with_a_sentence(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    for wrong, kind in ((5, "int"), (None, "NoneType"), (b"Hello", "bytes"), ({"role": "user"}, "dict")):
        for call in (engine.generate, engine.chat, engine.submit):
            with pytest.raises(InvalidRequest, match=f"^a prompt must be text, .*, not {kind}($|; put)"):
                call(wrong)
    with pytest.raises(InvalidRequest, match=r"^prompt 2: a prompt must be text, .*, not int\n"):
        engine.generate(["Hello", 5], max_tokens=1)


@pytest.mark.parametrize("impl", ["native", pytest.param("transformers", marks=pytest.mark.slow)])
def test_a_token_without_an_embedding_is_refused_and_others_go_on(
    impl: str, tmp_path: Path, make_engine: Callable[..., Engine]
) -> None:
    """A token without an embedding once failed the step of a text, and took the last row's embedding beside a
    picture."""
    make_tiny("llava", tmp_path / "m", seed=3)
    file, config = tmp_path / "m" / "tokenizer.json", json.loads((tmp_path / "m" / "config.json").read_text())
    values, rows = json.loads(file.read_text()), config["text_config"]["vocab_size"]
    values["added_tokens"].append({**values["added_tokens"][-1], "id": rows, "content": "[PAD]", "special": True})
    file.write_text(json.dumps(values))
    engine = make_engine(model=tmp_path / "m", model_impl=impl)
    for images in (None, Image.new("RGB", (40, 30))):
        for options in ({}, {"prompt_logprobs": 1}):
            with pytest.raises(InvalidRequest, match=rf"token '\[PAD\]' \(id {rows}\)"):
                engine.generate("a [PAD] b", images=images, max_tokens=2, **options)
        assert engine.generate("a b", images=images, max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
