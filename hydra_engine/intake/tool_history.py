"""Tool calls that an assistant made earlier, from OpenAI's messages to the form that chat templates read.

Clients send a call's arguments as JSON text, most templates want the object that it stands for, some want text. Does
not know templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hydra_engine.core.prompting import MAX_ARGUMENT_CHARS, MAX_TOOLS, json_problem
from hydra_engine.errors import InvalidRequest

MAX_ID_CHARS = 256
MAX_NAME_CHARS = 128


def parse_tool_calls(message: Mapping[str, Any], role: str, path: str) -> list[dict[str, Any]]:
    """The `tool_calls` of an assistant's message, arguments as objects where they are JSON objects at all: what a model
    wrote wrongly stays text. Raises InvalidRequest with the path of the field."""
    if message.get("function_call"):
        raise InvalidRequest(
            f"{path}.function_call is not supported; send tool_calls instead", param=f"{path}.function_call"
        )
    calls = message.get("tool_calls")
    if not calls:
        return []
    path = f"{path}.tool_calls"
    if role != "assistant":
        raise InvalidRequest(f"{path} belongs to messages of the assistant only", param=path)
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes) or len(calls) > MAX_TOOLS:
        raise InvalidRequest(f"{path} must be a list of at most {MAX_TOOLS} calls", param=path)
    return [_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def parse_tool_answer(message: Mapping[str, Any], role: str, path: str) -> dict[str, Any]:
    """`tool_call_id` and `name` of a tool's message, as far as it has them."""
    if role != "tool":
        return {}
    limits = {"tool_call_id": MAX_ID_CHARS, "name": MAX_NAME_CHARS}
    given = {name: message[name] for name in limits if message.get(name) is not None}
    return {name: _text(value, f"{path}.{name}", limits[name]) for name, value in given.items()}


def with_text_arguments(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same for templates that join arguments to other text."""
    return [{**call, "function": {**call["function"], "arguments": _as_text(call)}} for call in calls]


def _as_text(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _call(call: object, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or call.get("type") not in (None, "function"):
        raise InvalidRequest(f"{path} must be an object with a function", param=path)
    id = call.get("id")
    return {
        **({} if id is None else {"id": _text(id, f"{path}.id", MAX_ID_CHARS)}),
        "type": "function",
        "function": {
            "name": _text(function.get("name"), f"{path}.function.name", MAX_NAME_CHARS),
            "arguments": _arguments(function.get("arguments"), f"{path}.function.arguments"),
        },
    }


def _arguments(value: object, path: str) -> Mapping[str, Any] | str:
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, str | Mapping):
        raise InvalidRequest(f"{path} must be a JSON object, as text or as it is", param=path)
    if isinstance(value, Mapping):
        problem = json_problem(value, MAX_ARGUMENT_CHARS)
        if problem is not None:
            raise InvalidRequest(f"{path} {problem}", param=path)
        return value
    if len(value) > MAX_ARGUMENT_CHARS:
        raise InvalidRequest(f"{path} may have at most {MAX_ARGUMENT_CHARS} characters", param=path)
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    is_object = isinstance(parsed, Mapping) and json_problem(parsed, MAX_ARGUMENT_CHARS) is None
    return parsed if is_object else value


def _text(value: object, path: str, most: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= most:
        raise InvalidRequest(f"{path} must be text of 1 to {most} characters", param=path)
    return value
