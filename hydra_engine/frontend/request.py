"""A request on the frontend's side: its text (`ActiveRequest`), and its phase and current attempt (`RequestInFlight`).

An attempt is the request on its instances under one id, dropped as a whole when it ends; enough is kept to start again.
Sends nothing; `transitions.py` does, passes messages in and pieces on, and decides all but which requests may crash
instances (`PoisonGuard`). Does not know channels or readers.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import itemgetter
from typing import Protocol

import msgspec

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.logprobs import FIRST, SILENT, Logprobs, PromptLogprobs, TextLogprob, extend_logprobs
from hydra_engine.core.messages import Delta, Encode, Finished, PixelPayload
from hydra_engine.core.outputs import FinishReason, Piece, Result, StageSpan, Usage
from hydra_engine.core.reports import StageReport
from hydra_engine.core.request import Request, Resumed
from hydra_engine.core.results import TokenLogprobs
from hydra_engine.errors import HydraError
from hydra_engine.frontend.routing.instances import InstanceLoad
from hydra_engine.frontend.routing.router import Route
from hydra_engine.preprocess.preprocessor import CallFacts, Prepared
from hydra_engine.preprocess.text.tokenizer import IncrementalDetokenizer, Spelling, Tokenizer
from hydra_engine.telemetry.timeline import metrics_of, relative, slo_report
from hydra_engine.telemetry.trace import LiveRequest

MAX_LATE = 100  # gaps kept per request; all are counted


# ---- its text


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
            metrics=replace(metrics, clock_error_s=finished.clock_error_s, slo=slo),
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
    """Returns the active request. Its number is its arrival index on this node; its own latency limits take precedence
    over the engine's."""
    slo = prepared.request.slo.with_defaults(engine.ttft_slo, engine.tpot_slo)
    request = replace(prepared.request, arrival_index=prepared.request.id, slo=slo)
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


# ---- its attempts

# For this long a request that has left an instance is still blamed for its death, which peers often notice before it is
# reported.
LATE_S = 1.0

# (instance, id, since): the instance's latest report about the id, or None if there is none since that time.
Reported = Callable[[str, RequestId, float], StageReport | None]


@dataclass(slots=True, eq=False)
class Charge:
    """A request's share of an instance's load, counted from creation until `release`."""

    instance: InstanceLoad
    prefill_tokens: int = 0  # tokens to compute there
    decode_tokens: int = 0  # tokens whose KV is there while it decodes
    patches: int = 0
    decodes_later: bool = False  # it decodes there too, after this prefill
    is_expected: bool = False  # it will probably decode there: `decode_tokens` counts among those that are expected
    arriving_tokens: int = 0  # whose KV has to be copied there first

    def __post_init__(self) -> None:
        self._count(1)

    def grow(self, num_tokens: int) -> None:
        """Adds tokens to the decode share; no-op if there is none, or it is expected only."""
        if not self.decode_tokens or self.is_expected:
            return
        self.decode_tokens += num_tokens
        self.instance.decode_tokens += num_tokens

    def leave(self) -> None:
        """Records that its KV has been computed elsewhere and is being copied."""
        self.arriving_tokens = self.decode_tokens
        self.instance.arriving_tokens += self.arriving_tokens

    def arrive(self) -> None:
        """Records that its KV has been copied. No-op if it was already."""
        self.instance.arriving_tokens -= self.arriving_tokens
        self.arriving_tokens = 0

    def release(self) -> None:
        self._count(-1)
        self.prefill_tokens = self.decode_tokens = self.patches = self.arriving_tokens = 0
        self.decodes_later = False

    def _count(self, sign: int) -> None:
        if self.is_expected:
            self.instance.expected_decodes += sign * (self.decode_tokens > 0)
            self.instance.expected_tokens += sign * self.decode_tokens
            return
        self.instance.prefill_tokens += sign * self.prefill_tokens
        self.instance.patches += sign * self.patches
        self.instance.decode_tokens += sign * self.decode_tokens
        self.instance.decodes += sign * (self.decode_tokens > 0)
        self.instance.later_decodes += sign * self.decodes_later
        self.instance.arriving_tokens += sign * self.arriving_tokens


@dataclass(slots=True, eq=False)
class Job:
    """An encode job: images of a request on instance `name`. `pending` are those that no other instance has been asked
    for since."""

    id: RequestId
    name: str
    pending: set[int]
    charge: Charge


@dataclass(slots=True, eq=False)
class Attempt:
    """The request on its instances under one id, from `began_s` on, when `base` of its tokens were known. `decoder` is
    empty until it is chosen."""

    request: Request  # as its instances know it
    route: Route
    base: int
    began_s: float
    prefill_charge: Charge
    decode_charge: Charge
    decoder: str = field(init=False)
    decoder_ready: bool = field(init=False)  # the decoder has fetched all that it needs: it has sent a token
    instances: set[str] = field(init=False)  # those that have not reported their end
    jobs: dict[RequestId, Job] = field(default_factory=dict)
    unserved: set[int] = field(default_factory=set)  # images that wait for an encoder
    asks_decoder: bool = False  # its prefill has begun and no instance could decode it
    # By position: tokens that came before another instance's earlier ones.
    early_tokens: dict[int, Delta] = field(default_factory=dict)
    prefilled_s: float = 0.0  # the time of its first token
    num_routed: int = 0  # requests that had been routed by then
    replaced_decoder: str = ""  # the previous decoder, which may have the KV nevertheless
    victim: str = ""  # the instance that was asked to hand over to `decoder`
    late_victim_tokens: int = 0  # tokens that the victim has sent since
    final: Finished | None = None  # its end, though tokens before it may still be missing

    def __post_init__(self) -> None:
        self.decoder, self.decoder_ready = self.route.decode, not self.route.moves
        self.instances = {self.route.prefill}

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def is_unserved(self) -> bool:
        """True while it waits for an instance that serves one of its stages."""
        return self.asks_decoder or bool(self.unserved)

    @property
    def complete(self) -> bool:
        """True once the decoder runs it alone: no tokens, KV blocks or end of other instances are outstanding."""
        return self.decoder_ready and not self.early_tokens and self.final is None

    @property
    def idle(self) -> bool:
        return not self.instances and not self.jobs

    @property
    def lacks_tokens(self) -> bool:
        """True if tokens before the decoder's are missing and no other instance is left to send them."""
        return bool(self.early_tokens) and self.instances == {self.decoder}

    def holders(self) -> set[str]:
        """The instances that work on it or on its images."""
        return {*self.instances, *(job.name for job in list(self.jobs.values()))}

    def needs(self, name: str) -> bool:
        """True if the attempt cannot continue without this instance's KV or its outstanding tokens."""
        return name in self.instances and (name == self.decoder or not self.decoder_ready or bool(self.early_tokens))

    def moves_between(self, pair: set[str]) -> bool:
        """True if its KV is being transferred between the two instances of the pair."""
        sources = self.instances - {self.decoder}
        return not self.decoder_ready and any({source, self.decoder} == pair for source in sources)

    def jobs_between(self, pair: set[str]) -> list[Job]:
        """The encode jobs whose features are transferred between the two instances of the pair."""
        return [job for job in self.jobs.values() if {job.name, self.route.prefill} == pair]

    def release_prefill(self) -> None:
        """Releases the charges of the prompt and its images, which are computed. Its KV is on its way from now on."""
        for charge in (self.prefill_charge, *(job.charge for job in self.jobs.values())):
            charge.release()
        if self.decoder and not self.decoder_ready:
            self.decode_charge.leave()

    def decode_at(self, instance: InstanceLoad, num_tokens: int, *, ready: bool) -> None:
        """Makes `instance` the decoder, with `num_tokens` in its KV; if not `ready`, it pulls the KV first."""
        self.decode_charge.release()
        coming = num_tokens if self.prefilled_s and not ready else 0
        self.decode_charge = Charge(instance, decode_tokens=num_tokens, arriving_tokens=coming)
        self.decoder, self.decoder_ready = instance.name, ready


class Phase(Enum):
    """The phase of a request (docs/failures.md). Its attempt is None in WAITING and ENDED only."""

    WAITING = "waiting"  # waits for an instance that can serve it, or, as a suspect, for its turn
    PREFILLING = "prefilling"  # the attempt has no token yet; images are encoded by it or by others
    MOVING = "moving"  # its KV, or tokens older than the decoder's, are in transfer
    DECODING = "decoding"  # one instance sends token after token
    CLOSING = "closing"  # the end is decided, work is aborted, and reports of its instances are awaited
    ENDED = "ended"  # the result is out


_DECODING = Phase.DECODING
RUNNING = (Phase.PREFILLING, Phase.MOVING, Phase.DECODING)


@dataclass(slots=True, eq=False)
class RequestInFlight:
    """A request from its admission to its result. `pixels` are kept to the end, for an attempt that starts from
    nothing."""

    active: ActiveRequest
    pixels: tuple[PixelPayload, ...]
    preferred: str = ""  # the instance that has computed the same prompt for another answer, or empty
    phase: Phase = Phase.WAITING
    attempt: Attempt | None = None
    deadline_s: float | None = None  # of waiting (for an attempt or an encoder) or closing
    attempts: int = 0
    replays: int = 0  # attempts that ended without a death
    deaths: int = 0  # of instances that worked on it
    is_cleared: bool = False  # no longer suspected of crashing instances
    left_instances: frozenset[str] = frozenset()  # instances that it left last, at `left_s`
    left_s: float = 0.0
    preempted: bool = False
    has_moved: bool = False  # handed over while it decoded, which happens once
    blame: str = "transfer"  # cause of the time between the last attempt and this one
    lost_span: StageSpan | None = None  # from the last report of a lost instance, until the next attempt begins
    lost_attempts: set[RequestId] = field(default_factory=set)  # whose lost instances' spans are in `spans`
    spans: list[StageSpan] = field(default_factory=list)
    reports: list[Finished] = field(default_factory=list)

    @property
    def request(self) -> Request:
        """The request as submitted; its id and arrival index are the frontend's number."""
        return self.active.request

    @property
    def arrival_index(self) -> int:
        return self.request.arrival_index

    @property
    def num_known(self) -> int:
        return len(self.active.token_ids)

    @property
    def running(self) -> bool:
        """True while there is an attempt that is not being ended."""
        return self.phase in RUNNING

    @property
    def is_prefilled(self) -> bool:
        """True once the attempt has produced a token."""
        return self.attempt is not None and self.num_known > self.attempt.base

    def is_plain_next_token(self, name: str, number: int, position: int) -> bool:
        """True for a token that changes nothing but the text. Its conditions, and what is to be decided where one
        fails:

        it decodes                     a first token, or one during a KV transfer, changes the phase
        `number` is its attempt        another number belongs to an attempt that was given up
        `name` is its decoder          tokens of another instance must agree with the known ones
        `position` comes next          early tokens are kept, repeated ones compared
        no instance has died of it     a token clears a suspect
        """
        attempt = self.attempt
        return (
            self.phase is _DECODING
            and attempt is not None
            and number == attempt.id
            and name == attempt.decoder
            and position == len(self.active.token_ids)
            and not self.deaths
        )

    @property
    def current(self) -> Attempt:
        """The attempt of a request that has one."""
        assert self.attempt is not None
        return self.attempt

    def attempt_at(self, name: str, number: RequestId) -> Attempt | None:
        """The attempt, if `number` is its id and instance `name` works on it."""
        attempt = self.attempt
        return attempt if attempt is not None and number == attempt.id and name in attempt.instances else None

    def job_at(self, name: str, number: RequestId) -> Job | None:
        """The encode job with this id, if instance `name` works on it."""
        job = None if self.attempt is None else self.attempt.jobs.get(number)
        return job if job is not None and job.name == name else None

    def is_at(self, name: str) -> bool:
        attempt = self.attempt
        return attempt is not None and name in attempt.holders()

    def may_need_images(self) -> bool:
        return self.phase is Phase.PREFILLING and self.attempt is not None and self.attempt.route.remote_images

    # ---- from one phase to the next

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.request.num_prompt + self.num_known

    @property
    def num_left(self) -> int:
        """Tokens that it may still generate."""
        return self.request.max_new_tokens - self.num_known

    def begin(self, number: RequestId, route: Route, instances: Mapping[str, InstanceLoad], now: float) -> Attempt:
        num_tokens, prefill_at = self.num_tokens, instances[route.prefill]
        local = () if route.remote_images else self.request.images
        patches = sum(image.num_patches for image in local)
        stays = not route.moves
        prefill = Charge(prefill_at, prefill_tokens=num_tokens, patches=patches, decodes_later=stays)
        decode_at = instances[route.decode or route.likely_decoder or route.prefill]
        decode = Charge(decode_at, decode_tokens=num_tokens, is_expected=not stays)
        self.attempt = Attempt(self.attempt_request(number), route, self.num_known, now, prefill, decode)
        self.phase, self.deadline_s = Phase.PREFILLING, None
        self.attempts += 1
        self._end_lost(now)
        return self.attempt

    def advance(self) -> None:
        """Sets the phase that the attempt has reached; no-op once it is being ended."""
        attempt = self.current
        if self.phase not in RUNNING:
            return
        if len(self.active.token_ids) == attempt.base:
            self.phase = Phase.PREFILLING
        else:
            self.phase = Phase.DECODING if attempt.complete else Phase.MOVING

    def keep_early(self, delta: Delta) -> bool:
        """Keeps tokens that come early. Returns False if they contradict known ones."""
        known, attempt = self.active.token_ids, self.current
        for index, token_id in enumerate(delta.token_ids):
            position = delta.position + index
            if position < len(known):
                if position < attempt.base or known[position] != token_id:
                    return False
                continue
            late = None if index else delta.late
            logprobs = delta.logprobs[index : index + 1]
            early = Delta(delta.request_id, position, (token_id,), delta.time_s, logprobs, late)
            if attempt.early_tokens.setdefault(position, early).token_ids != (token_id,):
                return False
        return True

    def leave(self, blame: str) -> None:
        """Drops the attempt, which has no jobs any more. `blame`: why, if another one follows."""
        if self.attempt is not None:
            self.attempt.prefill_charge.release()
            self.attempt.decode_charge.release()
        self.phase, self.attempt, self.deadline_s, self.blame = Phase.WAITING, None, None, blame

    def lose(self, name: str) -> None:
        """Records the spans of a lost instance that the attempt needs, from its tokens and gaps: its report is lost
        with it."""
        attempt = self.current
        last_s = attempt.began_s
        if self.is_prefilled:
            if name == attempt.route.prefill:
                self.spans.append(_lost(name, attempt.began_s, attempt.prefilled_s))
            last_s = attempt.prefilled_s
            gaps = [gap for gap in self.active.late if gap.instance == name and gap.end_s >= attempt.began_s]
            end_s = self.active.last_token_s or last_s
            for gap in (*gaps, StageSpan("", end_s, end_s)):
                if gap.start_s > last_s:
                    self.spans.append(StageSpan("decode", last_s, gap.start_s, name, "language"))
                last_s = max(last_s, gap.end_s)
        self.lost_span = _lost(name, last_s, last_s)
        self.lost_attempts.add(attempt.id)

    def _end_lost(self, now: float) -> None:
        if self.lost_span is not None:
            self.spans.append(replace(self.lost_span, end_s=now))
            self.lost_span = None

    # ---- messages to instances

    def attempt_request(self, number: RequestId) -> Request:
        active, resumed = self.active, None
        if active.first_token_s is not None and active.last_token_s is not None:
            resumed = Resumed(active.first_token_s, active.last_token_s, active.late_by.total(), self.blame)
        tokens = tuple(active.token_ids)
        return replace(self.request, id=number, generated_token_ids=tokens, preempted=self.preempted, resumed=resumed)

    def encode_message(self, number: RequestId, indices: Iterable[int], target: str) -> Encode:
        chosen = tuple(indices)
        images = tuple(self.request.images[index] for index in chosen)
        request = replace(self.request, id=number, prompt_token_ids=(), images=images)
        return Encode(request, tuple(self.pixels[index] for index in chosen), target, self.current.id, chosen)

    # ---- progress

    def live(self, reported: Reported) -> LiveRequest:
        """The request's current stage as far as the frontend and the latest reports of its instances show."""
        where, report = self._report(reported)
        handle, arrival_s, first_s = self.active.handle, self.request.arrival_s, self.active.first_token_s
        return LiveRequest(handle.id, arrival_s, first_s, self.num_known, report.stage, where, report.done, report.of)

    def _report(self, reported: Reported) -> tuple[str, StageReport]:
        number, attempt = self.request.id, self.attempt
        if attempt is None:
            return "", StageReport(number, "queue" if self.lost_span is None else "lost")
        if self.is_prefilled:
            report = reported(attempt.decoder, attempt.id, self.active.last_token_s or 0.0)
            if report is not None and report.stage != "transfer":
                return attempt.decoder, report
            if attempt.decoder_ready:
                return attempt.decoder, StageReport(number, "decode")
            return attempt.victim or attempt.route.prefill, StageReport(number, "transfer")
        report = reported(attempt.route.prefill, attempt.id, 0.0) or StageReport(number, "queue")
        jobs = [(job.name, reported(job.name, job.id, 0.0)) for job in attempt.jobs.values()]
        if report.stage != "queue" or not jobs:
            return attempt.route.prefill, report
        stages = [(name, job.stage) for name, job in jobs if job is not None] or [(jobs[0][0], "queue")]
        name, stage = min(stages, key=lambda item: ("encode", "transfer", "queue").index(item[1]))
        return name, msgspec.structs.replace(report, stage=stage)

    # ---- the end

    def end_of_tokens(self) -> Finished | None:
        """The end that the known tokens already amount to, if an instance was lost before it could send it; None if
        more tokens are to come."""
        request, tokens = self.request, self.active.token_ids
        reason = request.finish_reason(len(tokens), tokens[-1]) if tokens else None
        if reason is None:
            return None
        stop_token_id = tokens[-1] if reason is FinishReason.STOP else None
        return Finished(request.id, reason, len(tokens), stop_token_id=stop_token_id)

    def merge_reports(self, final: Finished, now: float) -> Finished:
        """Returns `final` with the spans and counts of all attempts and encode jobs."""
        self._end_lost(now)
        request, reports = self.request, self.reports
        return msgspec.structs.replace(
            final,
            spans=(*self.spans, *(span for report in reports for span in report.spans)),
            num_preemptions=sum(report.num_preemptions for report in reports),
            cached_tokens=min(sum(report.cached_tokens for report in reports), request.num_prompt),
            cached_images=min(sum(report.cached_images for report in reports), request.num_media),
            clock_error_s=max((report.clock_error_s for report in reports), default=final.clock_error_s),
        )


def _lost(name: str, start_s: float, end_s: float) -> StageSpan:
    return StageSpan("lost", start_s, end_s, name, "language", cause="instance lost, tried again")


class PoisonGuard:
    """Requests that may crash instances: which are blamed for a death, and which run alone.

    All requests of an instance that dies are blamed, since the cause is unknown. A request that may only be blamed once
    more is a suspect, and suspects run one at a time, so that the one that kills an instance takes no other suspect
    with it. `requests` is a live view of all requests, by the user's number.
    """

    def __init__(self, requests: Mapping[RequestId, RequestInFlight], max_attempts: int) -> None:
        self._requests = requests
        self._max_attempts = max_attempts

    def is_poison(self, in_flight: RequestInFlight) -> bool:
        return in_flight.deaths >= self._max_attempts

    def is_suspect(self, in_flight: RequestInFlight) -> bool:
        return 0 < in_flight.deaths == self._max_attempts - 1

    def must_wait(self, in_flight: RequestInFlight) -> bool:
        """True if the request is a suspect while another suspect runs."""
        return self.is_suspect(in_flight) and any(
            other is not in_flight and other.running and self.is_suspect(other) for other in self._requests.values()
        )

    def on_token(self, in_flight: RequestInFlight) -> None:
        """Takes back one death of a suspect that has got a token from its decoder. Once per request, since it may cost
        one instance more than `max_attempts`."""
        if self.is_suspect(in_flight) and in_flight.is_prefilled and not in_flight.is_cleared:
            in_flight.is_cleared = True
            in_flight.deaths -= 1

    def note_left(self, in_flight: RequestInFlight, names: Iterable[str], now: float) -> None:
        """Records that the request leaves these instances, none of which is known to be dead."""
        in_flight.left_instances, in_flight.left_s = frozenset(names), now

    def left_lately(self, name: str, now: float) -> list[RequestInFlight]:
        """Returns the requests that left the dead instance `name` within `LATE_S`, the oldest first; each once."""
        blamed = [f for f in self._requests.values() if name in f.left_instances and now - f.left_s <= LATE_S]
        for in_flight in blamed:
            in_flight.left_instances = frozenset()
        return sorted(blamed, key=lambda in_flight: in_flight.arrival_index)
