"""Records the recent steps of both lanes and attributes late tokens to their causes: which request's prefill or encode,
a preemption, a hand-over, a slow step, the CPU.

The scheduler reports every step that has ended, the vision step in flight, and requests whose KV is gone or comes from
another instance; it asks only about late tokens. Reads no clock; times are arguments. Does not know plans.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from hydra_engine.core.cost import CostSurface
from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import DelayCause
from hydra_engine.core.plans import LanguageLoad
from hydra_engine.scheduler.hooks import StepObserver, Work
from hydra_engine.scheduler.step_stats import TypicalSteps

MAX_PARTS = 9  # causes of one answer
_ALWAYS_WHOLE = 3  # largest causes that always keep their request; with at most six kinds in a gap that makes nine
_ROUNDING_S = 1e-9  # seconds; less is a rounding error


@dataclass(frozen=True, slots=True, eq=False)
class _VisionStep:
    started_s: float
    ended_s: float  # infinite while it runs
    items: Work  # (request, patches) of each image
    num_patches: int


@dataclass(frozen=True, slots=True, eq=False)
class _LanguageStep:
    started_s: float
    ended_s: float
    load: LanguageLoad
    chunks: Work  # (request, tokens) of each chunk
    vision_s: float  # seconds that the vision lane ran beside it

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class _Shares:
    """A step's seconds, split: what its decodes alone take, what chunks and vision add, and the unexplained rest."""

    decode_s: float
    prefill_s: float
    encode_s: float
    rest_s: float


@dataclass(frozen=True, slots=True)
class _Away:
    """Time during which a request has no KV on this instance. It began at `reported_s` or earlier and ends at `until_s`
    or, if that is infinite, with the request's next step here. `kind`: its kind of DelayCause."""

    request_id: RequestId
    kind: str
    reported_s: float
    until_s: float


class _Gap:
    """Adds up the causes of one token gap of one request. `away`: its absence in the gap, None without one. The time of
    the request's own chunks and images counts as the kind of that absence, without one as preemption. Patches of a
    vision step count once, however many language steps it delayed."""

    def __init__(self, request_id: RequestId, tpot_limit_s: float, away: _Away | None) -> None:
        self.request_id = request_id
        self.tpot_limit_s = tpot_limit_s
        self.own = "preemption" if away is None else away.kind
        self.stays = away is not None and away.until_s == math.inf  # away until its own next step
        self.encodes: set[_VisionStep] = set()
        self._seconds: dict[tuple[str, RequestId | None], float] = {}
        self._amounts: dict[tuple[str, RequestId | None], int] = {}

    def add(self, kind: str, seconds: float, request: RequestId | None = None, amount: int = 0) -> None:
        """Adds `seconds` to the cause, and `amount` tokens or patches; ignores rounding errors. If the cause is the
        request itself, its kind becomes `own`, without request and amount."""
        if seconds > _ROUNDING_S:
            if request == self.request_id:
                kind, request, amount = self.own, None, 0
            self._seconds[kind, request] = self._seconds.get((kind, request), 0.0) + seconds
            self._amounts[kind, request] = self._amounts.get((kind, request), 0) + amount

    def idle(self, seconds: float) -> None:
        """Adds time in which no step ran: to `own` if the request lost its KV in this gap (`stays`), else to "cpu"."""
        self.add(self.own if self.stays else "cpu", seconds)

    def requests(self) -> set[RequestId]:
        """The other requests that caused a part of the gap."""
        return {request for _, request in self._seconds if request is not None}

    def causes(self) -> tuple[DelayCause, ...]:
        """The causes, the largest first. If there are more than `MAX_PARTS`, all but the three largest are merged by
        kind and lose their requests."""
        ordered = self._ordered()
        if len(ordered) > MAX_PARTS:
            for kind, request in ordered[_ALWAYS_WHOLE:]:
                if request is not None:
                    self.add(kind, self._seconds.pop((kind, request)), amount=self._amounts.pop((kind, request)))
            ordered = self._ordered()
        return tuple(DelayCause(kind, self._seconds[kind, who], who, self._amounts[kind, who]) for kind, who in ordered)

    def _ordered(self) -> list[tuple[str, RequestId | None]]:
        """The (kind, request) keys of all causes, the largest first."""
        return sorted(self._seconds, key=lambda key: -self._seconds[key])


@dataclass(frozen=True, slots=True)
class _Answer:
    """The latest answer of `explain`. It holds for every request with the same gap that was not away in it and is not
    `involved`, since a late step is late for all its decodes."""

    question: tuple[float, float, float, int]  # since_s, until_s, tpot_limit_s, number of reports so far
    involved: set[RequestId]  # requests among the causes, or with a chunk in a step of the gap
    causes: tuple[DelayCause, ...]


class StepHistory(StepObserver):
    """The observer that keeps the latest steps of both lanes and explains late tokens from them.

    Steps of a lane are reported in order; a vision step twice, when it is submitted and when it has ended. The oldest
    unfinished vision step is the running one. With a cost `surface` a step's time is split by its predictions, without
    one by the recent durations of similar steps. `capacity`: steps kept of each lane, and absences of requests.
    `explain` looks only at those since the gap began.
    """

    def __init__(self, surface: CostSurface | None = None, *, capacity: int = 512) -> None:
        self._surface = surface
        self._typical = TypicalSteps()
        self._language: deque[_LanguageStep] = deque(maxlen=capacity)
        self._vision: deque[_VisionStep] = deque(maxlen=capacity)
        self._begun: deque[_VisionStep] = deque()
        self._away: deque[_Away] = deque(maxlen=capacity)
        self._serial = 0  # number of reports so far
        self._answer: _Answer | None = None

    # ---- what happened

    def on_language_done(
        self, started_s: float, ended_s: float, load: LanguageLoad, chunks: Work, vision_s: float
    ) -> None:
        self._serial += 1
        self._language.append(_LanguageStep(started_s, ended_s, load, chunks, vision_s))
        if self._surface is None and not vision_s:
            self._typical.learn(load, ended_s - started_s)

    def on_vision_planned(self, now: float, items: Work) -> None:
        self._serial += 1
        self._begun.append(_VisionStep(now, math.inf, items, _total(items)))

    def on_vision_done(self, started_s: float, ended_s: float, items: Work) -> None:
        self._serial += 1
        if self._begun:
            self._begun.popleft()
        if self._begun:
            self._begun[0] = replace(self._begun[0], started_s=max(self._begun[0].started_s, ended_s))
        self._vision.append(_VisionStep(started_s, ended_s, items, _total(items)))

    def on_away(self, request_id: RequestId, kind: str, now: float, until_s: float = math.inf) -> None:
        self._serial += 1
        self._away.append(_Away(request_id, kind, now, until_s))

    # ---- why

    def explain(
        self, request_id: RequestId, since_s: float, until_s: float, tpot_limit_s: float
    ) -> tuple[DelayCause, ...]:
        """The causes, the largest first and at least one, of the time between a request's token at `since_s` and its
        next one at `until_s`, which is longer than `tpot_limit_s`. Of more than `MAX_PARTS` the smaller ones are merged
        by kind, without request. The last step in the gap computed the token; its decodes' own time is left out if it
        is within the limit. Together with that time the causes sum to the gap."""
        away = self._absence(request_id, since_s, until_s)
        question = since_s, until_s, tpot_limit_s, self._serial
        answer = self._answer
        if answer is not None and away is None and answer.question == question and request_id not in answer.involved:
            return answer.causes
        here_s = since_s
        gap = _Gap(request_id, tpot_limit_s, away)
        if away is not None and not gap.stays:
            here_s = min(away.until_s, until_s)
            gap.add(away.kind, here_s - since_s)
        steps = self._between(here_s, until_s)
        self._explain_gap(gap, steps, here_s, until_s)
        involved = gap.requests() | {request for step in steps for request, _ in step.chunks}
        causes = gap.causes() or (DelayCause("decode", until_s - since_s),)
        if away is None and request_id not in involved:
            self._answer = _Answer(question, involved, causes)
        return causes

    def _absence(self, request_id: RequestId, since_s: float, until_s: float) -> _Away | None:
        """The absence of the request that was reported between the two times and ends last; None if there is none."""
        found = None
        for away in reversed(self._away):
            if away.reported_s < since_s:
                break
            if (
                away.request_id == request_id
                and away.reported_s <= until_s
                and (not found or away.until_s > found.until_s)
            ):
                found = away
        return found

    def _between(self, since_s: float, until_s: float) -> list[_LanguageStep]:
        """The language steps in the history that ran, at least in part, between the two times, in order."""
        found: list[_LanguageStep] = []
        for step in reversed(self._language):
            if step.ended_s <= since_s:
                break
            if step.started_s < until_s:
                found.append(step)
        return found[::-1]

    def _explain_gap(self, gap: _Gap, steps: Sequence[_LanguageStep], since_s: float, until_s: float) -> None:
        """Adds to `gap` the causes of the time from `since_s` to `until_s`: those of `steps`, which ran in it, and the
        time between them. Before the oldest step of a full history: `gap.own` if `gap.stays`, else "step"."""
        clock_s = since_s
        if steps and steps[0] is self._language[0] and len(self._language) == self._language.maxlen:
            # Steps before the oldest one in the history are forgotten.
            clock_s = max(since_s, steps[0].started_s)
            gap.add(gap.own if gap.stays else "step", clock_s - since_s)
        for step in steps:
            started_s, ended_s = max(step.started_s, clock_s), min(step.ended_s, until_s)
            if ended_s > started_s:
                gap.idle(started_s - clock_s)
                self._charge_step(gap, step, (ended_s - started_s) / step.duration_s, last=step is steps[-1])
                clock_s = ended_s
        gap.idle(until_s - clock_s)

    def _charge_step(self, gap: _Gap, step: _LanguageStep, part: float, *, last: bool) -> None:
        """Adds to `gap` the causes of a step, `part` (0 to 1) of which lies in it. With `gap.stays`, a step without a
        chunk of the request counts whole as `gap.own`, unless it is the `last`. Otherwise chunks count as "prefill" of
        their requests, vision beside the step as "encode", the rest as "step". The time of its decodes alone counts in
        the last step, which computed the late token, only if it exceeds the limit ("decode"); in an earlier one as
        `gap.own` if it has a chunk of the request, in a step of chunks alone as "prefill", else as "step"."""
        own = any(request == gap.request_id for request, _ in step.chunks)
        if gap.stays and not own and not last:
            gap.add(gap.own, part * step.duration_s)
            return
        shares = self._shares(step)
        prefill_s, rest_s = shares.prefill_s, shares.rest_s
        num_tokens = _total(step.chunks)
        if last and part * shares.decode_s > gap.tpot_limit_s:
            gap.add("decode", part * shares.decode_s)
        elif own and not last:
            gap.add(gap.own, part * shares.decode_s)
        elif not last and (step.load.num_decodes or not num_tokens):
            rest_s += shares.decode_s
        elif not last:
            prefill_s += shares.decode_s
        for request, tokens in step.chunks:
            gap.add("prefill", part * prefill_s * tokens / num_tokens, request, tokens)
        self._charge_encodes(gap, step, part * shares.encode_s)
        gap.add("step", part * rest_s)

    def _charge_encodes(self, gap: _Gap, step: _LanguageStep, seconds: float) -> None:
        """Splits `seconds` among the vision steps that ran beside the step, by overlap, and within each among its
        images, by patches. If none is known, adds them to "encode" without a request."""
        beside = [
            (min(vision.ended_s, step.ended_s) - max(vision.started_s, step.started_s), vision)
            for vision in self._beside(step)
        ]
        total_s = sum(overlap_s for overlap_s, _ in beside)
        if not beside:
            gap.add("encode", seconds)
        for overlap_s, vision in beside:
            new = vision not in gap.encodes
            gap.encodes.add(vision)
            for request, patches in vision.items:
                share = overlap_s / total_s * patches / vision.num_patches
                gap.add("encode", seconds * share, request, patches if new else 0)

    def _beside(self, step: _LanguageStep) -> Iterator[_VisionStep]:
        """The vision steps that ran during the language step, the running one included, latest first."""
        running = [self._begun[0]] if self._begun else []
        for vision in chain(running, reversed(self._vision)):
            if vision.ended_s <= step.started_s:
                return
            if vision.started_s < step.ended_s and vision.ended_s > vision.started_s and vision.num_patches:
                yield vision

    # ---- what a step's time went to

    def _shares(self, step: _LanguageStep) -> _Shares:
        """Splits the duration of a step by the cost surface or, without one, by recent steps. Decodes come first; what
        chunks and vision add is scaled down to what they leave."""
        if self._surface is not None:
            decode_s, prefill_s, encode_s = self._predicted(self._surface, step)
        else:
            decode_s, prefill_s, encode_s = self._estimated(step)
        decode_s = min(decode_s, step.duration_s)
        excess_s = step.duration_s - decode_s
        explained_s = prefill_s + encode_s
        scale = min(1.0, excess_s / explained_s) if explained_s > 0 else 0.0
        return _Shares(decode_s, prefill_s * scale, encode_s * scale, max(0.0, excess_s - explained_s))

    @staticmethod
    def _predicted(surface: CostSurface, step: _LanguageStep) -> tuple[float, float, float]:
        """(decode, prefill, encode seconds) as the cost surface predicts them. A step without decodes counts as one
        with a decode: it reads the weights too."""
        load = step.load
        decode_s = surface.language_s(LanguageLoad(max(load.num_decodes, 1), load.decode_context))
        alone_s = surface.language_s(load)
        prefill_s = max(0.0, alone_s - decode_s) if step.chunks else 0.0
        return decode_s, prefill_s, max(0.0, surface.corun_s(load, step.vision_s) - alone_s)

    def _estimated(self, step: _LanguageStep) -> tuple[float, float, float]:
        """(decode, prefill, encode seconds) from recent steps: decodes are charged their recent time, that of one if
        there are none, chunks the recent cost per token, vision the rest, at most the time that it ran. Before any step
        of decodes alone, every row costs the same; before any with chunks, these are charged all that decodes leave."""
        load = step.load
        decode_s = self._typical.decode_s(max(load.num_decodes, 1))
        if decode_s is None:
            decode_s = step.duration_s * load.num_decodes / max(load.num_rows, 1)
        excess_s = max(0.0, step.duration_s - decode_s)
        prefill_s = 0.0
        if step.chunks:
            per_token_s = self._typical.per_token_s()
            prefill_s = excess_s if per_token_s is None else min(excess_s, per_token_s * load.prefill_tokens)
        return decode_s, prefill_s, min(excess_s - prefill_s, step.vision_s)


def _total(work: Work) -> int:
    return sum(amount for _, amount in work)
