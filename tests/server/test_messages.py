"""POST /v1/messages: what Anthropic's own client makes of it, the events to the letter, and errors in its shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest

from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.errors import RequestFailed, Unavailable
from tests.calls import plain
from tests.server.conftest import Serve, Served

PATH = "/v1/messages"
PNG = "iVBORw0KGgo="


def client_of(served: Served, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(**{"base_url": served.url, "api_key": "any", "max_retries": 0, **options})


def body_of(text: str = "one two three", **fields: Any) -> dict[str, Any]:
    return {"model": "stub", "max_tokens": 100, "messages": [{"role": "user", "content": text}], **fields}


async def ask(served: Served, path: str = PATH, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {name: value for name, value in body_of(**fields).items() if value is not None}
    async with served.post(path, body) as response:
        return response.status, await response.json()


async def test_the_client_gets_an_answer(served: Served) -> None:
    async with client_of(served) as client:
        answer = await client.messages.create(
            model="stub",
            max_tokens=20,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=[
                {"role": "user", "content": "Hello"},
                {"role": "user", "content": "again"},
                {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
                        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
                        {"type": "text", "text": "one two three"},
                    ],
                },
            ],
            stop_sequences=["###"],
            metadata={"user_id": "u"},
            extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "priority": 2, "cache_salt": "s"},
        )
    [block] = answer.content
    assert block.type == "text" and block.text == "one two three"
    assert (answer.role, answer.type, answer.stop_reason, answer.stop_sequence) == (
        "assistant",
        "message",
        "end_turn",
        None,
    )
    assert answer.id.startswith("msg_") and answer._request_id == answer.id.removeprefix("msg_")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (35, 3)
    [asked] = served.engine.submissions
    assert [part.param for part in asked.messages[-1].media] == [
        "messages[3].content[0].source.data",
        "messages[3].content[1].source.url",
    ]
    assert plain(asked.messages) == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "again"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
                {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
                {"type": "text", "text": "one two three"},
            ],
        },
    ]
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (20, 0.5, 0.9, 7)
    assert (sampling.stop, sampling.seed, asked.priority, asked.cache_salt) == (("###",), 3, 2, "s")


async def test_the_synchronous_client(served: Served) -> None:
    def call() -> list[str]:
        messages: Any = [{"role": "user", "content": "one two"}]
        with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as client:
            [block] = client.messages.create(model="stub", max_tokens=9, messages=messages).content
            with client.messages.stream(model="stub", max_tokens=9, messages=messages) as events:
                texts = list(events.text_stream)
                return [block.text, *texts, events.get_final_text()]

    assert await asyncio.to_thread(call) == ["one two", "one", " two", "one two"]


async def test_the_client_reads_a_stream(served: Served) -> None:
    messages: Any = [{"role": "user", "content": "a b c"}]
    async with (
        client_of(served) as client,
        client.messages.stream(model="stub", max_tokens=2, messages=messages) as events,
    ):
        texts = [text async for text in events.text_stream]
        final = await events.get_final_message()
    assert texts == ["a", " b"] and final.stop_reason == "max_tokens"
    assert (final.usage.input_tokens, final.usage.output_tokens) == (3, 2)


async def test_every_event_in_its_order(served: Served) -> None:
    async with served.post(PATH, body_of("one two", stream=True, return_metrics=True)) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        text = (await response.read()).decode()
    events = [block.split("\n") for block in text.strip().split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert [line.removeprefix("event: ") for line, _ in events] == [one["type"] for one in data]
    assert [one["type"] for one in data] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    started = data[0]["message"]
    assert started["content"] == [] and started["stop_reason"] is None and started["usage"]["input_tokens"] == 2
    assert data[1] == {
        "type": "content_block_start",
        "content_block": {"type": "text", "text": ""},
        "index": 0,
    }
    assert data[4]["delta"] == {"type": "text_delta", "text": " two"}
    assert data[6]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert data[6]["usage"]["output_tokens"] == 2 and data[6]["metrics"]["ttft_s"] == 0.2


@pytest.mark.parametrize(("matched", "reason"), [("###", "stop_sequence"), (7, "end_turn"), (None, "end_turn")])
async def test_stop_reasons(served: Served, matched: str | int | None, reason: str) -> None:
    served.engine.stop_reason = matched
    _, answer = await ask(served, stop_sequences=["###"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, "###" if matched == "###" else None)


async def test_an_assistant_s_turn_at_the_end_is_gone_on_with(served: Served) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is"}]
    assert (await ask(served, messages=turns))[0] == 200
    assert served.engine.submissions[0].template == TemplateOptions(
        add_generation_prompt=False, continue_final_message=True
    )
    assert (await ask(served))[0] == 200
    assert served.engine.submissions[1].template == TemplateOptions()


async def test_a_schema_for_the_answer(served: Served) -> None:
    schema = {"type": "object", "properties": {}}
    assert (await ask(served, output_config={"format": {"type": "json_schema", "schema": schema}}))[0] == 200
    grammar = served.engine.submissions[0].sampling.grammar
    assert grammar is not None and grammar.kind == "json_schema" and json.loads(grammar.source) == schema


async def test_tokens_are_counted(served: Served) -> None:
    async with client_of(served) as client:
        count = await client.messages.count_tokens(
            model="stub", system="s", messages=[{"role": "user", "content": "one two"}]
        )
    assert count.input_tokens == 17 and served.engine.submissions == []
    expected = [{"role": "system", "content": "s"}, {"role": "user", "content": "one two"}]
    [call] = served.engine.counted
    assert (plain(call.messages), call.template) == (expected, TemplateOptions())
    status, answer = await ask(served, PATH + "/count_tokens", tools=[{"name": "f", "input_schema": {}}])
    assert (status, answer["input_tokens"]) == (200, 17)
    assert [tool["function"]["name"] for tool in served.engine.counted[-1].template.tools] == ["f"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content must be"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            "messages[0].content[0]: tool_result blocks belong to turns of the user",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source.type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "base64", "media_type": "image/tiff", "data": ""}}
                        ],
                    }
                ]
            },
            "media_type",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                ]
            },
            "a turn of the user with their tool_result must follow",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: tools of type 'web_search_2"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
        (
            {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}},
            "not among the tools",
        ),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"stop": ["a"]}, "stop is not supported"),
        ({"n": 2}, "n is not supported"),
        ({"stop_sequences": ["x" * 5000]}, "stop_sequences[0]"),
        ({"temperature": 3}, "temperature"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format.schema"),
    ],
)
async def test_refusals_have_anthropic_s_shape(served: Served, fields: dict[str, Any], words: str) -> None:
    status, answer = await ask(served, **fields)
    assert status == 400 and set(answer) == {"type", "error", "request_id"}
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert words in answer["error"]["message"] and served.engine.submissions == []


async def test_defaults_may_be_sent(served: Served) -> None:
    fields: dict[str, Any] = {"tools": [], "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}}
    assert (await ask(served, **fields, service_tier="auto", stop_sequences=[]))[0] == 200


async def test_the_client_reads_the_errors(served: Served) -> None:
    async with client_of(served) as client:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(model="claude", max_tokens=1, messages=[{"role": "user", "content": "a"}])
        served.engine.refusal = Unavailable("full")
        with pytest.raises(anthropic.APIStatusError) as full:
            await client.messages.create(model="stub", max_tokens=1, messages=[{"role": "user", "content": "a"}])
    body: Any = unknown.value.body
    assert body["error"]["type"] == "not_found_error" and "does not exist" in body["error"]["message"]
    assert body["request_id"] == unknown.value.request_id
    assert full.value.status_code == 503 and full.value.response.headers["Retry-After"] == "1"


async def test_a_failure_inside_a_stream(served: Served) -> None:
    served.engine.fail_after, served.engine.error = 1, RequestFailed("broken")
    async with served.post(PATH, body_of(stream=True)) as response:
        text = (await response.read()).decode()
    last = text.strip().split("\n\n")[-1].split("\n")
    assert last[0] == "event: error"
    assert json.loads(last[1].removeprefix("data: "))["error"] == {"type": "api_error", "message": "broken"}
    async with client_of(served) as client:
        with pytest.raises(anthropic.APIStatusError, match="broken"):
            async with client.messages.stream(
                model="stub", max_tokens=9, messages=[{"role": "user", "content": "a b"}]
            ) as events:
                await events.get_final_message()


async def test_the_style_follows_the_route(served: Served) -> None:
    for method, path, status in (("GET", PATH, 405), ("POST", PATH + "/batches", 404), ("GET", PATH + "x", 404)):
        async with served.http.request(method, served.url + path) as response:
            answer = await response.json()
        assert response.status == status
        assert (answer.get("type") == "error") == (path != PATH + "x") and "message" in answer["error"]


async def test_the_key_may_come_in_anthropic_s_header(serve: Serve) -> None:
    served = await serve(api_key=("sesame",), admin_key="open-admin")
    messages: Any = [{"role": "user", "content": "a"}]
    for options in ({"api_key": "sesame"}, {"api_key": None, "auth_token": "sesame"}):
        async with client_of(served, **options) as client:
            assert (await client.messages.create(model="stub", max_tokens=1, messages=messages)).role == "assistant"
    for wrong in ("sesam", "open-admin"):
        async with client_of(served, api_key=wrong) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(model="stub", max_tokens=1, messages=messages)
        body: Any = refused.value.body
        assert body["error"]["type"] == "authentication_error"
