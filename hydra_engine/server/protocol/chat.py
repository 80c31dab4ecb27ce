"""POST /v1/chat/completions: its request, its answer and the chunks of its stream, in OpenAI's field order.

Does not know how a request is run or when an answer is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hydra_engine.core.outputs import TextLogprob
from hydra_engine.core.request import MAX_LOGPROBS, SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.protocol.common import Metrics, Usage, finite
from hydra_engine.server.protocol.fields import SamplingFields, TokenCount, sampling_of
from hydra_engine.server.protocol.names import log_once

MAX_MESSAGES = 4096
MAX_PARTS = 1024


# ---- the request


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ImageUrl(msgspec.Struct, frozen=True):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | str


class VideoUrl(msgspec.Struct, frozen=True):
    url: str


class VideoPart(msgspec.Struct, frozen=True, tag_field="type", tag="video_url"):
    """As vLLM's server takes it; OpenAI's API has no videos."""

    video_url: VideoUrl | str


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart | ImagePart | VideoPart], Meta(max_length=MAX_PARTS)] | str | None = None
    tool_calls: Annotated[list[msgspec.Raw], Meta(max_length=0)] | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatCompletionRequest(SamplingFields, frozen=True, kw_only=True):
    messages: Messages
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def sampling(self) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        max_tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return sampling_of(self, max_tokens=max_tokens, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as the engine takes them: known keys only, developer as system, media as objects with a URL."""
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: Message, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    if message.content is None and role != "assistant":
        raise InvalidRequest(f"{where}.content is required", param=f"{where}.content")
    if message.content is None or isinstance(message.content, str):
        return {"role": role, "content": message.content or ""}
    return {"role": role, "content": [_plain_part(part) for part in message.content]}


def _plain_part(part: TextPart | ImagePart | VideoPart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, VideoPart):
        url = part.video_url.url if isinstance(part.video_url, VideoUrl) else part.video_url
        return {"type": "video_url", "video_url": {"url": url}}
    picture = part.image_url if isinstance(part.image_url, ImageUrl) else ImageUrl(part.image_url)
    if picture.detail in ("low", "high"):  # every picture gets the model's own resolution
        log_once("image_url.detail")
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
    content: str
    role: str = "assistant"
    refusal: None = None


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
    metrics: Metrics | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


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
