from pathlib import Path
from typing import Any

import pytest

from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.errors import InvalidRequest
from hydra_engine.frontend.call import chat_messages
from hydra_engine.preprocess.text.tokenizer import Tokenizer
from hydra_engine.preprocess.text.writer import ChatTemplate

IMAGE = "<image>"
LLAVA = """\
{% for message in messages %}{{ message['role'].upper() + ': ' }}\
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}\
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
VICUNA = """\
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}{% set rest = messages[1:] %}\
{% else %}{% set rest = messages %}{% endif %}\
{% for m in rest %}\
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}\
{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
MIXED = """\
{% for m in messages %}{% if m['role'] == 'system' %}{{ 'S:' + m['content'] }}{% else %}{{ m['role'][0] + ':' }}\
{% for part in m['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}\
{% endif %}{% endfor %}"""


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(value: Any) -> dict[str, Any]:
    return {"type": "text", "text": value}


def url(value: Any = "http://h/x.png", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": value, **more}}


def asks(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def call(name: Any = "weather", arguments: Any = '{"city": "Paris"}') -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def render(tokenizer: Tokenizer, template: str | None, messages: list[Any], **options: Any) -> str:
    chat = ChatTemplate(tokenizer, template, IMAGE)
    return chat.render(
        [chat.with_known_fields(message) for message in chat_messages(messages)], TemplateOptions(**options)
    )


def test_messages_in_all_forms_are_understood_in_order() -> None:
    messages = [
        {"role": "developer", "content": "be brief", "name": "x"},
        user(text("a"), url("u1"), {"type": "image", "image": b"u2"}, text("b"), url("u3", detail="low")),
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        user({"type": "image_url", "image_url": "u4"}, {"type": "image", "url": "u5"}, {"type": "image", "path": "u6"}),
    ]
    typed = chat_messages(messages)
    assert [message.role for message in typed] == ["system", "user", "assistant", "tool", "user"]
    media = [part for message in typed for part in message.media]
    assert [part.source for part in media] == ["u1", b"u2", "u3", "u4", "u5", "u6"]
    assert [part.param for part in media] == [
        "messages[1].content[1].image_url.url",
        "messages[1].content[2].image",
        "messages[1].content[4].image_url.url",
        "messages[4].content[0].image_url",
        "messages[4].content[1].url",
        "messages[4].content[2].path",
    ]
    assert [text for message in typed for _, text in message.texts() if text] == ["be brief", "a", "b", "42"]
    assert (typed[2].content, typed[3].tool_call_id) == ("", "1")


WRONG = [
    (None, "messages"),
    ([], "messages"),
    ("hello", "messages"),
    ({"role": "user"}, "messages"),
    ([{"role": "user", "content": "x"}] * 5000, "messages"),
    ([7], "messages[0]"),
    (["x"], "messages[0]"),
    ([[]], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "king", "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": b"x"}], "messages[0].content"),
    ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
    ([user(*[text("x")] * 5000)], "messages[0].content"),
    ([user("x")], "messages[0].content[0]"),
    ([user(text("x"), {"type": "input_audio"})], "messages[0].content[1]"),
    ([user({"type": ["text"]})], "messages[0].content[0]"),
    ([user({"text": "x"})], "messages[0].content[0]"),
    ([user(text(5))], "messages[0].content[0].text"),
    ([user({"type": "text"})], "messages[0].content[0].text"),
    ([user({"type": "image_url"})], "messages[0].content[0].image_url"),
    ([user({"type": "image_url", "image_url": 5})], "messages[0].content[0].image_url"),
    ([user(url(None))], "messages[0].content[0].image_url.url"),
    ([user(url(b"x"))], "messages[0].content[0].image_url.url"),
    ([user(url(detail="huge"))], "messages[0].content[0].image_url.detail"),
    ([user(url(detail=["low"]))], "messages[0].content[0].image_url.detail"),
    ([user({"type": "image"})], "messages[0].content[0].image"),
    ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "content": None, "tool_calls": "x"}], "messages[0].tool_calls"),
    ([{"role": "assistant", "content": None, "function_call": {"name": "f"}}], "messages[0].function_call"),
    ([{"role": "user", "content": "x", "tool_calls": [call()]}], "messages[0].tool_calls"),
    ([asks(call(name=""))], "messages[0].tool_calls[0].function.name"),
    ([asks(call(name=5))], "messages[0].tool_calls[0].function.name"),
    ([asks(call(arguments=[1]))], "messages[0].tool_calls[0].function.arguments"),
    ([asks(call(arguments={"a": float("nan")}))], "messages[0].tool_calls[0].function.arguments"),
    ([asks(*[call()] * 129)], "messages[0].tool_calls"),
    ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id"),
    ([user({"type": "image", "image": b"", "detail": 5})], "messages[0].content[0].detail"),
]


@pytest.mark.parametrize(("messages", "param"), WRONG)
def test_wrong_messages_are_refused_by_field(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_messages(messages)
    assert caught.value.param == param
    assert len(caught.value.message) < 200 and "king" not in caught.value.message


def test_templates_that_read_parts_get_parts(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        user(text("see"), url()),
    ]
    assert render(tokenizer, LLAVA, messages) == "SYSTEM: brief USER: hi ASSISTANT: yes? USER: <image>\nsee ASSISTANT:"
    assert render(tokenizer, LLAVA, messages[1:2], add_generation_prompt=False) == "USER: hi "


def test_templates_that_read_strings_get_strings(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": [text("be"), text("brief")]}, user(text("a"), url(), text("b"), url())]
    assert render(tokenizer, VICUNA, messages) == "be\nbrief user: <image>\n<image>\na\nb\nassistant:"


def test_templates_may_differ_by_role(tokenizer: Tokenizer) -> None:
    messages = [{"role": "developer", "content": [text("x")]}, {"role": "user", "content": "y"}, user(url(), text("z"))]
    assert render(tokenizer, MIXED, messages) == "S:xu:yu:<image>z"


def test_the_models_own_template_equals_transformers(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "s"},
        user(text("a"), url(), text("b")),
        {"role": "assistant", "content": "c"},
    ]
    oracle = [dict(m) for m in messages]
    oracle[1] = {"role": "user", "content": [text("a"), {"type": "image"}, text("b")]}
    expected = tokenizer._tokenizer.apply_chat_template(oracle, tokenize=False, add_generation_prompt=True)
    assert render(tokenizer, tokenizer.chat_template, messages) == expected
    assert expected == "<s><|system|>s</s><|user|>a<image>b</s><|assistant|>c</s><|assistant|>"


def test_what_a_template_says_reaches_the_user_in_one_short_line(tokenizer: Tokenizer) -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InvalidRequest, match="Roles must alternate user/assistant") as caught:
        render(tokenizer, VICUNA, twice)
    long = "{{ raise_exception('a\\nb ' * 500) }}"
    with pytest.raises(InvalidRequest) as caught:
        render(tokenizer, long, twice)
    assert "\n" not in caught.value.message and len(caught.value.message) < 260


BROKEN = [
    "{% for %}",
    "{{ messages[5]['role'] }}",
    "{{ 1 / 0 }}",
    "{{ messages + 1 }}",
    "{{ messages | nothing }}",
    "{{ undefined.x.y }}",
    "{{ messages[0].content.format(x) }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ '{0.__class__}'.format(1).nope.nope }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
]


@pytest.mark.parametrize("template", BROKEN)
def test_broken_templates_are_an_answer(tokenizer: Tokenizer, template: str) -> None:
    with pytest.raises(InvalidRequest, match="template") as caught:
        render(tokenizer, template, [{"role": "user", "content": "a"}])
    assert "0x" not in caught.value.message and "class" not in caught.value.message


def test_a_model_without_template_says_what_to_do(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"--chat-template.*completions"):
        render(tokenizer, None, [{"role": "user", "content": "a"}])


TEMPLATES = Path(__file__).parents[1] / "templates"


@pytest.mark.parametrize(
    ("name", "variables", "end"),
    [
        ("qwen3", {}, "<|end|><|assistant|>"),
        ("qwen3", {"enable_thinking": False}, "<|end|><|assistant|><think>\n\n</think>\n\n"),
        ("qwen35", {}, "<|end|><|assistant|><think>\n"),
        ("deepseek_r1", {"enable_thinking": False}, "<|end|><|assistant|><think>\n"),
        ("deepseek_v3", {}, "<|end|><|assistant|></think>"),
        ("deepseek_v3", {"thinking": True}, "<|end|><|assistant|><think>"),
    ],
)
def test_what_stands_before_an_answer(tokenizer: Tokenizer, name: str, variables: dict[str, Any], end: str) -> None:
    template = ChatTemplate(tokenizer, (TEMPLATES / f"{name}.jinja").read_text(), IMAGE)
    options = TemplateOptions(variables=variables)
    assert template.generation_prompt(options) == template.generation_prompt(options) == end
    nothing = TemplateOptions(variables=variables, add_generation_prompt=False)
    assert template.generation_prompt(nothing) == "<|end|>"


def test_what_stands_before_an_answer_of_odd_templates(tokenizer: Tokenizer) -> None:
    """Templates: one that reads parts, one that depends on the tools, one that continues after a tool's result, one
    that refuses the conversation, and none."""
    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}!"
    assert ChatTemplate(tokenizer, parts, IMAGE).generation_prompt() == "!"
    tools = ChatTemplate(tokenizer, "{{ messages[0].content }}{{ 'T' if tools else 'N' }}", IMAGE)
    offered = TemplateOptions(({"type": "function", "function": {"name": "f"}},))
    assert (tools.generation_prompt(), tools.generation_prompt(offered)) == ("N", "T")
    result = (TEMPLATES / "deepseek_v3.jinja").read_text()
    assert ChatTemplate(tokenizer, result, IMAGE).generation_prompt(role="tool") == "<result|>"
    assert ChatTemplate(tokenizer, "{{ raise_exception('no') }}", IMAGE).generation_prompt() == ""
    assert ChatTemplate(tokenizer, None, IMAGE).generation_prompt() == ""
