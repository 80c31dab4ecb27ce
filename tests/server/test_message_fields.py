"""Reasoning of earlier turns, and other fields of messages that templates read, on the way from each API to the
engine.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.calls import plain
from tests.server.conftest import Served

USER: dict[str, Any] = {"role": "user", "content": "x"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": {}}}


async def sent(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    async with served.post(path, {"max_tokens": 9, **body}) as response:
        assert response.status == 200, await response.text()
    return plain(served.engine.submissions[-1].messages)


async def test_chat_takes_fields_that_templates_read(served: Served) -> None:
    messages = [
        USER | {"name": "Ann"},
        {"role": "assistant", "content": "5", "reasoning_content": "because", "tool_plan": "p"},
        USER | {"weight": 1},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "why", "thinking": "t"},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1", "name": "clock"},
        {"role": "assistant", "content": "a", "reasoning_content": None, "refusal": None, "name": ""},
    ]
    found = await sent(served, "/v1/chat/completions", messages=messages)
    assert found[:3] == [messages[0], messages[1], USER]
    assert found[3] == {**messages[3], "content": ""}
    assert found[4:] == [messages[4], {"role": "assistant", "content": "a"}]


async def test_messages_takes_thinking_blocks(served: Served) -> None:
    answer = [
        {"type": "thinking", "thinking": "because", "signature": "s"},
        {"type": "redacted_thinking", "data": "e30="},
        {"type": "text", "text": "5"},
        {"type": "thinking", "thinking": "so", "signature": ""},
        {"type": "tool_use", "id": "call_1", "name": "clock", "input": {}},
    ]
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "12:00"}
    later = [{"type": "redacted_thinking", "data": "e30="}, {"type": "text", "text": "noon"}]
    turns = [
        USER,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": later},
        USER,
    ]
    assert await sent(served, "/v1/messages", messages=turns) == [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "5"}],
            "tool_calls": [CALL],
            "reasoning_content": "because\n\nso",
        },
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1"},
        {"role": "assistant", "content": [{"type": "text", "text": "noon"}]},
        USER,
    ]


@pytest.mark.parametrize("kind", ["thinking", "redacted_thinking"])
async def test_thinking_belongs_to_the_assistant(served: Served, kind: str) -> None:
    turns = [{"role": "user", "content": [{"type": kind, "thinking": "a", "data": "a"}]}]
    async with served.post("/v1/messages", {"messages": turns, "max_tokens": 9}) as response:
        assert response.status == 400 and f"{kind} blocks belong to turns of the assistant" in await response.text()


def thought(*texts: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "reasoning",
        "id": "rs_1",
        "content": [{"type": "reasoning_text", "text": t} for t in texts],
        **more,
    }


async def test_responses_takes_reasoning_with_the_turn_that_follows(served: Served) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "12:00"}
    items = [
        USER,
        thought("a", "b", summary=[{"type": "summary_text", "text": "no"}]),
        {"role": "assistant", "content": "five"},
        call,
        result,
        thought(summary=[{"type": "summary_text", "text": "short"}], encrypted_content="x"),
        call,
        thought("more"),
        result,
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": "noon"},
        {"role": "assistant", "content": "or so"},
        thought("lost"),
        USER,
    ]
    assert await sent(served, "/v1/responses", input=items, max_tokens=None) == [
        USER,
        {"role": "assistant", "content": "five", "tool_calls": [CALL], "reasoning_content": "a\n\nb"},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "short\n\nmore"},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "noon"},
        {"role": "assistant", "content": "or so"},
        {"role": "assistant", "content": "", "reasoning_content": "lost"},
        USER,
    ]
