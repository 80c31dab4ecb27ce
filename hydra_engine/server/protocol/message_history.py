"""Turns of POST /v1/messages as messages for the engine: system prompt first, calls with the turn that made them, their
results as messages of their own. Does not know how a prompt is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.protocol.messages import (
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
from hydra_engine.server.protocol.names import log_once
from hydra_engine.server.protocol.tools import plain_function_call
from hydra_engine.server.tools import ToolUse


def conversation(messages: list[InputMessage], system: System | None) -> list[dict[str, Any]]:
    """As the engine takes it. Turns of the same role that follow each other are one."""
    found: list[dict[str, Any]] = []
    if system:
        found.append({"role": "system", "content": _plain_content(system)})
    for index, message in enumerate(messages):
        for turn in _turns(message, f"messages[{index}].content"):
            if found and found[-1]["role"] == turn["role"] != "tool":
                _go_on(found[-1], turn)
            else:
                found.append(turn)
    return found


def template_of(messages: list[InputMessage], use: ToolUse) -> TemplateOptions:
    """An assistant's turn at the end is gone on with."""
    last = messages[-1]
    goes_on = last.role == "assistant"
    if goes_on and any(isinstance(block, ToolUseBlock) for block in last.content):
        raise InvalidRequest(
            "the last turn calls tools; a turn of the user with their tool_result must follow", param="messages"
        )
    return TemplateOptions(use.shown, add_generation_prompt=not goes_on, continue_final_message=goes_on)


def _turns(message: InputMessage, where: str) -> list[dict[str, Any]]:
    """One, or several where there are results of tools."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    found: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        turn = _turn(block, message.role, f"{where}[{index}]")
        if found and found[-1]["role"] == turn["role"] != "tool":
            _go_on(found[-1], turn)
        else:
            found.append(turn)
    for turn in found:
        if "tool_calls" in turn:
            turn["content"] = turn["content"] or ""
    return found or [{"role": message.role, "content": []}]


def _turn(block: Block, role: str, where: str) -> dict[str, Any]:
    match block:
        case ToolUseBlock(id=id, name=name, input=arguments):
            _check_role(role, "assistant", "tool_use", where)
            return {"role": role, "content": [], "tool_calls": [plain_function_call(id, name, arguments)]}
        case ToolResultBlock(tool_use_id=id, content=content, is_error=is_error):
            _check_role(role, "user", "tool_result", where)
            if is_error:  # chat templates have no place for it; the content says what went wrong
                log_once("tool_result.is_error")
            return {"role": "tool", "content": _plain_content(content or ""), "tool_call_id": id}
        case _:
            return {"role": role, "content": [_plain_part(block)]}


def _check_role(role: str, wanted: str, kind: str, where: str) -> None:
    if role != wanted:
        raise InvalidRequest(f"{where}: {kind} blocks belong to turns of the {wanted}", param=where)


def _go_on(turn: dict[str, Any], more: dict[str, Any]) -> None:
    turn["content"] = _parts(turn["content"]) + _parts(more["content"])
    if "tool_calls" in more:
        turn["tool_calls"] = [*turn.get("tool_calls", ()), *more["tool_calls"]]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def _plain_content(content: Sequence[TextBlock | ImageBlock] | str) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [_plain_part(block) for block in content]


def _plain_part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    match block.source:
        case UrlSource(url=url):
            return {"type": "image_url", "image_url": {"url": url}}
        case Base64Source(media_type=media_type, data=data):
            return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
