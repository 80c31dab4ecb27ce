"""POST /v1/messages: its answer and the events of its stream, in Anthropic's format. Does not know when one is sent."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from hydra_engine.core import outputs
from hydra_engine.core.outputs import FinishReason, Result
from hydra_engine.server.protocol.common import Metrics

# ---- the answers


class OutputBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A text. `citations` is left out: some clients accept a list or no key, but not null."""

    text: str


class MessageUsage(msgspec.Struct, frozen=True):
    """Numbers of tokens; `input_tokens` are the prompt's tokens that were not read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class ToolUseOutput(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


class ThinkingOutput(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning. Clients send back only blocks with a signature; it is not checked."""

    thinking: str
    signature: str = "unsigned"


AnyOutputBlock = OutputBlock | ToolUseOutput | ThinkingOutput
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnyOutputBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    metrics: Metrics | UnsetType = UNSET


class TokensCount(msgspec.Struct, frozen=True):
    input_tokens: int


def message_usage(usage: outputs.Usage) -> MessageUsage:
    return MessageUsage(usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens, usage.cached_tokens)


def stop_of(result: Result, *, has_calls: bool = False) -> tuple[StopReason, str | None]:
    """(reason, the stop sequence that ended the answer or None)."""
    if result.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(result.stop_reason, str):
        return "stop_sequence", result.stop_reason
    return "tool_use" if has_calls else "end_turn", None


# ---- the events of a stream, in their order


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class ContentBlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    content_block: AnyOutputBlock
    index: int


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    pass


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class ContentBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    delta: TextDelta | InputJsonDelta | ThinkingDelta | SignatureDelta
    index: int


class ContentBlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage
    metrics: Metrics | UnsetType = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


AnyMessageEvent = (
    MessageStart | ContentBlockStart | Ping | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
)
