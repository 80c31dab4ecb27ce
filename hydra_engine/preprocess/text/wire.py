"""Prompts as JSON for the process that renders and tokenises them; media are reduced to their positions. Does not know
processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hydra_engine.core.call import ChatMessage, ImagePart, MediaPart, TextPart, ToolCall, VideoPart
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.models.specs.base import ItemPlan, MediaPlan
from hydra_engine.preprocess.text.writer import Prompt

_MEDIA = {"image": ImagePart, "video": VideoPart}
_SPAN = ItemPlan(0, 0, 0, 0, 0, (0, 0, 0))


def as_json(value: Any) -> bytes:
    """Encodes plain JSON, tuples and mappings of all kinds; keeps lone surrogates."""
    return json.dumps(value, default=dict).encode()


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """The fields from which `prompt_of` makes the same prompt, without media."""
    return {
        "messages": [_message_fields(message) for message in prompt.messages],
        "text": prompt.text,
        "num_chars": prompt.num_chars,
        "add_special_tokens": prompt.add_special_tokens,
        "param": prompt.param,
        "template": option_fields(prompt.template),
    }


def prompt_of(fields: Mapping[str, Any]) -> Prompt:
    return Prompt(
        [],
        tuple(_message_of(**message) for message in fields["messages"]),
        text=fields["text"],
        num_chars=fields["num_chars"],
        add_special_tokens=fields["add_special_tokens"],
        param=fields["param"],
        template=options_of(fields["template"]),
    )


def option_fields(options: TemplateOptions) -> dict[str, Any]:
    return {
        "tools": options.tools,
        "variables": options.variables,
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
        "add_special_tokens": options.add_special_tokens,
    }


def options_of(fields: Mapping[str, Any]) -> TemplateOptions:
    return TemplateOptions(**fields)


def plan_fields(plans: Sequence[MediaPlan]) -> list[list[str | None]]:
    """Lists of texts, with None for each span."""
    return [[part if isinstance(part, str) else None for part in plan.parts] for plan in plans]


def plans_of(fields: Sequence[Sequence[str | None]]) -> list[MediaPlan]:
    return [MediaPlan((), tuple(_SPAN if part is None else part for part in parts)) for parts in fields]


def _message_fields(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    return {
        "role": message.role,
        "content": content if isinstance(content, str) else [_part_fields(part) for part in content],
        "param": message.param,
        "calls": [(call.name, call.arguments, call.id) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "others": message.others,
    }


def _part_fields(part: TextPart | MediaPart) -> tuple[str, str]:
    return ("text", part.text) if isinstance(part, TextPart) else (part.kind, part.param)


def _message_of(*, content: Any, calls: Sequence[Any], **fields: Any) -> ChatMessage:
    return ChatMessage(
        content=content if isinstance(content, str) else tuple(_part_of(*part) for part in content),
        tool_calls=tuple(ToolCall(name, arguments, id, "tool_calls") for name, arguments, id in calls),
        **fields,
    )


def _part_of(kind: str, value: str) -> TextPart | MediaPart:
    return TextPart(value) if kind == "text" else _MEDIA[kind](None, value)
