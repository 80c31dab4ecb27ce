"""POST /v1/messages and /v1/messages/count_tokens: requests, answers and the events of a stream, as Anthropic has them.

Tools are not built and are refused by name. Does not know how a request is run or when an event is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hydra_engine.core import outputs
from hydra_engine.core.outputs import FinishReason, Result
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.core.request import MAX_STOPS, SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.protocol.chat import MAX_MESSAGES, MAX_PARTS
from hydra_engine.server.protocol.common import Metrics
from hydra_engine.server.protocol.fields import (
    GenerationFields,
    MediaUrl,
    Name,
    StopString,
    Text,
    TokenCount,
    sampling_of,
)
from hydra_engine.server.protocol.names import log_once
from hydra_engine.server.protocol.structured import schema_grammar

# ---- the requests


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: Text


class Base64Source(msgspec.Struct, frozen=True, tag_field="type", tag="base64"):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: MediaUrl


class UrlSource(msgspec.Struct, frozen=True, tag_field="type", tag="url"):
    url: MediaUrl


class ImageBlock(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    source: Base64Source | UrlSource


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """Refused by name."""


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """Refused by name."""


Block = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Meta(max_length=MAX_PARTS)] | Text


InputMessages = Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
System = Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)] | Text


class JsonSchemaOutput(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    schema: msgspec.Raw


class OutputConfig(msgspec.Struct, frozen=True):
    format: JsonSchemaOutput | None = None
    effort: Annotated[str, Meta(max_length=64)] | None = None


_TOOLS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "container": (),
}


class MessagesRequest(GenerationFields, frozen=True, kw_only=True):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_TOOLS,
        "n": (1,),
        "stop": (),  # as others name stop_sequences
        "max_completion_tokens": (),
    }

    messages: InputMessages
    max_tokens: TokenCount
    system: System | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    output_config: OutputConfig | None = None

    def sampling(self) -> SamplingParams:
        config = self.output_config or OutputConfig()
        if config.effort is not None:
            log_once("output_config.effort")
        grammar = None if config.format is None else schema_grammar(config.format.schema, "output_config.format.schema")
        stop = tuple(self.stop_sequences or ())
        return sampling_of(self, max_tokens=self.max_tokens, stop=stop, grammar=grammar)


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = _TOOLS

    model: Name | None = None
    messages: InputMessages
    system: System | None = None


def conversation(messages: list[InputMessage], system: System | None) -> list[dict[str, Any]]:
    """As the engine takes it: the system prompt first, and turns of the same role that follow each other as one."""
    found: list[dict[str, Any]] = []
    if system:
        found.append({"role": "system", "content": _plain_content(system, "system")})
    for index, message in enumerate(messages):
        content = _plain_content(message.content, f"messages[{index}].content")
        if found and found[-1]["role"] == message.role:
            found[-1]["content"] = _parts(found[-1]["content"]) + _parts(content)
        else:
            found.append({"role": message.role, "content": content})
    return found


def template_of(messages: list[InputMessage]) -> TemplateOptions | None:
    """An assistant's turn at the end is gone on with."""
    if messages[-1].role != "assistant":
        return None
    return TemplateOptions(add_generation_prompt=False, continue_final_message=True)


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _plain_content(content: Sequence[Block] | str, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_plain_block(block, f"{where}[{index}]") for index, block in enumerate(content)]


def _plain_block(block: Block, where: str) -> dict[str, Any]:
    match block:
        case TextBlock(text=text):
            return {"type": "text", "text": text}
        case ImageBlock(source=UrlSource(url=url)):
            return {"type": "image_url", "image_url": {"url": url}}
        case ImageBlock(source=Base64Source(media_type=media_type, data=data)):
            return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
        case _:
            raise InvalidRequest(
                f"{where}: {block.__struct_config__.tag} blocks are not supported by this server; send text and images",
                param=where,
                code="unsupported_parameter",
            )


# ---- the answers


class OutputBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class MessageUsage(msgspec.Struct, frozen=True):
    """`input_tokens` are those of the prompt that were not read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    metrics: Metrics | UnsetType = UNSET


class TokensCount(msgspec.Struct, frozen=True):
    input_tokens: int


def message_usage(usage: outputs.Usage) -> MessageUsage:
    return MessageUsage(usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens, usage.cached_tokens)


def stop_of(result: Result) -> tuple[StopReason, str | None]:
    """(reason, which of the stop sequences it was)."""
    if result.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(result.stop_reason, str):
        return "stop_sequence", result.stop_reason
    return "end_turn", None


# ---- the events of a stream, in their order


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class ContentBlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    content_block: OutputBlock
    index: int = 0


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    pass


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ContentBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    delta: TextDelta
    index: int = 0


class ContentBlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int = 0


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
