"""Fields of messages beyond role and content: a template gets those that it mentions, as in transformers; they are
bounded and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.errors import ContextLengthExceeded, InvalidRequest
from hydra_engine.preprocess.text.tokenizer import Tokenizer
from tests.preprocess.conftest import Kitchen
from tests.preprocess.test_chat import render

QUESTION = {"role": "user", "content": "q"}
THINKS = """\
{% for m in messages %}{{ m.role }}{% if m.name %}({{ m.name }}){% endif %}:\
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }};{% endfor %}"""
OTHERS = "{% for m in messages %}{{ m.get('tool_plan') }}{{ m['weight'] }}{{ m.thinking }}{{ m.content }};{% endfor %}"


def reference(tokenizer: Tokenizer, template: str, messages: list[dict[str, Any]]) -> str:
    text = tokenizer._tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_what_an_assistant_thought_reaches_the_template_by_any_name(tokenizer: Tokenizer, name: str) -> None:
    talk = [QUESTION, {"role": "assistant", "content": "a", name: "because"}, QUESTION]
    shown = "user:q;assistant:<think>because</think>a;user:q;"
    assert render(tokenizer, THINKS, talk) == shown
    assert render(tokenizer, THINKS.replace("reasoning_content", "reasoning"), talk) == shown
    named = talk[1] | {"reasoning_content": "because"}  # as transformers has it
    assert reference(tokenizer, THINKS, [QUESTION, named, QUESTION]) == shown
    silent = [QUESTION, {"role": "assistant", "content": "a", name: None}, QUESTION]
    assert render(tokenizer, THINKS, silent) == "user:q;assistant:a;user:q;"


def test_a_name_that_was_given_keeps_its_own_text(tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.reasoning }};{% endfor %}"
    talk = [QUESTION, {"role": "assistant", "content": "a", "reasoning_content": "x", "reasoning": "y"}]
    assert render(tokenizer, template, talk) == "|;x|y;"


def test_every_key_that_the_template_reads_is_there_as_in_transformers(tokenizer: Tokenizer) -> None:
    talk = [
        QUESTION | {"name": "Ann", "weight": 0.5},
        {"role": "assistant", "content": "a", "tool_plan": ["look"], "thinking": {"a": 1}, "name": "bot"},
    ]
    for template in (THINKS, OTHERS):
        assert render(tokenizer, template, talk) == reference(tokenizer, template, talk)
    assert "user(Ann):q" in render(tokenizer, THINKS, talk) and "['look']" in render(tokenizer, OTHERS, talk)


async def test_fields_count_and_those_that_nobody_reads_are_named_once(
    make_preprocessor: Callable[..., Kitchen], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t.jinja").write_text(THINKS)
    kitchen = make_preprocessor(chat_template_path=str(tmp_path / "t.jinja"), max_model_len=128)
    huge: Any = {"role": "assistant", "content": "a", "refusal": object(), "audio": "x" * 100_000}
    with caplog.at_level(logging.INFO, "hydra_engine"):
        for _ in range(2):
            await kitchen.prepare(messages=[QUESTION, huge])
    words = [record.getMessage() for record in caplog.records if "does not read" in record.getMessage()]
    assert [next(name for name in ("audio", "refusal") if name in one) for one in words] == ["audio", "refusal"]
    with pytest.raises(ContextLengthExceeded):
        await kitchen.prepare(messages=[QUESTION, huge | {"reasoning": "x" * 10_000}])
    for wrong in (object(), float("inf"), "x" * (1 << 20) + "y"):
        with pytest.raises(InvalidRequest) as caught:
            await kitchen.prepare(messages=[QUESTION, {"role": "assistant", "content": "a", "reasoning": wrong}])
        assert caught.value.param == "messages[1].reasoning"
