"""Parts that all answers share: usage, and the metrics of `return_metrics`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from hydra_engine import __version__
from hydra_engine.core import outputs
from hydra_engine.core.logprobs import TextLogprob
from hydra_engine.core.outputs import Result
from hydra_engine.server.http.answers import Slices
from hydra_engine.telemetry import timeline

FINGERPRINT = f"hydra-{__version__}"
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class CompletionHead(msgspec.Struct, frozen=True):
    """The first fields of OpenAI's completions and their chunks."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    image_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stage of the request, as `outputs.StageSpan`. `blame`, the causes of a delay, is present only if a token was
    late; the `request` of a cause is a number of this engine that identifies spans within one trace."""

    stage: str
    start_s: float
    end_s: float
    instance: str
    lane: str
    batch: int
    tokens: int
    cause: str | None
    blame: tuple[outputs.DelayCause, ...] = ()


class SloVerdict(msgspec.Struct, frozen=True):
    """The kept and missed limits, as `outputs.SloReport`, with the verdict over both."""

    ttft_limit_s: float | None
    tpot_limit_s: float | None
    ttft_met: bool | None
    tpot_met: bool | None
    met: bool | None
    late_gaps: int
    num_gaps: int
    reason: str | None


class Metrics(msgspec.Struct, frozen=True):
    """The metrics of `return_metrics`: times in seconds, the limits' verdict, and the stages of the request.

    `slo` is null without limits. `server_timing` is the header of a whole answer; a stream's headers are sent too early
    for it. `clock_error_s` is there if times of other nodes are among them.
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
    slo: SloVerdict | None
    timeline: tuple[Span, ...]
    server_timing: str | UnsetType = UNSET
    clock_error_s: float | UnsetType = UNSET


def usage_of(usage: outputs.Usage, completion_tokens: int | None = None) -> Usage:
    """Usage in OpenAI's form. `completion_tokens` overrides the count while the request still runs."""
    completed = usage.completion_tokens if completion_tokens is None else completion_tokens
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=completed,
        total_tokens=usage.prompt_tokens + completed,
        prompt_tokens_details=PromptDetails(usage.cached_tokens, usage.image_tokens),
    )


def metrics_of(result: Result, *, streamed: bool = False) -> Metrics:
    metrics, slo = result.metrics, result.metrics.slo
    has_limit = slo.ttft_limit_s is not None or slo.tpot_limit_s is not None
    return Metrics(
        ttft_s=metrics.ttft_s,
        tpot_s=metrics.tpot_s,
        e2e_s=metrics.e2e_s,
        queue_s=metrics.queue_s,
        encode_s=metrics.encode_s,
        prefill_s=metrics.prefill_s,
        decode_s=metrics.decode_s,
        num_preemptions=metrics.num_preemptions,
        cached_images=result.usage.cached_images,
        slo=msgspec.convert(slo, SloVerdict, from_attributes=True) if has_limit else None,
        timeline=tuple(msgspec.convert(span, Span, from_attributes=True) for span in result.timeline),
        server_timing=timeline.server_timing(result) if streamed else UNSET,
        clock_error_s=metrics.clock_error_s or UNSET,
    )


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


# ---- log probabilities of the prompt, in vLLM's form


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


def prompt_logprobs(
    entries: Sequence[TextLogprob | None] | None, num_top: int | None, slices: Slices
) -> PromptLogprobs | UnsetType:
    """The candidates of each token by their ids, the prompt's own token first and then the best ones; None for the
    first token. UNSET if they were not requested."""
    if entries is None or num_top is None:
        return UNSET
    result: PromptLogprobs = slices.defer(
        len(entries), lambda: (None if entry is None else _by_id(entry, num_top) for entry in entries)
    )
    return result


def _by_id(entry: TextLogprob, num_top: int) -> dict[int, PromptLogprob]:
    result = {entry.token_id: PromptLogprob(finite(entry.logprob), entry.rank, entry.token)}
    for rank, top in enumerate(entry.top[:num_top], start=1):
        result.setdefault(top.token_id, PromptLogprob(finite(top.logprob), rank, top.token))
    return result
