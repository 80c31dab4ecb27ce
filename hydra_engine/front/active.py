"""One request on the front's side while it runs: tokens in, text out, and the result at the end.

Does not know channels or readers; `front.py` feeds it messages and passes on what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.messages import Finished
from hydra_engine.core.outputs import FinishReason, Piece, Result, StageSpan, TextLogprob, Usage
from hydra_engine.core.plans import TokenLogprobs
from hydra_engine.core.request import Request, Slo
from hydra_engine.errors import HydraError
from hydra_engine.intake.detokenize import IncrementalDetokenizer
from hydra_engine.intake.intake import Prepared
from hydra_engine.intake.tokenizer import Tokenizer
from hydra_engine.observe.timeline import metrics_of, relative, slo_report


class Reader(Protocol):
    """Who is told what becomes of a request: a handle, or one of several answers that share a handle."""

    @property
    def id(self) -> str: ...

    @property
    def done(self) -> bool: ...

    def feed(self, piece: Piece) -> None:
        """The piece that carries a result is the last one."""
        ...

    def fail(self, error: HydraError) -> None: ...


@dataclass(slots=True)
class ActiveRequest:
    """Owned by the front's loop from submission to Finished. `limits` hold for it, its own or the engine's."""

    request: Request
    handle: Reader
    tokenizer: Tokenizer
    detokenizer: IncrementalDetokenizer
    intake_spans: tuple[StageSpan, ...]
    limits: Slo = field(default_factory=Slo)
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    scores: dict[int, TextLogprob] = field(default_factory=dict)  # of prompt tokens, by position
    first_token_s: float | None = None
    last_token_s: float | None = None
    stop_string: str | None = None
    cancelled: bool = False
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.stop_ids = self.request.stop_ids

    @property
    def closed(self) -> bool:
        """Nothing that still arrives is shown: a stop string matched or the owner cancelled."""
        return self.cancelled or self.stop_string is not None

    @property
    def lacks_scores(self) -> bool:
        """Log probabilities of the prompt are wanted, and some of them have not come."""
        return self._is_scored and len(self.scores) < self.request.num_prompt - 1

    def on_scores(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Of the prompt tokens from position `start` on, perhaps not for the first time."""
        for position, entry in enumerate(logprobs, start):
            self.scores[position] = self._text_logprob(entry)

    def on_tokens(
        self, position: int, token_ids: Sequence[int], time_s: float, logprobs: Sequence[TokenLogprobs] = ()
    ) -> Piece | None:
        """The piece to show, or None. `position` counts the tokens before. Sets `stop_string` when one is complete."""
        if self.closed:
            return None
        assert position == len(self.token_ids), "an instance skipped or repeated a token"
        if self.first_token_s is None:
            self.first_token_s = time_s
        self.last_token_s = time_s
        text, shown_logprobs = "", []
        for index, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if logprobs:
                shown_logprobs.append(self._text_logprob(logprobs[index]))
            if not self._ends_silently(token_id):
                text += self.detokenizer.feed_one(token_id)
            if self.detokenizer.stop_string is not None:
                self.stop_string = self.detokenizer.stop_string
                break
        self.texts.append(text)
        self.logprobs.extend(shown_logprobs)
        piece = Piece(text, tuple(self.token_ids[position:]), tuple(shown_logprobs))
        if position:
            return piece
        return replace(piece, prompt_token_ids=self.request.prompt_token_ids, prompt_logprobs=self._prompt_logprobs())

    def on_next_token(self, token_id: int, time_s: float) -> Piece:
        """As `on_tokens` while it is not closed, for one that comes behind another one, without a log probability."""
        self.last_token_s = time_s
        self.token_ids.append(token_id)
        text = ""
        if token_id not in self.stop_ids or not self._ends_silently(token_id):
            text = self.detokenizer.feed_one(token_id)
            self.stop_string = self.detokenizer.stop_string
        self.texts.append(text)
        return Piece(text, (token_id,))

    def on_finished(self, finished: Finished, now: float) -> Piece:
        """The last piece, with the result; for reasons stop and length, or after a stop string."""
        tail = "" if self.stop_string is not None else self.detokenizer.flush()
        stop_reason: str | int | None = finished.stop_token_id
        if self.stop_string is None and self.detokenizer.stop_string is not None:
            self.stop_string = self.detokenizer.stop_string
        reason = FinishReason(finished.reason)
        if self.stop_string is not None:
            reason, stop_reason = FinishReason.STOP, self.stop_string
        elif finished.stop_token_id in self.request.eos_token_ids:
            stop_reason = None
        self.texts.append(tail)
        result = self._result(finished, now, reason, stop_reason)
        return Piece(tail, result=result)

    def failed_result(self, finished: Finished | None, now: float, error: HydraError) -> Result:
        """What observers see of a request that was cancelled or failed."""
        reason = FinishReason.ABORT if self.cancelled else FinishReason.ERROR
        ended = finished or Finished(self.request.id, reason.value, len(self.token_ids))
        return self._result(ended, now, reason, None, error)

    def _result(
        self,
        finished: Finished,
        now: float,
        reason: FinishReason,
        stop_reason: str | int | None,
        error: HydraError | None = None,
    ) -> Result:
        request = self.request
        timeline = relative((*self.intake_spans, *finished.spans), request.arrival_s)
        metrics = metrics_of(
            timeline,
            arrival_s=request.arrival_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            finished_s=now,
            num_tokens=len(self.token_ids),
            num_preemptions=finished.num_preemptions,
        )
        slo = slo_report(
            self.limits,
            ttft_s=metrics.ttft_s,
            late_gaps=finished.late_gaps,
            num_gaps=finished.num_gaps,
            timeline=timeline,
        )
        return Result(
            request_id=self.handle.id,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=reason,
            usage=replace(
                usage_of(request),
                completion_tokens=len(self.token_ids),
                cached_tokens=finished.cached_tokens,
                cached_images=finished.cached_images,
            ),
            metrics=replace(metrics, slo=slo),
            timeline=timeline,
            logprobs=tuple(self.logprobs) if request.sampling.logprobs is not None else None,
            stop_reason=stop_reason,
            error=error,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(),
            max_tokens=request.max_new_tokens,
        )

    @property
    def _is_scored(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    def _prompt_logprobs(self) -> tuple[TextLogprob | None, ...] | None:
        """None for the first token, and for those that have not come before a request that fails."""
        return tuple(map(self.scores.get, range(self.request.num_prompt))) if self._is_scored else None

    def _ends_silently(self, token_id: int) -> bool:
        """End-of-sequence and stop tokens end the text without being part of it."""
        sampling = self.request.sampling
        too_early = len(self.token_ids) < sampling.min_tokens and sampling.grammar is None
        return token_id in self.stop_ids and not sampling.include_stop_str_in_output and not too_early

    def _text_logprob(self, entry: TokenLogprobs) -> TextLogprob:
        text = self.tokenizer.token_text
        top = tuple((token_id, text(token_id), logprob) for token_id, logprob in entry.top)
        return TextLogprob(entry.token_id, text(entry.token_id), entry.logprob, entry.rank, top)


def activate(prepared: Prepared, handle: Reader, tokenizer: Tokenizer, engine: SchedulerConfig) -> ActiveRequest:
    """As it begins. Its number is its age on this node; its own latency limits go before the engine's."""
    request = replace(prepared.request, age=prepared.request.id)
    own = request.slo
    limits = Slo(
        own.ttft_s if own.ttft_s is not None else engine.ttft_slo,
        own.tpot_s if own.tpot_s is not None else engine.tpot_slo,
    )
    detokenizer = IncrementalDetokenizer(tokenizer, request.sampling)
    return ActiveRequest(request, handle, tokenizer, detokenizer, prepared.spans, limits)


def usage_of(request: Request) -> Usage:
    """The counts that are known at admission."""
    return Usage(
        prompt_tokens=request.num_prompt,
        completion_tokens=0,
        image_tokens=request.num_image_tokens,
        num_images=request.num_media,
    )
