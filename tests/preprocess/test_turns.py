"""Turns that a template refuses where they stand: late system turns, several of them, two of one role in a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hydra_engine.errors import InvalidRequest
from hydra_engine.frontend.call import chat_messages
from hydra_engine.preprocess.text.tokenizer import Tokenizer
from hydra_engine.preprocess.text.writer import ChatTemplate
from hydra_engine.server.protocol.anthropic import MessagesRequest, conversation
from hydra_engine.server.protocol.chat import ChatCompletionRequest
from hydra_engine.server.protocol.chat import chat_messages as protocol_messages
from hydra_engine.server.protocol.responses import ResponsesRequest
from tests.preprocess.conftest import Kitchen
from tests.preprocess.test_chat import IMAGE, VICUNA, text, url, user

EACH = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
FIRST = (  # as Qwen3.5's
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"
)
ALTERNATING = VICUNA  # refuses a late system turn, and leaves out those behind the first one
NONE = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}" + EACH[23:]
DROPS = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}"
)
CALLING = (  # in the manner of Mistral's: what alternates are users and assistants without calls
    "{% set ns = namespace(index=0) %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('only at the beginning') }}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}[{{ m.role }}]"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('x') }}{% endif %}"
    "[{{ m.role }}]"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endfor %}"
)


def turns(*pairs: str) -> list[dict[str, Any]]:
    """ "s:be brief" is a system turn."""
    roles = {"s": "system", "u": "user", "a": "assistant", "d": "developer", "t": "tool"}
    return [{"role": roles[pair[0]], "content": pair[2:]} for pair in pairs]


def rendered(tokenizer: Tokenizer, template: str, messages: list[Any]) -> str:
    chat = ChatTemplate(tokenizer, template, IMAGE)
    return chat.render(chat.arrange(chat_messages(messages)))


LATE = turns("s:A", "u:b", "a:c", "s:D", "u:e", "d:F")
TWICE = turns("s:A", "d:B", "u:c")


def test_what_a_template_takes_stays_as_it_is(tokenizer: Tokenizer) -> None:
    assert rendered(tokenizer, EACH, LATE) == "[system]A[user]b[assistant]c[system]D[user]e[system]F"
    assert rendered(tokenizer, EACH, TWICE) == "[system]A[system]B[user]c"
    many = turns("u:a", "u:b", "a:c", "a:d")
    assert (
        rendered(tokenizer, EACH, many) == rendered(tokenizer, FIRST, many) == "[user]a[user]b[assistant]c[assistant]d"
    )


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (FIRST, LATE, "[system]A[user]b[assistant]c[user]D[user]e[user]F"),
        (FIRST, turns("u:a", "s:B", "a:c"), "[user]a[user]B[assistant]c"),
        (FIRST, turns("u:a", "a:b", "s:C"), "[user]a[assistant]b[user]C"),
        (FIRST, TWICE, "[system]A\n\nB[user]c"),
        (FIRST, turns("s:A", "s:B", "u:c", "s:D", "s:E"), "[system]A\n\nB[user]c[user]D[user]E"),
        (DROPS, LATE, "[system]A[user]b[assistant]c[user]D[user]e[user]F"),
        (DROPS, TWICE, "[system]A\n\nB[user]c"),
        (ALTERNATING, LATE, "A user: b\nassistant: c\nuser: D\n\ne\n\nF\nassistant:"),
        (ALTERNATING, TWICE, "A\n\nB user: c\nassistant:"),
        (ALTERNATING, turns("u:a", "u:b", "a:c", "a:d", "u:e"), "user: a\n\nb\nassistant: c\n\nd\nuser: e\nassistant:"),
        (EACH.replace("m.content", "m.content | upper"), TWICE, "[system]A[system]B[user]C"),
        (NONE, LATE, "[user]A[user]b[assistant]c[user]D[user]e[user]F"),
    ],
)
def test_other_turns_come_in_their_place(
    tokenizer: Tokenizer, template: str, messages: list[Any], expected: str
) -> None:
    assert rendered(tokenizer, template, messages) == expected


def test_late_system_turns_of_every_api_are_taken(tokenizer: Tokenizer) -> None:
    late = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}, {"role": "system", "content": "D"}]
    chat = msgspec.convert({"messages": [{"role": "system", "content": "A"}, *late]}, ChatCompletionRequest)
    responses = msgspec.convert({"instructions": "A", "input": late}, ResponsesRequest)
    anthropic = msgspec.convert({"system": "A", "messages": late, "max_tokens": 1}, MessagesRequest)
    for messages in (
        protocol_messages(chat.messages),
        responses.chat_messages(),
        conversation(anthropic.messages, anthropic.system),
    ):
        template = ChatTemplate(tokenizer, FIRST, IMAGE)
        assert template.render(template.arrange(messages)) == "[system]A[user]b[assistant]c[user]D"


def test_what_a_user_says_right_behind_a_tools_result(tokenizer: Tokenizer) -> None:
    """Claude Code sends reminders there."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [*turns("u:a"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    said = [*asked, *turns("t:12", "t:13", "u:b", "s:C", "a:d", "u:e")]
    begun = '[user]a[assistant]{"name": "f", "arguments": {}}[tool]12[tool]13'
    assert rendered(tokenizer, CALLING, said) == f"{begun}\n\nb\n\nC[assistant]d[user]e"
    kept = CALLING.replace("raise_exception('must alternate')", "''").replace("{{ '' }}", "")
    assert rendered(tokenizer, kept, said) == f"{begun}[user]b[user]C[assistant]d[user]e"
    assert rendered(tokenizer, CALLING, [*asked, *turns("t:12", "a:d")]).endswith("[tool]12[assistant]d")


def test_calls_and_pictures_of_joined_turns_stay(tokenizer: Tokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asks = {"role": "assistant", "content": "x", "tool_calls": [call]}
    found = ChatTemplate(tokenizer, ALTERNATING, IMAGE).arrange(
        chat_messages([*turns("u:a"), asks, asks | {"content": None, "reasoning": "why"}])
    )
    assert len(found) == 2 and len(found[1].tool_calls) == 2
    assert (found[1].content, found[1].others) == ("x", {"reasoning": "why"})
    shown = rendered(tokenizer, PARTS, [user(url(), text("a")), *turns("s:B"), user(text("c"), url(), text("d"))])
    assert shown == "[user]<image>a\n\nB\n\nc<image>d"
    shown = rendered(tokenizer, PARTS, [user(text("a"), url()), user(url(), text("b"))])
    assert shown == "[user]a<image><image>b"


def test_an_assistant_first_is_refused_in_the_template_s_words(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="Roles must alternate"):
        rendered(tokenizer, ALTERNATING, turns("a:hi", "u:b"))


async def test_what_is_cached_of_a_conversation_stays_when_late_turns_come(
    make_preprocessor: Callable[..., Kitchen], tmp_path: Path
) -> None:
    for number, template in enumerate((FIRST, ALTERNATING)):
        (tmp_path / f"{number}.jinja").write_text(template)
        kitchen = make_preprocessor(chat_template_path=str(tmp_path / f"{number}.jinja"))
        before: tuple[int, ...] = ()
        for count in (2, 4, 7):
            talk = turns("s:A", "u:b", "a:c", "u:d", "s:E", "a:f", "u:g")[:count]
            ids = (await kitchen.prepare(messages=talk)).request.prompt_token_ids
            assert ids[: len(before)] == before
            before = ids[: len(ids) - len("\nassistant:") - 2]
