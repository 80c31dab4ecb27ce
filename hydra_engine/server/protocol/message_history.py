"""Turns of POST /v1/messages as typed chat messages: system prompt first, calls with the turn that made them, their
results as messages of their own. Does not know how a prompt is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hydra_engine.core.chat import ChatMessage, ImagePart, MediaPart, Role, TextPart, ToolCall
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.protocol.anthropic import (
    Base64Source,
    Block,
    ImageBlock,
    InputMessage,
    System,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from hydra_engine.server.protocol.fields import content_of
from hydra_engine.server.protocol.names import log_once
from hydra_engine.server.tools.tool_calls import ToolUse


def conversation(messages: Sequence[InputMessage], system: System | None) -> tuple[ChatMessage, ...]:
    """Turns of the same role that follow each other are one."""
    turns: list[ChatMessage] = []
    if system:
        turns.append(ChatMessage("system", content_of(system, "system", _part), "system"))
    for index, message in enumerate(messages):
        for turn in _turns(message, f"messages[{index}]"):
            if turns and turns[-1].role == turn.role != "tool":
                turns[-1] = _joined(turns[-1], turn)
            else:
                turns.append(turn)
    return tuple(turns)


def template_of(messages: list[InputMessage], use: ToolUse) -> TemplateOptions:
    """An assistant's turn at the end is gone on with."""
    last = messages[-1]
    goes_on = last.role == "assistant"
    if goes_on and any(isinstance(block, ToolUseBlock) for block in last.content):
        raise InvalidRequest(
            "the last turn calls tools; a turn of the user with their tool_result must follow", param="messages"
        )
    return TemplateOptions(use.shown, add_generation_prompt=not goes_on, continue_final_message=goes_on)


def _turns(message: InputMessage, where: str) -> Iterator[ChatMessage]:
    """One, or one for each block."""
    if isinstance(message.content, str):
        yield ChatMessage(message.role, message.content, where)
        return
    if not message.content:
        yield ChatMessage(message.role, (), where)  # which is refused
    for index, block in enumerate(message.content):
        yield _turn(block, message.role, where, f"{where}.content[{index}]")


def _turn(block: Block, role: Role, message: str, where: str) -> ChatMessage:
    match block:
        case ToolUseBlock(id=id, name=name, input=arguments):
            _check_role(role, "assistant", "tool_use", where)
            return ChatMessage(role, "", message, tool_calls=(ToolCall(name, arguments, id, f"{where}.input"),))
        case ToolResultBlock(tool_use_id=id, content=content, is_error=is_error):
            _check_role(role, "user", "tool_result", where)
            if is_error:  # chat templates have no place for it; the content says what went wrong
                log_once("tool_result.is_error")
            return ChatMessage("tool", content_of(content or "", f"{where}.content", _part), message, tool_call_id=id)
        case _:
            return ChatMessage(role, (_part(block, where),), message)


def _check_role(role: str, wanted: str, kind: str, where: str) -> None:
    if role != wanted:
        raise InvalidRequest(f"{where}: {kind} blocks belong to turns of the {wanted}", param=where)


def _joined(turn: ChatMessage, more: ChatMessage) -> ChatMessage:
    content = _parts(turn.content) + _parts(more.content)
    return replace(turn, content=content or "", tool_calls=turn.tool_calls + more.tool_calls)


def _parts(content: str | tuple[TextPart | MediaPart, ...]) -> tuple[TextPart | MediaPart, ...]:
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    return content


def _part(block: TextBlock | ImageBlock, where: str) -> TextPart | ImagePart:
    if isinstance(block, TextBlock):
        return TextPart(block.text)
    match block.source:
        case UrlSource(url=url):
            return ImagePart(url, f"{where}.source.url")
        case Base64Source(media_type=media_type, data=data):
            return ImagePart(f"data:{media_type};base64,{data}", f"{where}.source.data")
