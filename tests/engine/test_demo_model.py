"""The shipped model through the real engine: right answers to held-out questions, the same as transformers' answers."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from PIL import Image

from hydra_engine import Engine
from tests.engine.conftest import assert_at_rest
from tools.demo_training.scenes import Question, held_out_questions

DEMO = Path(__file__).parents[2] / "hydra_engine" / "demo"


def transformers_answers(questions: list[Question]) -> list[str]:
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    processor = AutoProcessor.from_pretrained(DEMO / "model")
    model = LlavaForConditionalGeneration.from_pretrained(DEMO / "model", dtype=torch.float32).eval()
    answers = []
    for question in questions:
        content = [{"type": "image"}] if question.image is not None else []
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": question.text}]}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = processor(images=question.image, text=text, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=64)
        answers.append(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def number_right(engine: Engine, questions: list[Question]) -> int:
    results = engine.generate(
        [q.text for q in questions], images=[q.image for q in questions], temperature=0, max_tokens=64
    )
    return sum(result.text.strip() == q.answer for q, result in zip(questions, results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "least"), [("int8", 200), ("int4", 190)])
def test_quantised_it_answers_the_questions_too(quantization: str, least: int) -> None:
    questions = held_out_questions(200, seed=2024)
    with Engine("demo", quantization=quantization) as engine:
        assert number_right(engine, questions) >= least
        assert_at_rest(engine)


@pytest.mark.quick("auto")
@pytest.mark.parametrize(
    ("dtype", "count"), [("float32", 40), pytest.param("float32", 200, marks=pytest.mark.slow), ("auto", 200)]
)
def test_held_out_questions(dtype: str, count: int) -> None:
    questions = held_out_questions(count, seed=2024)
    with Engine("demo", dtype=dtype, threads=1) as engine:
        results = engine.generate(
            [q.text for q in questions], images=[q.image for q in questions], temperature=0, max_tokens=64
        )
        assert_at_rest(engine)
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for question, result in zip(questions, results, strict=True):
        by_kind[question.kind].append(result.text.strip() == question.answer)
    scores = {kind: f"{sum(right)}/{len(right)}" for kind, right in by_kind.items()}
    right = sum(sum(r) for r in by_kind.values())
    print(f"{dtype}: {right} of {count} exact: {scores}")
    assert right >= 0.95 * count, scores
    if dtype == "float32":
        # Equality is a fair demand where rounding leaves no room for another opinion.
        assert [r.text for r in results] == transformers_answers(questions)


def test_the_demo_questions_are_answered_right() -> None:
    questions = json.loads((DEMO / "questions.json").read_text(encoding="utf-8"))
    assert sum(q["picture"] is not None for q in questions) == 3 and len(questions) == 4
    with Engine("demo") as engine:
        for question in questions:
            image = Image.open(DEMO / question["picture"]) if question["picture"] else None
            answer = engine.generate(question["question"], image, temperature=0, max_tokens=64)
            assert answer.text.strip() == question["answer"]
