"""A machine of which everything is known, and traffic that budgets alone decide about: no scheduler, no caches, no
threads. Steps cost what a surface says, times seeded noise; the lanes slow each other as it says.

`Traffic` is the shortest loop that serves requests with budgets: decodes first, then prompts in order of arrival, then
as much vision beside the step as it may have.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from hydra_engine.core.cost import CostSurface
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.scheduler.budget import Budgets, PendingWork, StepBudget
from hydra_engine.scheduler.latency.pending_limits import stretch


class SimulatedMachine:
    """Durations of steps: `surface` times `speed` (above 1: slower) times noise, a normal factor of relative size
    `noise` for each step. A share `stalls` of the steps takes ten times as long. `slice_s`: the vision lane pauses only
    after whole slices. `pause_s` lies between two steps."""

    def __init__(
        self,
        surface: CostSurface,
        *,
        noise: float = 0.0,
        seed: int = 0,
        stalls: float = 0.0,
        slice_s: float = 0.0,
        pause_s: float = 0.0,
    ) -> None:
        self.surface = surface
        self.speed = 1.0
        self.pause_s = pause_s
        self._noise = noise
        self._stalls = stalls
        self._slice_s = slice_s
        self._random = np.random.default_rng(seed)

    def language(self, load: LanguageLoad, vision_s: float, work_s: float, partition: int = 0) -> tuple[float, float]:
        """Seconds of a language step and of the vision that ran beside it: what was allowed, up to the end of a slice,
        and no more than the `work_s` that the vision lane has. On a part of the device vision runs all along, and the
        step has that part only."""
        divided = partition > 0 and work_s > 0 and len(self.surface.splits) > 0
        if divided:
            vision_s = math.inf
        factor = self.speed * max(0.1, 1 + self._noise * float(self._random.standard_normal()))
        if self._slice_s and vision_s < math.inf:
            begun = float(self._random.uniform(0, self._slice_s))  # of the slice that is running
            vision_s = math.ceil((vision_s + begun) / self._slice_s) * self._slice_s - begun if vision_s else 0.0
        beside_s = min(vision_s, work_s)
        all_along = math.inf if divided else beside_s / factor
        duration = self.surface.for_partition(partition).corun_s(load, all_along) * factor
        if self._random.random() < self._stalls:
            duration *= 10
        return duration, min(beside_s, duration)

    def vision_speed(self, partition: int) -> float:
        """Speed of the vision lane beside the language lane, over that on the undivided device."""
        return self.surface.vision_slowdown / self.surface.for_partition(partition).vision_slowdown

    def vision_work_s(self, load: VisionLoad) -> float:
        """Seconds that the vision lane needs beside the language lane on the undivided device."""
        return self.surface.vision_s(load) * self.surface.vision_slowdown * self.speed


@dataclass
class Prompt:
    tokens: int
    output: int
    computed: int = 0


@dataclass
class Step:
    now: float
    pending: PendingWork
    budget: StepBudget
    load: LanguageLoad
    gap_s: float
    vision_s: float

    @property
    def late(self) -> bool:
        return self.load.num_decodes > 0 and self.gap_s > self.pending.tpot_limit_s


@dataclass(slots=True)
class Gaps:
    """The token gaps of a decode so far."""

    elapsed_s: float = 0.0
    count: int = 0
    late: int = 0


@dataclass
class Traffic:
    """Poisson arrivals of prompts and pictures (each pair independent), served on a machine by budgets.

    `requests_per_s` with prompts of up to `longest` tokens and up to `output` tokens; `images_per_s` of `patches` each,
    encoded for their own sake.
    """

    machine: SimulatedMachine
    budgets: Budgets
    tpot_limit_s: float
    requests_per_s: float = 0.0
    images_per_s: float = 0.0
    longest: int = 1500
    output: int = 60
    patches: int = 1024
    seed: int = 0
    now: float = 0.0
    prompts: deque[Prompt] = field(default_factory=deque)
    contexts: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    gaps: list[Gaps] = field(default_factory=list)
    images: int = 0
    image_left_s: float = 0.0
    images_done: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def run(self, steps: int) -> list[Step]:
        done = []
        while len(done) < steps:
            step = self._step()
            if step is None:
                self._advance(0.01, busy=False)
            else:
                done.append(step)
        return done

    def decode(self, count: int, context: int, output: int) -> None:
        """Puts running decodes there."""
        self.contexts += [context] * count
        self.left += [output] * count
        self.gaps += [Gaps() for _ in range(count)]

    def pending(self) -> PendingWork:
        limits = np.full(len(self.contexts), self.tpot_limit_s)
        elapsed = np.array([gaps.elapsed_s for gaps in self.gaps])
        counts = np.array([gaps.count for gaps in self.gaps], np.int64)
        late = np.array([gaps.late for gaps in self.gaps], np.int64)
        return PendingWork(
            now=self.now,
            num_decodes=len(self.contexts),
            decode_context=sum(self.contexts),
            tpot_limit_s=self.tpot_limit_s if self.contexts else math.inf,
            stretch_s=stretch(limits, elapsed, counts, late),
            prefill_tokens=sum(prompt.tokens - prompt.computed for prompt in self.prompts),
            num_prefills=len(self.prompts),
            prefill_context=self.prompts[0].computed if self.prompts else 0,
            encode_patches=self.images * self.patches,
        )

    def _step(self) -> Step | None:
        pending = self.pending()
        budget = self.budgets.step_budget(pending)
        chunks = self._chunks(budget.tokens)
        load = LanguageLoad(
            pending.num_decodes,
            pending.decode_context,
            sum(chunks),
            sum(n * p.computed + n * (n + 1) / 2 for n, p in zip(chunks, self.prompts, strict=False)),
            len(chunks),
        )
        if not load.num_rows:
            return None
        speed = self.machine.vision_speed(budget.partition)
        duration, vision_s = self.machine.language(load, budget.vision_s, self._work_s() / speed, budget.partition)
        gap_s = duration + self.machine.pause_s
        step = Step(self.now, pending, budget, load, gap_s, vision_s)
        self.budgets.on_language(load, budget, duration_s=duration, gap_s=gap_s, vision_s=vision_s)
        self._encode(vision_s * speed)
        self._take_tokens(gap_s, chunks)
        self._advance(gap_s, busy=True)
        return step

    def _chunks(self, tokens: int) -> list[int]:
        chunks = []
        for prompt in self.prompts:
            if not tokens:
                break
            chunks.append(min(tokens, prompt.tokens - prompt.computed))
            tokens -= chunks[-1]
        return chunks

    def _take_tokens(self, gap_s: float, chunks: list[int]) -> None:
        for index, gaps in enumerate(self.gaps):
            self.contexts[index] += 1
            self.left[index] -= 1
            gaps.elapsed_s += gap_s
            gaps.count += 1
            gaps.late += gap_s > self.tpot_limit_s
        alive = [index for index, left in enumerate(self.left) if left > 0]
        self.contexts = [self.contexts[index] for index in alive]
        self.left = [self.left[index] for index in alive]
        self.gaps = [self.gaps[index] for index in alive]
        for count, prompt in zip(chunks, self.prompts, strict=False):
            prompt.computed += count
        while self.prompts and self.prompts[0].computed == self.prompts[0].tokens:
            prompt = self.prompts.popleft()
            self.decode(1, prompt.tokens, prompt.output)

    def _work_s(self) -> float:
        if not self.images:
            return 0.0
        one = self.machine.vision_work_s(VisionLoad(self.patches, self.patches**2))
        return self.image_left_s + one * (self.images - (self.image_left_s > 0))

    def _encode(self, vision_s: float) -> None:
        while self.images and vision_s > 1e-12:
            if not self.image_left_s:
                self.image_left_s = self.machine.vision_work_s(VisionLoad(self.patches, self.patches**2))
            part = min(vision_s, self.image_left_s)
            vision_s -= part
            self.image_left_s -= part
            if self.image_left_s < 1e-12:
                self.image_left_s = 0.0
                self.images -= 1
                self.images_done += 1
                self.budgets.on_vision(VisionLoad(self.patches, self.patches**2))

    def _advance(self, seconds: float, *, busy: bool) -> None:
        self.now += seconds
        if not busy:
            self._encode(seconds)
        for _ in range(self._random.poisson(self.requests_per_s * seconds)):
            tokens = int(self._random.integers(1, self.longest + 1))
            self.prompts.append(Prompt(tokens, int(self._random.integers(1, self.output + 1))))
        self.images += int(self._random.poisson(self.images_per_s * seconds))
