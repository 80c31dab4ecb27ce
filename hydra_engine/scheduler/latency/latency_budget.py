"""Budgets that keep latency limits: the largest steps whose predicted time stays within the limit of their decodes.

HydraInfer (section 4.2, Algorithm 1) searches a token budget and an image budget once, separately, from the TPOT limit.
Here both are searched together before every step, for the decodes that run now, on a measured cost surface that
includes the slowdown of each lane by the other, corrected by the measured steps. The limits of the requests are read in
`pending_limits.py`. Reads no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.cost import CostSurface
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.core.reports import BudgetReport, StepSpeeds
from hydra_engine.core.state import RequestState
from hydra_engine.scheduler.budget import USED, Budgets, PendingWork, StepBudget
from hydra_engine.scheduler.decodes import ReadyDecodes
from hydra_engine.scheduler.latency.correction import Correction, Kind, kind_of
from hydra_engine.scheduler.latency.pending_limits import with_limits
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.scheduler.step_stats import Window

LOOK = 8  # steps after which the other partitions are rated again
GAIN = 1.05  # multiple of the current rate that another partition has to exceed
MIN_SHARE = 0.2  # share of the slack that prefill and vision each get at least while both have work
MIN_VISION = 0.05  # share of the limit that vision gets beside every step, even if decodes alone fill it
MIN_CHUNK = 16  # tokens; with fewer a waiting prefill counts as starved
STARVED_STEPS = 64  # after so many steps a starved prefill gets a chunk even if that exceeds the limit
STARVED_SHARE = 0.5  # share of the limit that such a chunk may take
MAX_STRETCH = 4.0  # multiple of the limit that a step may last for the sake of a first token
BATCH_EFFICIENCY = 0.95  # share of the vision model's best throughput that a batch has to reach
SLICE_SHARE = 0.25  # share of the limit: longest time between two points where the vision lane can pause
TYPICAL_CONTEXT = 512  # keys of each decode, where nothing has run yet
MIN_PREDICTION = 0.25  # share of the limit: smallest denominator of a step's relative error
RECENT_STEPS = 256  # steps behind `BudgetReport.limit_used`
OVERRUNS = 64
OVERRUN_KEPT = 0.9  # share of the steps in which vision overruns by no more than budgets assume


class _Towards(IntEnum):
    """The work that gets the slack: the time that decodes leave within the limit of a step."""

    BOTH = 0
    PREFILL = 1
    VISION = 2


class _Step:
    """Predicts the seconds of a language step with the decodes of `pending`, from its prefill tokens and the seconds of
    vision beside it; more of either never takes less time. Predictions are not corrected by measured steps. All prefill
    tokens are assumed to attend as one chunk behind the computed tokens of the first prefill."""

    __slots__ = ("_chunk_share", "_context", "_decodes", "_keys_s", "_num_chunks", "_surface", "base")

    def __init__(self, surface: CostSurface, pending: PendingWork) -> None:
        self._surface = surface
        self._decodes = pending.num_decodes
        self._context = pending.prefill_context
        self._num_chunks = pending.num_prefills
        self._chunk_share = pending.num_prefills / max(1, pending.prefill_tokens)
        self._keys_s = surface.per_key_s * pending.decode_context + surface.per_decode_s * pending.num_decodes
        self.base = surface.rows.interpolate(pending.num_decodes) + self._keys_s  # seconds of the decodes alone

    def alone_s(self, tokens: int) -> float:
        """Seconds of the step with `tokens` of prefill and no vision beside it."""
        if not tokens:
            return self.base
        surface = self._surface
        pairs = tokens * (self._context + 0.5 * (tokens + 1))
        chunks = min(self._num_chunks, math.ceil(tokens * self._chunk_share))
        seconds = surface.rows.interpolate(self._decodes + tokens) + self._keys_s
        return seconds + surface.per_pair_s * pairs + surface.per_chunk_s * chunks

    def corun_s(self, tokens: int, vision_s: float) -> float:
        """Seconds of the step while vision runs for `vision_s` of it; infinite: all along."""
        alone = self.alone_s(tokens)
        slowed = self._slowed(alone)
        if vision_s >= slowed:
            return slowed
        return alone + vision_s * (1 - alone / slowed)

    def vision_room_s(self, tokens: int, allowed_s: float) -> float:
        """Seconds of vision that fit beside the step within `allowed_s`; infinite if vision may run all along."""
        alone = self.alone_s(tokens)
        slowed = self._slowed(alone)
        if slowed <= allowed_s:
            return math.inf
        if alone >= allowed_s:
            return 0.0
        return (allowed_s - alone) / (1 - alone / slowed)

    def _slowed(self, alone: float) -> float:
        """Seconds of the step with vision beside it all along, from its seconds `alone`."""
        surface = self._surface
        return self.base * surface.decode_slowdown + (alone - self.base) * surface.prefill_slowdown


class LatencyBudgets(Budgets):
    """The budgets of one instance with a measured cost surface and latency limits.

    With decodes that have a limit, a step is filled until `predicted(tokens, vision seconds) * correction + pause`
    reaches it. `correction` is a factor that 99 % of the latest steps stay below (`correction.py`), `pause` the time
    between two steps. Without such decodes a step is filled as by `Budgets`. The configured `max_step_tokens` and
    `image_budget` are upper bounds at all times.

    While prefill and vision both have work, the slack that decodes leave is split in proportion to the seconds of work
    that wait on either side, at least a fifth each; what one cannot use goes to the other. If the first token with the
    earliest deadline would then be late, the side that it waits for gets all slack, and the step may last up to the
    smaller of `PendingWork.stretch_s` and four times the limit.

    Neither side starves: vision gets at least 5 % of the limit beside every step if it has that much work, and after 64
    steps in a row with less than 16 tokens a prefill gets as many as take half a limit, at least 16 if it has them.

    On a divided device (`CostSurface.splits`) a step also has a partition, chosen by `PartitionChoice`: on a part of
    the device vision runs beside it all along, and the step gets the prefill that fits the limit there.

    `num_slices`: number of pieces into which the vision lane can cut a vision step; 0: it cannot pause.
    """

    def __init__(self, surface: CostSurface, config: SchedulerConfig, *, num_slices: int) -> None:
        super().__init__(config)
        self._surface = surface
        self._surfaces = [surface.for_partition(number) for number in range(1 + len(surface.splits))]
        self._choice = PartitionChoice(len(self._surfaces))
        self._num_slices = num_slices
        self._correction = Correction(surface.language_error, surface.corun_error)
        self._kind = Kind.DECODES
        self._latest = PendingWork(now=0.0)
        self._latest_vision_s = math.inf
        self._guesses = [0] * len(_Towards)  # tokens of the latest step, where the search for the next one begins
        self._starved = 0
        self._pairs_per_patch = 0.0
        self._image_budget = self._best_image_budget()
        self._overruns = Window(OVERRUNS)
        self._overruns.add(self._vision_s(self._image_budget) / max(1, num_slices))
        self._late_steps = self._stretched_steps = 0
        self._used: deque[float] = deque(maxlen=RECENT_STEPS)

    # ---- before a step

    def with_limits(
        self, pending: PendingWork, requests: RequestTable, ready: ReadyDecodes, due: RequestState | None
    ) -> PendingWork:
        return with_limits(pending, requests, ready, due)

    def step_budget(self, pending: PendingWork) -> StepBudget:
        """The budget of the next language step: the largest that keeps the limit of its decodes. Longer steps, for a
        first token at risk, waiting vision or a starved prefill, are described in the class."""
        tpot_limit_s = pending.tpot_limit_s
        highest = max(0, self._config.max_step_tokens - pending.num_decodes)
        if not pending.num_decodes or tpot_limit_s == math.inf:
            budget = super().step_budget(pending)._replace(partition=0)
        else:
            budget = self._filled(pending, highest, tpot_limit_s, _Towards.BOTH)
            if self._is_at_risk(pending, budget):
                towards = _Towards.VISION if pending.due_patches else _Towards.PREFILL
                target = max(tpot_limit_s, min(pending.stretch_s, MAX_STRETCH * tpot_limit_s))
                budget = self._filled(pending, highest, target, towards)
        budget = self._on_partition(pending, budget, min(highest, pending.prefill_tokens))
        self._latest, self._latest_vision_s = pending, math.inf if budget.partition else budget.vision_s
        return self._without_starvation(pending, budget, min(highest, pending.prefill_tokens))

    def _filled(self, pending: PendingWork, highest: int, target_s: float, towards: _Towards) -> StepBudget:
        """The largest budget of at most `highest` tokens whose step stays within `target_s`, its slack given to
        `towards`. Vision may make it longer: it gets `MIN_VISION` of the limit, or all the time if it cannot pause."""
        step, guess = _Step(self._surface, pending), self._guesses[towards]
        tpot_limit_s, want = pending.tpot_limit_s, min(highest, pending.prefill_tokens)
        allowed = self._allowed(Kind.VISION, target_s)
        if not pending.encode_patches:
            tokens = _largest(step.alone_s, self._allowed(Kind.CHUNKS, target_s), want, guess=guess)
            self._guesses[towards] = tokens
            # for a picture that arrives meanwhile
            vision_s = max(0.0, step.vision_room_s(tokens, allowed) - self._overrun_s)
            return StepBudget(tokens, vision_s, tpot_limit_s, target_s, step.alone_s(tokens), tokens < want)
        if step.corun_s(want, math.inf) <= allowed:
            return StepBudget(want, math.inf, tpot_limit_s, target_s)
        if not self._num_slices:
            tokens = _largest(lambda count: step.corun_s(count, math.inf), allowed, want, guess=guess)
            return StepBudget(tokens, math.inf, tpot_limit_s, target_s, step.corun_s(tokens, math.inf), tokens < want)
        work = self._vision_s(pending.encode_patches)
        min_s = min(work, MIN_VISION * tpot_limit_s)
        tokens = self._tokens_beside(step, pending, want, allowed, min_s, work, towards) if want else 0
        self._guesses[towards] = tokens
        room = step.vision_room_s(tokens, allowed)
        vision_s = max(min_s, room - self._overrun_s)
        planned = step.corun_s(tokens, vision_s + self._overrun_s)
        return StepBudget(tokens, vision_s, tpot_limit_s, target_s, planned, tokens < want, room < work)

    def _tokens_beside(
        self, step: _Step, pending: PendingWork, want: int, allowed: float, min_s: float, work: float, towards: _Towards
    ) -> int:
        """Tokens of prefill, at most `want`: as many as fill prefill's share of the slack (`towards`: all, none, or by
        the work on either side), more if vision cannot use the rest, fewer if it would get less than `min_s`.
        `allowed`: predicted seconds that the step may take; `work`: seconds of vision that wait."""
        guess = self._guesses[towards]
        prefill_work = (step.alone_s(want) - step.base) * pending.prefill_tokens / want
        share = min(1 - MIN_SHARE, max(MIN_SHARE, prefill_work / (prefill_work + work)))
        if towards is not _Towards.BOTH:
            share = 1.0 if towards is _Towards.PREFILL else 0.0
        own = _largest(step.alone_s, step.base + share * (allowed - step.base), want, guess=guess)
        if share > 1 - MIN_SHARE or step.corun_s(own, min_s + self._overrun_s) > allowed:
            own = _largest(lambda count: step.corun_s(count, min_s + self._overrun_s), allowed, own)
        if own == want or step.corun_s(own + 1, work) > allowed:
            return own
        return _largest(lambda count: step.corun_s(count, work), allowed, want, low=own, guess=guess)

    def _without_starvation(self, pending: PendingWork, budget: StepBudget, want: int) -> StepBudget:
        """The budget or, after `STARVED_STEPS` steps in a row with fewer than `MIN_CHUNK` tokens for prefills that
        could use more, a budget with a chunk for them. `want`: tokens that could be used."""
        if budget.tokens >= min(MIN_CHUNK, want):
            self._starved = 0
            return budget
        self._starved += 1
        if self._starved <= STARVED_STEPS:
            return budget
        self._starved = 0
        step = _Step(self._surface, pending)
        tokens = _largest(step.alone_s, step.base + STARVED_SHARE * budget.tpot_limit_s, want)
        return budget._replace(tokens=max(tokens, min(MIN_CHUNK, want)), more_tokens=False, more_vision=False)

    # ---- a divided device

    def _on_partition(self, pending: PendingWork, whole: StepBudget, want: int) -> StepBudget:
        """The budget on the partition that `PartitionChoice` chooses; `whole` is the one on the undivided device. While
        no image waits or is encoded, returns `whole` on the latest partition. Another partition changes the image
        budget."""
        before = self._choice.partition
        if not self._surface.splits or not pending.encode_patches:
            return whole._replace(partition=before) if before else whole
        budgets = {0: whole}

        def rate(partition: int) -> float:
            if partition:
                budgets[partition] = self._divided(pending, whole, want, partition)
            return self._rate(pending, budgets[partition])

        chosen = self._choice.choose(rate)
        if chosen != before:
            self._image_budget = self._best_image_budget()
        return budgets[chosen]

    def _divided(self, pending: PendingWork, whole: StepBudget, want: int, partition: int) -> StepBudget:
        """The budget on a partition, where vision runs beside the step all along; at most `want` tokens. If the step
        has to run on the undivided device because an encode there is unfinished, vision gets the seconds of `whole`."""
        step = _Step(self._surfaces[partition], pending)
        allowed = self._allowed(Kind.VISION, whole.target_s)
        tokens = _largest(lambda count: step.corun_s(count, math.inf), allowed, want, guess=min(whole.tokens, want))
        return whole._replace(
            tokens=tokens,
            planned_s=step.corun_s(tokens, math.inf),
            more_tokens=tokens < want,
            more_vision=False,
            partition=partition,
        )

    def _rate(self, pending: PendingWork, budget: StepBudget) -> float:
        """Score of a budget for `PartitionChoice.choose`: waiting work, in seconds that it takes alone, divided by the
        time until all of it is done, including the prefill left after the last picture. Decodes that keep a limit do
        not count: they need not be faster. 0.0 if the step would take longer than its target."""
        surface = self._surfaces[budget.partition]
        step, tokens = _Step(surface, pending), min(budget.tokens, pending.prefill_tokens)
        vision_s = math.inf if budget.partition else budget.vision_s
        seconds, allowed = step.corun_s(tokens, vision_s), self._allowed(Kind.VISION, budget.target_s)
        if not seconds or seconds > allowed:
            return 0.0
        vision_rate = min(vision_s, seconds) / seconds / surface.vision_slowdown
        decode_rate = step.base / seconds if pending.tpot_limit_s == math.inf else 0.0
        if not tokens or not vision_rate:
            return decode_rate + vision_rate
        vision_work = self._vision_s(pending.encode_patches) / self._vision_slowdown
        both_s = vision_work / vision_rate
        if budget.partition:  # a step stays on its part when the last picture is done
            both_s = math.ceil(both_s / seconds) * seconds
        prefill_s = step.alone_s(tokens) - step.base
        prefill_work = prefill_s * pending.prefill_tokens / tokens
        left = max(0.0, prefill_work - prefill_s / seconds * both_s)  # for steps without vision beside them
        left_s = left / max(prefill_s / seconds, 1 - step.base / allowed)
        return decode_rate + (prefill_work + vision_work) / (both_s + left_s)

    def _is_at_risk(self, pending: PendingWork, budget: StepBudget) -> bool:
        """True if the first token with the earliest deadline would come too late were all steps like this one. False
        without a deadline ahead, or if `budget` leaves no work out."""
        left = pending.ttft_due_s - pending.now
        if not 0 < left < math.inf or not (budget.more_tokens or budget.more_vision):
            return False
        tpot_limit_s = pending.tpot_limit_s
        needed = tpot_limit_s
        if pending.due_patches:
            needed += self._vision_s(pending.due_patches) * max(
                1.0, tpot_limit_s / max(budget.vision_s, MIN_VISION * tpot_limit_s)
            )
        if pending.due_tokens:
            needed += tpot_limit_s * pending.due_tokens / budget.tokens if budget.tokens else math.inf
        return needed > left

    def _allowed(self, kind: Kind, target_s: float) -> float:
        """Longest predicted seconds of a step of this kind that is to take at most `target_s`, the pause before it
        included: (target - pause) / correction."""
        return (target_s - self._correction.pause_s) / self._correction.high(kind)

    def predict(self, load: LanguageLoad) -> float | None:
        """Expected seconds of a step that has the device to itself, corrected by the median of recent steps."""
        return self._surface.language_s(load) * self._correction.middle(kind_of(load, 0.0))

    def speeds(self) -> StepSpeeds:
        surface, config = self._surface, self._config

        def decode_s(count: int) -> float:
            return surface.language_s(LanguageLoad(count, count * TYPICAL_CONTEXT))

        def prefill_s(count: int) -> float:
            pairs = 0.5 * count * (count + 1)
            return surface.language_s(LanguageLoad(prefill_tokens=count, prefill_pairs=pairs, num_chunks=1))

        def vision_s(count: int) -> float:
            return surface.vision_s(VisionLoad(count))

        return StepSpeeds(
            _by_size(prefill_s, MIN_CHUNK, config.max_step_tokens),
            _by_size(decode_s, 1, config.max_running_requests),
            _by_size(vision_s, MIN_CHUNK, config.image_budget) if self._num_slices else {},
        )

    # ---- vision steps

    def max_patches(self) -> int:
        return self._image_budget

    def _vision_s(self, num_patches: int) -> float:
        """Predicted seconds of a vision step of pictures like the latest, with language steps beside it all along."""
        load = VisionLoad(num_patches, self._pairs_per_patch * num_patches)
        return self._surface.vision_s(load) * self._vision_slowdown

    @property
    def _vision_slowdown(self) -> float:
        """Factor on a vision step while the language lane runs, on the latest partition."""
        return self._surfaces[self._choice.partition].vision_slowdown

    def _best_image_budget(self) -> int:
        """Maximum patches of a vision step, at most the configured ones. With a TPOT limit the smallest batch with 95 %
        of the best throughput, for pictures like the latest; less if one of its slices would take more than a quarter
        of the limit."""
        highest, tpot_limit_s = self._config.image_budget, self._config.tpot_slo
        if tpot_limit_s is None or highest < 1 or not self._vision_s(highest):  # no vision lane: it takes no time
            return highest
        knots = {int(knot) for knot in self._surface.patches.knots if 1 <= knot < highest} | {1, highest}
        best = max(count / self._vision_s(count) for count in knots)
        # between two knots the throughput only rises or only falls: look before the first knot that suffices
        enough = BATCH_EFFICIENCY * best
        above = min(count for count in knots if count >= enough * self._vision_s(count))
        below = max((count for count in knots if count < above), default=above)
        short_of = _largest(lambda count: count - enough * self._vision_s(count), 0.0, above, low=below)
        efficient = min(above, short_of + 1)
        short = _largest(self._vision_s, SLICE_SHARE * tpot_limit_s * max(1, self._num_slices), highest)
        return max(1, min(efficient, short, highest))

    def on_vision(self, load: VisionLoad) -> None:
        """Updates the image budget if the step's pairs per patch, which are more in larger pictures, differ by over
        10 % from those that it was computed with."""
        pairs = load.pairs / max(1, load.num_patches)
        if not math.isclose(pairs, self._pairs_per_patch, rel_tol=0.1):
            self._pairs_per_patch = pairs
            self._image_budget = self._best_image_budget()

    @property
    def _overrun_s(self) -> float:
        """Seconds that vision runs beyond its allowance, until the end of a slice (90 % quantile)."""
        return self._overruns.quantile(OVERRUN_KEPT)

    # ---- after a step

    def on_language(
        self, load: LanguageLoad, budget: StepBudget, *, duration_s: float, gap_s: float, vision_s: float
    ) -> None:
        tpot_limit_s = budget.tpot_limit_s
        self._typical[vision_s > 0].learn(load, duration_s)
        self._kind = kind_of(load, vision_s)
        took = duration_s
        if load.num_decodes:
            self._correction.add_pause(gap_s - duration_s)
            took = gap_s - self._correction.pause_s
        used_up = budget.is_used_up(load.prefill_tokens, vision_s)
        predicted = budget.planned_s if used_up and budget.planned_s else self._expected_s(load, budget, vision_s)
        scale = max(predicted, MIN_PREDICTION * tpot_limit_s) if tpot_limit_s < math.inf else predicted
        self._correction.add_ratio(self._kind, 1 + (took - predicted) / scale)
        if not budget.partition and vision_s > 0 and vision_s >= USED * budget.vision_s:
            self._overruns.add(max(0.0, vision_s - budget.vision_s))
        if load.num_decodes:
            self._decode_steps += 1
            self._late_steps += gap_s > tpot_limit_s
            self._stretched_steps += budget.target_s > tpot_limit_s
            if used_up and budget.target_s == tpot_limit_s < math.inf:
                self._full_steps += 1
                self._used.append(gap_s / tpot_limit_s)

    def _expected_s(self, load: LanguageLoad, budget: StepBudget, vision_s: float) -> float:
        """Predicted seconds of a step with this load. On a part of the device the step is slowed all along if vision
        ran."""
        all_along = budget.partition and vision_s > 0
        return self._surfaces[budget.partition].corun_s(load, math.inf if all_along else vision_s)

    def report(self) -> BudgetReport:
        """The report of the budgets. `token_budget`: the prefill tokens that the latest language step could have held
        had enough prompts waited."""
        config, latest = self._config, self._latest
        tokens = self._latest_tokens
        if latest.num_decodes and latest.tpot_limit_s < math.inf:
            highest = max(0, config.max_step_tokens - latest.num_decodes)
            waiting = max(highest, latest.prefill_tokens)
            crowd = latest._replace(prefill_tokens=waiting, num_prefills=max(1, latest.num_prefills))
            tokens = self._filled(crowd, highest, latest.tpot_limit_s, _Towards.BOTH).tokens
        return BudgetReport(
            tpot_limit_s=config.tpot_slo or 0.0,
            token_budget=tokens,
            image_budget=self._image_budget,
            vision_s=-1.0 if self._latest_vision_s == math.inf else self._latest_vision_s,
            correction=self._correction.high(self._kind),
            decode_steps=self._decode_steps,
            late_steps=self._late_steps,
            stretched_steps=self._stretched_steps,
            full_steps=self._full_steps,
            limit_used=sum(self._used) / len(self._used) if self._used else 0.0,
        )


def _largest(seconds: Callable[[int], float], allowed: float, high: int, *, low: int = 0, guess: int = 0) -> int:
    """The largest count in [low, high] with `seconds(count) <= allowed`, or `low` if there is none. `seconds`
    must not fall as the count grows.

    Starts at `guess`, if that lies inside, and moves away from it in growing steps until it has passed the answer; then
    bisects.
    """
    count, step = (guess, 1) if low < guess < high else (high, high - low)
    below = above = -1  # a count that fits and one that does not
    while below < 0 or above < 0:
        if seconds(count) <= allowed:
            below = count
            if count == high:
                return high
            count = min(high, count + step)
        else:
            above = count
            if count == low:
                return low
            count = max(low, count - step)
        step *= 4
    while above - below > 1:
        count = (below + above) // 2
        if seconds(count) <= allowed:
            below = count
        else:
            above = count
    return below


def _by_size(seconds: Callable[[int], float], least: int, most: int) -> dict[int, float]:
    """Seconds at the middle of each size from `least` to `most`; sizes are bit lengths."""
    return {size: seconds(3 << size >> 2) for size in range(least.bit_length(), most.bit_length() + 1)}


class PartitionChoice:
    """The choice of a device partition for the next language step, among `count`: number 0, the whole device, where
    vision runs beside the step for some seconds and then waits, or a part of the device, with vision beside the step
    all along on the rest.

    SpaceServe (section 4.3) divides the SMs once, before it serves. Here the partition follows from the work: few
    decodes finish in time on a small part, many do not. A change costs little, since only the next launches wait for
    the last ones, but an encode in flight stays on its partition; so another partition has to be clearly better.
    """

    def __init__(self, count: int) -> None:
        self.partition = 0
        self._count = count
        self._steps = LOOK

    def choose(self, rate: Callable[[int], float]) -> int:
        """The partition of the step that is being planned: the one with the highest rate if that exceeds the present
        one's by 5 %. The others are rated only every `LOOK` steps, or at once if the present rate is 0. `rate(p)`: work
        done per second on partition p, the work measured in seconds that it takes alone; 0 if the step would miss its
        limit. If all rates are 0, it is the undivided device, where vision waits."""
        self._steps += 1
        present = rate(self.partition)
        if present and self._steps < LOOK:
            return self.partition
        self._steps = 0
        rates = [present if number == self.partition else rate(number) for number in range(self._count)]
        best = max(range(self._count), key=rates.__getitem__)
        if rates[best] > GAIN * present or not present:
            self.partition = best
        return self.partition
