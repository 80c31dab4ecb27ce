"""POST /v1/responses: its request and its answer, in OpenAI's format, without a memory.

Nothing is stored, so references to an earlier response are refused by name, and so are tools that are not functions.
`response_events.py` has the events of its stream. Does not know how a request is run.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hydra_engine.core import outputs
from hydra_engine.core.call import MAX_MESSAGES, ChatMessage
from hydra_engine.core.grammar import Grammar
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.prompting import MAX_TOOLS
from hydra_engine.core.sampling import MAX_LOGPROBS, SamplingParams
from hydra_engine.server.protocol.chat import TokenLogprob, Variables
from hydra_engine.server.protocol.common import Metrics
from hydra_engine.server.protocol.fields import (
    Description,
    GenerationFields,
    GivenFunction,
    ProcessorSettings,
    ReasoningConfig,
    Schema,
    StopStrings,
    Text,
    TokenCount,
    ToolName,
    log_once,
    plain_functions,
    sampling_of,
    schema_grammar,
    unsupported_tool,
)
from hydra_engine.server.protocol.response_input import InputItem, ReasoningText, ShortText, required, turns_of
from hydra_engine.server.tools.reasoning import Wish
from hydra_engine.server.tools.tool_calls import ToolUse

MAX_METADATA = 16
MAX_INCLUDES = 32
LOGPROBS = "message.output_text.logprobs"  # the only supported value of `include`

Metadata = Annotated[dict[ShortText, Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)]


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
