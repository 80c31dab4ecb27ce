"""The outputs of the engine: results and pieces of text for callers, and the stage timeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hydra_engine.core.logprobs import TextLogprob, concat_logprobs
from hydra_engine.errors import HydraError


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Departure(StrEnum):
    """Reasons why an instance has finished its part of a request that continues, or may continue, elsewhere."""

    MOVED = "moved"  # its features or KV have been pulled and acknowledged
    RETURNED = "returned"  # preempted where it cannot be prefilled, or its pulled KV does not match its tokens
    WITHDRAWN = "withdrawn"  # its offer was not fetched: the lease expired, or the other instance is gone


@dataclass(frozen=True, slots=True)
class DelayCause:
    """A part of the wait for a late token.

    `kind`: prefill or encode (of `request`, the number of a request on this engine, with `amount` tokens or patches;
    None: of several, or of one that a caller must not know), transfer (its KV moved to another instance), preemption
    (of itself), lost (its instance was lost), step (the step took longer than usual), decode (the decodes of the step
    alone took longer than the limit) or cpu (no step ran).
    """

    kind: str
    seconds: float
    request: int | None = None
    amount: int = 0


BLAMES = ("prefill", "encode", "transfer", "preemption", "lost", "step", "decode", "cpu")


@dataclass(frozen=True, slots=True)
class StageSpan:
    """A span of a request's timeline: seconds since its arrival in a Result, monotonic time before.

    `stage`: fetch, preprocess, tokenize, encode_wait, encode, prefill_wait, cached (an instant: prefix cache hit of
    `tokens` tokens), prefill, decode, decode_wait (the gap before a late token, which may overlap other spans),
    preempted, or lost (the unreported time of a lost instance, until another one begins); between instances
    offered_features, offered_kv (computed, not fetched yet), pull_features and pull_kv.

    `lane`: front, vision, language or transfer. `batch`: number of requests in the step, the mean for a span of several
    decode steps, 0 if it is no step. `tokens`: tokens of this request, patches for stages preprocess and encode.
    `cause`: what a wait was for. `blame`: the causes of a late token's wait, the largest first.
    """

    stage: str
    start_s: float
    end_s: float
    instance: str = "front"
    lane: str = "front"
    batch: int = 0
    tokens: int = 0
    cause: str | None = None
    blame: tuple[DelayCause, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token and image counts. `cached_tokens`: tokens found in the KV cache at the request's start. `num_images` counts
    pictures and videos, `cached_images` those of which nothing was encoded or loaded for the request itself."""

    prompt_tokens: int
    completion_tokens: int
    image_tokens: int = 0
    cached_tokens: int = 0
    num_images: int = 0
    cached_images: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class SloReport:
    """The result of a request's latency limits, in seconds; None without a limit, or if the request did not get that
    far.

    TTFT is met if the first token came within the limit, TPOT if at least 90 % of the gaps between tokens did
    (HydraInfer, section 5.1). `late_gaps` of `num_gaps` were late; without a limit a gap is late above 50 ms and two
    typical steps. `late_by`: late gaps by the kind of their largest `DelayCause`. `reason`: why a limit was missed.
    """

    ttft_limit_s: float | None = None
    tpot_limit_s: float | None = None
    ttft_met: bool | None = None
    tpot_met: bool | None = None
    late_gaps: int = 0
    num_gaps: int = 0
    reason: str | None = None
    late_by: dict[str, int] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """True if every limit with a verdict was met; None if there is no verdict."""
        verdicts = [met for met in (self.ttft_met, self.tpot_met) if met is not None]
        return all(verdicts) if verdicts else None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Latencies in seconds. `tpot_s` is (last - first token) / (tokens - 1); None for fewer than two tokens.
    `encode_s`, `prefill_s` and `decode_s` are sums of the spans of these stages, `queue_s` of waits for a lane, for
    blocks or before late tokens, not for images, transfers or another instance. `clock_error_s`: of times elsewhere."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float = 0.0
    queue_s: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_preemptions: int = 0
    clock_error_s: float = 0.0
    slo: SloReport = field(default_factory=SloReport)


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """A finished request. Picklable. Printing it prints its text; a notebook shows its timeline.

        >>> result = engine.generate("What is two plus three?", max_tokens=20)
        >>> result.text, result.finish_reason, result.usage.completion_tokens, result.metrics.ttft_s

    `error` is set, instead of raised, if the caller asked for that.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    metrics: RequestMetrics
    timeline: tuple[StageSpan, ...] = ()
    logprobs: Sequence[TextLogprob] | None = None  # None also if they were streamed and not kept
    stop_reason: str | int | None = None  # the stop string or stop token id that matched
    error: HydraError | None = None
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: Sequence[TextLogprob | None] | None = None  # one for each prompt token, None for the first
    max_tokens: int | None = None  # its limit: as requested, or the rest of the context
    gaps_s: Sequence[float] = ()  # seconds between each token and the next
    choices: tuple[Result, ...] = ()  # with n > 1 all answers in order, this one first; its usage counts them all

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Result({self.error!r})"
        text = self.text if len(self.text) <= _REPR_CHARS else self.text[: _REPR_CHARS - 1] + "…"
        return f"Result({', '.join([repr(text), *self.facts()])})"

    def facts(self) -> list[str]:
        """Returns phrases for a one-line summary: finish reason, numbers of tokens, images and answers, times."""
        usage, metrics = self.usage, self.metrics
        found = [str(self.finish_reason), f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"]
        if usage.num_images:
            found.append(f"{usage.num_images} image{'s' if usage.num_images > 1 else ''}")
        if self.choices:
            found.append(f"{len(self.choices)} answers")
        if metrics.ttft_s is not None:
            found.append(f"first token {1e3 * metrics.ttft_s:.0f} ms")
        return [*found, f"{1e3 * metrics.e2e_s:.0f} ms"]

    def _repr_html_(self) -> str:
        from hydra_engine.notebook import result_html  # only a notebook needs it

        answers = self.choices or (self,)
        texts = [one.text if one.error is None else f"{type(one.error).__name__}: {one.error}" for one in answers]
        return result_html(texts, self.facts(), self.timeline)


@dataclass(slots=True)  # not frozen: one is made for every token, and that would cost three times as much
class Piece:
    """An item of a stream: new text (may be empty), the new tokens, and in the last one the result.

    With n > 1 pieces of all answers are mixed; `index` is the answer's, and each answer ends with a piece that has its
    result. The first piece of each answer has the values of the prompt.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: Sequence[TextLogprob] = ()
    result: Result | None = None
    index: int = 0
    prompt_token_ids: tuple[int, ...] = ()  # only in an answer's first piece
    prompt_logprobs: Sequence[TextLogprob | None] | None = None  # only in an answer's first piece, if asked for


_REPR_CHARS = 60
_FULL_CHARS = 1 << 12
_FULL_TOKENS = 1 << 10
_FULL_LOGPROBS = 32  # entries with candidates; all of a piece's are built at once


def join_last(pieces: deque[Piece], piece: Piece) -> bool:
    """Merges `piece` into the latest of `pieces` of the same answer. False, and no change, if `piece` has a result, if
    none of `pieces` is of its answer, or if the latest is so large that copying it costs more than another piece."""
    if piece.result is not None:
        return False
    for place in range(len(pieces) - 1, -1, -1):
        latest = pieces[place]
        if latest.index == piece.index:
            if len(latest.text) >= _FULL_CHARS or len(latest.token_ids) >= _FULL_TOKENS:
                return False
            if len(latest.logprobs) >= _FULL_LOGPROBS:
                return False
            pieces[place] = _join(latest, piece)
            return True
    return False


def _join(first: Piece, second: Piece) -> Piece:
    """Returns two consecutive pieces of one answer as one. `second` has no result and no values of the prompt."""
    return replace(
        first,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=concat_logprobs(first.logprobs, second.logprobs),
    )
