"""Limits of all calls in a conversation's history together, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from hydra_engine.core import call
from hydra_engine.core.call import ToolCall
from tests.server.conftest import Served, until

Body = dict[str, Any]
ARGUMENTS = {"a": [1] * 97}  # 100 values with the object, the name and the list


def chat(num_calls: int) -> Body:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": json.dumps(ARGUMENTS)}}
        for n in range(num_calls)
    ]
    turns = [{"role": "assistant", "content": None, "tool_calls": calls[i : i + 64]} for i in range(0, num_calls, 64)]
    return {"messages": [*turns, {"role": "user", "content": "x"}]}


def responses(num_calls: int) -> Body:
    items = [
        {"type": "function_call", "name": "f", "call_id": f"c{n}", "arguments": json.dumps(ARGUMENTS)}
        for n in range(num_calls)
    ]
    return {"input": [*items, {"role": "user", "content": "x"}]}


def messages(num_calls: int) -> Body:
    blocks = [{"type": "tool_use", "id": f"c{n}", "name": "f", "input": ARGUMENTS} for n in range(num_calls)]
    return {"messages": [{"role": "assistant", "content": blocks}, {"role": "user", "content": "x"}], "max_tokens": 4}


DIALECTS = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}


@pytest.mark.parametrize("path", DIALECTS)
async def test_all_calls_of_a_conversation_have_a_bound(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "MAX_CALL_VALUES", 10_000)
    made: list[str] = []
    make = ToolCall.__post_init__

    def count(self: ToolCall, param: str) -> None:
        made.append(param)
        make(self, param)

    monkeypatch.setattr(ToolCall, "__post_init__", count)
    body: Callable[[int], Body] = DIALECTS[path]
    async with served.post(path, body(100)) as answer:
        assert answer.status == 200, await answer.text()
    assert len(made) == 100
    made.clear()
    async with served.post(path, body(120)) as answer:
        problem = (await answer.json())["error"]["message"]
        assert answer.status == 400 and "hold more than 10000 JSON values" in problem
    assert len(made) == 101, "those behind it are not looked at"
    await until(lambda: served.lifecycle.num_running == 0)


def test_values_are_counted_where_arguments_stay_text_too() -> None:
    assert ToolCall("f", json.dumps(ARGUMENTS), None, "p").num_values == 100
    assert ToolCall("f", ARGUMENTS, None, "p").num_values == 100
    assert ToolCall("f", "no JSON", None, "p").num_values == 1
    long = ToolCall("f", json.dumps({"a": [1] * 20_000}), None, "p")
    assert isinstance(long.arguments, str) and long.num_values > 10_000
