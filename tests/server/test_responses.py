"""POST /v1/responses: what OpenAI's own client makes of it, the events to the letter, and what is refused by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from hydra_engine.core.grammar import Grammar
from hydra_engine.errors import RequestFailed, Unavailable
from tests.calls import plain
from tests.server.conftest import Served
from tests.server.test_chat import client_of

PATH = "/v1/responses"
PICTURE = "https://example.com/a.png"


async def ask(served: Served, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with served.post(PATH, {"input": "one two three", **fields}) as response:
        return response.status, await response.json()


async def stream(served: Served, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of all events."""
    async with served.post(PATH, {"input": "one two three", "stream": True, **fields}) as response:
        assert response.status == 200
        text = (await response.read()).decode()
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        events.append((name[7:], json.loads(data[6:])))
    return events


async def test_the_client_gets_an_answer(served: Served) -> None:
    async with client_of(served) as client:
        answer = await client.responses.create(
            model="stub",
            instructions="Be brief.",
            input=[
                {"role": "user", "content": "Hello"},
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Hi", "annotations": []}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "one two three"},
                        {"type": "input_image", "image_url": PICTURE, "detail": "high"},
                    ],
                },
            ],
            max_output_tokens=20,
            temperature=0.5,
            top_p=0.9,
            metadata={"a": "b"},
            store=True,
            extra_body={"top_k": 7, "seed": 3, "priority": -1, "cache_salt": "s", "stop": "x", "tpot_ms": 40},
        )
    assert answer.output_text == "one two three"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.id.startswith("resp_") and answer.output[0].id == "msg_" + answer.id.removeprefix("resp_")
    assert (answer.model, answer.temperature, answer.top_p, answer.metadata) == ("stub", 0.5, 0.9, {"a": "b"})
    assert answer.instructions == "Be brief." and answer.max_output_tokens == 20
    assert answer.to_dict()["store"] is False  # nothing is stored, whatever was asked
    assert answer.usage is not None and answer.usage.output_tokens == 3
    assert answer.usage.total_tokens == answer.usage.input_tokens + 3
    [asked] = served.engine.submissions
    assert [part.param for part in asked.messages[-1].media] == ["input[2].content[1].image_url"]
    assert plain(asked.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "one two three"},
                {"type": "image_url", "image_url": {"url": PICTURE, "detail": "high"}},
            ],
        },
    ]
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed, sampling.stop) == (20, 7, 3, ("x",))
    assert (asked.priority, asked.cache_salt, asked.slo.tpot_s) == (-1, "s", 0.04)
    assert asked.request_id == answer.id


async def test_the_synchronous_client(served: Served) -> None:
    def call() -> list[str]:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
            whole = client.responses.create(model="stub", input="one two").output_text
            with client.responses.stream(model="stub", input="one two") as events:
                deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
                return [whole, *deltas, events.get_final_response().output_text]

    assert await asyncio.to_thread(call) == ["one two", "one", " two", "one two"]


async def test_the_client_reads_a_stream(served: Served) -> None:
    async with (
        client_of(served) as client,
        client.responses.stream(model="stub", input="a b", top_logprobs=2) as events,
    ):
        seen = [event async for event in events]
        final = await events.get_final_response()
    assert final.output_text == "a b" and final.status == "completed"
    assert [event.snapshot for event in seen if event.type == "response.output_text.delta"] == ["a", "a b"]
    [part] = final.output[0].content
    assert [entry.token for entry in part.logprobs] == ["a", " b"] and len(part.logprobs[0].top_logprobs) == 2


async def test_every_event_in_its_order(served: Served) -> None:
    events = await stream(served, input="one two", return_metrics=True)
    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert all(data["type"] == name for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    created, done, last = events[0][1]["response"], events[6][1], events[-1][1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert done["text"] == "one two" and done["item_id"] == events[2][1]["item"]["id"]
    assert last["output"][0] == events[8][1]["item"] and last["id"] == created["id"]
    assert last["metrics"]["ttft_s"] == 0.2 and "metrics" not in created


async def test_a_limit_makes_it_incomplete(served: Served) -> None:
    status, answer = await ask(served, max_output_tokens=2)
    assert (status, answer["status"], answer["output"][0]["status"]) == (200, "incomplete", "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"} and answer["completed_at"] is None
    name, data = (await stream(served, max_output_tokens=2))[-1]
    assert name == "response.incomplete" and data["response"]["incomplete_details"]["reason"] == "max_output_tokens"


async def test_a_failure_behind_the_first_token_is_the_last_event(served: Served) -> None:
    served.engine.fail_after, served.engine.error = 1, RequestFailed("broken", code="numerical_error")
    events = await stream(served)
    name, data = events[-1]
    assert (name, data["response"]["status"], data["response"]["id"]) == (
        "response.failed",
        "failed",
        events[0][1]["response"]["id"],
    )
    assert data["response"]["error"]["code"] == "server_error" and data["response"]["error"]["message"] == "broken"
    assert data["sequence_number"] == len(events) - 1
    async with client_of(served) as client:
        seen = [e.type async for e in await client.responses.create(model="stub", input="a b", stream=True)]
    assert seen[-1] == "response.failed"


async def test_a_failure_before_it_is_a_status(served: Served) -> None:
    served.engine.refusal = Unavailable("full")
    async with served.post(PATH, {"input": "a", "stream": True}) as response:
        assert response.status == 503 and response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["code"] == "overloaded"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


async def test_text_formats(served: Served) -> None:
    named = {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}
    for form in ({"type": "text"}, {"type": "json_object"}, named):
        _, answer = await ask(served, text={"format": form, "verbosity": "low"})
        assert answer["text"] == {"format": form}
    plain, some_json, schema = (s.sampling.grammar for s in served.engine.submissions)
    assert plain is None and some_json == Grammar("json_object", param="text.format")
    assert schema is not None and schema.kind == "json_schema" and json.loads(schema.source) == SCHEMA
    assert (await ask(served))[1]["text"] == {"format": {"type": "text"}}


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("previous_response_id", "resp_1", "previous_response_id"),
        ("conversation", "c", "conversation"),
        ("background", True, "background"),
        ("prompt", {"id": "p"}, "prompt"),
        ("truncation", "last", "truncation"),
        ("tools", [{"type": "function", "name": "f"}, {"type": "web_search"}], "tools[1].type"),
        ("n", 2, "n"),
        ("max_tokens", 5, "max_tokens"),
        ("input", [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "x"}], "input[1].type"),
    ],
)
async def test_what_is_not_built_is_refused_by_name(served: Served, name: str, value: Any, param: str) -> None:
    status, answer = await ask(served, **{name: value})
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["code"] == "unsupported_parameter" and served.engine.submissions == []


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("input", [], "input"),
        ("input", 3, "input"),
        ("input", [{"role": "user"}], "input[0].content"),
        ("input", [{"role": "user", "content": []}], "input[0].content"),
        ("input", [{"content": "a"}], "input[0].role"),
        ("input", [{"type": "reasoning", "summary": [], "encrypted_content": "x"}], "input"),
        ("input", [{"type": "reasoning", "content": [{"type": "input_text", "text": "x"}]}], "input[0].content[0]"),
        ("input", [{"role": "user", "content": [{"type": "reasoning_text", "text": "x"}]}], "input[0].content[0]"),
        ("input", [{"role": "tool", "content": "a"}], "input[0].role"),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].image_url"),
        ("input", [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}], "input[0].content[0].type"),
        ("input", [{"type": "function_call", "call_id": "c", "arguments": "{}"}], "input[0].name"),
        ("input", [{"type": "function_call", "name": "f", "arguments": "{}"}], "input[0].call_id"),
        ("input", [{"type": "function_call_output", "call_id": "c"}], "input[0].output"),
        ("input", [{"type": "function_call_output", "output": "1"}], "input[0].call_id"),
        ("tools", [{"type": "function"}], "tools[0].name"),
        ("tools", [{"type": "function", "name": "a b"}], "tools[0].name"),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", {"type": "function", "name": "f"}, "tool_choice"),
        ("tool_choice", {"type": "allowed_tools", "tools": []}, "tool_choice.type"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("top_logprobs", 21, "top_logprobs"),
        ("metadata", {str(i): "" for i in range(17)}, "metadata"),
        ("text", {"format": {"type": "yaml"}}, "text.format.type"),
        ("text", {"format": {"type": "json_schema", "name": "a b", "schema": {}}}, "text.format.name"),
        ("text", {"format": {"type": "json_schema", "name": "a"}}, "text.format.schema"),
        ("text", {"format": {"type": "json_schema", "name": "a", "schema": [1]}}, "text.format.schema"),
    ],
)
async def test_wrong_fields_are_named(served: Served, name: str, value: Any, param: str) -> None:
    status, answer = await ask(served, **{name: value})
    assert (status, answer["error"]["param"]) == (400, param)
    assert served.engine.submissions == []


async def test_defaults_may_be_sent(served: Served) -> None:
    status, _ = await ask(
        served,
        previous_response_id=None,
        background=False,
        truncation="auto",
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        include=["reasoning.encrypted_content"],
        stream_options={"include_obfuscation": False},
        user="u",
    )
    assert status == 200 and served.engine.submissions[0].sampling.logprobs is None


async def test_logprobs_may_be_included(served: Served) -> None:
    _, answer = await ask(served, include=["message.output_text.logprobs"])
    assert [entry["token"] for entry in answer["output"][0]["content"][0]["logprobs"]] == ["one", " two", " three"]
