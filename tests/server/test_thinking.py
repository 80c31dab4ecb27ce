"""Reasoning on all three APIs: what the official clients make of it, whole and streamed, the switches of each, and what
becomes of an answer that ends inside a call.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Serve, Served
from tests.server.test_chat import client_of as openai_client
from tests.server.test_function_blocks import call
from tests.server.test_messages import client_of as anthropic_client
from tests.server.test_tool_parsers import CLOCK, PARIS, TOOLS
from tests.server.test_tools import cut
from tests.server.test_tools_elsewhere import FUNCTIONS, INPUT_TOOLS, QUESTION, events_of

FOLDER = Path(__file__).parents[1] / "templates"
TEMPLATES = {path.stem: path.read_text() for path in FOLDER.glob("*.jinja")}
TEXT = f"Perhaps {PARIS}, no.\n</think>\n\nSo."
SIZES = pytest.mark.parametrize("size", [1, 4, 1000])


def thinks(served: Served, template: str, text: str, size: int = 1000) -> Served:
    served.engine.chat_template, served.engine.pieces = TEMPLATES[template], cut(text, size)
    return served


async def ask(served: Served, path: str = "/v1/chat/completions", status: int = 200, **fields: Any) -> Any:
    body: dict[str, Any] = {"input": "x"} if path.endswith("responses") else {"messages": QUESTION, "max_tokens": 999}
    async with served.post(path, body | fields) as response:
        answer = await response.json()
    assert response.status == status, answer
    return answer


# ---- the three APIs


@SIZES
async def test_chat(served: Served, size: int) -> None:
    thinks(served, "qwen35", TEXT + call("weather", city="Rome"), size)
    async with openai_client(served) as client:
        given: Any = {"model": "stub", "messages": QUESTION, "tools": TOOLS, "logprobs": True}
        whole = (await client.chat.completions.create(**given)).choices[0]
        chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**given, stream=True)]
    message: Any = whole.message
    assert message.reasoning_content == message.reasoning == f"Perhaps {PARIS}, no."
    assert (message.content, whole.finish_reason) == ("So.", "tool_calls")
    deltas: list[Any] = [chunk.delta for chunk in chunks]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == message.reasoning
    assert "".join(delta.content or "" for delta in deltas) == "So."
    arguments = [one.function.arguments for delta in deltas for one in delta.tool_calls or ()]
    assert "".join(arguments) == message.tool_calls[0].function.arguments == '{"city": "Rome"}'
    thought = [index for index, delta in enumerate(deltas) if getattr(delta, "reasoning", None)]
    said = [index for index, delta in enumerate(deltas) if delta.content]
    assert max(thought) < min(said) and chunks[-1].finish_reason == "tool_calls"
    streamed = [entry.token for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content or ()]
    assert whole.logprobs and whole.logprobs.content and streamed == [one.token for one in whole.logprobs.content]
    assert served.engine.submissions[0].sampling.skip_special_tokens is False


@SIZES
async def test_responses(served: Served, size: int) -> None:
    thinks(served, "qwen35", TEXT + call("weather", city="Rome"), size)
    async with openai_client(served) as client:
        given: Any = {
            "model": "stub",
            "input": "x",
            "tools": FUNCTIONS,
            "reasoning": {"effort": "low", "summary": "auto"},
        }
        whole = await client.responses.create(**given)
        async with client.responses.stream(**given) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    for answer in (whole, final):
        reasoning, message, called = answer.output
        assert reasoning.type == "reasoning" and reasoning.content and reasoning.summary == []
        assert (reasoning.content[0].text, reasoning.status) == (f"Perhaps {PARIS}, no.", "completed")
        assert answer.output_text == "So." and message.type == "message"
        assert called.type == "function_call" and called.arguments == '{"city": "Rome"}'
        assert answer.reasoning is not None and answer.reasoning.effort == "low" and answer.status == "completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    own = [event for event in events if getattr(event, "item_id", None) == final.output[0].id]
    assert [event.type for event in own if not event.type.endswith("delta")] == [
        *("response.content_part.added", "response.reasoning_text.done", "response.content_part.done")
    ]
    deltas = [event.delta for event in own if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == final.output[0].content[0].text  # type: ignore[union-attr, index]
    assert final.output[0].id.startswith("rs_")


@SIZES
async def test_messages(served: Served, size: int) -> None:
    thinks(served, "qwen35", TEXT + call("weather", city="Rome"), size)
    async with anthropic_client(served) as client:
        given: Any = {"model": "stub", "max_tokens": 9999, "messages": QUESTION, "tools": INPUT_TOOLS}
        whole = await client.messages.create(**given)
        async with client.messages.stream(**given) as stream:
            thoughts = [event.thinking async for event in stream if event.type == "thinking"]
            final = await stream.get_final_message()
    for answer in (whole, final):
        thinking, text, used = answer.content
        assert thinking.type == "thinking" and thinking.thinking == f"Perhaps {PARIS}, no." and thinking.signature
        assert text.type == "text" and text.text == "So."
        assert used.type == "tool_use" and used.input == {"city": "Rome"} and answer.stop_reason == "tool_use"
    assert "".join(thoughts) == f"Perhaps {PARIS}, no."


async def test_every_event_of_reasoning_in_its_order(served: Served) -> None:
    thinks(served, "qwen35", "Hm.</think>So.")
    events = await events_of(served, "/v1/messages", {"max_tokens": 9, "messages": QUESTION})
    assert [(one["type"], one.get("delta", {}).get("type")) for one in events[2:-2]] == [
        ("content_block_start", None),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
        ("content_block_start", None),
        ("content_block_delta", "text_delta"),
        ("content_block_stop", None),
    ]
    assert events[2]["content_block"]["type"] == "thinking" and events[2]["content_block"]["thinking"] == ""
    omitted: Any = {"thinking": {"type": "adaptive", "display": "omitted"}}
    answer = await ask(served, "/v1/messages", **omitted)
    assert answer["content"][0] == {"type": "thinking", "thinking": "", "signature": "unsigned"}
    events = await events_of(served, "/v1/messages", {"max_tokens": 9, "messages": QUESTION, **omitted})
    assert [one["delta"]["type"] for one in events if one["type"] == "content_block_delta"] == [
        *("signature_delta", "text_delta")
    ]


@pytest.mark.parametrize(
    ("template", "variables", "text", "expected"),
    [
        ("qwen3", {}, "<think>\na\n</think>\n\nb", ("a", "b")),
        ("qwen3", {}, "b", (None, "b")),
        ("qwen3", {"enable_thinking": False}, "b</think>", (None, "b</think>")),
        ("qwen35", {}, "a", ("a", None)),  # it was cut off, or never came to an answer
        ("qwen35", {"enable_thinking": False}, "b", (None, "b")),
        ("deepseek_r1", {}, "a</think>b", ("a", "b")),
        ("deepseek_v3", {}, "b", (None, "b")),
        ("deepseek_v3", {"thinking": True}, "a</think>b", ("a", "b")),
    ],
)
async def test_the_template_says_where_an_answer_begins(
    served: Served, template: str, variables: dict[str, Any], text: str, expected: tuple[str | None, str | None]
) -> None:
    thinks(served, template, text)
    message = (await ask(served, chat_template_kwargs=variables))["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == expected


async def test_an_answer_that_goes_on_is_where_its_message_is(served: Served) -> None:
    thinks(served, "qwen35", "b</think>c")
    for begun, expected in (("<think>a", ("b", "c")), ("<think>a</think>", (None, "b</think>c"))):
        turns = [*QUESTION, {"role": "assistant", "content": begun}]
        message = (await ask(served, messages=turns, continue_final_message=True))["choices"][0]["message"]
        assert (message.get("reasoning"), message["content"]) == expected
        content = (await ask(served, "/v1/messages", messages=turns))["content"]
        assert content[-1]["text"] == expected[1] and len(content) == 1 + (expected[0] is not None)


async def test_the_operator_says_which_parser(serve: Serve) -> None:
    answers = {}
    for parser in ("none", "qwen3", "deepseek_r1"):
        served = await serve(reasoning_parser=parser)
        served.engine.pieces = ["a</think>b"]
        for template in ("{{ messages }}", TEMPLATES["qwen35"]):
            served.engine.chat_template = template
            message = (await ask(served))["choices"][0]["message"]
            answers[parser, template[:2]] = message.get("reasoning"), message["content"]
    unread, read = (None, "a</think>b"), ("a", "b")
    assert list(answers.values()) == [unread, unread, unread, read, read, read]


async def test_models_that_do_not_think_are_as_ever(served: Served) -> None:
    """Thinking marks stay in the text of a model that does not think, but what stands between them calls no tool."""
    served.engine.pieces = cut(f"<think>maybe {CLOCK}, no</think>It is noon.")
    choice = (await ask(served, tools=TOOLS))["choices"][0]
    assert choice["message"] == {"content": "".join(served.engine.pieces), "role": "assistant", "refusal": None}
    assert choice["finish_reason"] == "stop" and served.engine.submissions[-1].sampling.skip_special_tokens is False
    await ask(served)
    assert served.engine.submissions[-1].sampling.skip_special_tokens is True


async def test_reasoning_may_be_left_out_or_in(served: Served) -> None:
    thinks(served, "qwen35", f"Hm. {CLOCK}</think>So.", 3)
    message = (await ask(served, include_reasoning=False))["choices"][0]["message"]
    assert message == {"content": "So.", "role": "assistant", "refusal": None}
    choice = (await ask(served, separate_reasoning=False, tools=TOOLS))["choices"][0]
    assert choice["message"]["content"] == f"Hm. {CLOCK}</think>So." and choice["finish_reason"] == "stop"
    body = {"messages": QUESTION, "stream_reasoning": False, "stream": True}
    async with served.post("/v1/chat/completions", body) as response:
        lines = [line async for line in response.content if line.startswith(b"data: {")]
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
    assert [delta["reasoning"] for delta in deltas if "reasoning" in delta] == [f"Hm. {CLOCK}"]


# ---- switches


@pytest.mark.parametrize(
    ("template", "fields", "variables"),
    [
        ("qwen35", {"reasoning_effort": "none"}, {"enable_thinking": False}),
        ("qwen35", {"reasoning_effort": "high"}, {"enable_thinking": True}),
        ("qwen35", {"enable_thinking": False}, {"enable_thinking": False}),
        ("qwen35", {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ("deepseek_v3", {"thinking": {"type": "enabled"}}, {"thinking": True}),
        ("deepseek_r1", {"reasoning_effort": "minimal"}, {}),
        (
            "qwen35",
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
    ],
)
async def test_switches_of_chat(
    served: Served, template: str, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    await ask(thinks(served, template, "a"), **fields)
    assert served.engine.submissions[-1].template.variables == variables


async def test_switches_of_the_others(served: Served) -> None:
    thinks(served, "qwen35", "a")
    asked: list[tuple[str, dict[str, Any], bool | None]] = [
        ("/v1/responses", {"reasoning": {"effort": "none"}}, False),
        ("/v1/responses", {"reasoning": {"effort": "medium", "summary": "detailed"}}, True),
        ("/v1/responses", {"reasoning": {}}, None),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, False),
        ("/v1/messages", {"thinking": {"type": "adaptive"}}, True),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 2048}}, True),
        ("/v1/messages", {"output_config": {"effort": "high"}}, True),
        ("/v1/messages", {}, None),
    ]
    for path, fields, on in asked:
        await ask(served, path, **fields)
        expected = {} if on is None else {"enable_thinking": on}
        assert served.engine.submissions[-1].template.variables == expected, fields
    await ask(served, "/v1/messages/count_tokens", thinking={"type": "disabled"})
    assert served.engine.counted[-1].template.variables == {"enable_thinking": False}


async def test_a_model_that_does_not_think_takes_every_wish(served: Served) -> None:
    wishes: list[tuple[str, dict[str, Any]]] = [
        *(("/v1/chat/completions", {"reasoning_effort": effort}) for effort in ("none", "minimal", "high")),
        ("/v1/responses", {"reasoning": {"effort": "high"}}),
        *(("/v1/messages", {"thinking": {"type": kind}}) for kind in ("adaptive", "disabled")),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ]
    for path, fields in wishes:
        await ask(served, path, **fields)
        assert served.engine.submissions[-1].template.variables == {}


async def test_a_model_that_always_thinks(served: Served) -> None:
    thinks(served, "deepseek_r1", "a</think>b")
    for path, fields, param in (
        ("/v1/chat/completions", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("/v1/chat/completions", {"enable_thinking": False}, "enable_thinking"),
        ("/v1/responses", {"reasoning": {"effort": "none"}}, "reasoning.effort"),
    ):
        error = (await ask(served, path, 400, **fields))["error"]
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    answer = await ask(served, "/v1/messages", thinking={"type": "disabled"})  # as all their models are by default
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]


async def test_forms_and_calls_that_must_come_begin_behind_the_reasoning(served: Served) -> None:
    form = {"type": "json_object"}
    thinks(served, "qwen35", 'a</think>\n\n{"k": 1}')
    message = (await ask(served, response_format=form))["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("a", '{"k": 1}')
    grammar = served.engine.submissions[-1].sampling.grammar
    assert grammar is not None and grammar.reasoning is not None and grammar.reasoning.opened
    thinks(served, "qwen3", '<think>a</think>\n\n[{"name": "clock", "parameters": {}}]')
    choice = (await ask(served, tools=TOOLS, tool_choice="required"))["choices"][0]
    assert choice["message"]["reasoning"] == "a" and choice["finish_reason"] == "tool_calls"
    grammar = served.engine.submissions[-1].sampling.grammar
    assert grammar is not None and grammar.reasoning is not None and not grammar.reasoning.opened
    thinks(served, "qwen35", '{"k": 1}')
    await ask(served, response_format=form, reasoning_effort="none")
    grammar = served.engine.submissions[-1].sampling.grammar
    assert grammar is not None and grammar.reasoning is None


# ---- answers that end inside a call

CODER = call("weather", city="Par")[: -len("\n</parameter>\n</function>\n</tool_call>")]
BROKEN = '<tool_call>{"name": "weather", "arguments": {"city": "Par'
ENDS = [
    ("hermes", BROKEN),
    ("qwen35", f"</think>{CODER}"),
    ("required", '[{"name": "weather", "parameters": {"city": "P'),
]


@pytest.mark.parametrize(("kind", "text"), ENDS)
@pytest.mark.parametrize("stop_reason", ["END", 7, None])
async def test_half_a_call_is_none(served: Served, kind: str, text: str, stop_reason: str | int | None) -> None:
    """The answer ended at a stop string, a stop token or by itself; the call before it is kept."""
    engine = served.engine
    engine.stop_reason = stop_reason
    if kind == "qwen35":
        engine.chat_template = TEMPLATES["qwen35"]
    engine.pieces = cut(text)
    choice: Any = {"tool_choice": "required"} if kind == "required" else {}
    whole = (await ask(served, tools=TOOLS, **choice))["choices"][0]
    assert whole["finish_reason"] == "stop" and "tool_calls" not in whole["message"]
    assert (whole["message"]["content"], whole["stop_reason"]) == ("", stop_reason)
    body = {"messages": QUESTION, "tools": TOOLS, "stream": True, **choice}
    async with served.post("/v1/chat/completions", body) as response:
        lines = [line async for line in response.content if line.startswith(b"data: {")]
    assert json.loads(lines[-1][6:])["choices"][0]["finish_reason"] == "stop"

    answer = await ask(served, "/v1/responses", tools=FUNCTIONS, **choice)
    assert (answer["status"], answer["output"][-1]["status"]) == ("incomplete", "incomplete")
    assert answer["incomplete_details"] is None and answer["completed_at"] is None
    events = await events_of(served, "/v1/responses", {"input": "x", "tools": FUNCTIONS, **choice})
    assert events[-1]["type"] == "response.incomplete" and events[-2]["item"]["status"] == "incomplete"

    reason = "stop_sequence" if stop_reason == "END" else "end_turn"
    kinds: Any = {"tool_choice": {"type": "any"}} if kind == "required" else {}
    answer = await ask(served, "/v1/messages", tools=INPUT_TOOLS, **kinds)
    assert (answer["stop_reason"], answer["content"]) == (reason, [{"type": "text", "text": ""}])
    body = {"messages": QUESTION, "max_tokens": 999, "tools": INPUT_TOOLS, **kinds}
    events = await events_of(served, "/v1/messages", body)
    assert events[-2]["delta"]["stop_reason"] == reason
    assert [one["content_block"]["type"] for one in events if one["type"] == "content_block_start"] == ["text"]


async def test_the_call_before_half_a_call_is_kept(served: Served) -> None:
    served.engine.stop_reason, served.engine.pieces = "END", cut(f"{CLOCK}\n{BROKEN}", 9)
    whole = (await ask(served, tools=TOOLS))["choices"][0]
    assert [one["function"]["name"] for one in whole["message"]["tool_calls"]] == ["clock"]
    assert whole["finish_reason"] == "stop"
    answer = await ask(served, "/v1/responses", tools=FUNCTIONS)
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
    answer = await ask(served, "/v1/messages", tools=INPUT_TOOLS)
    assert [block["name"] for block in answer["content"]] == ["clock"] and answer["stop_reason"] == "stop_sequence"
    async with anthropic_client(served) as client:
        given: Any = {"model": "stub", "max_tokens": 999, "messages": QUESTION, "tools": INPUT_TOOLS}
        async with client.messages.stream(**given) as stream:
            final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["tool_use"] and final.stop_reason == "stop_sequence"


@pytest.mark.parametrize("text", [PARIS.removesuffix("</tool_call>"), PARIS.removesuffix("}\n</tool_call>")])
async def test_a_stop_string_behind_the_arguments_leaves_a_whole_call(served: Served, text: str) -> None:
    served.engine.stop_reason, served.engine.pieces = "</tool_call>", cut(text)
    assert (await ask(served, tools=TOOLS))["choices"][0]["finish_reason"] == "tool_calls"
    answer = await ask(served, "/v1/responses", tools=FUNCTIONS)
    assert (answer["status"], answer["output"][0]["status"]) == ("completed", "completed")
    answer = await ask(served, "/v1/messages", tools=INPUT_TOOLS)
    assert answer["content"][0]["input"] == {"city": "Paris"}


async def test_a_named_call_that_is_cut(served: Served) -> None:
    served.engine.stop_reason, served.engine.pieces = "END", ['{"city": "Par']
    named = {"type": "function", "function": {"name": "weather"}}
    choice = (await ask(served, tools=TOOLS, tool_choice=named))["choices"][0]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    answer = await ask(served, "/v1/messages", tools=INPUT_TOOLS, tool_choice={"type": "tool", "name": "weather"})
    assert answer["content"] == [{"type": "text", "text": ""}]


async def test_calls_cut_by_the_limit_of_tokens_are_shown_as_far_as_they_came(served: Served) -> None:
    """OpenAI's API shows them; Anthropic's does not, as its clients run what they get."""
    served.engine.pieces = [*cut(BROKEN), "is"]
    limit = len(cut(BROKEN))
    choice = (await ask(served, tools=TOOLS, max_tokens=limit))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Par'
    answer = await ask(served, "/v1/messages", tools=INPUT_TOOLS, max_tokens=limit)
    assert answer["stop_reason"] == "max_tokens" and [block["type"] for block in answer["content"]] == ["text"]
