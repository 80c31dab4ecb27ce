"""Detail and pixel budgets through real engines: fewer image tokens, the same answers as a server set so."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from hydra_engine import Engine
from hydra_engine.core.prompting import PixelBudget, TemplateOptions
from tests.engine.conftest import EngineFactory, assert_at_rest, picture
from tests.engine.test_demo_model import DEMO
from tools.miniatures import make_tiny

ASKED = {"temperature": 0, "max_tokens": 8}


def ask(engine: Engine, image: Image.Image, detail: str | None = None, **options: object) -> object:
    part = {"type": "image", "image": image} | ({} if detail is None else {"detail": detail})
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "what is it"}]}]
    return engine.chat(messages, **ASKED, **options)


@pytest.mark.quick("internvl")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_fewer_pixels_are_fewer_tokens(
    make_engine: EngineFactory, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hydra_engine.core.prompting.LOW_DETAIL_PIXELS", 1024)
    make_tiny(family, tmp_path, seed=3)
    engine = make_engine(model=tmp_path)
    image = picture(1, 90, 60)
    default, low = ask(engine, image), ask(engine, image, "low")
    assert low.usage.image_tokens < default.usage.image_tokens
    assert low.usage.cached_images == 0, "another resolution has features of its own"
    assert ask(engine, image, "high").usage.image_tokens == default.usage.image_tokens
    same = ask(engine, image, pixels=PixelBudget(max_pixels=1024))
    assert (same.text, same.usage.image_tokens) == (low.text, low.usage.image_tokens)
    assert same.usage.cached_images == 1 or same.usage.cached_tokens > 0, "the same resolution is the same picture"
    if family == "qwen2_5_vl":
        with Engine(tmp_path, max_pixels=1024, threads=1, block_size=4, num_kv_blocks=512) as configured:
            assert ask(configured, image).token_ids == low.token_ids
            assert_at_rest(configured)


def test_the_demo_model_has_one_size_and_goes_on_with_a_message() -> None:
    question = next(q for q in json.loads((DEMO / "questions.json").read_text()) if q["picture"])
    image = Image.open(io.BytesIO((DEMO / question["picture"]).read_bytes()))
    with Engine("demo") as engine:
        answers = []
        for detail in (None, "low", "high"):
            part = {"type": "image", "image": image, "detail": detail}
            messages = [{"role": "user", "content": [part, {"type": "text", "text": question["question"]}]}]
            answers.append(engine.chat(messages, temperature=0, max_tokens=64))
        assert [answer.text.strip() for answer in answers] == [question["answer"]] * 3
        assert len({answer.usage.image_tokens for answer in answers}) == 1
        first, others = question["answer"].split(" ", 1)
        begun = [*messages, {"role": "assistant", "content": first}]
        template = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
        rest = engine.chat(begun, temperature=0, max_tokens=64, template=template)
        assert rest.text.strip() == others
        assert_at_rest(engine)
