"""Tokens that the tokenizer knows and the model has no embedding for are refused by name, wherever they come from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.config import MediaConfig
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.errors import InvalidRequest
from hydra_engine.models.specs.base import ItemPlan
from hydra_engine.preprocess.text.tokenizer import Tokenizer
from tests.preprocess.conftest import CHAT_TEMPLATE, Kitchen, build_byte_level, make_spec, noise, wrap
from tests.preprocess.in_process import preprocessor_of

PAD = "[PAD]"


@pytest.fixture
def padded() -> Tokenizer:
    """A tokenizer whose last three tokens have no rows: one that is special, one that is not, and the placeholder."""
    backend = build_byte_level()
    backend.add_tokens(["[NOTE]"])
    backend.add_special_tokens([PAD, "<late>"])
    return Tokenizer(wrap(backend), CHAT_TEMPLATE.replace("<image>", "<late>"))


@pytest.fixture
async def kitchen(padded: Tokenizer, request: Any, tmp_path: Path) -> AsyncIterator[Kitchen]:
    template = getattr(request, "param", None)
    if template is not None:
        (tmp_path / "t.jinja").write_text(template)
    spec = make_spec(padded)
    rows = padded.vocab_size - 3
    late = padded._backend.token_to_id("<late>")
    spec = replace(spec, language=replace(spec.language, vocab_size=rows), image_token_id=late)
    path = None if template is None else str(tmp_path / "t.jinja")
    preprocessor = preprocessor_of(spec, padded, MediaConfig(), max_model_len=256, chat_template_path=path)
    yield Kitchen(preprocessor)
    await preprocessor.close()


@pytest.mark.parametrize("token", [PAD, "[NOTE]"])
async def test_a_typed_one_is_refused_by_name(kitchen: Kitchen, token: str) -> None:
    words = rf"token '\{token}' \(id \d+\), for which the model has no embedding: its ids go from 0 to \d+"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"a {token}"}]
    tool = {"type": "function", "function": {"name": "f", "description": token}}
    shown = TemplateOptions((tool,))
    for param, prompt, options in (
        ("prompt", f"a {token} b", {}),
        ("prompt", f"a {token} b", {"raw": True}),
        ("prompt", f"a {token} b", {"images": noise(9, 9)}),
        ("prompt", f"a {token} b<late>", {"raw": True, "images": noise(9, 9)}),
        ("prompt", f"a {token} b", {"raw": True, "sampling": {"prompt_logprobs": 1}}),
        ("messages", None, {"messages": turns}),
        ("messages", None, {"messages": turns, "images": noise(9, 9)}),
    ):
        with pytest.raises(InvalidRequest, match=words) as caught:
            await kitchen.prepare(prompt, **options)
        assert caught.value.param == param
    assert await kitchen.prepare(messages=turns[:1], template=shown)  # this template does not show tools
    plain = await kitchen.prepare("a b", noise(9, 9))  # the placeholder needs no row
    assert len(plain.pixels) == 1


@pytest.mark.parametrize("kitchen", ["{{ messages[0].content }}[PAD]"], indirect=True)
async def test_a_template_that_writes_one_says_so_for_each_request(kitchen: Kitchen) -> None:
    with pytest.raises(InvalidRequest, match="no embedding"):
        await kitchen.prepare("hi")


async def test_text_between_parts_of_a_picture_is_looked_at_too(
    kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = kitchen.preprocessor._loader._spec.vision
    plan = vision.plan_image(9, 9)
    item: ItemPlan = plan.items[0]

    def with_separator(*_: Any, **__: Any) -> Any:
        return plan._replace(parts=(PAD, item))

    monkeypatch.setattr(type(vision), "plan_image", with_separator)
    with pytest.raises(InvalidRequest, match="no embedding"):
        await kitchen.prepare("hi", noise(9, 9))
