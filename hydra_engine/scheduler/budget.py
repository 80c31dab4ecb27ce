"""The size limits of one step: prefill tokens beside the decodes of a language step, seconds of vision beside both,
patches of a vision step.

Has the budgets of an engine without latency limits, which are the interface that the planners ask before every step.
Budgets from latency limits are in `latency/latency_budget.py`. Reads no clock.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.messages import BudgetReport
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.core.state import RequestState
from hydra_engine.scheduler.decodes import Ready
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
    requests that could start; `num_prefills`: the number of these requests. Limits and what is due are filled by
    `Budgets.with_limits`. `due_tokens` and `due_patches`: what has to be computed before the first token with the
    earliest deadline, `ttft_due_s`: the rest of its own request and the work known to come before it. Deadlines that
    have passed are not counted.
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
    """The limits of one language step. The planner keeps it with the plan and returns it with the result."""

    tokens: int  # prefill tokens
    vision_s: float  # seconds that the vision lane may run beside it; infinite: no limit
    tpot_limit_s: float = math.inf  # tightest TPOT limit among its decodes
    target_s: float = math.inf  # longest duration, with the pause before it; above `tpot_limit_s`: stretched
    planned_s: float = 0.0  # the cost surface's uncorrected prediction for a step that uses all of it
    more_tokens: bool = False  # more prefill waits than the step may hold
    more_vision: bool = False  # more images wait than can be encoded beside it
    partition: int = 0  # see `LanguagePlan.partition`

    def is_used_up(self, tokens: int, vision_s: float) -> bool:
        """True if a step with these amounts was as full as this budget allows."""
        tokens_used = tokens >= self.tokens or not self.more_tokens
        vision_used = vision_s >= USED * self.vision_s or not self.more_vision
        return (self.more_tokens or self.more_vision) and tokens_used and vision_used


class Budgets:
    """Budgets for the highest throughput, from the configuration alone; no latency limit is kept.

    Prefill is chunked only beside decodes, whose tokens wait for it: a chunk adds at most `PREFILL_SHARE` times the
    recent duration of such decodes, or has `MIN_CHUNK` tokens if that is more. The planner asks before each step and
    reports after it. Calls of `language` and `on_language` may interleave (a step is planned while the one before it
    runs), but every budget that became a plan is reported, in order.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._max_tokens = self._latest_tokens = config.max_step_tokens
        self._decode_steps = self._full_steps = 0
        self._typical = TypicalSteps(), TypicalSteps()  # steps without vision, steps beside vision

    def with_limits(
        self, pending: PendingWork, requests: RequestTable, ready: Ready, due: RequestState | None
    ) -> PendingWork:
        """Adds the latency limits of the requests to the pending work; here nothing reads them. Called before
        `language` if some request has a limit. `ready`: the decodes of the step. `due`: `RequestTable.next_due`."""
        return pending

    def language(self, pending: PendingWork) -> StepBudget:
        """The budget of the next language step; called once per step."""
        tokens = max(0, self._max_tokens - pending.num_decodes)
        if pending.num_decodes and min(tokens, pending.prefill_tokens) > MIN_CHUNK:
            tokens = min(tokens, self._beside_decodes(pending.num_decodes))
        self._latest_tokens = tokens
        return StepBudget(tokens, math.inf, more_tokens=pending.prefill_tokens > tokens, partition=1)

    def _beside_decodes(self, num_decodes: int) -> int:
        """Maximum tokens of prefill beside decodes without a limit. Steps beside vision are used only if no others were
        measured: vision slows decodes and chunks by about the same factor."""
        highest = self._max_tokens
        for typical in self._typical:
            decode_s, token_s = typical.decode_s(num_decodes), typical.per_token_s()
            if decode_s is not None and token_s is not None:
                if PREFILL_SHARE * decode_s >= highest * token_s:
                    return highest
                return max(1, int(PREFILL_SHARE * decode_s / token_s / MIN_CHUNK)) * MIN_CHUNK
        return highest

    def vision(self) -> int:
        """Maximum patches of a vision step; its first image may exceed them."""
        return self._config.image_budget

    def predict(self, load: LanguageLoad) -> float | None:
        """Expected seconds of a step that has the device to itself; None without a measured cost surface."""
        return None

    def on_language(
        self, load: LanguageLoad, budget: StepBudget, *, duration_s: float, gap_s: float, vision_s: float
    ) -> None:
        """Records a language step. `gap_s`: time from the end of the step before to its own end, used only if the step
        has decodes, as the gap between their tokens. `vision_s`: seconds that the vision lane ran beside it."""
        self._typical[vision_s > 0].learn(load, duration_s)
        if load.num_decodes:
            self._decode_steps += 1
            self._full_steps += budget.is_used_up(load.prefill_tokens, vision_s)

    def on_vision(self, load: VisionLoad) -> None:
        """Records a vision step."""

    def report(self) -> BudgetReport:
        return BudgetReport(
            token_budget=self._latest_tokens,
            image_budget=self._config.image_budget,
            vision_s=-1.0,
            decode_steps=self._decode_steps,
            full_steps=self._full_steps,
        )
