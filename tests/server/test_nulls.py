"""Answers as the SDKs' own types have them, checked and not only constructed: no null where they have none."""

from __future__ import annotations

import json
from typing import Any

import anthropic.types
import openai.types
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import TypeAdapter

from tests.server.conftest import Served

QUESTION = [{"role": "user", "content": "one two three"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/completions": {"prompt": "one two three"},
    "/v1/responses": {"input": "one two three"},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 9},
}
MORE: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"logprobs": True, "top_logprobs": 2},
        {"tools": [{"type": "function", "function": FUNCTION}]},
    ],
    "/v1/completions": [{"logprobs": 2}],
    "/v1/responses": [{"top_logprobs": 2}, {"tools": [{"type": "function", **FUNCTION}]}],
    "/v1/messages": [{"tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]}],
}
WHOLE: dict[str, Any] = {
    "/v1/chat/completions": openai.types.chat.ChatCompletion,
    "/v1/completions": openai.types.Completion,
    "/v1/responses": openai.types.responses.Response,
    "/v1/messages": anthropic.types.Message,
}
EVENTS: dict[str, Any] = {
    "/v1/chat/completions": openai.types.chat.ChatCompletionChunk,
    "/v1/completions": openai.types.Completion,
    "/v1/responses": openai.types.responses.ResponseStreamEvent,
    "/v1/messages": anthropic.types.RawMessageStreamEvent,
}
# What OpenAI's and Anthropic's own answers have as null, so that every client knows it, and vLLM's `stop_reason`.
NULLS = frozenset(
    {
        *("refusal", "logprobs", "finish_reason", "stop_reason", "stop_sequence", "usage", "error", "user"),
        *("incomplete_details", "instructions", "completed_at", "max_output_tokens", "previous_response_id"),
        *("reasoning", "encrypted_content", "content", "description", "strict"),
    }
)


def nulls(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {name for name, one in value.items() if one is None} | {n for one in value.values() for n in nulls(one)}
    return {name for one in value for name in nulls(one)} if isinstance(value, list) else set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(ASKED))
async def test_no_null_where_a_client_s_type_has_none(served: Served, path: str, stream: bool) -> None:
    kind = TypeAdapter((EVENTS if stream else WHOLE)[path])
    for more in ({}, *MORE[path]):
        served.engine.answer = CALL if "tools" in more else None
        usage = {"stream_options": {"include_usage": True}} if stream and "completions" in path else {}
        async with served.post(path, {**ASKED[path], **more, **usage, "stream": stream}) as response:
            assert response.status == 200, await response.text()
            text = await response.text()
        lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
        for answer in map(json.loads, lines if stream else [text]):
            if path == "/v1/completions" and stream:  # null on all but the last, which the type does not know
                [one] = answer["choices"] or [{}]
                answer["choices"] = [{**one, "finish_reason": one["finish_reason"] or "stop"}] if one else []
            if answer.get("type") != "ping":  # which the SDK does not read
                kind.validate_python(answer)
            assert not nulls(answer) - NULLS
