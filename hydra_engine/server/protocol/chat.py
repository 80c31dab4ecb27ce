"""POST /v1/chat/completions: its request with the parts of messages, its answer and the chunks of its stream, in
OpenAI's field order.

Does not know how a request is run or when an answer is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hydra_engine.core import call
from hydra_engine.core.call import MAX_MESSAGES, MAX_NAME_CHARS, MAX_PARTS
from hydra_engine.core.logprobs import TextLogprob
from hydra_engine.core.prompting import MAX_TOOLS, MAX_VARIABLES, PixelBudget, TemplateOptions
from hydra_engine.core.sampling import MAX_LOGPROBS, SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.http.answers import Slices
from hydra_engine.server.http.strict_json import NO_NUL
from hydra_engine.server.protocol.common import CompletionHead, Metrics, PromptLogprobs, Usage, finite
from hydra_engine.server.protocol.fields import (
    ArgumentsText,
    CalledName,
    CallId,
    Description,
    Effort,
    GivenFunction,
    MediaUrl,
    ProcessorSettings,
    SamplingFields,
    Schema,
    Text,
    ThinkingConfig,
    TokenCount,
    ToolName,
    content_of,
    pixel_budget,
    plain_functions,
    sampling_of,
)
from hydra_engine.server.tools.reasoning import Wish
from hydra_engine.server.tools.tool_calls import ToolUse

# ---- the parts of a message's content

ImageDetail = Literal["auto", "low", "high", "original"]


class TextContent(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: Text


class RefusalContent(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """The refusal of an earlier answer, read as its text."""

    refusal: Text


class ImageUrl(msgspec.Struct, frozen=True):
    url: MediaUrl
    detail: ImageDetail | None = None


class ImageContent(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | MediaUrl


class VideoUrl(msgspec.Struct, frozen=True):
    url: MediaUrl


class VideoContent(msgspec.Struct, frozen=True, tag_field="type", tag="video_url"):
    """A video in the form of vLLM's server; OpenAI's API has none."""

    video_url: VideoUrl | MediaUrl


AnyPart = TextContent | RefusalContent | ImageContent | VideoContent


def chat_part(part: AnyPart, where: str) -> call.TextPart | call.MediaPart:
    if isinstance(part, TextContent):
        return call.TextPart(part.text)
    if isinstance(part, RefusalContent):
        return call.TextPart(part.refusal)
    if isinstance(part, VideoContent):
        video, param = part.video_url, f"{where}.video_url"
        return call.VideoPart(*((video.url, f"{param}.url") if isinstance(video, VideoUrl) else (video, param)))
    picture, param = part.image_url, f"{where}.image_url"
    if isinstance(picture, str):
        return call.ImagePart(picture, param)
    return call.ImagePart(picture.url, f"{param}.url", detail_of(picture.detail))


def detail_of(detail: ImageDetail | None) -> call.Detail:
    """The engine's `detail`; `original` becomes `high`, the default is `auto`."""
    return "high" if detail == "original" else detail or "auto"


# ---- the request

Variables = Annotated[dict[str, Any], Meta(max_length=MAX_VARIABLES)]


class FunctionDefinition(msgspec.Struct, frozen=True):
    """A function. `strict` is not shown to models; constrained output always follows the schema."""

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
    """A message. `function_call` and the role `function` are OpenAI's older form of tool calls and their results;
    `prefix` (DeepSeek) and `partial` (Moonshot) mark a last message that the answer continues."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[list[AnyPart], Meta(max_length=MAX_PARTS)] | Text | None = None
    tool_calls: Annotated[list[PastCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: CallId | None = None
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS, pattern=NO_NUL)] | None = None
    # For templates that read them; `reasoning` is vLLM's name of `reasoning_content`.
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    thinking: Text | None = None
    tool_plan: Text | None = None
    refusal: Text | None = None
    function_call: PastFunction | None = None
    prefix: bool | None = None
    partial: bool | None = None


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
    # Thinking: the fields of OpenAI, vLLM, SGLang, DeepSeek and others.
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingConfig | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None

    @property
    def wish(self) -> Wish:
        asked = {
            "thinking": self.thinking.is_enabled if self.thinking else None,
            "enable_thinking": self.enable_thinking,
        }
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
        """The tools that the request allows; without tools, `auto` and `none` have no effect. Raises InvalidRequest."""
        tools, choice = plain_tools(self.tools or ()), self.tool_choice or "auto"
        name = choice.function.name if isinstance(choice, NamedTool) else ""
        mode = "named" if isinstance(choice, NamedTool) else choice
        return ToolUse(tools, mode, name, parallel=self.parallel_tool_calls is not False)

    def template(self, use: ToolUse) -> TemplateOptions:
        return template_options(
            use.prompt_tools,
            self.chat_template_kwargs,
            self.add_generation_prompt,
            continues_last(self.messages, self.continue_final_message),
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


def plain_tools(tools: Sequence[Tool]) -> tuple[Mapping[str, Any], ...]:
    """Tools in the form that chat templates read. Raises InvalidRequest."""
    functions = [tool.function for tool in tools]
    return plain_functions(
        GivenFunction(one.name, one.description, one.parameters, f"tools[{index}].function.parameters")
        for index, one in enumerate(functions)
    )


def template_options(
    tools: Sequence[Mapping[str, Any]],
    variables: dict[str, Any] | None,
    add_generation_prompt: bool | None,
    continues: bool,
    add_special_tokens: bool | None = None,
) -> TemplateOptions:
    """Options of the chat template. By default an answer that continues the last message gets no generation prompt."""
    begins = not continues if add_generation_prompt is None else add_generation_prompt
    return TemplateOptions(tuple(tools), variables or {}, begins, continues, add_special_tokens)


def continues_last(messages: Sequence[Message], continue_final_message: bool | None) -> bool:
    """True if the answer continues the last message. Raises InvalidRequest for a mark on another one."""
    for index, message in enumerate(messages):
        for name, is_marked in (("prefix", message.prefix), ("partial", message.partial)):
            if is_marked and (index < len(messages) - 1 or message.role != "assistant"):
                param = f"messages[{index}].{name}"
                raise InvalidRequest(f"{param} may be true of the last message only, the assistant's", param=param)
    last = messages[-1] if messages else None
    return bool(continue_final_message or (last and (last.prefix or last.partial)))


def chat_messages(messages: Sequence[Message]) -> tuple[call.ChatMessage, ...]:
    past = call.PastCalls()
    return tuple(_chat_message(message, f"messages[{index}]", past) for index, message in enumerate(messages))


def _chat_message(message: Message, where: str, past: call.PastCalls) -> call.ChatMessage:
    role = _ROLES[message.role]
    if message.content is None and role != "assistant":
        raise InvalidRequest(f"{where}.content is required", param=f"{where}.content")
    if message.content and message.refusal:
        raise InvalidRequest(f"{where} has content and a refusal; send one of them", param=f"{where}.refusal")
    content = message.refusal if message.refusal else "" if message.content is None else message.content
    calls = [
        past.add(one.function.name, one.function.arguments, one.id, f"{where}.tool_calls[{index}].function.arguments")
        for index, one in enumerate(message.tool_calls or ())
    ]
    if (older := message.function_call) is not None:
        calls.append(past.add(older.name, older.arguments, None, f"{where}.function_call.arguments"))
    return call.ChatMessage(
        role,
        content_of(content, f"{where}.content", chat_part),
        where,
        tool_calls=tuple(calls),
        tool_call_id=message.tool_call_id if role == "tool" else None,
        name=(message.name or None) if role == "tool" else None,
        others=_others(message),
    )


_ROLES: dict[str, call.Role] = {
    **{role: role for role in get_args(call.Role)},
    "developer": "system",
    "function": "tool",
}


def _others(message: Message) -> dict[str, Any]:
    given = {name: getattr(message, name) for name in _FOR_TEMPLATES}
    if message.role != "tool":
        given["name"] = message.name or None
    return {name: value for name, value in given.items() if value is not None}


# ---- the answer


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True):
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
    """A part of a call. The first one has its id, type and name; the others continue its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, frozen=True):
    """An answer. `content` is null if it is only calls or reasoning. `reasoning` is vLLM's name of
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
    """Log probabilities in OpenAI's form; for many, a placeholder that `slices` fills in."""
    result: list[TokenLogprob] = slices.defer(len(entries), lambda: map(_token_logprob, entries))
    return result


def _token_logprob(entry: TextLogprob) -> TokenLogprob:
    top = [TopLogprob(other.token, finite(other.logprob), list(other.raw)) for other in entry.top]
    return TokenLogprob(entry.token, finite(entry.logprob), list(entry.raw), top)
