"""Template options end to end: tools, histories of calls, variables, generation prompts, and their bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.core.prompting import MAX_JSON_DEPTH, MAX_TOOLS, PixelBudget, TemplateOptions
from hydra_engine.errors import ContextLengthExceeded, InvalidRequest
from hydra_engine.frontend.call import chat_messages
from hydra_engine.preprocess.text.tokenizer import Tokenizer
from tests.calls import asked
from tests.preprocess.conftest import Kitchen
from tests.preprocess.test_chat import LLAVA, asks, call, render, text, user

# In the manner of Qwen's: tools in a system turn, calls between marks, answers of tools in a user's turn.
QWEN_LIKE = """\
{% if tools %}{{ '[system]' }}{% if messages[0].role == 'system' %}{{ messages[0].content + ' ' }}{% endif %}\
{{ 'Tools:' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}\
{{ '\\nCalls: <tool_call>{"name": ..., "arguments": ...}</tool_call>\\n' }}\
{% elif messages[0].role == 'system' %}{{ '[system]' + messages[0].content + '\\n' }}{% endif %}\
{% for m in messages %}{% if m.role == 'user' %}{{ '[user]' + m.content + '\\n' }}\
{% elif m.role == 'assistant' %}{{ '[assistant]' + m.content }}\
{% for call in m.tool_calls or [] %}{% set f = call.function or call %}\
{{ '<tool_call>{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}</tool_call>' }}{% endfor %}\
{{ '\\n' }}\
{% elif m.role == 'tool' %}{{ '[tool ' + (m.name or m.tool_call_id or '') + ']' + m.content + '\\n' }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' + ('<think>' if enable_thinking else '') }}{% endif %}"""
# Arguments are joined to other text, which an object cannot be; and every call wants its answer.
TEXT_ARGUMENTS = """\
{% for m in messages %}{{ m.role + ':' + m.content }}{% for call in m.tool_calls or [] %}\
{% if messages[loop.index].role != 'tool' and messages | length < 3 %}{{ raise_exception('answers!') }}{% endif %}\
{{ call.function.name + '(' + call.function.arguments + ')' }}{% endfor %}{{ ';' }}{% endfor %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def hello(*more: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hello"}, *more]


def answer(content: str = "sunny", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "call_1", **more}


def test_tools_reach_the_template(tokenizer: Tokenizer) -> None:
    rendered = render(tokenizer, QWEN_LIKE, hello(), tools=(WEATHER,))
    assert rendered.startswith("[system]Tools:\n" + json.dumps(WEATHER))
    assert rendered.endswith("[user]hello\n[assistant]")
    assert render(tokenizer, QWEN_LIKE, hello()) == "[user]hello\n[assistant]"


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
def test_a_history_of_calls_is_what_the_model_wrote(tokenizer: Tokenizer, arguments: Any) -> None:
    history = hello(asks(call(arguments=arguments)), answer(), answer("12 degrees", name="weather"))
    assert render(tokenizer, QWEN_LIKE, history) == (
        '[user]hello\n[assistant]<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>\n'
        "[tool call_1]sunny\n[tool weather]12 degrees\n[assistant]"
    )


@pytest.mark.parametrize("arguments", ["", None, "{}"])
def test_calls_without_arguments_have_an_empty_object(tokenizer: Tokenizer, arguments: Any) -> None:
    assert '"arguments": {}}' in render(tokenizer, QWEN_LIKE, hello(asks(call(arguments=arguments))))


def test_arguments_that_are_no_object_stay_text(tokenizer: Tokenizer) -> None:
    """An agent goes on after a wrong call."""
    for broken in ('{"city": Paris}', "[1]", "NaN", '{"a": ' * 100):
        assert json.dumps(broken) in render(tokenizer, QWEN_LIKE, hello(asks(call(arguments=broken))))


@pytest.mark.parametrize("arguments", ['{"city": "Zürich"}', {"city": "Zürich"}])
def test_templates_that_want_text_get_text(tokenizer: Tokenizer, arguments: Any) -> None:
    rendered = render(tokenizer, TEXT_ARGUMENTS, hello(asks(call(arguments=arguments)), answer()))
    assert rendered == 'user:hello;assistant:weather({"city": "Zürich"});tool:sunny;'


def test_templates_without_a_place_for_calls_say_so(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no place for tool calls") as caught:
        render(tokenizer, LLAVA, hello(asks(call()), answer()))
    assert (caught.value.param, caught.value.code) == ("messages[1].tool_calls", "unsupported_parameter")


def test_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    assert render(tokenizer, QWEN_LIKE, hello(), variables={"enable_thinking": True}).endswith("[assistant]<think>")
    shown = "{{ a.b[1] }} {{ c }} {{ bos_token }}{{ messages[0].content }}"
    assert render(tokenizer, shown, hello(), variables={"a": {"b": [1, "x"]}, "c": None}) == "x None <s>hello"


def test_templates_may_use_what_transformers_offers(tokenizer: Tokenizer) -> None:
    """Dates, loop controls and laid-out JSON, which templates of published models use."""
    today = "{{ strftime_now('%d %b %Y') }}"
    days = {(datetime.now() + timedelta(seconds=seconds)).strftime("%d %b %Y") for seconds in (-30, 30)}
    assert render(tokenizer, today, hello()) in days
    loops = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% if m.content == 'end' %}{% break %}{% endif %}{{ m.content }};{% endfor %}"
    )
    talk = [{"role": "system", "content": "s"}, *hello(), *hello(), {"role": "user", "content": "end"}, *hello()]
    assert render(tokenizer, loops, talk) == "hello;hello;"
    for indent in (2, 4):
        shown = "{% for tool in tools %}{{ tool | tojson(indent=" + str(indent) + ") }}{% endfor %}"
        assert render(tokenizer, shown, hello(), tools=(WEATHER,)) == json.dumps(WEATHER, indent=indent)
    assert render(tokenizer, "{{ a | tojson }}", hello(), variables={"a": "<é>"}) == '"<é>"'


GOES_ON = {"add_generation_prompt": False, "continue_final_message": True}


def test_an_answer_may_go_on_with_the_last_message(tokenizer: Tokenizer) -> None:
    begun = {"role": "assistant", "content": "The sky is "}
    assert render(tokenizer, QWEN_LIKE, hello(begun), **GOES_ON) == "[user]hello\n[assistant]The sky is "
    parts = {"role": "assistant", "content": [text("The"), text("sky")]}
    assert render(tokenizer, LLAVA, hello(parts), **GOES_ON) == "USER: hello ASSISTANT: The sky"
    again = hello(begun, {"role": "user", "content": "The sky is "}, begun)  # the last one, not the first
    assert render(tokenizer, QWEN_LIKE, again, **GOES_ON).count("The sky is ") == 3


@pytest.mark.parametrize(
    "last",
    [{"role": "user", "content": "x"}, asks(call()), user(text("x"), {"type": "image", "image": b""})],
)
def test_other_last_messages_cannot_go_on(tokenizer: Tokenizer, last: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(tokenizer, QWEN_LIKE, hello(last), **GOES_ON)
    assert caught.value.param == "continue_final_message"
    with pytest.raises(InvalidRequest, match="contradict"):
        TemplateOptions(continue_final_message=True)


def test_templates_that_drop_the_last_message_cannot_go_on_with_it(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="goes on") as caught:
        render(tokenizer, "{{ messages[0].content }}", hello({"role": "assistant", "content": "yes"}), **GOES_ON)
    assert "hello" not in caught.value.message


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def tool(name: Any = "f", **function: Any) -> Any:
    return {"type": "function", "function": {"name": name, **function}}


WRONG = [
    ({"tools": "x"}, "tools"),
    ({"tools": (WEATHER,) * (MAX_TOOLS + 1)}, "tools"),
    ({"tools": ({"function": {}},)}, "tools[0]"),
    ({"tools": (WEATHER, {"type": "function"})}, "tools[1]"),
    ({"tools": (tool(5),)}, "tools[0].function.name"),
    ({"tools": (tool("a b"),)}, "tools[0].function.name"),
    ({"tools": (tool(parameters="x"),)}, "tools[0].function.parameters"),
    ({"tools": (tool(parameters={"x": "y" * 40_000}),)}, "tools[0]"),
    ({"tools": (tool(parameters={"x": nested(MAX_JSON_DEPTH)}),)}, "tools[0]"),
    ({"tools": (tool(parameters={"x": [1] * 11_000}),)}, "tools[0]"),
    ({"tools": (tool(parameters={"x": object()}),)}, "tools[0]"),
    ({"tools": (tool(parameters={5: 1}),)}, "tools[0]"),
    ({"variables": {"a": float("inf")}}, "chat_template_kwargs"),
    ({"variables": {"a": 1 << 70}}, "chat_template_kwargs"),
    ({"variables": {"_private": 1}}, "chat_template_kwargs"),
    ({"variables": {f"v{n}": n for n in range(65)}}, "chat_template_kwargs"),
    *(({"variables": {name: []}}, f"chat_template_kwargs.{name}") for name in ("messages", "tools", "functions")),
    ({"variables": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ({"variables": {"raise_exception": 1}}, "chat_template_kwargs.raise_exception"),
    ({"variables": {"eos_token": "x"}}, "chat_template_kwargs.eos_token"),
]


@pytest.mark.parametrize(("options", "param"), WRONG)
def test_options_are_bounded(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TemplateOptions(**options)
    assert caught.value.param == param and len(caught.value.message) < 200


def test_values_at_the_bounds_are_taken() -> None:
    TemplateOptions(tools=(WEATHER,) * MAX_TOOLS, variables={"a": nested(MAX_JSON_DEPTH - 1)})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidRequest, match="nested"):
        TemplateOptions(variables={"a": endless})


async def test_the_preprocessor_takes_the_options(make_preprocessor: Callable[..., Kitchen], tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(QWEN_LIKE)
    kitchen = make_preprocessor(chat_template_path=str(tmp_path / "t.jinja"), max_model_len=512)
    preprocessor = kitchen.preprocessor
    options = TemplateOptions(tools=(WEATHER,), variables={"enable_thinking": True})
    prepared = await kitchen.prepare(messages=hello(), template=options, sampling={"max_tokens": 1})
    rendered = preprocessor.tokenizer.decode(prepared.request.prompt_token_ids)
    assert "Tells it." in rendered and rendered.endswith("<think>")
    assert await preprocessor.tokenize(asked(messages=hello(), template=options)) == list(
        prepared.request.prompt_token_ids
    )
    assert preprocessor.chat_template == QWEN_LIKE
    begun = hello({"role": "assistant", "content": "So"})
    prepared = await kitchen.prepare(messages=begun, template=TemplateOptions(**GOES_ON))
    assert preprocessor.tokenizer.decode(prepared.request.prompt_token_ids).endswith("[assistant]So")
    long = tuple(tool(f"f{n}", description="x" * 30_000) for n in range(2))
    with pytest.raises(ContextLengthExceeded):  # counted before anything is rendered
        await kitchen.prepare(messages=hello(), template=TemplateOptions(tools=long))


def test_detail_comes_with_its_picture() -> None:
    low = {"type": "image_url", "image_url": {"url": "u", "detail": "low"}}
    messages = [user(low, {"type": "image", "image": b"x", "detail": "high"}, {"type": "image_url", "image_url": "v"})]
    assert [part.detail for part in chat_messages(messages)[0].media] == ["low", "high", "auto"]
    assert PixelBudget(max_pixels=10_000_000).for_detail("low") == PixelBudget(max_pixels=512 * 512)
    assert (
        PixelBudget(100, 1000).for_detail("low") == PixelBudget(100, 1000) == PixelBudget(100, 1000).for_detail("high")
    )
    assert PixelBudget(min_pixels=1 << 20).for_detail("low") == PixelBudget(512 * 512, 512 * 512)
