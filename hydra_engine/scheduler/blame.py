"""What the lanes did lately, and from that what delayed a token: whose prefill, whose encode, a preemption, the CPU.

The scheduler tells it every step that has ended, the vision step that runs and who was preempted; it is asked only
about tokens that came late. Is told times, never asks for them. Does not know limits, plans or who reads the answer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median

from hydra_engine.core.cost import CostSurface, LanguageLoad
from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import Blame

Work = Sequence[tuple[RequestId, int]]  # (request, tokens or patches), amounts positive

MAX_PARTS = 8  # of one answer
_ALWAYS_WHOLE = 3  # largest parts that keep their request; with five kinds there are never more than eight
_MAX_NAMED = 3  # parts that a sentence names
_MIN_NAMED = 0.1  # of the blame that a part must have to be named
_ROUNDING_S = 1e-9  # less is no time but a difference of floats
_RECENT = 32  # steps that a typical duration is taken from
_UNITS = {"prefill": "tokens", "encode": "patches"}
_WORDS = {"preemption": "preemption", "step": "slow step", "cpu": "between steps"}


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


class _Gap:
    """The blame for one gap of one request as it is added up. Its own chunks and images are there because it was
    preempted. Patches of a vision step count once, however many language steps it delayed."""

    def __init__(self, request_id: RequestId, preempted: bool) -> None:
        self.request_id = request_id
        self.preempted = preempted
        self.encodes: set[_VisionStep] = set()
        self._seconds: dict[tuple[str, RequestId | None], float] = {}
        self._amounts: dict[tuple[str, RequestId | None], int] = {}

    def add(self, kind: str, seconds: float, request: RequestId | None = None, amount: int = 0) -> None:
        if seconds > _ROUNDING_S:
            if request == self.request_id:
                kind, request, amount = "preemption", None, 0
            self._seconds[kind, request] = self._seconds.get((kind, request), 0.0) + seconds
            self._amounts[kind, request] = self._amounts.get((kind, request), 0) + amount

    def idle(self, seconds: float) -> None:
        """No step ran."""
        self.add("preemption" if self.preempted else "cpu", seconds)

    def culprits(self) -> set[RequestId]:
        return {request for _, request in self._seconds if request is not None}

    def blames(self) -> tuple[Blame, ...]:
        """Largest first, at most `MAX_PARTS`; beyond these, what is left of a kind becomes one part."""
        ordered = self._ordered()
        if len(ordered) > MAX_PARTS:
            for kind, request in ordered[_ALWAYS_WHOLE:]:
                if request is not None:
                    self.add(kind, self._seconds.pop((kind, request)), amount=self._amounts.pop((kind, request)))
            ordered = self._ordered()
        return tuple(Blame(kind, self._seconds[kind, who], who, self._amounts[kind, who]) for kind, who in ordered)

    def _ordered(self) -> list[tuple[str, RequestId | None]]:
        return sorted(self._seconds, key=lambda key: -self._seconds[key])


@dataclass(frozen=True, slots=True)
class _Answer:
    """The last one, good for every request of the same gap that had no part in it: a late step is late for all."""

    since_s: float
    until_s: float
    serial: int
    involved: set[RequestId]
    blames: tuple[Blame, ...]

    def holds_for(self, request_id: RequestId, since_s: float, until_s: float, serial: int) -> bool:
        same = (self.since_s, self.until_s, self.serial) == (since_s, until_s, serial)
        return same and request_id not in self.involved


class TypicalSteps:
    """What steps usually take on a machine without a cost surface: medians of the latest ones, so that single slow
    steps do not matter. To be taught only steps beside which no vision ran."""

    def __init__(self) -> None:
        self._decodes: dict[int, deque[float]] = {}  # seconds by the bit length of the number of rows
        self._per_token: deque[float] = deque(maxlen=_RECENT)

    def learn(self, load: LanguageLoad, duration_s: float) -> None:
        if not load.prefill_tokens:
            size = load.num_decodes.bit_length()
            if size not in self._decodes:
                self._decodes[size] = deque(maxlen=_RECENT)
            self._decodes[size].append(duration_s)
            return
        decode_s = self.decode_s(load.num_decodes) if load.num_decodes else 0.0
        if decode_s is not None:
            self._per_token.append(max(0.0, duration_s - decode_s) / load.prefill_tokens)

    def decode_s(self, num_decodes: int) -> float | None:
        """A step of about so many decodes and nothing else; None if no such step has been seen."""
        size = num_decodes.bit_length()
        nearest = min(self._decodes, key=lambda other: abs(other - size), default=None)
        return None if nearest is None else median(self._decodes[nearest])

    def per_token_s(self) -> float | None:
        """What a token of a chunk adds to a step."""
        return median(self._per_token) if self._per_token else None


class StepLog:
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
        self._preemptions: deque[tuple[float, RequestId]] = deque(maxlen=capacity)
        self._serial = 0  # grows with everything told
        self._answer: _Answer | None = None

    # ---- what happened

    def language(self, started_s: float, ended_s: float, load: LanguageLoad, chunks: Work, vision_s: float) -> None:
        """A language step has ended, beside which vision ran for `vision_s`. The hot path."""
        self._serial += 1
        self._language.append(_LanguageStep(started_s, ended_s, load, chunks, vision_s))
        if self._surface is None and not vision_s:
            self._typical.learn(load, ended_s - started_s)

    def vision_began(self, now: float, items: Work) -> None:
        """A vision step is given to the lane, which begins it as soon as the ones before it have ended."""
        self._serial += 1
        self._begun.append(_VisionStep(now, math.inf, items, _total(items)))

    def vision(self, started_s: float, ended_s: float, items: Work) -> None:
        """The oldest vision step that has begun has ended."""
        self._serial += 1
        if self._begun:
            self._begun.popleft()
        if self._begun:
            self._begun[0] = replace(self._begun[0], started_s=max(self._begun[0].started_s, ended_s))
        self._vision.append(_VisionStep(started_s, ended_s, items, _total(items)))

    def preempted(self, request_id: RequestId, now: float) -> None:
        self._serial += 1
        self._preemptions.append((now, request_id))

    # ---- why

    def explain(self, request_id: RequestId, since_s: float, until_s: float) -> tuple[Blame, ...]:
        """What the time between a request's token at `since_s` and its next one at `until_s` went to, largest part
        first. The last step in the gap is the one that gave the token; what its decodes alone take is nobody's fault
        and left out. The parts and it sum to the gap."""
        preempted = self._was_preempted(request_id, since_s, until_s)
        answer = self._answer
        if answer is not None and not preempted and answer.holds_for(request_id, since_s, until_s, self._serial):
            return answer.blames
        steps = self._between(since_s, until_s)
        gap = _Gap(request_id, preempted)
        self._blame_gap(gap, steps, since_s, until_s)
        involved = gap.culprits() | {request for step in steps for request, _ in step.chunks}
        blames = gap.blames()
        if not preempted and request_id not in involved:
            self._answer = _Answer(since_s, until_s, self._serial, involved, blames)
        return blames

    def _was_preempted(self, request_id: RequestId, since_s: float, until_s: float) -> bool:
        for preempted_s, who in reversed(self._preemptions):
            if preempted_s < since_s:
                return False
            if who == request_id and preempted_s <= until_s:
                return True
        return False

    def _between(self, since_s: float, until_s: float) -> list[_LanguageStep]:
        """Steps that ran in the gap, in order."""
        found: list[_LanguageStep] = []
        for step in reversed(self._language):
            if step.ended_s <= since_s:
                break
            if step.started_s < until_s:
                found.append(step)
        return found[::-1]

    def _blame_gap(self, gap: _Gap, steps: Sequence[_LanguageStep], since_s: float, until_s: float) -> None:
        clock_s = since_s
        if steps and steps[0] is self._language[0] and len(self._language) == self._language.maxlen:
            # Steps that are forgotten ran before the oldest one that is known.
            clock_s = max(since_s, steps[0].started_s)
            gap.add("preemption" if gap.preempted else "step", clock_s - since_s)
        for step in steps:
            started_s, ended_s = max(step.started_s, clock_s), min(step.ended_s, until_s)
            if ended_s > started_s:
                gap.idle(started_s - clock_s)
                self._blame_step(gap, step, (ended_s - started_s) / step.duration_s, last=step is steps[-1])
                clock_s = ended_s
        gap.idle(until_s - clock_s)

    def _blame_step(self, gap: _Gap, step: _LanguageStep, part: float, *, last: bool) -> None:
        """`part` of the step lies in the gap. What decodes take is blamed too in steps that gave no token."""
        own = any(request == gap.request_id for request, _ in step.chunks)
        if gap.preempted and not own and not last:
            gap.add("preemption", part * step.duration_s)
            return
        shares = self._shares(step)
        prefill_s, rest_s = shares.prefill_s, shares.rest_s
        num_tokens = _total(step.chunks)
        if own and not last:
            gap.add("preemption", part * shares.decode_s)
        elif not last and (step.load.num_decodes or not num_tokens):
            rest_s += shares.decode_s
        elif not last:
            prefill_s += shares.decode_s
        for request, tokens in step.chunks:
            gap.add("prefill", part * prefill_s * tokens / num_tokens, request, tokens)
        self._blame_encodes(gap, step, part * shares.encode_s)
        gap.add("step", part * rest_s)

    def _blame_encodes(self, gap: _Gap, step: _LanguageStep, seconds: float) -> None:
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


def sentence(blames: Sequence[Blame]) -> str:
    """The largest parts in words: "prefill of request 12 (384 tokens), encode of request 9 (1152 patches)"."""
    if not blames:
        return "the decode step itself"
    limit_s = _MIN_NAMED * sum(blame.seconds for blame in blames)
    return ", ".join(_words(blame) for blame in blames[:_MAX_NAMED] if blame.seconds >= limit_s)


def _words(blame: Blame) -> str:
    if blame.kind in _WORDS:
        return _WORDS[blame.kind]
    whose = "other requests" if blame.request is None else f"request {blame.request}"
    size = f" ({blame.amount} {_UNITS[blame.kind]})" if blame.amount else ""
    return f"{blame.kind} of {whose}{size}"


def _total(work: Work) -> int:
    return sum(amount for _, amount in work)
