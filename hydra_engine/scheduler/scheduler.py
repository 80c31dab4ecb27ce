"""The stage scheduler: events in, plans and events out. The live instance and the simulator drive the same object.

Pure and clock-injected: the same calls with the same `now` give the same plans. It owns the state of its requests and
the bookkeeping of both caches. What a result means for each request is in `progress.py`, what is fetched from other
instances in `pulls.py`, how parts of requests leave in `parts.py`. Does not know tensors, threads, channels, other
instances or text.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from hydra_engine.cache.ledger import LedgerSnapshot
from hydra_engine.cache.manager import CacheManager
from hydra_engine.config import SchedulerConfig
from hydra_engine.core.cost import VisionLoad
from hydra_engine.core.ids import FeatureKey, RequestId, StepId
from hydra_engine.core.messages import BudgetReport
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.plans import KvEnd, LanguagePlan, LanguageResult, PullPlan, VisionPlan, VisionResult
from hydra_engine.core.request import Request
from hydra_engine.core.roles import Role
from hydra_engine.core.state import Ending, RequestState
from hydra_engine.errors import ConfigError
from hydra_engine.scheduler.admission import Limits, check_fits, check_queue
from hydra_engine.scheduler.audit import check_book, check_in_flight
from hydra_engine.scheduler.blame import StepLog
from hydra_engine.scheduler.book import RequestBook
from hydra_engine.scheduler.budget import Budgets, FixedBudgets
from hydra_engine.scheduler.events import Event, FinishEvent, OutsideEvent
from hydra_engine.scheduler.language import LanguagePlanner, LanguageStep
from hydra_engine.scheduler.modes import Mode
from hydra_engine.scheduler.parts import Parts
from hydra_engine.scheduler.progress import Progress
from hydra_engine.scheduler.pulls import Pulls
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
    num_handing_over: int
    num_arriving: int
    num_decoding: int


class StageScheduler:
    """Contract: one vision plan is in flight at most, and one language plan; with look-ahead two of these, which the
    lane runs one after the other; and any number of pulls. Every result is given back exactly once, those of a lane in
    order, also when it failed. Every request, or part of one, that `add` accepts ends in exactly one FinishEvent, at
    which time no plan names it and its blocks are free. If every result comes back, what is asked of other instances is
    offered and what is offered to them is fetched, every request ends, whatever the sizes of the caches.

    `take_events` is called after each plan and before it is submitted: what others may not read any more is in it.
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
        has_states: bool = False,
        budgets: Budgets | None = None,
        log: StepLog | None = None,
    ) -> None:
        """`has_states`: the model keeps recurrent states, one in each seat. `log` explains late tokens. A pool that
        the role does not use has no blocks."""
        if has_states and (Role.P in role) != (Role.D in role):
            raise ConfigError(
                f"a model with recurrent states cannot be served by an instance of role {role.letters}: states stay "
                "where they are, so use roles that prefill and decode, for example E+PD",
                param="topology",
            )
        self._limits = Limits(role, kv.num_blocks, kv.block_size, images.num_blocks, images.block_size)
        self._max_queue = config.max_queue
        self._book = RequestBook(kv, images, instance, config, reuse=reuse, has_states=has_states, log=log)
        self._budgets = budgets if budgets is not None else FixedBudgets(config)
        self._mode = Mode(config, role)
        self._vision = VisionPlanner(self._book, self._budgets, config)
        whole = self._mode.whole_requests
        self._language = LanguagePlanner(self._book, self._budgets, config, whole_requests=whole)
        self._times = StepTimes()
        self._progress = Progress(self._book, self._times)
        self._pulls = Pulls(self._book, self._language.arrivals, self._progress, config)
        self._parts = Parts(self._book)
        self._vision_plans: dict[StepId, VisionPlan] = {}
        self._encodes: dict[StepId, tuple[tuple[RequestId, int], ...]] = {}  # (request, patches) of these plans
        self._language_steps: dict[StepId, LanguageStep] = {}
        self._next_step = 0
        self._yielded = False  # the language lane is idle so that the vision lane has the device
        self._language_ended_s = 0.0
        self._patches_in_flight = 0
        self._finish_times: deque[float] = deque(maxlen=32)

    # ---- requests

    def add(
        self,
        request: Request,
        now: float,
        *,
        part: Role | None = None,
        remote_images: frozenset[int] = frozenset(),
        pulls_kv: bool = False,
    ) -> None:
        """Accepts a request or raises the RequestError that says why it is refused; then nothing has changed.

        `part`: the stages to be done here, by default all that the role can do; E alone is an encode job, a request
        with images and no prompt. Images in `remote_images` are encoded elsewhere, and all are if the part has no E.
        With `pulls_kv` the KV of the prompt is computed elsewhere and pulled.
        """
        part = self._limits.role if part is None else part
        check_fits(request, self._limits, part)
        if Role.P in part and not pulls_kv:  # what goes on with an accepted request is accepted
            check_queue(len(self._book.states), self._max_queue, self._finish_times)
        self._book.add(request, now, part=part, remote_images=remote_images, pulls_kv=pulls_kv)

    def set_role(self, role: Role) -> None:
        """Which parts are accepted from now on. Only while nothing is held."""
        assert not self.has_work, "the role changes while requests are served"
        self._limits = replace(self._limits, role=role)
        self._mode.set_role(role)

    def reset_caches(self, *, kv: bool, images: bool) -> None:
        """Forgets reusable KV, reusable features, or both; what requests hold stays."""
        self._book.reset_caches(kv=kv, images=images)

    def abort(self, request_id: RequestId, now: float) -> list[Event]:
        """Ends a request; unknown ids are ignored. Its FinishEvent is returned now or, while a plan in flight names it,
        by the `on_...` call that takes the last such plan back."""
        state = self._book.states.get(request_id)
        if state is None or state.ending is not None:
            return []
        self._book.end(state, Ending(FinishReason.ABORT))
        return self._finish([state], now)

    # ---- other instances

    def image_offered(self, request_id: RequestId, image_index: int, offer: int, now: float) -> None:
        """Features of a remote image can be pulled. `offer` is a number of the caller's, as in the plan of the pull."""
        self._pulls.image_offered(request_id, image_index, offer)

    def image_offer_gone(self, offer: int, now: float) -> None:
        """They cannot be pulled any more; a copy in flight comes back all the same."""
        self._book.images.offer_gone(offer)

    def kv_offered(self, request_id: RequestId, offer: int, num_blocks: int, end: KvEnd | None, now: float) -> None:
        """`num_blocks` of a request's KV can be pulled, in all: told again whenever there are more, the last time with
        `end`."""
        self._pulls.kv_offered(request_id, offer, num_blocks, end)

    def kv_offer_gone(self, offer: int, now: float) -> None:
        self._pulls.kv_offer_gone(offer)

    def plan_pulls(self, now: float) -> list[PullPlan]:
        """Copies to begin now. They write to blocks of ours until `on_pull`."""
        plans = self._pulls.plan(self._next_step, now)
        self._next_step += len(plans)
        return plans

    def on_pull(self, step_id: StepId, now: float, *, valid: bool, started_s: float, ended_s: float) -> list[Event]:
        """Takes back a pull. Not `valid`: its offer was gone before the copy had ended, or the bytes were wrong."""
        state = self._pulls.end(step_id, now, valid=valid, started_s=started_s, ended_s=ended_s)
        self._depart(now)
        return self._finish([state], now)

    def release_features(self, request_id: RequestId, image_index: int, now: float) -> list[Event]:
        """Features that an encode job has offered have been fetched, or are not wanted."""
        return self._finish(self._parts.release_features(request_id, image_index, now), now)

    def release_kv(self, request_id: RequestId, now: float) -> list[Event]:
        """All KV that was offered has been fetched, or is not wanted."""
        return self._finish(self._parts.release_kv(request_id, now), now)

    def withdraw(self, request_id: RequestId, now: float, reason: str) -> list[Event]:
        """Nobody is going to fetch what an encode job or a request that moves on offers. `reason` is for its
        timeline."""
        return self._finish(self._parts.withdraw(request_id, now, reason), now)

    def hand_over(self, request_id: RequestId, now: float) -> bool:
        """A decode that runs here is to go on elsewhere: from here on its KV is offered. False if it does not run."""
        return self._parts.hand_over(request_id, now)

    def take_events(self) -> list[OutsideEvent]:
        """What other instances have to be told since the last call, in order, and the ends of requests that departed
        while something was planned."""
        return self._book.outside.take()

    def _depart(self, now: float) -> None:
        departed, self._book.departed = self._book.departed, []
        for event in self._finish(departed, now):
            assert isinstance(event, FinishEvent)
            self._book.outside.tell(event)

    # ---- plans

    @property
    def vision_first(self) -> bool:
        """Whether the vision lane is to be asked for a step before the language lane, and not only behind it. Matters
        where one may have to wait for the other."""
        return self._mode.vision_first

    @property
    def settled(self) -> bool:
        """Whether no image waits for its features or gets them now. While one does, a language step planned before the
        running one has ended would keep out a request that is about to be ready."""
        return not (self._book.encoding or self._vision_plans)

    def plan_vision(self, now: float) -> VisionPlan | None:
        """The next vision step, or None when there is nothing to encode, no room, or one in flight."""
        runs = bool(self._vision_plans), bool(self._language_steps)
        if not self._book.unencoded or not self._mode.may_plan_vision(vision_runs=runs[0], language_runs=runs[1]):
            return None
        among = self._num_served_next() if self._mode.whole_requests else None
        plan = self._vision.plan(StepId(self._next_step), now, among=among)
        if plan is not None:
            self._vision_plans[plan.step_id] = plan
            self._next_step += 1
            self._patches_in_flight += plan.num_patches
            self._mode.planned(vision=True)
            work = tuple((item.request_id, item.num_patches) for item in plan.items)
            self._encodes[plan.step_id] = work
            self._book.log.vision_began(now, work)
        return plan

    @property
    def language_due_s(self) -> float:
        """When `plan_language` is worth calling again although nothing has happened; infinite if never."""
        return self._mode.due_s if self._yielded else math.inf

    def plan_language(self, now: float) -> LanguagePlan | None:
        """The next language step, or None when nothing can run or as many as may be are in flight.

        With one in flight it is planned ahead: token -1 stands for those that are not known yet, nobody gives way, and
        None may mean that the result has to come first.
        """
        ahead, vision_runs = bool(self._language_steps), bool(self._vision_plans)
        images_wait = bool(self._book.unencoded)
        self._yielded = False
        if not self._book.states or len(self._language_steps) > 1:
            return None
        if not self._mode.may_plan_language(vision_runs=vision_runs, language_runs=ahead, images_wait=images_wait):
            return None
        only_borrowed = self._mode.may_yield(vision_runs=vision_runs) and self._book.only_borrowed
        if self._mode.yields(now, vision_runs=vision_runs, language_runs=ahead, only_borrowed=only_borrowed):
            self._yielded = not ahead
            return None
        patches = self._patches_in_flight
        step = self._language.plan(StepId(self._next_step), now, ahead=ahead, patches_in_flight=patches)
        self._depart(now)
        if step is None:
            return None
        self._language_steps[step.plan.step_id] = step
        self._next_step += 1
        self._mode.planned(vision=False)
        return step.plan

    def _num_served_next(self) -> int:
        """Requests with images that have a seat, or find one beside those that wait for nothing else."""
        running = sum(state.waits_for_images for state in self._book.prefilling)
        return running + max(0, self._book.seats.num_free - len(self._book.waiting))

    def tidy(self) -> None:
        """Does what can be done while the lanes compute, so that it takes no time between two steps."""
        self._book.prefixes.settle()

    def expected_s(self, plan: LanguagePlan) -> float | None:
        """How long a language step in flight will take; None if nothing is known of such steps yet."""
        load = self._language_steps[plan.step_id].load
        predicted_s = self._budgets.predict(load)
        return predicted_s if predicted_s is not None else self._times.expected_s(load.num_rows)

    # ---- results

    def on_vision(self, result: VisionResult, now: float) -> list[Event]:
        """Takes back a vision plan: features are there, or their request fails."""
        plan = self._vision_plans.pop(result.step_id)
        self._patches_in_flight -= plan.num_patches
        self._book.log.vision(result.started_s, result.ended_s, self._encodes.pop(result.step_id))
        patches = [item.num_patches for item in plan.items]
        self._budgets.on_vision(VisionLoad(sum(patches), float(sum(count * count for count in patches))))
        return self._finish(self._progress.encoded(plan, result), now)

    def on_language(self, result: LanguageResult, now: float) -> list[Event]:
        """Takes back a language plan: progress, tokens, and requests that ended or failed."""
        step = self._language_steps.pop(result.step_id)
        duration_s = result.ended_s - result.started_s
        gap_s = result.ended_s - self._language_ended_s if step.load.num_decodes else duration_s
        self._language_ended_s = result.ended_s
        self._mode.language_ended(result.ended_s)
        self._times.record(duration_s, step.load.num_rows)
        self._book.log.language(result.started_s, result.ended_s, step.load, step.chunks, result.vision_s)
        self._budgets.on_language(step.load, step.budget, duration_s=duration_s, gap_s=gap_s, vision_s=result.vision_s)
        events, ended = self._progress.computed(step.plan, result)
        events += self._finish(ended, now)
        return events

    def _finish(self, ended: list[RequestState], now: float) -> list[Event]:
        """The events of those that no plan names any more."""
        events: list[Event] = []
        for state in ended:
            ending = state.ending
            if ending is None or self._book.in_use(state):
                continue
            timeline = self._book.timelines[state.request.id]
            spans = timeline.close(now)
            self._book.forget(state)
            self._finish_times.append(now)
            events.append(
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
                    late_gaps=timeline.late_gaps,
                    num_gaps=max(0, state.num_generated - 1),
                )
            )
        return events

    # ---- looking

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return bool(self._book.states)

    def stats(self) -> SchedulerStats:
        book, progress = self._book, self._progress
        return SchedulerStats(
            num_running=len(book.prefilling) + len(book.decoding),
            num_waiting=len(book.waiting),
            num_encoding=len(book.encoding) + len(book.jobs),
            kv_blocks_used=book.kv.num_held,
            kv_blocks_total=book.kv.num_blocks,
            image_blocks_used=book.features.num_held,
            image_blocks_total=book.features.num_blocks,
            num_preemptions=book.num_preemptions,
            prompt_tokens=progress.prompt_tokens,
            generation_tokens=progress.generation_tokens,
            images_encoded=progress.images_encoded,
            num_handing_over=len(book.handing_over),
            num_arriving=len(book.arriving) + len(book.incoming),
            num_decoding=len(book.decoding),
        )

    def budget(self) -> BudgetReport:
        return self._budgets.report()

    def ledger(self) -> LedgerSnapshot:
        return self._book.ledger.snapshot(self._book.states)

    def check(self) -> None:
        """Raises AssertionError if any of the books disagree with another."""
        check_book(self._book)
        language = [step.plan for step in self._language_steps.values()]
        check_in_flight(self._book, self._vision_plans.values(), language, self._pulls.in_flight.values())
