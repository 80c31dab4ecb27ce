"""One engine instance: the loop that joins a scheduler, a worker and a channel.

The loop waits for one event (a message or a lane's result), then takes a turn: drain the inbox, collect results, plan
what idle lanes can do, send what happened. The two lanes are fed separately; nothing waits for both. The next language
step is planned shortly before the running one is expected to end, so that the lane goes on at once and requests that
arrive meanwhile are in it; if the step ends sooner, planning follows its result. Does not import torch, does not know
where its worker computes or who is at the other end of the channel.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING

from hydra_engine.core.messages import (
    Abort,
    Delta,
    Finished,
    LedgerReport,
    QueryLedger,
    SetFault,
    Shutdown,
    Status,
    Submit,
    ToFront,
    ToInstance,
    Tokens,
)
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.plans import LanguageResult, PullResult, VisionResult
from hydra_engine.errors import ConfigError, RequestError
from hydra_engine.scheduler.events import Event, FinishEvent, TokenEvent, TokensEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from hydra_engine.clock import Clock
    from hydra_engine.core.plans import LanguagePlan
    from hydra_engine.instance.ports import Inbox, Outbox, WorkerPort
    from hydra_engine.scheduler.scheduler import StageScheduler

logger = logging.getLogger(__name__)

STATUS_PERIOD_S = 0.25
LEAD_S = 0.002  # before the expected end of a language step, or a third of it if that is shorter, the next is planned


class Instance:
    """Owns its requests from Submit to Finished. `run` returns after Shutdown; the caller then closes the worker."""

    def __init__(
        self,
        *,
        scheduler: StageScheduler,
        worker: WorkerPort,
        inbox: Inbox,
        outbox: Outbox,
        wake: threading.Event,
        clock: Clock,
        look_ahead: bool = False,
        arm_fault: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._inbox = inbox
        self._outbox = outbox
        self._wake = wake
        self._clock = clock
        self._arm_fault = arm_fault
        self._look_ahead = look_ahead
        self._vision_in_flight = False
        self._language_in_flight: list[LanguagePlan] = []  # the first one runs
        self._ahead_due_s = math.inf  # when to plan the step behind it
        self._vision_busy_s = 0.0
        self._language_busy_s = 0.0
        self._steps = {"vision": 0, "language": 0}
        self._progress = 0
        self._stopping = False
        self._last_status_s = float("-inf")
        self._idle_reported = False

    def run(self) -> None:
        while not self._stopping:
            self._wake.wait(self.wait_s())
            self._wake.clear()
            self.turn()

    def wait_s(self) -> float:
        """How long nothing is to be done unless something happens."""
        return min(STATUS_PERIOD_S, max(0.0, self._ahead_due_s - self._clock.now()))

    def turn(self) -> None:
        """One pass of the loop; separate so that tests and the simulator can step it."""
        outgoing: list[ToFront] = []
        for message in self._inbox.drain():
            self._receive(message, outgoing)
        for result in self._worker.poll():
            self._collect(result, outgoing)
        self._feed_lanes()
        self._progress += 1
        self._append_status(outgoing)
        if outgoing:
            self._outbox.send(outgoing)
        self._scheduler.tidy()

    # ---- what comes in

    def _receive(self, message: ToInstance, outgoing: list[ToFront]) -> None:
        match message:
            case Submit():
                self._submit(message, outgoing)
            case Abort():
                self._emit(self._scheduler.abort(message.request_id, self._clock.now()), outgoing)
            case QueryLedger():
                outgoing.append(self._ledger(message.query_id))
            case SetFault():
                self._set_fault(message)
            case Shutdown():
                self._stopping = True

    def _set_fault(self, message: SetFault) -> None:
        if self._arm_fault is None:
            logger.error("fault point %s refused: fault points are off", message.point)
            return
        try:
            self._arm_fault(message.point, message.action, message.argument)
        except ConfigError as error:
            logger.error("fault point refused: %s", error.message)

    def _submit(self, message: Submit, outgoing: list[ToFront]) -> None:
        request = message.request
        try:
            self._scheduler.add(request, self._clock.now())
        except RequestError as error:
            finished = Finished(request.id, FinishReason.ERROR.value, num_generated=0, error=error.info())
            outgoing.append(finished)
        else:
            self._worker.add_request(request, message.pixels)

    def _collect(self, result: VisionResult | LanguageResult | PullResult, outgoing: list[ToFront]) -> None:
        now = self._clock.now()
        if isinstance(result, VisionResult):
            self._vision_in_flight = False
            self._steps["vision"] += 1
            self._vision_busy_s += result.ended_s - result.started_s
            self._emit(self._scheduler.on_vision(result, now), outgoing)
        else:
            self._language_in_flight.pop(0)
            self._expect_end(result.ended_s)
            self._steps["language"] += 1
            self._language_busy_s += result.ended_s - result.started_s
            self._emit(self._scheduler.on_language(result, now), outgoing)

    # ---- what goes to the lanes

    def _feed_lanes(self) -> None:
        """Vision comes last in any case: a request that is considered for its start may find that it needs an encode
        after all."""
        if self._scheduler.vision_first:
            self._feed_vision()
        self._feed_language()
        self._feed_vision()

    def _feed_vision(self) -> None:
        if not self._vision_in_flight and (plan := self._scheduler.plan_vision(self._clock.now())) is not None:
            self._vision_in_flight = True
            self._worker.submit_vision(plan)

    def _feed_language(self) -> None:
        now = self._clock.now()
        if self._language_in_flight:
            if now < self._ahead_due_s:
                return
            self._ahead_due_s = math.inf  # one attempt; if it fails, the result is waited for
            if not self._scheduler.settled:
                return
        plan = self._scheduler.plan_language(now)
        if plan is None:
            return
        self._language_in_flight.append(plan)
        self._worker.submit_language(plan)
        if len(self._language_in_flight) == 1:
            self._expect_end(now)

    def _expect_end(self, started_s: float) -> None:
        """The first language step in flight has begun; says when to plan the next one."""
        self._ahead_due_s = math.inf
        if self._look_ahead and len(self._language_in_flight) == 1:
            expected_s = self._scheduler.expected_s(self._language_in_flight[0])
            if expected_s is not None:
                self._ahead_due_s = started_s + expected_s - min(LEAD_S, expected_s / 3)

    # ---- what goes out

    def _emit(self, events: list[Event], outgoing: list[ToFront]) -> None:
        now = self._clock.now()
        for event in events:
            match event:
                case TokensEvent():
                    outgoing.append(Tokens(event.request_ids, event.positions, event.token_ids, now))
                case TokenEvent():
                    position, token_ids = event.position, (event.token_id,)
                    outgoing.append(Delta(event.request_id, position, token_ids, now, (event.logprobs,)))
                case FinishEvent():
                    outgoing.append(self._finish(event))

    def _finish(self, event: FinishEvent) -> Finished:
        self._worker.remove_request(event.request_id)
        return Finished(
            event.request_id,
            event.reason.value,
            num_generated=event.num_generated,
            stop_token_id=event.stop_token_id,
            error=event.error,
            spans=event.spans,
            num_preemptions=event.num_preemptions,
            cached_tokens=event.cached_tokens,
            cached_images=event.cached_images,
            late_gaps=event.late_gaps,
            num_gaps=event.num_gaps,
        )

    def _append_status(self, outgoing: list[ToFront]) -> None:
        """A few times a second while there is work, once when it has ended."""
        now = self._clock.now()
        idle = not self._scheduler.has_work
        due = now - self._last_status_s >= STATUS_PERIOD_S
        if idle and self._idle_reported and not due:
            return
        if not idle and not due:
            self._idle_reported = False
            return
        self._idle_reported = idle
        self._last_status_s = now
        outgoing.append(self._status(now))

    def _status(self, now: float) -> Status:
        stats = self._scheduler.stats()
        return Status(
            time_s=now,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_encoding=stats.num_encoding,
            kv_blocks_used=stats.kv_blocks_used,
            kv_blocks_total=stats.kv_blocks_total,
            image_blocks_used=stats.image_blocks_used,
            image_blocks_total=stats.image_blocks_total,
            num_preemptions=stats.num_preemptions,
            language_steps=self._steps["language"],
            vision_steps=self._steps["vision"],
            language_busy_s=self._language_busy_s,
            vision_busy_s=self._vision_busy_s,
            prompt_tokens=stats.prompt_tokens,
            generation_tokens=stats.generation_tokens,
            images_encoded=stats.images_encoded,
            progress=self._progress,
            budget=self._scheduler.budget(),
        )

    def _ledger(self, query_id: int) -> LedgerReport:
        snapshot = self._scheduler.ledger()
        return LedgerReport(
            query_id=query_id,
            num_requests=snapshot.num_requests,
            kv_blocks_held=snapshot.kv_blocks_held,
            kv_blocks_total=snapshot.kv_blocks_total,
            image_blocks_held=snapshot.image_blocks_held,
            image_blocks_total=snapshot.image_blocks_total,
            pixel_bytes=self._worker.pixel_bytes,
            holders=snapshot.holders,
            problems=snapshot.problems,
            state_slots_held=snapshot.state_slots_held,
            state_slots_total=snapshot.state_slots_total,
        )
