"""Schedules of other engines, to compare ours with: whole requests whose prompts come first, batches of them that run
to completion, and one step of either model at a time. `bench.baselines` serves with them, and a simulated deployment
may (`node.Site.scheduler`)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np

from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.plans import EncodeItem, LanguagePlan, VisionPlan
from hydra_engine.core.state import RequestState
from hydra_engine.scheduler.budget import Budgets
from hydra_engine.scheduler.decodes import ReadyDecodes
from hydra_engine.scheduler.scheduler import StageScheduler
from hydra_engine.scheduler.step import (
    LanguagePlanner,
    NeedsResult,
    PlannedStep,
    PrefillStarter,
    StepBuilder,
    pending_work,
)
from hydra_engine.scheduler.vision import VisionPlanner


class OneLaneScheduler(StageScheduler):
    """A scheduler with at most one step of either model in flight. While both have work they take turns."""

    _last_was_vision = True

    @property
    def vision_first(self) -> bool:
        return not self._last_was_vision

    def plan_vision(self, now: float) -> VisionPlan | None:
        plan = None if self._language_steps or self._vision_plans else super().plan_vision(now)
        self._last_was_vision |= plan is not None
        return plan

    def plan_language(self, now: float) -> LanguagePlan | None:
        plan = None if self._vision_plans or self._language_steps else super().plan_language(now)
        self._last_was_vision &= plan is None
        return plan


class RequestScheduler(StageScheduler):
    """A scheduler of whole requests: all images of the next requests are encoded, then their prompts are prefilled
    whole in steps of their own, and decodes go on when that is done. Steps are as large as the configuration allows."""

    def __init__(self, *given: Any, budgets: Budgets | None = None, **more: Any) -> None:
        del budgets  # they divide a step between stages
        super().__init__(*given, **more)
        config = given[3]
        self._language = self._whole_prompts = WholePrompts(self._requests, self._budgets, config)
        self._vision = self._first_images = FirstImages(self._requests, self._budgets, config)

    @property
    def vision_first(self) -> bool:
        return True

    def plan_vision(self, now: float) -> VisionPlan | None:
        """Plans images of requests that have a slot, or find one beside those that wait for nothing else."""
        requests = self._requests
        running = sum(state.waits_for_images for state in requests.prefilling)
        num_free = requests.seq_slots.num_seq_slots - len(requests.seq_slots.slot_of)
        self._first_images.num_requests = running + max(0, num_free - len(requests.waiting))
        return super().plan_vision(now)

    def plan_language(self, now: float) -> LanguagePlan | None:
        """None while an encode runs. Images that could be encoded now are in a vision step already."""
        if self._vision_plans or (self._language_steps and self._requests.unencoded):
            return None
        return super().plan_language(now)


class BatchScheduler(RequestScheduler):
    """A scheduler of batches that run to completion: the requests that wait when a batch begins are encoded, prefilled
    and decoded together, and no other one starts before the last of them has ended."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._batch: set[RequestId] = set()
        self._first_images.batch = self._whole_prompts.starter.batch = self._batch

    def _begin_batch(self) -> None:
        """Begins the next batch if the last one has ended."""
        states = self._requests.states
        self._batch.intersection_update(states)
        if not self._batch:
            oldest = sorted(states.values(), key=attrgetter("order"))
            self._batch.update(state.request.id for state in oldest[: self._requests.seq_slots.num_seq_slots])

    def plan_vision(self, now: float) -> VisionPlan | None:
        self._begin_batch()
        return super().plan_vision(now)

    def plan_language(self, now: float) -> LanguagePlan | None:
        self._begin_batch()
        return super().plan_language(now)


class FirstImages(VisionPlanner):
    """Looks only at images of the first `num_requests`, or of those in `batch`."""

    num_requests = 0
    batch: Container[RequestId] | None = None

    def _fill(self, states: Iterable[RequestState], now: float, *, may_evict: bool) -> list[EncodeItem]:
        if self.batch is None:
            return super()._fill(islice(states, self.num_requests), now, may_evict=may_evict)
        chosen = [state for state in states if state.request.id in self.batch]
        return super()._fill(chosen, now, may_evict=may_evict)


class WholePrompts(LanguagePlanner):
    """Prompts that fit a step together, or else the first one alone; decodes only where no prompt can be computed."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        requests, _, config = given
        self._starter = self.starter = WholeStarter(requests, config)

    def plan(self, step_id: StepId, now: float, *, ahead: bool, patches_in_flight: int) -> PlannedStep | None:
        builder = WholeStepBuilder(self._requests, now, ahead=ahead)
        ready = ReadyDecodes(slice(0, 0), np.zeros(0, dtype=np.int64), 0)
        can_start = not self._starter.is_full
        pending = pending_work(self._requests, ready, patches_in_flight, can_start=can_start, now=now)
        budget = self._budgets.step_budget(pending)
        builder.tokens_left = budget.tokens
        try:
            self._starter.start(builder, self._continue_prefills(builder))
            if not builder.chunks:
                ready = self._ready_decodes(builder)
                if not len(ready.starts):  # the decodes gave way, which may have made room for a prefill
                    self._continue_prefills(builder)
        except NeedsResult:
            return None
        return self._build_plan(step_id, ready, builder, budget)


class WholeStarter(PrefillStarter):
    """A request starts when all its images are encoded, the oldest earlier: its images may exceed the cache. `batch`:
    no others start."""

    batch: Container[RequestId] | None = None

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._early_limit = 0

    def _try_start(self, state: RequestState, step: StepBuilder, num_early: int) -> bool | None:
        if self.batch is not None and state.request.id not in self.batch:
            return None
        self._step = step
        return super()._try_start(state, step, num_early)

    def find_blocks(self, state: RequestState, num_tokens: int, preempt_next: Callable[[], bool]) -> list[int] | None:
        cached, step = super().find_blocks(state, num_tokens, preempt_next), self._step
        assert isinstance(step, WholeStepBuilder)
        if cached is None or step.takes(state.num_tokens - len(cached) * self._kv.block_size):
            return cached
        step.tokens_left = 0  # no other request gets the rest of the budget
        return None


class WholeStepBuilder(StepBuilder):
    def next_chunk_tokens(self, state: RequestState) -> int:
        """The whole rest that can be computed, or 0."""
        num_tokens = state.num_computable - state.num_planned
        return num_tokens if self.takes(num_tokens) else 0

    def takes(self, num_tokens: int) -> bool:
        """The first prompt may exceed the budget."""
        return not self.chunks or num_tokens <= self.tokens_left
