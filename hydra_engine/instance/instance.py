"""An engine instance: the loop between a scheduler, a worker, a channel and connections to other instances.

The loop waits for an event (a message or a lane's result), then runs one turn: drain messages, collect results, plan
for idle lanes, send what happened. Each lane is fed by itself; nothing waits for all lanes. With look-ahead the next
language step is planned shortly before the expected end of the running one, so that the lane continues at once and the
step includes requests that arrived meanwhile; if the running step ends earlier, planning follows its result. Does not
import torch, does not know where its worker computes or what is at the other end of a channel.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from hydra_engine.core.instances import Role
from hydra_engine.core.messages import (
    Abort,
    Encode,
    Finished,
    HandOver,
    NeedDecoder,
    NeedImages,
    QueryLedger,
    RequestMessage,
    ResetCaches,
    SetRole,
    Shutdown,
    Submit,
    ToFrontend,
    ToInstance,
)
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.plans import LanguagePlan
from hydra_engine.core.reports import LedgerReport, Status, StepReport, TransferReport
from hydra_engine.core.results import ConnectorResult, LaneResult, ReadyResult, VisionResult
from hydra_engine.errors import RequestError, RequestFailed, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hydra_engine.clock import Clock
    from hydra_engine.core.ids import RequestId
    from hydra_engine.core.plans import VisionPlan
    from hydra_engine.core.request import Request
    from hydra_engine.instance.ports import Inbox, Outbox, WorkerPort
    from hydra_engine.scheduler.scheduler import StageScheduler
    from hydra_engine.transfer.plans import PullPlan


STATUS_PERIOD_S = 0.25
HOLD_S = 60.0  # maximum hold of a request while the worker prepares it, including its wait behind others
LEAD_S = 0.002  # planning starts this long before the expected end of a language step, at most a third of the step


@dataclass(slots=True)
class _LaneActivity:
    """Counters of a lane for the status. `latest`: the running or last plan, and the time at which it started; None
    before the first."""

    num_steps: int = 0
    busy_s: float = 0.0
    latest: tuple[VisionPlan | LanguagePlan, float] | None = None

    def add_step(self, started_s: float, ended_s: float) -> None:
        self.num_steps += 1
        self.busy_s += ended_s - started_s

    def report(self, *, running: bool) -> StepReport:
        """The lane's report. The plan's tokens are counted only here, a few times a second."""
        if self.latest is None:
            return StepReport()
        plan, since_s = self.latest
        if isinstance(plan, LanguagePlan):
            return StepReport(running, since_s, len(plan.decodes), len(plan.chunks), tokens=plan.num_tokens)
        return StepReport(running, since_s, images=len(plan.items), tokens=plan.num_patches)


class Instance:
    """An instance owns its requests from Submit to Finished. `run` returns after Shutdown; the caller then closes the
    worker. Not thread-safe: all methods run on one thread."""

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
        migration: MigrationPort | None = None,
        clock_error: Callable[[], float] = float,
    ) -> None:
        """Creates an idle instance. `clock_error`: of `clock`, against the frontend's, in seconds."""
        self._scheduler = scheduler
        self._worker = worker
        self._inbox = inbox
        self._outbox = outbox
        self._wake = wake
        self._clock = clock
        self._clock_error = clock_error
        self._look_ahead = look_ahead
        self._migration = migration or MigrationPort()
        self._vision_in_flight: list[VisionPlan] = []  # the first one runs
        self._language_in_flight: list[LanguagePlan] = []  # the first one runs
        self._ahead_due_s = math.inf  # when to plan the next step
        self._vision = _LaneActivity()
        self._language = _LaneActivity()
        self._progress = 0
        self._requests: dict[RequestId, Request] = {}
        self._held: dict[RequestId, tuple[float, str]] = {}  # (deadline, reason), the earliest deadline first
        self._stopping = False
        self._last_status_s = float("-inf")
        self._idle_reported = False

    def run(self) -> None:
        """Runs turns until one has received Shutdown; requests in flight are left unfinished. Raises what
        `WorkerPort.poll` raises."""
        while not self._stopping:
            self._wake.wait(self.wait_s())
            self._wake.clear()
            self.turn()

    def wait_s(self) -> float:
        """Maximum seconds that the loop may sleep without an event."""
        held_s, _ = next(iter(self._held.values()), (math.inf, ""))
        due_s = min(self._ahead_due_s, self._scheduler.language_due_s, self._migration.next_deadline_s, held_s)
        return min(STATUS_PERIOD_S, max(0.0, due_s - self._clock.now()))

    def turn(self) -> None:
        """Runs one pass of the loop; public so that tests and the simulator can step it."""
        outgoing: list[ToFrontend] = []
        for message in self._inbox.drain():
            self._receive(message, outgoing)
        for result in self._worker.poll():
            self._collect(result, outgoing)
        self._end_holds(outgoing)
        self._emit(self._migration.drain(self._clock.now(), outgoing), outgoing)
        self._feed_lanes(outgoing)
        self._progress += 1
        self._append_status(outgoing)
        if outgoing:
            self._outbox.send(outgoing)
        self._scheduler.publish()

    # ---- input

    def _receive(self, message: ToInstance, outgoing: list[ToFrontend]) -> None:
        """Carries out a message of the frontend and appends what follows from it to `outgoing`."""
        match message:
            case Submit() | Encode():
                self._add(message, outgoing)
                self._drop_vision()
            case HandOver():
                request = self._requests.get(message.request_id)
                if request is not None:
                    self._migration.hand_over(request, message.target, self._clock.now())
            case SetRole():
                self._scheduler.set_role(Role.parse(message.role))
            case ResetCaches():
                self._scheduler.reset_caches(kv=message.kv, images=message.images)
            case Abort():
                self._emit(self._scheduler.abort(message.request_id, self._clock.now()), outgoing)
                self._drop_vision()
            case QueryLedger():
                outgoing.append(self._ledger(message.query_id))
            case Shutdown():
                self._stopping = True

    def _add(self, message: Submit | Encode, outgoing: list[ToFrontend]) -> None:
        """Adds a request or an encode job to the worker, the scheduler and the migration. If the worker or the
        scheduler refuses it, or it needs peers and there are none, it ends with an error at once."""
        request, now = message.request, self._clock.now()
        try:
            held_for = self._worker.add_request(request, message.pixels) or ""
        except RequestError as error:
            self._refuse(request, error, outgoing)
            return
        try:
            if isinstance(message, Encode):
                self._check_connected()
                self._scheduler.add(request, now, stages=Role.E)
            else:
                stages = Role.parse(message.stages)
                if message.source or message.remote_images or not stages & Role.D:
                    self._check_connected()
                self._scheduler.add(
                    request,
                    now,
                    stages=stages,
                    external_images=frozenset(message.remote_images),
                    external_kv=bool(message.source),
                    held_for=held_for,
                )
        except RequestError as error:
            self._worker.remove_request(request.id)
            self._refuse(request, error, outgoing)
            return
        self._requests[request.id] = request
        if held_for:
            self._held[request.id] = now + HOLD_S, held_for
        self._migration.on_accepted(message)
        self._look_outside(outgoing)

    def _refuse(self, request: Request, error: RequestError, outgoing: list[ToFrontend]) -> None:
        """Appends the Finished of a request that was not accepted."""
        outgoing.append(Finished(request.id, FinishReason.ERROR, num_generated=0, error=error.info()))

    def _check_connected(self) -> None:
        """Raises RequestFailed if this instance has no peers."""
        if not self._migration.connected:
            raise RequestFailed("this instance has no connection to others")

    def _collect(self, result: LaneResult, outgoing: list[ToFrontend]) -> None:
        """Passes a result of the worker to the scheduler or the migration, and appends what follows to `outgoing`."""
        now = self._clock.now()
        if isinstance(result, VisionResult):
            self._vision_in_flight.pop(0)
            if self._vision_in_flight:
                self._vision.latest = self._vision_in_flight[0], result.ended_s
            self._vision.add_step(result.started_s, result.ended_s)
            self._emit(self._scheduler.on_vision(result, now), outgoing)
        elif isinstance(result, ConnectorResult):
            self._emit(self._migration.on_result(result, now), outgoing)
        elif isinstance(result, ReadyResult):
            self._held.pop(result.request_id, None)
            self._emit(self._scheduler.release_held(result.request_id, now, result.error), outgoing)
        else:
            self._language_in_flight.pop(0)
            self._expect_end(result.ended_s)
            self._language.add_step(result.started_s, result.ended_s)
            self._emit(self._scheduler.on_language(result, now), outgoing)

    def _end_holds(self, outgoing: list[ToFrontend]) -> None:
        """Ends requests that were held for longer than `HOLD_S`, with the error Unavailable."""
        now = self._clock.now()
        while self._held:
            request_id, (until_s, what) = next(iter(self._held.items()))
            if until_s > now:
                return
            del self._held[request_id]
            error = Unavailable(f"the {what} of this request was not ready within {HOLD_S:g} s; try again later")
            self._emit(self._scheduler.release_held(request_id, now, error.info()), outgoing)

    # ---- feeding the lanes

    def _feed_lanes(self, outgoing: list[ToFrontend]) -> None:
        """Plans and submits steps and pulls. Vision and pulls are planned after language, vision with `vision_first`
        also before: a request considered for its start may turn out to need an encode, or get blocks for its pull."""
        if self._scheduler.vision_first:
            self._feed_vision(outgoing)
        self._feed_language(outgoing)
        self._feed_vision(outgoing)
        self._feed_pulls(outgoing)

    def _feed_pulls(self, outgoing: list[ToFrontend]) -> None:
        """Plans and submits the pulls that can begin now."""
        now = self._clock.now()
        plans = self._migration.plan_pulls(now)
        self._look_outside(outgoing)
        self._emit(self._migration.submit(plans, now), outgoing)

    def _feed_vision(self, outgoing: list[ToFrontend]) -> None:
        """Plans and submits vision steps until the scheduler has no more for now."""
        now, plan = self._clock.now(), self._scheduler.plan_vision(self._clock.now())
        self._look_outside(outgoing)
        while plan is not None:
            if not self._vision_in_flight:
                self._vision.latest = plan, now
            self._vision_in_flight.append(plan)
            self._worker.submit_vision(plan)
            plan = self._scheduler.plan_vision(now)
            self._look_outside(outgoing)

    def _drop_vision(self) -> None:
        """Stops vision steps of which no request needs the features any more."""
        for plan in self._vision_in_flight:
            if self._scheduler.may_drop(plan):
                self._worker.drop_vision(plan.step_id)

    def _feed_language(self, outgoing: list[ToFrontend]) -> None:
        """Plans and submits a language step if none is in flight or, with look-ahead, once when the running one is
        about to end and no image is pending."""
        now = self._clock.now()
        if self._language_in_flight:
            if now < self._ahead_due_s:
                return
            self._ahead_due_s = math.inf  # one attempt; if it fails, the next plan waits for the result
            if not self._scheduler.no_image_pending:
                return
        plan = self._scheduler.plan_language(now)
        self._look_outside(outgoing)
        if plan is None:
            return
        self._language_in_flight.append(plan)
        self._worker.submit_language(plan)
        if len(self._language_in_flight) == 1:
            self._expect_end(now)

    def _look_outside(self, outgoing: list[ToFrontend]) -> None:
        """Carries out the scheduler's latest decisions that concern other instances. Must be called before a plan is
        submitted, as the plan may overwrite blocks that were offered."""
        self._send(self._migration.take_events(self._clock.now()), outgoing)

    def _expect_end(self, started_s: float) -> None:
        """Records `started_s` as the start of the first language step in flight, if any, and sets the time to plan the
        next one: with look-ahead shortly before its expected end, if nothing follows it yet."""
        self._ahead_due_s = math.inf
        if self._language_in_flight:
            self._language.latest = self._language_in_flight[0], started_s
        if self._look_ahead and len(self._language_in_flight) == 1:
            expected_s = self._scheduler.expected_s(self._language_in_flight[0])
            if expected_s is not None:
                self._ahead_due_s = started_s + expected_s - min(LEAD_S, expected_s / 3)

    # ---- output

    def _emit(self, messages: list[RequestMessage], outgoing: list[ToFrontend]) -> None:
        """Carries out the scheduler's decisions that concern other instances, then appends its messages to `outgoing`:
        both in the order in which they came about."""
        self._look_outside(outgoing)  # events of a request for other instances precede its end
        self._send(messages, outgoing)

    def _send(self, messages: Iterable[RequestMessage | NeedImages | NeedDecoder], outgoing: list[ToFrontend]) -> None:
        """Appends messages to `outgoing`; a Finished also removes the request from the worker and the migration."""
        for message in messages:
            if isinstance(message, Finished):
                self._worker.remove_request(message.request_id)
                del self._requests[message.request_id]
                self._held.pop(message.request_id, None)
                self._migration.on_finished(message.request_id)
                if error_s := self._clock_error():
                    message = msgspec.structs.replace(message, clock_error_s=error_s)
            outgoing.append(message)

    def _append_status(self, outgoing: list[ToFrontend]) -> None:
        """Appends a status every `STATUS_PERIOD_S`, with or without work, and at once when all work has ended."""
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
        return msgspec.structs.replace(
            self._scheduler.status(),
            time_s=now,
            progress=self._progress,
            language_steps=self._language.num_steps,
            vision_steps=self._vision.num_steps,
            language_busy_s=self._language.busy_s,
            vision_busy_s=self._vision.busy_s,
            language_step=self._language.report(running=bool(self._language_in_flight)),
            vision_step=self._vision.report(running=bool(self._vision_in_flight)),
            transfer=self._migration.report(),
            clock_error_s=self._clock_error(),
        )

    def _ledger(self, query_id: int) -> LedgerReport:
        transfer = self._migration.report()
        return msgspec.structs.replace(
            self._scheduler.ledger(),
            query_id=query_id,
            pixel_bytes=self._worker.pixel_bytes,
            offers=transfer.offers,
            pulls=transfer.pulls,
            staged=transfer.staged,
        )


class MigrationPort:
    """The exchange of an instance with its peers, as a no-op for an instance without peers; see `migration.Migration`
    for the other. All methods are called on the instance's thread."""

    connected = False

    def on_accepted(self, message: Submit | Encode) -> None:
        """Called when the scheduler has accepted an encode job, or a request with the stages that run here. Offers for
        it may have arrived before."""

    def hand_over(self, request: Request, target: str, now: float) -> None:
        """Moves a request to the instance `target`, which decodes it from now on. One that leaves already, such as one
        prefilled for another instance, gets this target: KV offered so far is offered to it instead. Ignored if the
        request cannot move (`Offers.hand_over`)."""

    def on_finished(self, request_id: RequestId) -> None:
        """Called when a request has ended. Withdraws what it still offers, and refuses what is offered for it."""

    def drain(self, now: float, outgoing: list[ToFrontend]) -> list[RequestMessage]:
        """Handles messages of peers and what has expired, and sends renewals and offers that waited. Returns messages
        of requests that ended by that, and appends to `outgoing` which peers are up or down."""
        return []

    def take_events(self, now: float) -> Iterable[Finished | NeedImages | NeedDecoder]:
        """Carries out the scheduler's latest decisions that concern other instances, and yields messages for the
        frontend, in order. May do so only while it is iterated: the caller must exhaust it."""
        return ()

    def plan_pulls(self, now: float) -> list[PullPlan]:
        """Plans the pulls to begin now; the caller passes them to `submit`."""
        return []

    def submit(self, plans: Iterable[PullPlan], now: float) -> list[RequestMessage]:
        """Submits planned pulls; called after `take_events`. A pull whose offer is gone ends at once as not valid.
        Returns messages of requests that ended by that."""
        return []

    def on_result(self, result: ConnectorResult, now: float) -> list[RequestMessage]:
        """Handles the result of a job of the transfer lane. Returns messages of requests that ended by it."""
        return []

    @property
    def next_deadline_s(self) -> float:
        """Time at which `drain` has work next if no message comes; minus infinity: now; infinite: never."""
        return math.inf

    def report(self) -> TransferReport:
        return TransferReport()
