"""The stage scheduler: events in, plans and events out. The live instance and the simulator drive the same object.

Pure and clock-injected: the same calls with the same `now` give the same plans. It owns the state of its requests and
the bookkeeping of both caches. Does not know tensors, threads, channels or text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hydra_engine.cache.ledger import LedgerSnapshot
from hydra_engine.cache.manager import CacheManager
from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import FeatureKey, RequestId, StepId
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.plans import LanguagePlan, LanguageResult, LanguageRow, RowOutcome, VisionPlan, VisionResult
from hydra_engine.core.request import Request
from hydra_engine.core.roles import Role
from hydra_engine.core.state import Ending, ImageProgress, RequestState
from hydra_engine.errors import ConfigError
from hydra_engine.scheduler.admission import Limits, check_fits, check_queue
from hydra_engine.scheduler.book import RequestBook
from hydra_engine.scheduler.budget import Budgets
from hydra_engine.scheduler.events import Event, FinishEvent, TokenEvent
from hydra_engine.scheduler.language import LanguagePlanner
from hydra_engine.scheduler.timeline import StepTimes
from hydra_engine.scheduler.vision import VisionPlanner


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges and counters, named as in `core.messages.Status`."""

    num_running: int
    num_waiting: int
    num_encoding: int
    kv_blocks_used: int
    kv_blocks_total: int
    image_blocks_used: int
    image_blocks_total: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    images_encoded: int


class StageScheduler:
    """Contract: one plan per lane is in flight at most, and its result is given back exactly once, also when it failed.
    Every request that `add` accepts ends in exactly one FinishEvent, at which time no plan names it and its blocks are
    free. If every result comes back, every request ends, whatever the sizes of the caches.
    """

    def __init__(
        self,
        role: Role,
        kv: CacheManager[RequestId],
        images: CacheManager[FeatureKey],
        config: SchedulerConfig,
        *,
        instance: str,
        reuse: bool = True,
        num_state_slots: int = 0,
        budgets: Budgets | None = None,
    ) -> None:
        if Role.P not in role or Role.D not in role:
            raise ConfigError(f"an instance must prefill and decode, not only {role.letters}", param="topology")
        self._limits = Limits(role, kv.num_blocks, kv.block_size, images.num_blocks, images.block_size)
        self._max_queue = config.max_queue
        self._book = RequestBook(kv, images, instance, reuse=reuse, num_state_slots=num_state_slots)
        budgets = budgets if budgets is not None else Budgets.from_config(config)
        self._vision = VisionPlanner(self._book, budgets, config)
        self._language = LanguagePlanner(self._book, budgets, config)
        self._vision_plans: dict[StepId, VisionPlan] = {}
        self._language_plans: dict[StepId, LanguagePlan] = {}
        self._next_step = 0
        self._step_times = StepTimes()
        self._finish_times: deque[float] = deque(maxlen=32)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._images_encoded = 0

    # ---- requests

    def add(self, request: Request, now: float) -> None:
        """Accepts a request or raises the RequestError that says why it is refused; then nothing has changed."""
        check_fits(request, self._limits)
        check_queue(len(self._book.states), self._max_queue, self._finish_times)
        self._book.add(request, now)

    def abort(self, request_id: RequestId, now: float) -> list[Event]:
        """Ends a request; unknown ids are ignored. Its FinishEvent is returned now or, while a plan in flight names it,
        by the `on_...` call that takes the last such plan back."""
        state = self._book.states.get(request_id)
        if state is None or state.ending is not None:
            return []
        self._book.end(state, Ending(FinishReason.ABORT))
        return self._finish_if_unused(state, now)

    # ---- plans

    def plan_vision(self, now: float) -> VisionPlan | None:
        """The next vision step, or None when there is nothing to encode, no room, or one in flight."""
        if self._vision_plans or not self._book.unencoded:
            return None
        plan = self._vision.plan(StepId(self._next_step), now)
        if plan is not None:
            self._vision_plans[plan.step_id] = plan
            self._next_step += 1
        return plan

    def plan_language(self, now: float) -> LanguagePlan | None:
        """The next language step, or None when nothing can run or one is in flight."""
        if self._language_plans or not self._book.states:
            return None
        plan = self._language.plan(StepId(self._next_step), now)
        if plan is not None:
            self._language_plans[plan.step_id] = plan
            self._next_step += 1
        return plan

    # ---- results

    def on_vision(self, result: VisionResult, now: float) -> list[Event]:
        """Takes back a vision plan: features are there, or their request fails."""
        plan = self._vision_plans.pop(result.step_id)
        outcomes = {(outcome.request_id, outcome.image_index): outcome for outcome in result.outcomes}
        patches: dict[RequestId, int] = {}
        sharing: dict[RequestId, RequestState] = {}
        for item in plan.items:
            patches[item.request_id] = patches.get(item.request_id, 0) + item.num_patches
            state = self._book.states[item.request_id]
            error = outcomes[item.request_id, item.image_index].error
            if error is None:
                self._images_encoded += 1
            elif state.ending is None:
                self._book.end(state, Ending(FinishReason.ERROR, error=error))
            key = state.image_keys[item.image_index]
            users = self._book.finish_features(key, failed=error is not None)
            sharing |= {user.request.id: user for user in users}
        events: list[Event] = []
        for request_id, count in patches.items():
            state = self._book.states[request_id]
            state.plans_in_flight -= 1
            timeline = self._book.timelines[request_id]
            more = state.ending is None and ImageProgress.WAITING in state.images
            timeline.encoded(result.started_s, result.ended_s, batch=len(patches), patches=count, more=more)
            if not more and not state.num_scheduled:
                timeline.images_ready(result.ended_s)
            events += self._finish_if_unused(state, now)
        for request_id, state in sharing.items():
            if request_id not in patches and state.ending is None and not state.waits_for_images:
                self._book.images_settled(state, result.ended_s)
        return events

    def on_language(self, result: LanguageResult, now: float) -> list[Event]:
        """Takes back a language plan: progress, tokens, and requests that ended or failed."""
        plan = self._language_plans.pop(result.step_id)
        outcomes = {outcome.request_id: outcome for outcome in result.outcomes}
        self._step_times.record(result.ended_s - result.started_s)
        with_prefill = not plan.rows[-1].is_decode
        batch = len(plan.rows)
        events: list[Event] = []
        for row in plan.rows:
            state = self._book.states[row.request_id]
            state.plans_in_flight -= 1
            state.num_scheduled -= len(row.token_ids)
            timeline = self._book.timelines[row.request_id]
            if row.is_decode:
                timeline.decoded(
                    result.started_s, result.ended_s, batch=batch, times=self._step_times, with_prefill=with_prefill
                )
            else:
                timeline.prefilled(
                    result.started_s, result.ended_s, batch=batch, tokens=len(row.token_ids), more=not row.sample
                )
            if state.ending is None:
                self._advance(state, row, outcomes[row.request_id], events)
            if state.ending is not None:
                events += self._finish_if_unused(state, now)
        return events

    def _advance(self, state: RequestState, row: LanguageRow, outcome: RowOutcome, events: list[Event]) -> None:
        """The one place where a request makes progress on the language lane."""
        if outcome.error is not None:
            self._book.end(state, Ending(FinishReason.ERROR, error=outcome.error))
            return
        state.num_computed += len(row.token_ids)
        if row.images:
            self._book.consume_images(state)
        if row.sample:
            assert outcome.token_id is not None, "a row that samples came back without a token"
            self._take_token(state, outcome, events)
            self._book.prefixes.lend(state)
        if not row.is_decode and state.ending is None:
            self._book.place(state)

    def _take_token(self, state: RequestState, outcome: RowOutcome, events: list[Event]) -> None:
        token_id = outcome.token_id
        assert token_id is not None
        events.append(TokenEvent(state.request.id, len(state.generated), token_id, outcome.logprobs))
        if not state.generated:
            self._prompt_tokens += state.request.num_prompt - state.cached_tokens
        state.generated.append(token_id)
        self._generation_tokens += 1
        if token_id in state.stop_ids:
            self._book.end(state, Ending(FinishReason.STOP, stop_token_id=token_id))
        elif len(state.generated) >= state.request.max_new_tokens:
            self._book.end(state, Ending(FinishReason.LENGTH))

    def _finish_if_unused(self, state: RequestState, now: float) -> list[Event]:
        ending = state.ending
        if ending is None or state.plans_in_flight:
            return []
        spans = self._book.timelines[state.request.id].close(now)
        self._book.forget(state)
        self._finish_times.append(now)
        return [
            FinishEvent(
                request_id=state.request.id,
                reason=ending.reason,
                num_generated=state.num_generated,
                stop_token_id=ending.stop_token_id,
                error=ending.error,
                spans=spans,
                num_preemptions=state.num_preemptions,
                cached_tokens=state.cached_tokens,
                cached_images=state.cached_images,
            )
        ]

    # ---- looking

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return bool(self._book.states)

    def stats(self) -> SchedulerStats:
        book = self._book
        return SchedulerStats(
            num_running=len(book.prefilling) + len(book.decoding),
            num_waiting=len(book.waiting),
            num_encoding=len(book.encoding),
            kv_blocks_used=book.kv.num_held,
            kv_blocks_total=book.kv.num_blocks,
            image_blocks_used=book.features.num_held,
            image_blocks_total=book.features.num_blocks,
            num_preemptions=book.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            images_encoded=self._images_encoded,
        )

    def ledger(self) -> LedgerSnapshot:
        return self._book.ledger.snapshot(self._book.states)

    def check(self) -> None:
        """Raises AssertionError if any of the books disagree with another."""
        self._book.check()
        in_flight: dict[RequestId, int] = {}
        for vision in self._vision_plans.values():
            for request_id in {item.request_id for item in vision.items}:
                in_flight[request_id] = in_flight.get(request_id, 0) + 1
        for language in self._language_plans.values():
            for row in language.rows:
                in_flight[row.request_id] = in_flight.get(row.request_id, 0) + 1
        for request_id, state in self._book.states.items():
            assert state.plans_in_flight == in_flight.pop(request_id, 0), f"request {request_id}: plans in flight"
            assert state.ending is None or state.plans_in_flight, f"request {request_id} has ended and is still here"
        assert not in_flight, f"plans name requests that are gone: {sorted(in_flight)}"
