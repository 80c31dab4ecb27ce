"""POST /v1/chat/completions: its request, its answer and the chunks of its stream, in OpenAI's field order.

Does not know how a request is run or when an answer is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hydra_engine.core.outputs import TextLogprob
from hydra_engine.core.prompting import MAX_TOOLS, PixelBudget, TemplateOptions
from hydra_engine.core.request import MAX_LOGPROBS, SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.protocol.common import Metrics, PromptLogprobs, Usage, finite
from hydra_engine.server.protocol.fields import MediaUrl, SamplingFields, Text, TokenCount, sampling_of
from hydra_engine.server.protocol.tools import (
    CallDelta,
    CallId,
    MessageCall,
    NamedTool,
    PastCall,
    ToolChoice,
    Tools,
    Variables,
    pixel_budget,
    plain_call,
    plain_tool,
    template_options,
)
from hydra_engine.server.strict_json import NO_NUL
from hydra_engine.server.tools import ToolUse

MAX_MESSAGES = 4096
MAX_PARTS = 1024


# ---- the request


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: Text


class ImageUrl(msgspec.Struct, frozen=True):
    url: MediaUrl
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | MediaUrl


class VideoUrl(msgspec.Struct, frozen=True):
    url: MediaUrl


class VideoPart(msgspec.Struct, frozen=True, tag_field="type", tag="video_url"):
    """As vLLM's server takes it; OpenAI's API has no videos."""

    video_url: VideoUrl | MediaUrl


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart | ImagePart | VideoPart], Meta(max_length=MAX_PARTS)] | Text | None = None
    tool_calls: Annotated[list[PastCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: CallId | None = None
    name: Annotated[str, Meta(max_length=128, pattern=NO_NUL)] | None = None


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
    continue_final_message: bool | None = None
    mm_processor_kwargs: Annotated[dict[str, Any], Meta(max_length=16)] | None = None

    def tool_use(self) -> ToolUse:
        """Without tools, `auto` and `none` ask for nothing."""
        tools, choice = tuple(plain_tool(tool) for tool in self.tools or ()), self.tool_choice or "auto"
        name = choice.function.name if isinstance(choice, NamedTool) else ""
        mode = "named" if isinstance(choice, NamedTool) else choice
        return ToolUse(tools, mode, name, parallel=self.parallel_tool_calls is not False)

    def template(self, use: ToolUse) -> TemplateOptions:
        return template_options(
            use.shown, self.chat_template_kwargs, self.add_generation_prompt, self.continue_final_message
        )

    @property
    def pixels(self) -> PixelBudget:
        return pixel_budget(self.mm_processor_kwargs)

    def sampling(self) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs come with whole answers only; leave out stream", param="prompt_logprobs"
            )
        max_tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return sampling_of(self, max_tokens=max_tokens, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as the engine takes them: known keys only, developer as system, media as objects with a URL."""
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: Message, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    if message.content is None and role != "assistant":
        raise InvalidRequest(f"{where}.content is required", param=f"{where}.content")
    plain: dict[str, Any] = {"role": role, "content": message.content or ""}
    if isinstance(message.content, list):
        plain["content"] = [_plain_part(part) for part in message.content]
    if message.tool_calls:
        plain["tool_calls"] = [plain_call(call) for call in message.tool_calls]
    if role == "tool":
        about = {"tool_call_id": message.tool_call_id, "name": message.name}
        plain |= {name: value for name, value in about.items() if value}
    return plain


def _plain_part(part: TextPart | ImagePart | VideoPart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, VideoPart):
        url = part.video_url.url if isinstance(part.video_url, VideoUrl) else part.video_url
        return {"type": "video_url", "video_url": {"url": url}}
    picture = part.image_url if isinstance(part.image_url, ImageUrl) else ImageUrl(part.image_url)
    return {"type": "image_url", "image_url": {"url": picture.url, "detail": picture.detail or "auto"}}


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


class ChatMessage(msgspec.Struct, frozen=True):
    """`content` is null where all that came are calls."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[MessageCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET


def chat_logprobs(entries: Sequence[TextLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(
                token=entry.token,
                logprob=finite(entry.logprob),
                bytes=_utf8(entry.token),
                top_logprobs=[TopLogprob(text, finite(logprob), _utf8(text)) for _, text, logprob in entry.top],
            )
            for entry in entries
        ]
    )


def _utf8(text: str) -> list[int]:
    return list(text.encode("utf-8"))
