"""POST /v1/chat/completions: its request, its answer and the chunks of its stream, in OpenAI's field order.

Does not know how a request is run or when an answer is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hydra_engine.core import call
from hydra_engine.core.call import MAX_MESSAGES, MAX_NAME_CHARS, MAX_PARTS
from hydra_engine.core.logprobs import TextLogprob
from hydra_engine.core.prompting import MAX_PIXELS, MAX_TOOLS, MAX_VARIABLES, PixelBudget, TemplateOptions
from hydra_engine.core.request import MAX_LOGPROBS, SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.http.encoding import Slices
from hydra_engine.server.http.strict_json import NO_NUL
from hydra_engine.server.protocol.common import CompletionHead, Metrics, PromptLogprobs, Usage, finite
from hydra_engine.server.protocol.fields import (
    ArgumentsText,
    CalledName,
    CallId,
    Description,
    MediaUrl,
    SamplingFields,
    Schema,
    Text,
    TokenCount,
    ToolName,
    content_of,
    plain_function,
    sampling_of,
)
from hydra_engine.server.protocol.reasoning import Effort, ThinkingConfig
from hydra_engine.server.tools.reasoning import Wish
from hydra_engine.server.tools.tool_calls import ToolUse

Variables = Annotated[dict[str, Any], Meta(max_length=MAX_VARIABLES)]
ProcessorSettings = Annotated[dict[str, Any], Meta(max_length=16)]
PixelCount = Annotated[int, Meta(ge=1, le=MAX_PIXELS)]


# ---- the request


class TextContent(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: Text


class ImageUrl(msgspec.Struct, frozen=True):
    url: MediaUrl
    detail: Literal["auto", "low", "high"] | None = None


class ImageContent(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | MediaUrl


class VideoUrl(msgspec.Struct, frozen=True):
    url: MediaUrl


class VideoContent(msgspec.Struct, frozen=True, tag_field="type", tag="video_url"):
    """As vLLM's server takes it; OpenAI's API has no videos."""

    video_url: VideoUrl | MediaUrl


AnyPart = TextContent | ImageContent | VideoContent


class FunctionDefinition(msgspec.Struct, frozen=True):
    """`strict` is not shown to models; where the output is constrained, it is so in any case."""

    name: ToolName
    description: Description | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class FunctionName(msgspec.Struct, frozen=True):
    name: ToolName


class NamedTool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class PastFunction(msgspec.Struct, frozen=True):
    name: CalledName
    arguments: Schema | ArgumentsText | None = None


class PastCall(msgspec.Struct, frozen=True):
    """A call in an earlier message of the assistant."""

    function: PastFunction
    id: CallId | None = None
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[AnyPart], Meta(max_length=MAX_PARTS)] | Text | None = None
    tool_calls: Annotated[list[PastCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: CallId | None = None
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS, pattern=NO_NUL)] | None = None
    # For templates that read them; `reasoning` is vLLM's name of what others call `reasoning_content`.
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    thinking: Text | None = None
    tool_plan: Text | None = None


_FOR_TEMPLATES = ("reasoning_content", "reasoning", "thinking", "tool_plan")
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatCompletionRequest(SamplingFields, frozen=True, kw_only=True):
    messages: Messages
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Variables | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    continue_final_message: bool | None = None
    mm_processor_kwargs: ProcessorSettings | None = None
    # How the model thinks: the fields of OpenAI, vLLM, SGLang, DeepSeek and others.
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingConfig | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None

    @property
    def wish(self) -> Wish:
        asked = {"thinking": self.thinking.on if self.thinking else None, "enable_thinking": self.enable_thinking}
        param = next((name for name, on in asked.items() if on is not None), "reasoning_effort")
        return Wish(
            asked.get(param),
            self.reasoning_effort,
            param,
            read=self.separate_reasoning is not False,
            shown=self.include_reasoning is not False,
            streamed=self.stream_reasoning is not False,
        )

    def tool_use(self) -> ToolUse:
        """Without tools, `auto` and `none` ask for nothing."""
        tools, choice = plain_tools(self.tools or ()), self.tool_choice or "auto"
        name = choice.function.name if isinstance(choice, NamedTool) else ""
        mode = "named" if isinstance(choice, NamedTool) else choice
        return ToolUse(tools, mode, name, parallel=self.parallel_tool_calls is not False)

    def template(self, use: ToolUse) -> TemplateOptions:
        return template_options(
            use.shown,
            self.chat_template_kwargs,
            self.add_generation_prompt,
            self.continue_final_message,
            self.add_special_tokens,
        )

    @property
    def pixels(self) -> PixelBudget:
        return pixel_budget(self.mm_processor_kwargs)

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs come with whole answers only; leave out stream", param="prompt_logprobs"
            )
        max_tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return sampling_of(
            self, defaults, max_tokens=max_tokens, logprobs=(self.top_logprobs or 0) if self.logprobs else None
        )


def plain_tools(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """Tools in the one form and order that chat templates were trained with, whatever order a client sends. Raises
    InvalidRequest."""
    functions = [tool.function for tool in tools]
    return tuple(
        plain_function(one.name, one.description, one.parameters, f"tools[{index}].function.parameters")
        for index, one in enumerate(functions)
    )


def template_options(
    tools: Sequence[Mapping[str, Any]],
    variables: dict[str, Any] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    add_special_tokens: bool | None = None,
) -> TemplateOptions:
    """Unless it is said, an answer that goes on with the last message gets no generation prompt."""
    goes_on = bool(continue_final_message)
    begins = not goes_on if add_generation_prompt is None else add_generation_prompt
    return TemplateOptions(tuple(tools), variables or {}, begins, goes_on, add_special_tokens)


class _PixelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min_pixels: PixelCount | None = None
    max_pixels: PixelCount | None = None


def pixel_budget(settings: dict[str, Any] | None) -> PixelBudget:
    """The pixel limits of `mm_processor_kwargs`, which may change nothing else."""
    param = "mm_processor_kwargs"
    names = _PixelSettings.__struct_fields__
    if other := next((name for name in settings or {} if name not in names), None):
        raise InvalidRequest(
            f"{param} may have {' and '.join(names)} only; leave out {other[:64]!r}",
            param=f"{param}.{other[:64]}",
            code="unsupported_parameter",
        )
    try:
        chosen = msgspec.convert(settings or {}, _PixelSettings)
    except msgspec.ValidationError:
        raise InvalidRequest(
            f"{' and '.join(names)} of {param} must be integers from 1 to {MAX_PIXELS}", param=param
        ) from None
    if chosen.min_pixels is not None and chosen.max_pixels is not None and chosen.min_pixels > chosen.max_pixels:
        raise InvalidRequest(f"{param}: min_pixels must not exceed max_pixels", param=f"{param}.min_pixels")
    return PixelBudget(chosen.min_pixels, chosen.max_pixels)


def chat_messages(messages: Sequence[Message]) -> tuple[call.ChatMessage, ...]:
    return tuple(_chat_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _chat_message(message: Message, where: str) -> call.ChatMessage:
    role = message.role
    if message.content is None and role != "assistant":
        raise InvalidRequest(f"{where}.content is required", param=f"{where}.content")
    return call.ChatMessage(
        "system" if role == "developer" else role,
        content_of("" if message.content is None else message.content, f"{where}.content", _chat_part),
        where,
        tool_calls=tuple(
            call.ToolCall(
                past.function.name, past.function.arguments, past.id, f"{where}.tool_calls[{index}].function.arguments"
            )
            for index, past in enumerate(message.tool_calls or ())
        ),
        tool_call_id=message.tool_call_id if role == "tool" else None,
        name=(message.name or None) if role == "tool" else None,
        others=_others(message),
    )


def _others(message: Message) -> dict[str, Any]:
    given = {name: getattr(message, name) for name in _FOR_TEMPLATES}
    if message.role != "tool":
        given["name"] = message.name or None
    return {name: value for name, value in given.items() if value is not None}


def _chat_part(part: AnyPart, where: str) -> call.TextPart | call.MediaPart:
    if isinstance(part, TextContent):
        return call.TextPart(part.text)
    if isinstance(part, VideoContent):
        video, param = part.video_url, f"{where}.video_url"
        return call.VideoPart(*((video.url, f"{param}.url") if isinstance(video, VideoUrl) else (video, param)))
    picture, param = part.image_url, f"{where}.image_url"
    if isinstance(picture, str):
        return call.ImagePart(picture, param)
    return call.ImagePart(picture.url, f"{param}.url", picture.detail or "auto")


# ---- the answer


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class MessageCall(msgspec.Struct, frozen=True):
    id: str
    function: Function
    type: str = "function"


class FunctionDelta(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(msgspec.Struct, frozen=True):
    """The first one of a call has its id, type and name; the others go on with its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, frozen=True):
    """`content` is null where all that came are calls or reasoning. `reasoning` is vLLM's name for what others call
    `reasoning_content`."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[MessageCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None


class ChatCompletion(CompletionHead, frozen=True):
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(CompletionHead, frozen=True):
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET


def chat_logprobs(entries: Sequence[TextLogprob], slices: Slices) -> ChatLogprobs:
    return ChatLogprobs(token_logprobs(entries, slices))


def token_logprobs(entries: Sequence[TextLogprob], slices: Slices) -> list[TokenLogprob]:
    """The entries, or a placeholder that `slices` fills in where there are many."""
    result: list[TokenLogprob] = slices.later(len(entries), lambda: map(_token_logprob, entries))
    return result


def _token_logprob(entry: TextLogprob) -> TokenLogprob:
    top = [TopLogprob(other.token, finite(other.logprob), list(other.raw)) for other in entry.top]
    return TokenLogprob(entry.token, finite(entry.logprob), list(entry.raw), top)
