"""The input of POST /v1/responses: OpenAI's items, and their conversion to the turns of a conversation.

A message, the calls after it and the reasoning before it were one turn of the assistant. Does not know the request's
other fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from hydra_engine.core.call import MAX_PARTS, ChatMessage, ImagePart, PastCalls, TextPart
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.protocol.chat import ImageDetail, detail_of
from hydra_engine.server.protocol.fields import (
    MAX_TEXT_CHARS,
    ArgumentsText,
    CalledName,
    CallId,
    MediaUrl,
    Text,
    content_of,
    log_once,
)

T = TypeVar("T")

ShortText = Annotated[str, Meta(max_length=64)]


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    text: Text


class InputImage(msgspec.Struct, frozen=True, tag_field="type", tag="input_image"):
    image_url: MediaUrl
    detail: ImageDetail | None = None


class EarlierText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """The text of an earlier answer, which the client sends back."""

    text: Text


class RefusalText(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """The refusal of an earlier answer, read as its text."""

    refusal: Text


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """A part of a `reasoning` item."""

    text: Text


class SummaryText(msgspec.Struct, frozen=True, tag_field="type", tag="summary_text"):
    text: Text


Part = InputText | InputImage | EarlierText | RefusalText | ReasoningText
Parts = Annotated[list[Part], Meta(max_length=MAX_PARTS)]


class InputItem(msgspec.Struct, frozen=True):
    """A message (role, content), an earlier function_call (call_id, name, arguments), its function_call_output
    (call_id, output) or the reasoning of an earlier answer (content, else summary; reasoning that another server
    encrypted is left out). Other types of items are refused by name."""

    type: ShortText = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | Text | None = None
    call_id: CallId | None = None
    name: CalledName | None = None
    arguments: ArgumentsText | None = None
    output: Parts | Text | None = None
    summary: Annotated[list[SummaryText], Meta(max_length=MAX_PARTS)] | None = None
    encrypted_content: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)] | None = None


def turns_of(items: Sequence[InputItem]) -> tuple[ChatMessage, ...]:
    turns: list[ChatMessage] = []
    past = PastCalls()
    for index, item in enumerate(items):
        turn = _chat_message(item, f"input[{index}]", past)
        if turn is None:
            continue
        if turns and (joined := _joined(turns[-1], turn, item.type)) is not None:
            turns[-1] = joined
        else:
            turns.append(turn)
    if not turns:
        raise InvalidRequest("input holds nothing but reasoning that cannot be read; add a message", param="input")
    return tuple(turns)


def _joined(turn: ChatMessage, more: ChatMessage, kind: str) -> ChatMessage | None:
    """The single turn of two items that belong together: reasoning and what follows it, or a message and the calls
    after it. None if they do not."""
    if turn.role != "assistant" or more.role != "assistant":
        return None
    is_thought = turn.others and not turn.content and not turn.tool_calls
    if kind == "function_call" or (is_thought and kind == "message"):
        return replace(turn, content=more.content or turn.content, tool_calls=turn.tool_calls + more.tool_calls)
    if kind == "reasoning" and (is_thought or turn.tool_calls):
        thoughts = [each.others["reasoning_content"] for each in (turn, more) if each.others]
        return replace(turn, others={"reasoning_content": "\n\n".join(thoughts)})
    return None


def _chat_message(item: InputItem, where: str, past: PastCalls) -> ChatMessage | None:
    """The item as a message; None for reasoning that cannot be read. Raises InvalidRequest."""
    match item.type:
        case "message":
            role = "system" if item.role == "developer" else item.role
            return ChatMessage(required(role, f"{where}.role"), _content(item.content, f"{where}.content"), where)
        case "function_call":
            name = required(item.name, f"{where}.name")
            call_id = required(item.call_id, f"{where}.call_id")
            calls = (past.add(name, item.arguments, call_id, f"{where}.arguments"),)
            return ChatMessage("assistant", "", where, tool_calls=calls)
        case "function_call_output":
            call_id = required(item.call_id, f"{where}.call_id")
            return ChatMessage("tool", _content(item.output, f"{where}.output"), where, tool_call_id=call_id)
        case "reasoning":
            text = _reasoning(item, where)
            return ChatMessage("assistant", "", where, others={"reasoning_content": text}) if text else None
    raise InvalidRequest(
        f"{where}: items of type {item.type!r} are not supported by this server; send messages, function_call, "
        "function_call_output and reasoning",
        param=f"{where}.type",
        code="unsupported_parameter",
    )


def _reasoning(item: InputItem, where: str) -> str:
    if item.encrypted_content:
        log_once("encrypted_content")
    parts = item.content or item.summary or ()
    if isinstance(parts, str):
        return parts
    for index, part in enumerate(parts):
        if not isinstance(part, ReasoningText | SummaryText):
            param = f"{where}.content[{index}]"
            raise InvalidRequest(f"{param}: reasoning items have parts of type reasoning_text", param=param)
    return "\n\n".join(part.text for part in parts if isinstance(part, ReasoningText | SummaryText))


def required(value: T | None, param: str) -> T:
    if value is None:
        raise InvalidRequest(f"{param} is required", param=param)
    return value


def _content(content: list[Part] | str | None, param: str) -> str | tuple[TextPart | ImagePart, ...]:
    return content_of(content, param, _part) if isinstance(content, list) else required(content, param)


def _part(part: Part, param: str) -> TextPart | ImagePart:
    match part:
        case ReasoningText():
            raise InvalidRequest(f"{param}: reasoning_text belongs to items of type reasoning", param=param)
        case InputImage(image_url=url, detail=detail):
            return ImagePart(url, f"{param}.image_url", detail_of(detail))
        case RefusalText(refusal=text) | InputText(text=text) | EarlierText(text=text):
            return TextPart(text)
