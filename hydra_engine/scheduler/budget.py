"""The size limits of one step: prefill tokens beside the decodes of a language step, seconds of vision beside both,
patches of a vision step.

Has the budgets of an engine without latency limits, which are the interface that the planners ask before every step.
Budgets from latency limits are in `latency/latency_budget.py`. Reads no clock.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.core.reports import BudgetReport, StepSpeeds
from hydra_engine.core.state import RequestState
from hydra_engine.scheduler.decodes import ReadyDecodes
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.scheduler.step_stats import TypicalSteps

USED = 0.9  # share of a step's vision seconds from which on they count as used up
# Time that prefill may add to a step whose decodes have no limit, as a multiple of the decodes' own time. A chunk reads
# the weights once more, which is about one decode step, so chunking costs at most 1 / 16 of the prefill.
PREFILL_SHARE = 16.0
MIN_CHUNK = 64  # tokens; with fewer rows the matrix products of a prefill cost more per row


class PendingWork(NamedTuple):
    """The work at hand when a language step is planned. Without work of a kind its counts are 0 and its times infinite.

    `prefill_tokens`: tokens that could be computed now without a budget, of the running prefills and the waiting
    requests that could start; `num_prefills`: the number of these requests. `Budgets.with_limits` fills the limits
    (`tpot_limit_s`, `stretch_s`) and the earliest deadline of a first token that has not passed: its time
    (`ttft_due_s`) and what has to be computed before (`due_tokens`, `due_patches`), which is the rest of its own
    request and the work known to come first.
    """

    now: float
    num_decodes: int = 0
    decode_context: int = 0  # sum of keys that the decodes read
    tpot_limit_s: float = math.inf  # tightest TPOT limit among the running decodes
    stretch_s: float = math.inf  # longest step that puts no running decode's limit at risk
    prefill_tokens: int = 0
    num_prefills: int = 0
    prefill_context: int = 0  # tokens of the first prefill that are computed already
    encode_patches: int = 0  # patches of images that wait or are being encoded
    ttft_due_s: float = math.inf  # absolute; earliest deadline of a first token that is still ahead
    due_tokens: int = 0
    due_patches: int = 0


class StepBudget(NamedTuple):
    """The limits of one language step. `Budgets.on_language` gets it back with the step's duration."""

    tokens: int  # prefill tokens
    vision_s: float  # seconds that the vision lane may run beside it; infinite: no limit
    tpot_limit_s: float = math.inf  # tightest TPOT limit among its decodes
    target_s: float = math.inf  # longest duration, with the pause before it; above `tpot_limit_s`: stretched
    planned_s: float = 0.0  # the cost surface's uncorrected prediction for a step that uses all of it; 0.0: none
    more_tokens: bool = False  # more prefill waits than the step may hold
    more_vision: bool = False  # more images wait than can be encoded beside it
    partition: int = 0  # see `LanguagePlan.partition`

    def is_used_up(self, tokens: int, vision_s: float) -> bool:
        """True if prefill or images had to wait (`more_tokens`, `more_vision`) and each of the two that had to reached
        its limit: `tokens` of prefill the step's tokens, `vision_s` seconds of vision `USED` of its seconds."""
        tokens_used = tokens >= self.tokens or not self.more_tokens
        vision_used = vision_s >= USED * self.vision_s or not self.more_vision
        return (self.more_tokens or self.more_vision) and tokens_used and vision_used


class Budgets:
    """Budgets for the highest throughput, from the configuration and recent step times; no latency limit is kept.

    Beside decodes, whose tokens wait for it, the prefill of a step adds at most `PREFILL_SHARE` times the recent
    duration of such decodes, rounded down to a multiple of `MIN_CHUNK` tokens, but not to 0; before these times are
    known, and without decodes, `max_step_tokens` is the only limit. The planner asks before each step, the scheduler
    reports after it. Calls of `step_budget` and `on_language` may interleave (a step is planned while the one before it
    runs), but every budget that became a plan is reported, in order.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._max_tokens = self._latest_tokens = config.max_step_tokens
        self._decode_steps = self._full_steps = 0
        self._typical = TypicalSteps(), TypicalSteps()  # steps without vision, steps beside vision

    def with_limits(
        self, pending: PendingWork, requests: RequestTable, ready: ReadyDecodes, due: RequestState | None
    ) -> PendingWork:
        """The pending work with the latency limits of the requests; unchanged here, where nothing reads them. Called
        before `step_budget` while a decode has a TPOT limit or a first token a deadline. `ready`: the decodes of the
        step. `due`: the request whose first token has the earliest deadline that has not passed, or None."""
        return pending

    def step_budget(self, pending: PendingWork) -> StepBudget:
        """The budget of the next language step; called again if planning it ahead was given up."""
        tokens = max(0, self._max_tokens - pending.num_decodes)
        if pending.num_decodes and min(tokens, pending.prefill_tokens) > MIN_CHUNK:
            tokens = min(tokens, self._beside_decodes(pending.num_decodes))
        self._latest_tokens = tokens
        return StepBudget(tokens, math.inf, more_tokens=pending.prefill_tokens > tokens, partition=1)

    def _beside_decodes(self, num_decodes: int) -> int:
        """Maximum tokens of prefill beside `num_decodes` decodes, from recent step times; `max_step_tokens` before
        there are any. Steps beside vision are used only if no others were measured: vision slows decodes and chunks by
        about the same factor."""
        highest = self._max_tokens
        for typical in self._typical:
            decode_s, token_s = typical.decode_s(num_decodes), typical.per_token_s()
            if decode_s is not None and token_s is not None:
                if PREFILL_SHARE * decode_s >= highest * token_s:
                    return highest
                return max(1, int(PREFILL_SHARE * decode_s / token_s / MIN_CHUNK)) * MIN_CHUNK
        return highest

    def max_patches(self) -> int:
        """Maximum patches of a vision step; its first image may exceed them."""
        return self._config.image_budget

    def predict(self, load: LanguageLoad) -> float | None:
        """Expected seconds of a step that has the device to itself; None without measured costs, as here."""
        return None

    def speeds(self) -> StepSpeeds:
        """Expected seconds of steps by size, before any has run; none without measured costs, as here."""
        return StepSpeeds()

    def on_language(
        self, load: LanguageLoad, budget: StepBudget, *, duration_s: float, gap_s: float, vision_s: float
    ) -> None:
        """Records a language step that has ended and the budget that it was planned with. `gap_s`: with decodes, the
        time from the end of the step before to its own end, which is the gap between their tokens; else `duration_s`.
        `vision_s`: seconds that the vision lane ran beside it."""
        self._typical[vision_s > 0].learn(load, duration_s)
        if load.num_decodes:
            self._decode_steps += 1
            self._full_steps += budget.is_used_up(load.prefill_tokens, vision_s)

    def on_vision(self, load: VisionLoad) -> None:
        """Records a vision step that has ended; ignored here."""

    def report(self) -> BudgetReport:
        """The latest budgets, how many steps with decodes there were, and how many of these used up theirs."""
        return BudgetReport(
            token_budget=self._latest_tokens,
            image_budget=self._config.image_budget,
            vision_s=-1.0,
            decode_steps=self._decode_steps,
            full_steps=self._full_steps,
        )
