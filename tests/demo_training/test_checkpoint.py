"""The shipped checkpoint: its chat template, and that it still answers the shipped questions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

import hydra_engine.demo
from tools.demo_training.evaluate import MODEL, Answerer
from tools.demo_training.scenes import Question

FOLDER = Path(hydra_engine.demo.__file__).parent
IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    return Answerer(MODEL, torch.bfloat16)


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([{"role": "user", "content": "Hello."}], "<|user|>Hello.<|end|>"),
        ([{"role": "user", "content": [text(" Hello. ")]}], "<|user|>Hello.<|end|>"),
        ([{"role": "user", "content": [IMAGE, text("Why?")]}], "<|user|><image>\nWhy?<|end|>"),
        ([{"role": "user", "content": [text("Why?"), IMAGE]}], "<|user|><image>\nWhy?<|end|>"),
        (
            [{"role": "user", "content": [IMAGE, text("Is"), IMAGE, text("it?")]}],
            "<|user|><image>\n<image>\nIs it?<|end|>",
        ),
        (
            [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi!"}],
            "<|system|>Be kind.<|end|><|user|>Hi!<|end|>",
        ),
        (
            [
                {"role": "user", "content": "Hi!"},
                {"role": "assistant", "content": [text("Hello!")]},
                {"role": "user", "content": "Bye!"},
            ],
            "<|user|>Hi!<|end|><|assistant|>Hello!<|end|><|user|>Bye!<|end|>",
        ),
    ],
)
def test_chat_template(answerer: Answerer, messages: list[dict[str, Any]], prompt: str) -> None:
    for renderer in (answerer.processor, AutoTokenizer.from_pretrained(MODEL)):
        assert renderer.apply_chat_template(messages, tokenize=False) == f"<s>{prompt}"
        generating = renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert generating == f"<s>{prompt}<|assistant|>"


def test_shipped_questions_are_answered(answerer: Answerer) -> None:
    for entry in json.loads((FOLDER / "questions.json").read_text()):
        image = Image.open(FOLDER / entry["picture"]) if entry["picture"] else None
        question = Question("shipped", image, entry["question"], entry["answer"])
        assert answerer.answer([question]) == [entry["answer"]]
