"""What the lanes did lately, and from that what delayed a token: whose prefill, whose encode, a preemption, the CPU.

The scheduler tells it every step that has ended, the vision step that runs and whose KV is gone or comes from
elsewhere; it is asked only about tokens that came late. Is told times, never asks for them. Does not know plans or who
reads the answer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from hydra_engine.core.cost import CostSurface, LanguageLoad
from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import DelayCause
from hydra_engine.scheduler.hooks import StepObserver, Work
from hydra_engine.scheduler.typical_steps import TypicalSteps

MAX_PARTS = 9  # of one answer
_ALWAYS_WHOLE = 3  # largest parts that keep their request; with six kinds in a gap there are never more than nine
_ROUNDING_S = 1e-9  # less is no time but a difference of floats


@dataclass(frozen=True, slots=True, eq=False)
class _VisionStep:
    started_s: float
    ended_s: float  # infinite while it runs
    items: Work
    num_patches: int


@dataclass(frozen=True, slots=True, eq=False)
class _LanguageStep:
    started_s: float
    ended_s: float
    load: LanguageLoad
    chunks: Work
    vision_s: float

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class _Shares:
    """A step's seconds: what its decodes alone take, what chunks and vision added, and what nothing explains."""

    decode_s: float
    prefill_s: float
    encode_s: float
    rest_s: float


@dataclass(frozen=True, slots=True)
class _Away:
    """A request had no KV here, from before `told_s` until `until_s`, or (infinite) until a step computes it again."""

    request_id: RequestId
    kind: str
    told_s: float
    until_s: float


class _Gap:
    """The causes of one gap of one request as they are added up. Its own chunks and images are there because it was
    `away`. Patches of a vision step count once, however many language steps it delayed."""

    def __init__(self, request_id: RequestId, limit_s: float, away: _Away | None) -> None:
        self.request_id = request_id
        self.limit_s = limit_s
        self.own = "preemption" if away is None else away.kind
        self.stays = away is not None and away.until_s == math.inf  # away, until a step of its own
        self.encodes: set[_VisionStep] = set()
        self._seconds: dict[tuple[str, RequestId | None], float] = {}
        self._amounts: dict[tuple[str, RequestId | None], int] = {}

    def add(self, kind: str, seconds: float, request: RequestId | None = None, amount: int = 0) -> None:
        if seconds > _ROUNDING_S:
            if request == self.request_id:
                kind, request, amount = self.own, None, 0
            self._seconds[kind, request] = self._seconds.get((kind, request), 0.0) + seconds
            self._amounts[kind, request] = self._amounts.get((kind, request), 0) + amount

    def idle(self, seconds: float) -> None:
        """No step ran."""
        self.add(self.own if self.stays else "cpu", seconds)

    def requests(self) -> set[RequestId]:
        return {request for _, request in self._seconds if request is not None}

    def causes(self) -> tuple[DelayCause, ...]:
        """Largest first, at most `MAX_PARTS`; beyond these, what is left of a kind becomes one part."""
        ordered = self._ordered()
        if len(ordered) > MAX_PARTS:
            for kind, request in ordered[_ALWAYS_WHOLE:]:
                if request is not None:
                    self.add(kind, self._seconds.pop((kind, request)), amount=self._amounts.pop((kind, request)))
            ordered = self._ordered()
        return tuple(DelayCause(kind, self._seconds[kind, who], who, self._amounts[kind, who]) for kind, who in ordered)

    def _ordered(self) -> list[tuple[str, RequestId | None]]:
        return sorted(self._seconds, key=lambda key: -self._seconds[key])


@dataclass(frozen=True, slots=True)
class _Answer:
    """The last one, good for every request of the same gap that had no part in it: a late step is late for all."""

    question: tuple[float, float, float, int]
    involved: set[RequestId]
    causes: tuple[DelayCause, ...]


class StepHistory(StepObserver):
    """The latest steps of both lanes, and why a token was late.

    Steps of a lane are told in order. A vision step is told twice: when it is given to the lane, and when it has ended;
    the lane runs the oldest one that has not ended. With a `surface` a step is shared out by what it predicts, without
    one by what such steps took lately. `explain` costs as much as there are steps in the gap.
    """

    def __init__(self, surface: CostSurface | None = None, *, capacity: int = 512) -> None:
        self._surface = surface
        self._typical = TypicalSteps()
        self._language: deque[_LanguageStep] = deque(maxlen=capacity)
        self._vision: deque[_VisionStep] = deque(maxlen=capacity)
        self._begun: deque[_VisionStep] = deque()
        self._away: deque[_Away] = deque(maxlen=capacity)
        self._serial = 0  # grows with everything told
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

    def explain(self, request_id: RequestId, since_s: float, until_s: float, limit_s: float) -> tuple[DelayCause, ...]:
        """What the time between a request's token at `since_s` and its next one at `until_s`, longer than `limit_s`,
        went to: at least one part, the largest first. The last step in the gap is the one that gave the token; what its
        decodes alone take is left out where it is within the limit. The parts and it sum to the gap."""
        away = self._was_away(request_id, since_s, until_s)
        question = since_s, until_s, limit_s, self._serial
        answer = self._answer
        if answer is not None and away is None and answer.question == question and request_id not in answer.involved:
            return answer.causes
        here_s = since_s
        gap = _Gap(request_id, limit_s, away)
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

    def _was_away(self, request_id: RequestId, since_s: float, until_s: float) -> _Away | None:
        """The one that lasted longest."""
        found = None
        for away in reversed(self._away):
            if away.told_s < since_s:
                break
            if away.request_id == request_id and away.told_s <= until_s and (not found or away.until_s > found.until_s):
                found = away
        return found

    def _between(self, since_s: float, until_s: float) -> list[_LanguageStep]:
        """Steps that ran in the gap, in order."""
        found: list[_LanguageStep] = []
        for step in reversed(self._language):
            if step.ended_s <= since_s:
                break
            if step.started_s < until_s:
                found.append(step)
        return found[::-1]

    def _explain_gap(self, gap: _Gap, steps: Sequence[_LanguageStep], since_s: float, until_s: float) -> None:
        clock_s = since_s
        if steps and steps[0] is self._language[0] and len(self._language) == self._language.maxlen:
            # Steps that are forgotten ran before the oldest one that is known.
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
        """`part` of the step lies in the gap. What decodes take counts too in steps that gave no token."""
        own = any(request == gap.request_id for request, _ in step.chunks)
        if gap.stays and not own and not last:
            gap.add(gap.own, part * step.duration_s)
            return
        shares = self._shares(step)
        prefill_s, rest_s = shares.prefill_s, shares.rest_s
        num_tokens = _total(step.chunks)
        if last and part * shares.decode_s > gap.limit_s:
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
        """Shared by patches among the images of the vision steps beside it, each for as much of it as ran there."""
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
        """Vision steps that ran while it did: the running one, and those that have ended."""
        running = [self._begun[0]] if self._begun else []
        for vision in chain(running, reversed(self._vision)):
            if vision.ended_s <= step.started_s:
                return
            if vision.started_s < step.ended_s and vision.ended_s > vision.started_s and vision.num_patches:
                yield vision

    # ---- what a step's time went to

    def _shares(self, step: _LanguageStep) -> _Shares:
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
        load = step.load
        decode_s = surface.language_s(LanguageLoad(max(load.num_decodes, 1), load.decode_context))
        alone_s = surface.language_s(load)
        prefill_s = max(0.0, alone_s - decode_s) if step.chunks else 0.0
        return decode_s, prefill_s, max(0.0, surface.corun_s(load, step.vision_s) - alone_s)

    def _estimated(self, step: _LanguageStep) -> tuple[float, float, float]:
        """Chunks are charged what tokens of chunks cost lately, vision the rest, but no more than it ran; where nothing
        is known, every row costs the same."""
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
