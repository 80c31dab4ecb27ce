"""How much one step may hold: prefill tokens beside the decodes of a language step, seconds of vision beside both,
patches of a vision step.

The budgets of an engine without limits, which are the interface that the planners ask before every step, and the rule
for how far a step may be stretched. Budgets that follow from limits are in `latency/latency_budget.py`. Knows no
requests and no clock.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.cost import LanguageLoad, VisionLoad
from hydra_engine.core.messages import BudgetReport
from hydra_engine.scheduler.typical_steps import TypicalSteps

Seconds = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# A request keeps its TPOT limit if 90 % of its gaps do; half of the rest may be spent on purpose.
STRETCHED_SHARE = 0.05
USED = 0.9  # of the vision seconds that a step may have, from which on they count as used up
# What prefill may add to a step whose decodes have no limit, in times of what they take alone. A chunk reads the
# weights once more, which is about one decode step, so cutting a prompt costs at most 1 / 16 of its prefill.
PREFILL_SHARE = 16.0
LEAST_CHUNK = 64  # tokens; with fewer rows the products of a prefill cost a processor more per row


class PendingWork(NamedTuple):
    """What is there to do when a language step is planned. Counts are zero and times infinite where there is nothing.

    `prefill_tokens` are all tokens that could be computed now if there were no budget, of the running prefills and of
    the waiting requests that could start; `num_prefills` is how many requests these are. `due_tokens` and `due_patches`
    are what has to be computed before the first token that is due at `ttft_due_s`: what its own request lacks and, as
    far as it is known, what goes before it. A first token that is late already is due at no time.
    """

    now: float
    num_decodes: int = 0
    decode_context: int = 0  # keys that the decodes read, all together
    decode_limit_s: float = math.inf  # tightest TPOT limit among the running decodes
    stretch_s: float = math.inf  # how long the step may last and put no running decode at risk, see `stretch`
    prefill_tokens: int = 0
    num_prefills: int = 0
    prefill_context: int = 0  # tokens already computed of the first prefill at hand
    encode_patches: int = 0  # waiting and in flight
    ttft_due_s: float = math.inf  # absolute; the earliest due first token that is still to come
    due_tokens: int = 0
    due_patches: int = 0


class StepBudget(NamedTuple):
    """What one language step may hold. The planner keeps it with the plan and gives it back with the result."""

    tokens: int  # of prefill
    vision_s: float  # seconds that the vision lane may run beside it; infinite: all along
    limit_s: float = math.inf  # tightest TPOT limit among its decodes
    target_s: float = math.inf  # how long it may last, the pause before it included; more than the limit: stretched
    planned_s: float = 0.0  # what the surface says, uncorrected, of a step that uses all of it
    more_tokens: bool = False  # more prefill waits than the step may hold
    more_vision: bool = False  # more images wait than can be encoded beside it
    partition: int = 0  # as `LanguagePlan.partition`

    def is_used_up(self, tokens: int, vision_s: float) -> bool:
        """Whether a step that held so much was as full as it could be."""
        tokens_used = tokens >= self.tokens or not self.more_tokens
        vision_used = vision_s >= USED * self.vision_s or not self.more_vision
        return (self.more_tokens or self.more_vision) and tokens_used and vision_used


class Budgets:
    """The numbers of the configuration, for the highest throughput: no limit is kept. Only beside decodes, whose tokens
    wait for it, prefill is cut into chunks that add at most `PREFILL_SHARE` times what such decodes took lately, or of
    `LEAST_CHUNK` tokens if that is more. Asked before each step and told after it. Calls of `language` and
    `on_language` may interleave (a step is planned while the one before it runs), but every budget that became a plan
    comes back, in order."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._latest_tokens = config.most_tokens
        self._decode_steps = self._full_steps = 0
        self._typical = TypicalSteps(), TypicalSteps()  # without vision beside them, and with it

    def language(self, pending: PendingWork) -> StepBudget:
        """The budget of the next language step; to be asked once per step."""
        tokens = max(0, self._config.most_tokens - pending.num_decodes)
        if pending.num_decodes and min(tokens, pending.prefill_tokens) > LEAST_CHUNK:
            tokens = min(tokens, self._beside_decodes(pending.num_decodes))
        self._latest_tokens = tokens
        return StepBudget(tokens, math.inf, more_tokens=pending.prefill_tokens > tokens, partition=1)

    def _beside_decodes(self, num_decodes: int) -> int:
        """Tokens of prefill beside decodes without a limit. Steps beside vision are asked only where no others are
        known: it slows decodes and chunks about alike."""
        highest = self._config.most_tokens
        for typical in self._typical:
            decode_s, token_s = typical.decode_s(num_decodes), typical.per_token_s()
            if decode_s is not None and token_s is not None:
                if PREFILL_SHARE * decode_s >= highest * token_s:
                    return highest
                return max(1, int(PREFILL_SHARE * decode_s / token_s / LEAST_CHUNK)) * LEAST_CHUNK
        return highest

    def vision(self) -> int:
        """Patches that a vision step may hold; its first image may exceed them."""
        return self._config.image_budget

    def predict(self, load: LanguageLoad) -> float | None:
        """Seconds that a step is expected to take if it has the machine to itself; None: nothing was measured."""
        return None

    def on_language(
        self, load: LanguageLoad, budget: StepBudget, *, duration_s: float, gap_s: float, vision_s: float
    ) -> None:
        """A language step has come back. `gap_s`: from the end of the step before it to its own end; read only if the
        step has decodes, whose tokens lie that far apart. `vision_s`: how long the vision lane ran beside it."""
        self._typical[vision_s > 0].learn(load, duration_s)
        if load.num_decodes:
            self._decode_steps += 1
            self._full_steps += budget.is_used_up(load.prefill_tokens, vision_s)

    def on_vision(self, load: VisionLoad) -> None:
        """A vision step has come back."""

    def report(self) -> BudgetReport:
        return BudgetReport(
            token_budget=self._latest_tokens,
            image_budget=self._config.image_budget,
            vision_s=-1.0,
            decode_steps=self._decode_steps,
            full_steps=self._full_steps,
        )


def stretch(limits_s: Seconds, elapsed_s: Seconds, num_gaps: Counts, late_gaps: Counts) -> float:
    """How long the next step may last so that every running decode still keeps its TPOT limit: `PendingWork.stretch_s`.

    Entry i belongs to one running decode: its limit (infinite: none), the seconds between its first and its latest
    token, how many gaps these are and how many of them were longer than the limit; all [B]. A request may have a step
    longer than its limit if its late gaps, this one included, stay within 5 % and its mean gap within the limit.
    Otherwise the step may last as long as its limit. Infinite without decodes.
    """
    if not len(limits_s):
        return math.inf
    gaps = num_gaps + 1
    spare = limits_s * gaps - elapsed_s
    spare[late_gaps + 1 > STRETCHED_SHARE * gaps] = 0.0
    return float(np.maximum(spare, limits_s).min())
