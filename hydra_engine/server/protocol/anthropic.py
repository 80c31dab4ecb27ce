"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's format: requests, answer, and events of its stream.

Tools that the server would have to run are refused by name. Does not know how a request is run or when an answer is
sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hydra_engine.core import outputs
from hydra_engine.core.call import MAX_MESSAGES, MAX_PARTS, ChatMessage, ImagePart, MediaPart, PastCalls, Role, TextPart
from hydra_engine.core.outputs import FinishReason, Result
from hydra_engine.core.prompting import MAX_TOOLS, TemplateOptions
from hydra_engine.core.sampling import MAX_STOPS, SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.protocol.chat import Variables
from hydra_engine.server.protocol.common import Metrics
from hydra_engine.server.protocol.fields import (
    CalledName,
    CallId,
    Description,
    GenerationFields,
    GivenFunction,
    MediaUrl,
    Name,
    ProcessorSettings,
    Schema,
    StopString,
    Text,
    ThinkingConfig,
    TokenCount,
    ToolName,
    content_of,
    log_once,
    plain_functions,
    sampling_of,
    schema_grammar,
    unsupported_tool,
)
from hydra_engine.server.tools.reasoning import Wish
from hydra_engine.server.tools.tool_calls import ToolUse

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
    """A call in an earlier turn of the assistant."""

    id: CallId
    name: CalledName
    input: Schema


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """The result of a call, in the user's turn after it."""

    tool_use_id: CallId
    content: Annotated[list[TextBlock | ImageBlock], Meta(max_length=MAX_PARTS)] | Text | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """The thinking of an earlier turn of the assistant; its `signature` is ignored."""

    thinking: Text


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Thinking that another server has encrypted; it is ignored."""


Block = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


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


class InputTool(msgspec.Struct, frozen=True):
    """A function. A tool with a type other than `custom` is refused by name. `strict` is not shown to models;
    constrained output always follows the schema."""

    name: ToolName
    input_schema: Schema | None = None
    description: Description | None = None
    type: Annotated[str, Meta(max_length=64)] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    """The choice of tools; `name` belongs to the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


InputTools = Annotated[list[InputTool], Meta(max_length=MAX_TOOLS)]
_MODES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


class MessagesRequest(GenerationFields, frozen=True, kw_only=True):
    """A request. `output_format` is the earlier name of `output_config.format`."""

    messages: InputMessages
    max_tokens: TokenCount
    system: System | None = None
    tools: InputTools | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonSchemaOutput | None = None
    thinking: ThinkingConfig | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: ProcessorSettings | None = None

    @property
    def wish(self) -> Wish:
        return wish_of(self.thinking, self.output_config.effort if self.output_config else None)

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        config = self.output_config or OutputConfig()
        if config.format is not None and self.output_format is not None:
            message = "output_format and output_config.format are two names of one field; leave out one of them"
            raise InvalidRequest(message, param="output_format")
        form, param = config.format or self.output_format, "output_config.format" if config.format else "output_format"
        grammar = None if form is None else schema_grammar(form.schema, f"{param}.schema")
        stop = tuple(self.stop_sequences or ())
        return sampling_of(self, defaults, max_tokens=self.max_tokens, stop=stop, grammar=grammar)


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: Name | None = None
    messages: InputMessages
    system: System | None = None
    tools: InputTools | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: ProcessorSettings | None = None


def wish_of(thinking: ThinkingConfig | None, effort: str | None = None) -> Wish:
    """The wish about thinking. `disabled` is the default of Anthropic's models, so it is not refused for a model that
    always thinks."""
    if thinking is None:
        return Wish(effort=effort, param="output_config.effort", required=False)
    return Wish(thinking.is_enabled, effort, "thinking", required=False)


def tool_use_of(body: MessagesRequest | CountTokensRequest) -> ToolUse:
    """The tools that the request allows; without tools, `auto` and `none` have no effect. Raises InvalidRequest."""
    tools = plain_functions(_function(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ()))
    choice = body.tool_choice or ToolChoice("auto")
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequest("tool_choice.name is required", param="tool_choice.name")
    return ToolUse(tools, _MODES[choice.type], choice.name or "", parallel=not choice.disable_parallel_tool_use)


def _function(tool: InputTool, where: str) -> GivenFunction:
    if tool.type not in (None, "custom"):
        raise unsupported_tool(where, tool.type or "")
    if tool.input_schema is None:
        raise InvalidRequest(f"{where}.input_schema is required", param=f"{where}.input_schema")
    return GivenFunction(tool.name, tool.description, tool.input_schema, f"{where}.input_schema")


# ---- turns as chat messages


def conversation(messages: Sequence[InputMessage], system: System | None) -> tuple[ChatMessage, ...]:
    """The turns as chat messages: the system prompt first, successive turns of one role joined, tool results as their
    own messages."""
    turns: list[ChatMessage] = []
    past = PastCalls()
    if system:
        turns.append(ChatMessage("system", content_of(system, "system", _part), "system"))
    for index, message in enumerate(messages):
        for turn in _turns(message, f"messages[{index}]", past):
            if turns and turns[-1].role == turn.role != "tool":
                turns[-1] = _joined(turns[-1], turn)
            else:
                turns.append(turn)
    return tuple(turns)


def template_of(body: MessagesRequest | CountTokensRequest, use: ToolUse) -> TemplateOptions:
    """Options of the chat template; an assistant's turn at the end is continued by the answer. Raises InvalidRequest if
    it calls tools."""
    last = body.messages[-1]
    goes_on = last.role == "assistant"
    if goes_on and any(isinstance(block, ToolUseBlock) for block in last.content):
        raise InvalidRequest(
            "the last turn calls tools; a turn of the user with their tool_result must follow", param="messages"
        )
    return TemplateOptions(use.prompt_tools, body.chat_template_kwargs or {}, not goes_on, goes_on)


def _turns(message: InputMessage, where: str, past: PastCalls) -> Iterator[ChatMessage]:
    """Yields the turns of a message: one for a text, else one per block."""
    if isinstance(message.content, str):
        yield ChatMessage(message.role, message.content, where)
        return
    if not message.content:
        yield ChatMessage(message.role, (), where)  # refused later, as an empty message
    for index, block in enumerate(message.content):
        yield _turn(block, message.role, where, f"{where}.content[{index}]", past)


def _turn(block: Block, role: Role, message: str, where: str, past: PastCalls) -> ChatMessage:
    match block:
        case ToolUseBlock(id=id, name=name, input=arguments):
            _check_role(role, "assistant", "tool_use", where)
            return ChatMessage(role, "", message, tool_calls=(past.add(name, arguments, id, f"{where}.input"),))
        case ToolResultBlock(tool_use_id=id, content=content, is_error=is_error):
            _check_role(role, "user", "tool_result", where)
            if is_error:  # chat templates cannot show it; the content says what went wrong
                log_once("tool_result.is_error")
            return ChatMessage("tool", content_of(content or "", f"{where}.content", _part), message, tool_call_id=id)
        case ThinkingBlock(thinking=text):
            _check_role(role, "assistant", "thinking", where)
            return ChatMessage(role, "", message, others={"reasoning_content": text})
        case RedactedThinkingBlock():
            _check_role(role, "assistant", "redacted_thinking", where)
            log_once("redacted_thinking")
            return ChatMessage(role, "", message)
        case _:
            return ChatMessage(role, (_part(block, where),), message)


def _check_role(role: str, required: str, kind: str, where: str) -> None:
    if role != required:
        raise InvalidRequest(f"{where}: {kind} blocks belong to turns of the {required}", param=where)


def _joined(turn: ChatMessage, more: ChatMessage) -> ChatMessage:
    content = _parts(turn.content) + _parts(more.content)
    thoughts = [each.others["reasoning_content"] for each in (turn, more) if each.others]
    others = {"reasoning_content": "\n\n".join(thoughts)} if thoughts else {}
    return replace(turn, content=content or "", tool_calls=turn.tool_calls + more.tool_calls, others=others)


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


# ---- the answer


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
