"""The stage scheduler: takes requests and results, returns plans and messages. The live instance and the simulator
drive the same object.

Pure: reads no clock; the same calls with the same `now` give the same plans. Owns the states of its requests and the
bookkeeping of both caches (`requests.py`). A language step is filled in `step.py`, a vision step in `vision.py`; the
rules of order and preemption are in `policy.py`, and `results.py` applies results. Optional parts plug in (`hooks.py`,
`budget.py`): a connector that moves features and KV between instances, budgets for latency limits, an observer that
explains late tokens. Does not know tensors, threads, channels or text.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import FeatureKey, RequestId, StepId
from hydra_engine.core.instances import Role
from hydra_engine.core.messages import RequestMessage
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.plans import LanguagePlan, VisionLoad, VisionPlan
from hydra_engine.core.reports import LedgerReport, Status
from hydra_engine.core.request import Request
from hydra_engine.core.results import LanguageResult, VisionResult
from hydra_engine.core.state import Ending
from hydra_engine.errors import ErrorInfo
from hydra_engine.scheduler.admission import Limits, check_fits, check_queue
from hydra_engine.scheduler.budget import Budgets
from hydra_engine.scheduler.hooks import Connector, StepObserver, Work
from hydra_engine.scheduler.report import scheduler_status
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.scheduler.results import ResultProcessor
from hydra_engine.scheduler.step import LanguagePlanner, PlannedStep
from hydra_engine.scheduler.step_stats import SpeedMeter, StepTimes
from hydra_engine.scheduler.vision import VisionPlanner


class StageScheduler:
    """The scheduler of one instance: plans the steps of its two lanes and tracks its requests.

    At most `vision_plans` vision plans and one language plan (two with look-ahead) are in flight; a lane runs its plans
    in order. The caller returns every result exactly once, in the order of the lane's plans, also if the step failed.
    Every request (or part of one) that `add` accepts ends in exactly one Finished; by then no plan names it and its
    blocks are free. If every result comes back, every held request is released and the connector loads what it parks
    requests for, every request ends, whatever the sizes of the caches.
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
        num_snapshots: int | None = None,
        num_state_blocks: int = 0,
        budgets: Budgets | None = None,
        observer: StepObserver | None = None,
        connector: Connector | None = None,
        vision_plans: int = 1,
    ) -> None:
        """`kv`, `images`: the block pools; a pool that the role does not use has no blocks. `instance`: its name, for
        timelines. `reuse`: prefix and image caching. `budgets` None: no latency limits. `observer` None: late tokens
        have no cause but their step. `connector` None: all is computed here. `vision_plans`: maximum of vision plans in
        flight.

        `num_snapshots`: slots of recurrent states behind the two of each sequence slot; None: the model keeps none.
        `num_state_blocks`: KV blocks in which such a state moves between instances."""
        self._num_state_blocks = num_state_blocks
        self._has_language = role.needs_language
        self._limits = Limits(role, kv.pool.num_blocks, kv.block_size, images.pool.num_blocks, images.block_size)
        self._max_queue = config.max_queue
        self._requests = RequestTable(
            kv,
            images,
            instance,
            config,
            reuse=reuse,
            num_snapshots=num_snapshots,
            observer=observer,
            connector=connector,
        )
        self._budgets = budgets if budgets is not None else Budgets(config)
        self._vision = VisionPlanner(self._requests, self._budgets, config)
        self._times = StepTimes()
        self._language = LanguagePlanner(self._requests, self._budgets, config)
        self._max_ahead = 1 if config.look_ahead else 0
        self._speeds = SpeedMeter(self._budgets.speeds())
        self._results = ResultProcessor(self._requests, self._times)
        self._connector = self._requests.connector
        self._connector.attach(self._requests, self._times, self._results.finish)
        self._connector.set_role(role)
        self._max_vision_plans = vision_plans
        self._vision_plans: deque[VisionPlan] = deque()  # in flight, the first one runs
        self._language_steps: dict[StepId, PlannedStep] = {}
        self._next_step = 0
        self.language_due_s = math.inf  # time of the next call of `plan_language` that no event announces
        self._language_ended_s = 0.0

    # ---- requests

    def add(
        self,
        request: Request,
        now: float,
        *,
        stages: Role | None = None,
        external_images: frozenset[int] = frozenset(),
        external_kv: bool = False,
        held_for: str = "",
    ) -> None:
        """Accepts a request, or raises the RequestError that says why it is refused and changes nothing. A full queue
        refuses only requests that are prefilled here. Asserts that the id is not in use.

        `stages`: the stages to run here, by default all of the role; E alone is an encode job, a request with images
        and no prompt. `external_images`: indices of images whose features the connector loads; all images if `stages`
        has no E. `external_kv`: the connector loads the KV of the prompt. `held_for`: the reason, for the timeline, why
        the request has to wait for `release_held`, until which it holds nothing and is in no plan; "" if it may start.
        """
        stages = self._limits.role if stages is None else stages
        state_blocks = self._num_state_blocks if external_kv or Role.D not in stages else 0
        check_fits(request, self._limits, stages, state_blocks)
        if Role.P in stages and not external_kv:  # other parts belong to a request that was accepted already
            check_queue(len(self._requests.states), self._max_queue, self._results.finish_times)
        state = self._requests.add(
            request, now, stages=stages, external_images=external_images, external_kv=external_kv, held_for=held_for
        )
        state.num_state_blocks = state_blocks

    def release_held(self, request_id: RequestId, now: float, error: ErrorInfo | None = None) -> list[RequestMessage]:
        """Lets a held request start or, with `error`, ends it and returns its Finished. Ignores other requests."""
        state = self._requests.states.get(request_id)
        if state is None or state.ending is not None or not state.held:
            return []
        if error is None:
            self._requests.release_held(state, now)
            return []
        self._requests.end(state, Ending(FinishReason.ERROR, error=error))
        return self._results.finish([state], now)

    def set_role(self, role: Role) -> None:
        """Sets the stages that are accepted from now on. Requests accepted before are completed."""
        self._limits = replace(self._limits, role=role)
        self._connector.set_role(role)

    def reset_caches(self, *, kv: bool, images: bool) -> None:
        """Forgets the cached KV (`kv`) and the cached features (`images`) that no request holds. A request that relies
        on a prefix hit and has not started finds the blocks missing at its next lookup, as after an eviction."""
        if kv:
            self._requests.kv.pool.forget_evictable()
            if self._requests.checkpoints is not None:
                self._requests.checkpoints.snapshots.pool.forget_evictable()
        if images:
            self._requests.features.pool.forget_evictable()

    def abort(self, request_id: RequestId, now: float) -> list[RequestMessage]:
        """Ends a request; ignores unknown ids and requests that are ending. Its Finished is returned now or, while
        plans in flight name it, by the call that brings the result of the last one (`on_vision`, `on_language` or the
        connector's)."""
        state = self._requests.states.get(request_id)
        if state is None or state.ending is not None:
            return []
        self._requests.end(state, Ending(FinishReason.ABORT))
        return self._results.finish([state], now)

    # ---- plans

    @property
    def vision_first(self) -> bool:
        """True if `plan_vision` must be called before `plan_language`, since a language step may have to wait for the
        vision step in flight."""
        return self._connector.vision_first

    @property
    def no_image_pending(self) -> bool:
        """True while no request waits for images before its start, and no vision step is in flight. Otherwise a step
        that is planned ahead could leave out a request that is about to be ready."""
        return not self._requests.encoding and not self._vision_plans

    def plan_vision(self, now: float) -> VisionPlan | None:
        """The next vision step, with blocks allocated for its features; features of later images may be evicted. None
        if no image waits for an encode here, none can have blocks now, or the maximum of plans is in flight."""
        if not self._requests.unencoded or len(self._vision_plans) >= self._max_vision_plans:
            return None
        plan = self._vision.plan(StepId(self._next_step), now)
        if plan is not None:
            self._vision_plans.append(plan)
            self._next_step += 1
            self._requests.observer.on_vision_planned(now, _work(plan))
        return plan

    def plan_language(self, now: float) -> LanguagePlan | None:
        """The next language step, with blocks allocated, for which requests are started and may be preempted. None if
        nothing can run, the maximum of plans is in flight, or the connector leaves the device to the vision step in
        flight; in the last case, `language_due_s` is the time to ask again, infinite if a result comes before.

        With a language step in flight the next one is planned ahead: token -1 stands for a token that is not read yet,
        no request is preempted, and None may also mean that the result has to come first.
        """
        ahead = bool(self._language_steps)
        self.language_due_s = math.inf
        if not (self._requests.states and self._has_language) or len(self._language_steps) > self._max_ahead:
            return None
        if self._vision_plans:
            due_s = self._connector.language_due_s(self._language_ended_s)
            if now < due_s or (ahead and due_s > -math.inf):
                self.language_due_s = math.inf if ahead else due_s
                return None
        patches = sum(plan.num_patches for plan in self._vision_plans)
        step = self._language.plan(StepId(self._next_step), now, ahead=ahead, patches_in_flight=patches)
        if step is None:
            return None
        self._language_steps[step.plan.step_id] = step
        self._next_step += 1
        return step.plan

    def may_drop(self, plan: VisionPlan) -> bool:
        """True if the caller may stop the vision plan in flight: there are requests that have not ended, and none of
        them uses features that it computes. Alone it goes on, for a client that asks again. Images that come back with
        an error are encoded again for requests that use them by then."""
        requests = self._requests
        keys = [requests.states[item.request_id].image_keys[item.image_index] for item in plan.items]
        if any(requests.images.is_needed(key) for key in keys):
            return False
        return any(state.ending is None for state in requests.states.values())

    def publish(self) -> None:
        """Makes computed blocks findable in the prefix cache. Called while the lanes compute, so that it takes no time
        between two steps."""
        self._requests.prefixes.publish()

    def expected_s(self, plan: LanguagePlan) -> float | None:
        """Expected seconds of a language step in flight: as the budgets predict for one alone on the device, else from
        the latest steps. None if neither is known, i.e. without measured costs before the first language step."""
        load = self._language_steps[plan.step_id].load
        predicted_s = self._budgets.predict(load)
        return predicted_s if predicted_s is not None else self._times.expected_s(load.num_rows)

    # ---- results

    def on_vision(self, result: VisionResult, now: float) -> list[RequestMessage]:
        """Applies the result of the oldest vision plan: its features are ready, or the requests of failed images end.
        Returns the Finished of its requests that have ended and that no other plan names."""
        assert self._vision_plans and self._vision_plans[0].step_id == result.step_id, "not the vision step that runs"
        plan = self._vision_plans.popleft()
        self._requests.observer.on_vision_done(result.started_s, result.ended_s, _work(plan))
        patches = [item.num_patches for item in plan.items]
        if None in result.errors:  # else it stopped early
            self._speeds.on_vision(sum(patches), result.ended_s - result.started_s)
        self._budgets.on_vision(VisionLoad(sum(patches), float(sum(count * count for count in patches))))
        return self._results.finish(self._results.on_vision(plan, result), now)

    def on_language(self, result: LanguageResult, now: float) -> list[RequestMessage]:
        """Applies the result of the oldest language plan. Returns its prompt scores and tokens, then the Finished of
        its requests that have ended and that no other plan names."""
        step = self._language_steps.pop(result.step_id)
        duration_s = result.ended_s - result.started_s
        gap_s = result.ended_s - self._language_ended_s if step.load.num_decodes else duration_s
        self._language_ended_s = result.ended_s
        self._times.record(duration_s, step.load.num_rows)
        self._speeds.on_language(step.load, duration_s, result.vision_s)
        chunks = [(row.request_id, len(row.token_ids)) for row in step.plan.chunks]
        self._requests.observer.on_language_done(result.started_s, result.ended_s, step.load, chunks, result.vision_s)
        self._budgets.on_language(step.load, step.budget, duration_s=duration_s, gap_s=gap_s, vision_s=result.vision_s)
        events, ended = self._results.on_language(step.plan, result)
        events += self._results.finish(ended, now)
        return events

    # ---- looking

    @property
    def has_work(self) -> bool:
        """True while the Finished of some request is still to come."""
        return bool(self._requests.states)

    def status(self) -> Status:
        """The scheduler's part of a Status; the instance adds the rest."""
        return scheduler_status(self._requests, self._results, self._budgets.report(), self._speeds.report())

    def ledger(self) -> LedgerReport:
        """The report of `Ledger.report` on all requests that are not forgotten; the instance adds the rest."""
        return self._requests.ledger.report(self._requests.states)


def _work(plan: VisionPlan) -> Work:
    """(request, patches) of each image of a vision step."""
    return [(item.request_id, item.num_patches) for item in plan.items]
