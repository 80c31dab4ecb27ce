"""The answers of the API as structs, in OpenAI's field order, and how they follow from what the engine returns.

Does not know when they are sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from hydra_engine import __version__
from hydra_engine.core import outputs
from hydra_engine.core.outputs import Result, TextLogprob

FINGERPRINT = f"hydra-{__version__}"
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    image_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Metrics(msgspec.Struct, frozen=True):
    """What `return_metrics` asks for: seconds, and the stages that the request went through."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    queue_s: float
    encode_s: float
    prefill_s: float
    decode_s: float
    num_preemptions: int
    cached_images: int
    timeline: tuple[outputs.StageSpan, ...]


# ---- chat


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


# ---- completions


class TextLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class TextCompletion(msgspec.Struct, frozen=True):
    """Whole answer and chunk of a stream alike."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET


# ---- from the engine's results


def usage_of(usage: outputs.Usage, completion_tokens: int | None = None) -> Usage:
    """`completion_tokens` overrides the count while the request still runs."""
    completed = usage.completion_tokens if completion_tokens is None else completion_tokens
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=completed,
        total_tokens=usage.prompt_tokens + completed,
        prompt_tokens_details=PromptDetails(usage.cached_tokens, usage.image_tokens),
    )


def metrics_of(result: Result) -> Metrics:
    m = result.metrics
    return Metrics(
        ttft_s=m.ttft_s,
        tpot_s=m.tpot_s,
        e2e_s=m.e2e_s,
        queue_s=m.queue_s,
        encode_s=m.encode_s,
        prefill_s=m.prefill_s,
        decode_s=m.decode_s,
        num_preemptions=m.num_preemptions,
        cached_images=result.usage.cached_images,
        timeline=result.timeline,
    )


def chat_logprobs(entries: Sequence[TextLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(
                token=entry.token,
                logprob=_finite(entry.logprob),
                bytes=_utf8(entry.token),
                top_logprobs=[TopLogprob(text, _finite(logprob), _utf8(text)) for _, text, logprob in entry.top],
            )
            for entry in entries
        ]
    )


def text_logprobs(entries: Sequence[TextLogprob], offset: int) -> TextLogprobs:
    """`offset`: how many characters of the answer come before the first entry."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return TextLogprobs(
        text_offset=offsets,
        token_logprobs=[_finite(entry.logprob) for entry in entries],
        tokens=[entry.token for entry in entries],
        top_logprobs=[{text: _finite(logprob) for _, text, logprob in entry.top} for entry in entries],
    )


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


def _utf8(text: str) -> list[int]:
    return list(text.encode("utf-8"))
