"""Tools on /v1/responses and /v1/messages: what the official clients make of calls, whole and streamed, and how calls
and their results in the input reach the engine.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.server.tools.tool_calls import ToolUse
from tests.calls import plain
from tests.server.conftest import Serve, Served
from tests.server.test_chat import client_of as openai_client
from tests.server.test_messages import client_of as anthropic_client
from tests.server.test_tool_parsers import CLOCK, PARAMETERS, PARIS, TOOLS
from tests.server.test_tools import cut

FUNCTIONS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Tells it.", "parameters": PARAMETERS, "strict": True},
    {"type": "function", "name": "clock", "parameters": None, "strict": None},
]
INPUT_TOOLS: list[Any] = [
    {"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS},
    {"name": "clock", "type": "custom", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
]
QUESTION: list[Any] = [{"role": "user", "content": "x"}]
SEVERAL = f"Wait.\n{PARIS}\n{CLOCK}"
REQUIRED = '[{"name": "clock", "parameters": {}}, {"name": "weather", "parameters": {"city": "P"}}]'


async def events_of(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with served.post(path, body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        text = (await response.read()).decode()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [line[7:] for line in text.splitlines() if line.startswith("event: ")] == [one["type"] for one in events]
    return events


# ---- Responses


async def test_responses_whole(served: Served) -> None:
    served.engine.pieces = cut(SEVERAL)
    async with openai_client(served) as client:
        answer = await client.responses.create(model="stub", input="x", tools=FUNCTIONS)
    message, weather, clock = answer.output
    assert message.type == "message" and message.content[0].text == "Wait.\n" == answer.output_text
    assert weather.type == clock.type == "function_call"
    assert (weather.name, json.loads(weather.arguments), weather.status) == ("weather", {"city": "Paris"}, "completed")
    assert (clock.name, clock.arguments) == ("clock", "{}")
    assert re.fullmatch(r"call_\w{24}", weather.call_id) and weather.id == weather.call_id.replace("call", "fc")
    assert len({weather.call_id, clock.call_id}) == 2
    assert (answer.status, answer.tool_choice, answer.parallel_tool_calls) == ("completed", "auto", True)
    assert [tool.to_dict() for tool in answer.tools] == [
        FUNCTIONS[0],
        {"type": "function", "name": "clock", "parameters": None, "strict": None, "description": None},
    ]
    (submission,) = served.engine.submissions
    assert submission.template == TemplateOptions(tuple(TOOLS))
    assert submission.sampling.grammar is None and submission.sampling.skip_special_tokens is False


async def test_responses_calls_that_must_come(served: Served) -> None:
    served.engine.pieces = cut(REQUIRED)
    async with openai_client(served) as client:
        ask: Any = client.responses.create
        answer = await ask(model="stub", input="x", tools=FUNCTIONS, tool_choice="required")
        assert [(one.type, one.name) for one in answer.output] == [
            ("function_call", "clock"),
            ("function_call", "weather"),
        ]
        assert answer.output_text == ""
        assert served.engine.submissions[-1].sampling.grammar == ToolUse(tuple(TOOLS), "required").grammar()
        answer = await ask(model="stub", input="x", tools=FUNCTIONS, tool_choice="required", parallel_tool_calls=False)
        assert [one.name for one in answer.output] == ["clock"] and answer.parallel_tool_calls is False
        served.engine.pieces = cut('{"city": "Rome"}')
        named = {"type": "function", "name": "weather"}
        answer = await ask(model="stub", input="x", tools=FUNCTIONS, tool_choice=named)
        assert [(one.name, one.arguments) for one in answer.output] == [("weather", '{"city": "Rome"}')]
        assert answer.tool_choice.to_dict() == named
        served.engine.pieces = cut(PARIS)
        answer = await ask(model="stub", input="x", tools=FUNCTIONS, tool_choice="none")
        assert answer.output_text == PARIS and served.engine.submissions[-1].template == TemplateOptions()
        answer = await ask(model="stub", input="x", tools=FUNCTIONS, max_output_tokens=len(cut(PARIS)) - 4)
        [cut_off] = answer.output
        assert (answer.status, cut_off.status) == ("incomplete", "incomplete")
        assert PARIS.find(cut_off.arguments) > 0


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_responses_streamed(served: Served, size: int) -> None:
    served.engine.pieces = cut(SEVERAL, size)
    async with (
        openai_client(served) as client,
        client.responses.stream(model="stub", input="x", tools=FUNCTIONS, top_logprobs=1) as stream,
    ):
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [one.type for one in final.output] == ["message", "function_call", "function_call"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "Wait.\n"
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.name, event.output_index) for event in done] == [("weather", 1), ("clock", 2)]
    for index, event in enumerate(done, 1):
        deltas = [
            one.delta
            for one in events
            if one.type == "response.function_call_arguments.delta" and one.item_id == event.item_id
        ]
        assert "".join(deltas) == event.arguments == final.output[index].arguments
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.id for item in added] == [item.id for item in final.output]
    assert [item.arguments for item in added[1:]] == ["", ""]


async def test_every_event_of_a_call_in_its_order(served: Served) -> None:
    served.engine.pieces = [*cut(CLOCK, 1000), "Good."]
    events = await events_of(served, "/v1/responses", {"input": "x", "tools": FUNCTIONS})
    assert [(one["type"].removeprefix("response."), one.get("output_index")) for one in events] == [
        ("created", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("function_call_arguments.delta", 0),
        ("function_call_arguments.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.delta", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        ("completed", None),
    ]
    output = events[-1]["response"]["output"]
    assert output == [events[5]["item"], events[11]["item"]] and output[1]["content"][0]["text"] == "Good."


async def test_responses_history(served: Served) -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "clock", "arguments": "{}"}
    history: Any = [
        *QUESTION,
        {"role": "assistant", "content": "Wait."},
        call,
        call | {"id": "fc_2", "call_id": "call_2", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "12:00"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "Sun"}]},
        call | {"call_id": "call_3"},
        {"type": "function_call_output", "call_id": "call_3", "output": "12:01"},
    ]
    async with openai_client(served) as client:
        await client.responses.create(model="stub", input=history, tools=FUNCTIONS)
    clock = {"type": "function", "function": {"name": "clock", "arguments": {}}}
    other = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert plain(served.engine.submissions[0].messages) == [
        *QUESTION,
        {
            "role": "assistant",
            "content": "Wait.",
            "tool_calls": [{"id": "call_1", **clock}, {"id": "call_2", **other}],
        },
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1"},
        {"role": "tool", "content": [{"type": "text", "text": "Sun"}], "tool_call_id": "call_2"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_3", **clock}]},
        {"role": "tool", "content": "12:01", "tool_call_id": "call_3"},
    ]


# ---- Messages


async def test_messages_whole(served: Served) -> None:
    served.engine.pieces = cut(SEVERAL)
    async with anthropic_client(served) as client:
        answer = await client.messages.create(model="stub", max_tokens=99, messages=QUESTION, tools=INPUT_TOOLS)
    text, weather, clock = answer.content
    assert (text.type, text.text) == ("text", "Wait.\n")
    assert (weather.type, weather.name, weather.input) == ("tool_use", "weather", {"city": "Paris"})
    assert (clock.type, clock.name, clock.input) == ("tool_use", "clock", {})
    assert re.fullmatch(r"toolu_\w{24}", weather.id) and weather.id != clock.id
    assert answer.stop_reason == "tool_use"
    template = served.engine.submissions[0].template
    assert template.tools == (
        TOOLS[0],
        {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}},
    )
    assert template.add_generation_prompt and not template.continue_final_message


async def test_messages_calls_that_must_come(served: Served) -> None:
    served.engine.pieces = cut(REQUIRED)
    async with anthropic_client(served) as client:

        async def ask(**choice: Any) -> Any:
            options: Any = {"tools": INPUT_TOOLS, "tool_choice": choice}
            return await client.messages.create(model="stub", max_tokens=99, messages=QUESTION, **options)

        answer = await ask(type="any")
        assert [(one.name, one.input) for one in answer.content] == [("clock", {}), ("weather", {"city": "P"})]
        assert answer.stop_reason == "tool_use" and served.engine.submissions[-1].sampling.grammar is not None
        assert [one.name for one in (await ask(type="any", disable_parallel_tool_use=True)).content] == ["clock"]
        served.engine.pieces = cut('{"city": "Rome"}')
        answer = await ask(type="tool", name="weather")
        assert [(one.name, one.input) for one in answer.content] == [("weather", {"city": "Rome"})]
        assert answer.stop_reason == "tool_use"
        served.engine.pieces = cut(PARIS)
        answer = await ask(type="none")
        assert (answer.content[0].text, answer.stop_reason) == (PARIS, "end_turn")
        assert served.engine.submissions[-1].template.tools == ()
        served.engine.pieces = ['<tool_call>{"name": "clock", "arguments": {"a": }}</tool_call>']
        answer = await ask(type="auto")  # no JSON, so it is no call
        assert [(one.type, one.text) for one in answer.content] == [("text", '{"a": }')]
        assert answer.stop_reason == "end_turn"


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_messages_streamed(served: Served, size: int) -> None:
    served.engine.pieces = cut(SEVERAL, size)
    async with (
        anthropic_client(served) as client,
        client.messages.stream(model="stub", max_tokens=999, messages=QUESTION, tools=INPUT_TOOLS) as stream,
    ):
        final = await stream.get_final_message()
    assert [one.type for one in final.content] == ["text", "tool_use", "tool_use"]
    text, weather, clock = final.content
    assert (text.text, weather.input, clock.input) == ("Wait.\n", {"city": "Paris"}, {})
    assert final.stop_reason == "tool_use"


async def test_every_event_of_a_use_in_its_order(served: Served) -> None:
    served.engine.pieces = [*cut(CLOCK, 1000), "Good."]
    body = {"max_tokens": 9, "messages": QUESTION, "tools": INPUT_TOOLS}
    events = await events_of(served, "/v1/messages", body)
    assert [(one["type"], one.get("index")) for one in events] == [
        ("message_start", None),
        ("ping", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("message_delta", None),
        ("message_stop", None),
    ]
    used = events[2]["content_block"]
    assert used == {"type": "tool_use", "id": used["id"], "name": "clock", "input": {}}
    assert events[3]["delta"] == {"type": "input_json_delta", "partial_json": "{}"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_messages_history(served: Served) -> None:
    history: Any = [
        *QUESTION,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {}},
                {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12:00"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "Sun"}],
                    "is_error": True,
                },
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_3", "name": "clock", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_3"}]},
    ]
    async with anthropic_client(served) as client:
        await client.messages.create(model="stub", max_tokens=9, messages=history, tools=INPUT_TOOLS)

    def call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert plain(served.engine.submissions[0].messages) == [
        *QUESTION,
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Wait."}],
            "tool_calls": [call("toolu_1", "clock", {}), call("toolu_2", "weather", {"city": "Rome"})],
        },
        {"role": "tool", "content": "12:00", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": [{"type": "text", "text": "Sun"}], "tool_call_id": "toolu_2"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
        {"role": "assistant", "content": "", "tool_calls": [call("toolu_3", "clock", {"a": 1})]},
        {"role": "tool", "content": "", "tool_call_id": "toolu_3"},
    ]


# ---- both


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "x", "tools": FUNCTIONS}),
        ("/v1/messages", {"messages": QUESTION, "max_tokens": 9, "tools": INPUT_TOOLS}),
    ],
)
async def test_what_cannot_be_asked_for(serve: Serve, path: str, fields: dict[str, Any]) -> None:
    served = await serve()
    served.engine.chat_template = "{{ messages }}"
    async with served.post(path, fields) as response:
        assert response.status == 400 and "knows no tools" in (await response.json())["error"]["message"]
    forced = "required" if path == "/v1/responses" else {"type": "any"}
    async with served.post(path, fields | {"tool_choice": forced, "regex": "a"}) as response:
        assert response.status == 200, await response.text()
    grammar = served.engine.submissions[0].sampling.grammar
    assert grammar is not None and (grammar.kind, grammar.param) == ("json_schema", "tools")  # the form is for texts
    served.engine.pieces = cut(REQUIRED)
    async with served.post(path, fields | {"tool_choice": forced}) as response:
        assert response.status == 200
