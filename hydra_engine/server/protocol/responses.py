"""POST /v1/responses: its request, its answer and the events of its stream, in OpenAI's format, without a memory.

Nothing is stored, so references to an earlier response are refused by name, and so are tools that are not functions. In
the input, a message, the calls after it and the reasoning before it were one turn of the assistant. Does not know how a
request is run or when an answer is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hydra_engine.core import outputs
from hydra_engine.core.call import MAX_MESSAGES, MAX_PARTS, ChatMessage, ImagePart, PastCalls, TextPart
from hydra_engine.core.grammar import Grammar
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.prompting import MAX_TOOLS
from hydra_engine.core.sampling import MAX_LOGPROBS, SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.protocol.chat import ImageDetail, RefusalContent, TokenLogprob, Variables, detail_of
from hydra_engine.server.protocol.common import Metrics
from hydra_engine.server.protocol.fields import (
    MAX_TEXT_CHARS,
    ArgumentsText,
    CalledName,
    CallId,
    Description,
    GenerationFields,
    GivenFunction,
    MediaUrl,
    ProcessorSettings,
    ReasoningConfig,
    Schema,
    StopStrings,
    Text,
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

T = TypeVar("T")

ShortText = Annotated[str, Meta(max_length=64)]

MAX_METADATA = 16
MAX_INCLUDES = 32
LOGPROBS = "message.output_text.logprobs"  # the only supported value of `include`

Metadata = Annotated[dict[ShortText, Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)]


# ---- the items of the input, and the turns of the conversation that they make


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    text: Text


class InputImage(msgspec.Struct, frozen=True, tag_field="type", tag="input_image"):
    image_url: MediaUrl
    detail: ImageDetail | None = None


class EarlierText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """The text of an earlier answer, which the client sends back."""

    text: Text


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """A part of a `reasoning` item."""

    text: Text


class SummaryText(msgspec.Struct, frozen=True, tag_field="type", tag="summary_text"):
    text: Text


Part = InputText | InputImage | EarlierText | RefusalContent | ReasoningText
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
        case RefusalContent(refusal=text) | InputText(text=text) | EarlierText(text=text):
            return TextPart(text)


# ---- the request


class FunctionTool(msgspec.Struct, frozen=True):
    """A function; other types of tools are refused by name. `strict` is not shown to models; constrained output always
    follows the schema."""

    name: ToolName | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    description: Description | None = None
    type: ShortText = "function"


class NamedFunction(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    name: ToolName


ResponseToolChoice = Literal["none", "auto", "required"] | NamedFunction


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    pass


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """A schema for the output, which follows it with or without `strict`."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_\-]{1,64}\Z")]
    schema: msgspec.Raw
    description: Text | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class TextConfig(msgspec.Struct, frozen=True):
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | UnsetType | None = UNSET


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(GenerationFields, frozen=True, kw_only=True):
    """A request. `store` may be true, OpenAI's default: nothing is stored, and the answer says `store: false`."""

    input: Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)] | Text
    instructions: Text | None = None
    max_output_tokens: TokenCount | None = None
    stop: StopStrings | None = None
    text: TextConfig | None = None
    include: Annotated[list[ShortText], Meta(max_length=MAX_INCLUDES)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: ProcessorSettings | None = None

    @property
    def wish(self) -> Wish:
        return Wish() if self.reasoning is None else self.reasoning.wish

    @property
    def logprob_fields(self) -> tuple[str, ...]:
        return "max_output_tokens", "top_logprobs"

    def tool_use(self) -> ToolUse:
        """The tools that the request allows; without tools, `auto` and `none` have no effect. Raises InvalidRequest."""
        tools = plain_functions(_function(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ()))
        choice = self.tool_choice or "auto"
        name = choice.name if isinstance(choice, NamedFunction) else ""
        mode = "named" if isinstance(choice, NamedFunction) else choice
        return ToolUse(tools, mode, name, parallel=self.parallel_tool_calls is not False)

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        for name in self.include or ():
            if name != LOGPROBS:
                log_once(f"include: {name}")
        wants_logprobs = bool(self.top_logprobs) or LOGPROBS in (self.include or ())
        return sampling_of(
            self,
            defaults,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if wants_logprobs else None,
            grammar=_grammar_of(self.text) if self.text is not None else None,
        )

    def chat_messages(self) -> tuple[ChatMessage, ...]:
        """The conversation; the instructions come first, as a system message."""
        messages: list[ChatMessage] = []
        if self.instructions is not None:
            messages.append(ChatMessage("system", self.instructions, "instructions"))
        if isinstance(self.input, str):
            return (*messages, ChatMessage("user", self.input, "input"))
        return (*messages, *turns_of(self.input))


def _grammar_of(text: TextConfig) -> Grammar | None:
    if text.verbosity:
        log_once("text.verbosity")
    match text.format:
        case JsonObjectFormat():
            return Grammar("json_object", param="text.format")
        case JsonSchemaFormat(schema=schema):
            return schema_grammar(schema, "text.format.schema")
    return None


def _function(tool: FunctionTool, where: str) -> GivenFunction:
    if tool.type != "function":
        raise unsupported_tool(where, tool.type)
    name = required(tool.name, f"{where}.name")
    return GivenFunction(name, tool.description, tool.parameters, f"{where}.parameters")


# ---- the answer


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    image_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: list[TokenLogprob] = []


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class FunctionCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call; `arguments` is the model's text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """Reasoning in full, in `content`; there is no summary."""

    id: str
    status: Status
    content: list[ReasoningText] = []
    summary: tuple[()] = ()
    encrypted_content: None = None


OutputItem = OutputMessage | FunctionCall | ReasoningItem


FailureCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class ResponseFailure(msgspec.Struct, frozen=True):
    code: FailureCode
    message: str
    param: str | None
    type: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """An answer. Fields that are always null or fixed are present because clients read them."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningConfig | None = None
    store: Literal[False] = False
    temperature: float
    text: TextConfig
    tool_choice: ResponseToolChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: None = None
    metadata: dict[str, str]
    metrics: Metrics | UnsetType = UNSET


def echo_format(text: TextConfig | None) -> TextConfig:
    """The requested form of the output, as the answer repeats it."""
    return TextConfig(TextFormat()) if text is None or text.format is None else TextConfig(text.format)


def response_usage(usage: outputs.Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(usage.cached_tokens, usage.image_tokens),
        usage.completion_tokens,
        OutputDetails(),
        usage.total_tokens,
    )


def failure_code(status: int) -> FailureCode:
    """OpenAI's error code for an HTTP status."""
    if status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if status < 500 else "server_error"


def status_of(reason: FinishReason) -> Status:
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


# ---- the events of a stream


class ResponseEvent(msgspec.Struct, frozen=True, tag_field="type", kw_only=True):
    sequence_number: int


class ContentEvent(ResponseEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0


class ResponseCreated(ResponseEvent, frozen=True, tag="response.created", kw_only=True):
    response: Response


class ResponseInProgress(ResponseEvent, frozen=True, tag="response.in_progress", kw_only=True):
    response: Response


class OutputItemAdded(ResponseEvent, frozen=True, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: OutputItem


class ContentPartAdded(ContentEvent, frozen=True, tag="response.content_part.added", kw_only=True):
    part: OutputText | ReasoningText


class OutputTextDelta(ContentEvent, frozen=True, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob] = []


class OutputTextDone(ContentEvent, frozen=True, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob] = []


class ContentPartDone(ContentEvent, frozen=True, tag="response.content_part.done", kw_only=True):
    part: OutputText | ReasoningText


class ReasoningDelta(ContentEvent, frozen=True, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(ContentEvent, frozen=True, tag="response.reasoning_text.done", kw_only=True):
    text: str


class OutputItemDone(ResponseEvent, frozen=True, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: OutputItem


class ArgumentsDelta(ResponseEvent, frozen=True, tag="response.function_call_arguments.delta", kw_only=True):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(ResponseEvent, frozen=True, tag="response.function_call_arguments.done", kw_only=True):
    item_id: str
    output_index: int
    name: str
    arguments: str


class ResponseCompleted(ResponseEvent, frozen=True, tag="response.completed", kw_only=True):
    response: Response


class ResponseIncomplete(ResponseEvent, frozen=True, tag="response.incomplete", kw_only=True):
    response: Response


class ResponseFailed(ResponseEvent, frozen=True, tag="response.failed", kw_only=True):
    response: Response


AnyResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ContentPartDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | OutputItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)
