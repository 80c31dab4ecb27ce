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
from hydra_engine.observe import timeline

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


class Blame(msgspec.Struct, frozen=True):
    """`request` is a number of this engine, by which the spans of one trace name each other."""

    kind: str
    seconds: float
    request: int | None
    amount: int


class Span(msgspec.Struct, frozen=True):
    """As `outputs.StageSpan`; `blame` is there only where a token was late."""

    stage: str
    start_s: float
    end_s: float
    instance: str
    lane: str
    batch: int
    tokens: int
    cause: str | None
    blame: tuple[Blame, ...] | UnsetType = UNSET


class Slo(msgspec.Struct, frozen=True):
    """As `outputs.SloReport`, with the verdict over both limits."""

    ttft_limit_s: float | None
    tpot_limit_s: float | None
    ttft_met: bool | None
    tpot_met: bool | None
    met: bool | None
    late_gaps: int
    num_gaps: int
    reason: str | None


class Metrics(msgspec.Struct, frozen=True):
    """What `return_metrics` asks for: seconds, limits kept or not, and the stages that the request went through.

    `slo` is null where no limit held. `server_timing` is what a whole answer has as a header; a stream's headers are
    sent too early for it.
    """

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    queue_s: float
    encode_s: float
    prefill_s: float
    decode_s: float
    num_preemptions: int
    cached_images: int
    slo: Slo | None
    timeline: tuple[Span, ...]
    server_timing: str | UnsetType = UNSET


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


def metrics_of(result: Result, *, streamed: bool = False) -> Metrics:
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
        slo=_slo_of(m.slo),
        timeline=tuple(_span_of(span) for span in result.timeline),
        server_timing=timeline.server_timing(result) if streamed else UNSET,
    )


def _slo_of(slo: outputs.SloReport) -> Slo | None:
    if slo.ttft_limit_s is None and slo.tpot_limit_s is None:
        return None
    return Slo(
        ttft_limit_s=slo.ttft_limit_s,
        tpot_limit_s=slo.tpot_limit_s,
        ttft_met=slo.ttft_met,
        tpot_met=slo.tpot_met,
        met=slo.met,
        late_gaps=slo.late_gaps,
        num_gaps=slo.num_gaps,
        reason=slo.reason,
    )


def _span_of(span: outputs.StageSpan) -> Span:
    return Span(
        span.stage,
        span.start_s,
        span.end_s,
        span.instance,
        span.lane,
        span.batch,
        span.tokens,
        span.cause,
        tuple(Blame(b.kind, b.seconds, b.request, b.amount) for b in span.blame) or UNSET,
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
