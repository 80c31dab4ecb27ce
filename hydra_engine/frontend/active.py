"""A running request on the frontend's side: tokens in, text out, and the result at the end.

Does not know channels or readers; `transitions.py` passes messages in and pieces on.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Protocol

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.logprobs import FIRST, SILENT, Logprobs, PromptLogprobs, TextLogprob, extend_logprobs
from hydra_engine.core.messages import Finished
from hydra_engine.core.outputs import FinishReason, Piece, Result, StageSpan, Usage
from hydra_engine.core.plans import TokenLogprobs
from hydra_engine.core.request import Request
from hydra_engine.errors import HydraError
from hydra_engine.preprocess.preprocessor import CallFacts, Prepared
from hydra_engine.preprocess.text.detokenize import IncrementalDetokenizer, Spelling
from hydra_engine.preprocess.text.tokenizer import Tokenizer
from hydra_engine.telemetry.timeline import metrics_of, relative, slo_report

MAX_LATE = 100  # gaps kept per request; all are counted


class Reader(Protocol):
    """The receiver of a request's text and end: a handle, or one of several answers that share a handle."""

    @property
    def id(self) -> str: ...

    @property
    def done(self) -> bool: ...

    @property
    def takes_pieces(self) -> bool:
        """True if log probabilities go out with pieces only; the result then has none."""
        ...

    def feed(self, piece: Piece) -> None:
        """Receives a piece; the one that carries a result is the last."""
        ...

    def fail(self, error: HydraError) -> None: ...


@dataclass(slots=True)
class ActiveRequest:
    """A request and the text made of its tokens. Owned by the frontend's loop from submission to Finished."""

    request: Request
    handle: Reader
    tokenizer: Tokenizer
    detokenizer: IncrementalDetokenizer
    preprocess_spans: tuple[StageSpan, ...]
    facts: CallFacts | None = None
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: Sequence[TextLogprob] = ()
    scores: Logprobs = field(init=False)  # of the prompt tokens received so far; the first token has none
    first_token_s: float | None = None
    last_token_s: float | None = None
    gaps_s: array[float] = field(default_factory=lambda: array("d"))  # between tokens
    late_by: Counter[str] = field(default_factory=Counter)  # late tokens by the main cause of the gap
    stop_string: str | None = None
    cancelled: bool = False
    stop_ids: frozenset[int] = field(init=False)
    _late: list[tuple[float, int, StageSpan]] = field(default_factory=list)  # a heap: (seconds, tokens before, gap)

    def __post_init__(self) -> None:
        self.stop_ids = self.request.stop_ids
        self.scores = Logprobs(Spelling(self.tokenizer))

    @property
    def closed(self) -> bool:
        """True once later tokens are not shown: a stop string matched or the owner cancelled."""
        return self.cancelled or self.stop_string is not None

    @property
    def lacks_scores(self) -> bool:
        """True while log probabilities of the prompt are wanted and some have not arrived."""
        return self._is_scored and len(self.scores) < self.request.num_prompt - 1

    def on_scores(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Adds log probabilities of the prompt tokens from position `start` on; ignores those that arrived before."""
        assert start <= len(self.scores) + 1, "an instance skipped a prompt token"
        for entry in logprobs[len(self.scores) + 1 - start :]:
            self.scores.append(entry)

    def on_tokens(
        self, position: int, token_ids: tuple[int, ...], time_s: float, logprobs: Sequence[TokenLogprobs] = ()
    ) -> Piece | None:
        """Returns the piece to show, or None once closed. `position` is the number of tokens before. Sets `stop_string`
        when one is complete."""
        if self.cancelled or self.stop_string is not None:
            return None
        known, detokenizer, text = self.token_ids, self.detokenizer, ""
        assert position == len(known), "an instance skipped or repeated a token"
        if self.first_token_s is None:
            self.first_token_s = time_s
        shown = Logprobs(detokenizer.spelling) if logprobs else None
        for index, token_id in enumerate(token_ids):
            if self.last_token_s is not None:
                self.gaps_s.append(time_s - self.last_token_s)
            self.last_token_s = time_s
            known.append(token_id)
            is_silent = token_id in self.stop_ids and self._ends_silently()
            if shown is not None:
                shown.append(logprobs[index], FIRST * detokenizer.at_start | SILENT * is_silent)
            if not is_silent:
                text += detokenizer.decode_one(token_id)
            if detokenizer.stop_string is not None:
                self.stop_string = detokenizer.stop_string
                break
        self.texts.append(text)
        piece = Piece(text, token_ids[: len(known) - position], shown or ())
        if shown is not None and not self.handle.takes_pieces:
            self.logprobs = extend_logprobs(self.logprobs, shown)
        if position:
            return piece
        return replace(piece, prompt_token_ids=self.request.prompt_token_ids, prompt_logprobs=self._prompt_logprobs())

    def on_late(self, gap: StageSpan) -> None:
        """Records the gap before the next token, which is late."""
        if not self.closed:
            self.late_by[gap.blame[0].kind] += 1
            keep = heapq.heappush if len(self._late) < MAX_LATE else heapq.heappushpop
            keep(self._late, (gap.end_s - gap.start_s, len(self.token_ids), gap))

    @property
    def late(self) -> list[StageSpan]:
        """The longest gaps before late tokens, in order of time; times are absolute."""
        return [gap for _, _, gap in sorted(self._late, key=itemgetter(1))]

    def on_finished(self, finished: Finished, now: float) -> Piece:
        """Returns the last piece, with the result: for reasons stop and length, or after a stop string."""
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
        """The result of a request that was cancelled or failed, for observers."""
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
        reported = (span for span in finished.spans if not span.blame)  # gaps include tokens that were not shown
        timeline = relative((*self.preprocess_spans, *reported, *self.late), request.arrival_s)
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
            self.request.slo,
            ttft_s=metrics.ttft_s,
            late_by=self.late_by,
            num_gaps=max(0, len(self.token_ids) - 1),
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
            logprobs=None if request.sampling.logprobs is None or self.handle.takes_pieces else self.logprobs,
            stop_reason=stop_reason,
            error=error,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(),
            max_tokens=request.max_new_tokens,
            gaps_s=self.gaps_s,
        )

    @property
    def _is_scored(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        return PromptLogprobs(self.scores, self.request.num_prompt) if self._is_scored else None

    def _ends_silently(self) -> bool:
        """True if the latest token, one of `stop_ids`, ends the text without being part of it."""
        sampling = self.request.sampling
        too_early = len(self.token_ids) < sampling.min_tokens and sampling.grammar is None
        return not sampling.include_stop_str_in_output and not too_early


def activate(prepared: Prepared, handle: Reader, tokenizer: Tokenizer, engine: SchedulerConfig) -> ActiveRequest:
    """Returns the active request. Its number is its age on this node; its own latency limits take precedence over the
    engine's."""
    slo = prepared.request.slo.with_defaults(engine.ttft_slo, engine.tpot_slo)
    request = replace(prepared.request, age=prepared.request.id, slo=slo)
    detokenizer = IncrementalDetokenizer(tokenizer, request.sampling)
    return ActiveRequest(request, handle, tokenizer, detokenizer, prepared.spans, prepared.facts)


def usage_of(request: Request) -> Usage:
    """The counts known at admission."""
    return Usage(
        prompt_tokens=request.num_prompt,
        completion_tokens=0,
        image_tokens=request.num_image_tokens,
        num_images=request.num_media,
    )
