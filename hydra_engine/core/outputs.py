"""What comes out of the engine: token deltas inside, results and pieces of text outside, and the stage timeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hydra_engine.core.logprobs import TextLogprob, joined
from hydra_engine.errors import HydraError


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Departure(StrEnum):
    """Why an instance is done with its part of a request although the request goes on elsewhere, or may."""

    MOVED = "moved"  # what it computed has been pulled and acknowledged
    RETURNED = "returned"  # it gave way to an older request, and what it needs again is not computed here
    WITHDRAWN = "withdrawn"  # nobody fetched what was offered: the lease is over, or the other instance is gone


@dataclass(frozen=True, slots=True)
class DelayCause:
    """What a part of a late token's wait went to.

    `kind` is prefill or encode (of `request`, a request's number on this engine, with `amount` tokens or patches),
    transfer (its KV moved to another instance), preemption (its own), lost (its instance was), step (the step took
    longer than such steps take), decode (the decodes of the step alone took longer than the limit) or cpu (nothing was
    computed for it).
    """

    kind: str
    seconds: float
    request: int | None = None
    amount: int = 0


BLAMES = ("prefill", "encode", "transfer", "preemption", "lost", "step", "decode", "cpu")


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One stretch of a request's life, in seconds since the request arrived.

    `stage` is one of fetch, preprocess, tokenize, encode_wait, encode, prefill_wait, cached (a moment: KV of `tokens`
    tokens was found in the cache), prefill, decode, decode_wait (a late token's gap, over whatever else is told of that
    time), preempted and lost (what an instance that was lost has not told, until another one begins); between instances
    offered_features, offered_kv (computed, not fetched yet), pull_features and pull_kv.
    `lane` is front, vision, language or transfer; `batch` how many requests shared the step (0: not a step); `tokens`
    how many tokens (language) or patches (vision) of this request it covered. `cause` says what a wait was for;
    `blame` shares the time of a late token out among what ran instead, largest part first.
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
    """`cached_tokens` of the prompt were found in the KV cache; `cached_images` needed no encode of their own."""

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
    """Whether a request met its limits, in seconds; None where it had no limit or did not get that far.

    TTFT is met if the first token came within the limit, TPOT if at least 90 % of the gaps between tokens did
    (HydraInfer, section 5.1). `late_gaps` of `num_gaps` did not; without a limit those count that are longer than 50 ms
    and two typical steps. `late_by` counts them by the kind of `DelayCause` that took most of each. `reason` says
    what a missed limit was lost to.
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
        """Both, as far as there are limits; None without any."""
        verdicts = [met for met in (self.ttft_met, self.tpot_met) if met is not None]
        return all(verdicts) if verdicts else None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds. `tpot_s` is (last - first token) / (tokens - 1); None where the request had too few tokens."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float = 0.0
    queue_s: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_preemptions: int = 0
    slo: SloReport = field(default_factory=SloReport)


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """A finished request. Picklable; `error` is set instead of raised when the caller asked for that. Printing it
    prints its text, and a notebook shows its timeline."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    metrics: RequestMetrics
    timeline: tuple[StageSpan, ...] = ()
    logprobs: Sequence[TextLogprob] | None = None  # None also where they went out with pieces and were not kept
    stop_reason: str | int | None = None  # the stop string or stop token id that matched
    error: HydraError | None = None
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: Sequence[TextLogprob | None] | None = None  # of every prompt token but the first, which has None
    max_tokens: int | None = None  # how many it could have had: as asked for, or what the context had room for
    gaps_s: Sequence[float] = ()  # between each token and the next, as the instances sent them
    choices: tuple[
        Result, ...
    ] = ()  # with n > 1 all answers in order; this one is the first, its usage counts them all

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Result({self.error!r})"
        text = self.text if len(self.text) <= _REPR_CHARS else self.text[: _REPR_CHARS - 1] + "…"
        return f"Result({', '.join([repr(text), *self.facts()])})"

    def facts(self) -> list[str]:
        """What it took, in a few words each."""
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
        from hydra_engine.core.result_html import result_html  # which imports this file

        return result_html(self)


@dataclass(slots=True)  # not frozen: one is made for every token, and that would cost three times as much
class Piece:
    """What a stream yields: new text (may be empty on the last one), the new tokens, and at the end the result.

    With n > 1 pieces of all answers come mixed; `index` says whose, and each answer ends with a piece that carries its
    result. What a reader may want to know of the prompt is in the first piece of each answer.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: Sequence[TextLogprob] = ()
    result: Result | None = None
    index: int = 0
    prompt_token_ids: tuple[int, ...] = ()  # of an answer's first piece
    prompt_logprobs: Sequence[TextLogprob | None] | None = None  # the same, where they were asked for


_REPR_CHARS = 60
_FULL_CHARS = 1 << 12
_FULL_TOKENS = 1 << 10
_FULL_LOGPROBS = 32  # each with its candidates: what is made of a piece is made in one go


def join_last(pieces: deque[Piece], piece: Piece) -> bool:
    """Adds `piece` to the latest one of its answer. False: it is an end, or nothing of its answer waits, or so much of
    it that copying it for each piece would cost more than another one."""
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
    return replace(
        first,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=joined(first.logprobs, second.logprobs),
    )
