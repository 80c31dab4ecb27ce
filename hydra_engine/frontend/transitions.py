"""The requests in flight and the table of their transitions: event x phase -> actions.

`TRANSITIONS`, at the end, is the whole of it: what is done when an instance is lost, a token comes, a decoder is
needed, a caller cancels. docs/architecture.md shows the table, drawn by `python -m tools.frontend_table`. Every
submitted request ends exactly once.

Reads no clock and knows no event loop: `now` is passed in, messages leave through `send`. Tokens are matched by attempt
and position. A message under an id that is not a current attempt or job of its sender is dropped, and the sender is
sent one abort for that id.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, cast

import msgspec

from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Condition, Role
from hydra_engine.core.messages import (
    Abort,
    Delta,
    Finished,
    HandOver,
    NeedDecoder,
    NeedImages,
    PixelPayload,
    PromptScores,
    Submit,
    ToFrontend,
    Tokens,
)
from hydra_engine.core.outputs import Departure, FinishReason, Result
from hydra_engine.core.request import Request
from hydra_engine.errors import HydraError, RequestAborted, RequestFailed, Unavailable, from_info
from hydra_engine.frontend.request import (
    RUNNING,
    ActiveRequest,
    Attempt,
    Charge,
    Job,
    Phase,
    PoisonGuard,
    RequestInFlight,
)
from hydra_engine.frontend.routing.instances import InstanceLoad, Instances, Send, missing_for_good, prefillers
from hydra_engine.frontend.routing.router import Router

logger = logging.getLogger(__name__)

# Attempts that ended without a death: their causes pass (a full cache, a lost lease), but not if there are this many.
MAX_REPLAYS = 32
RETRY_AFTER_S = 5
# A connection usually breaks because one end has died, which is reported a moment later and counted as a death.
PAIR_GRACE_S = 0.3
# From the first token until another decoder is chosen: most transfers have ended by then; a longer wait is for room.
PATIENCE_S = 0.25
# A request to be handed over decodes on while steps are in flight; after this many tokens it stays.
MAX_LATE_TOKENS = 32

_UNSETTLED = (Phase.WAITING, Phase.MOVING)

Report = Callable[[ActiveRequest, Result], None]


class Event(Enum):
    """An event in the life of a request in flight. The values are the table's labels."""

    # The caller and the clock.
    SUBMITTED = "submitted"
    CANCELLED = "cancelled by the caller"
    ERROR = "an error that is not retried"
    TICK = "tick, a few times a second"
    DEADLINE = "deadline of waiting or closing"
    # The cluster.
    WOKEN = "more instances are usable, or a stand-in is"
    INSTANCE_LOST = "an instance that works on it is lost"
    DIED_AFTERWARDS = "an instance that it left just now has died"
    PAIR_LOST = "a connection broke and both ends live"
    HANDED_OVER = "an idle instance takes the decode over"
    # Messages of the attempt's instances; the reason of `Finished` decides which event it is.
    TOKENS = "Tokens"
    SCORES = "PromptScores"
    IMAGES_NEEDED = "NeedImages"
    DECODER_NEEDED = "NeedDecoder"
    FINISHED = "Finished: stop or length"
    MOVED = "Finished: KV moved to the decoder"
    RETURNED = "Finished: preempted at the decoder"
    WITHDRAWN = "Finished: offer withdrawn"
    FAILED = "Finished: failed"
    # Messages of its encode jobs, and of attempts and jobs that were given up.
    FEATURES_MOVED = "job finished: features moved"
    JOB_WITHDRAWN = "job finished: offer withdrawn"
    JOB_FAILED = "job finished: failed"
    STALE_REPORT = "Finished under an id that was given up"


_PART_EVENTS: dict[str, Event] = {
    FinishReason.STOP: Event.FINISHED,
    FinishReason.LENGTH: Event.FINISHED,
    Departure.MOVED: Event.MOVED,
    Departure.RETURNED: Event.RETURNED,
    Departure.WITHDRAWN: Event.WITHDRAWN,
}
_JOB_EVENTS: dict[str, Event] = {FinishReason.ERROR: Event.JOB_FAILED, Departure.MOVED: Event.FEATURES_MOVED}


class Broken(NamedTuple):
    """A broken pair of instances, and the attempt and jobs that may have had a transfer between them."""

    in_flight: RequestInFlight
    attempt: Attempt
    pair: set[str]
    jobs: set[RequestId]
    due_s: float


class Dispatcher:
    """The requests in flight and the table of instances. `next_id` returns unused numbers; `report` receives every
    result. Not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        roles: dict[str, Role],
        *,
        send: Send,
        next_id: Callable[[], RequestId],
        report: Report,
    ) -> None:
        self.requests: dict[RequestId, RequestInFlight] = {}  # by the user's request
        self.by_id: dict[RequestId, RequestInFlight] = {}  # by the ids of attempts and jobs
        self.instances = Instances(roles, send)
        self.poison_guard = PoisonGuard(self.requests, config.cluster.max_attempts)
        self._cluster = config.cluster
        self._next_id = next_id
        self._report = report
        self._router = Router(self.instances, config.cluster.router)
        self._broken: list[Broken] = []
        # Called after an instance is lost, before its requests are. True: another instance has taken a stage over.
        self.on_loss: Callable[[], bool] = lambda: False

    def _fire(self, event: Event, in_flight: RequestInFlight, now: float, *facts: object) -> None:
        """Runs the actions of the table. `facts` are the event's own; every action of its row takes them."""
        actions = TRANSITIONS[event].get(in_flight.phase)
        assert actions is not None, f"{event.name} cannot happen in {in_flight.phase.name}"
        if not isinstance(actions, str):
            for action in actions:
                action(self, in_flight, now, *facts)

    # ---- events of the caller and the clock

    def submit(self, active: ActiveRequest, pixels: Sequence[PixelPayload], now: float, *, preferred: str = "") -> None:
        """Starts a new request. `preferred`: an instance that has computed this prompt, or empty."""
        in_flight = RequestInFlight(active, tuple(pixels), preferred)
        self.requests[active.request.id] = in_flight
        self._fire(Event.SUBMITTED, in_flight, now)

    def cancel(self, number: RequestId, now: float) -> None:
        """Cancels a request by the user's number. No-op if there is none."""
        if (in_flight := self.requests.get(number)) is not None:
            self._fire(Event.CANCELLED, in_flight, now)

    def fail(self, in_flight: RequestInFlight, error: HydraError, now: float) -> None:
        """Gives the error to the reader at once and aborts what still runs. No-op if the request has ended."""
        self._fire(Event.ERROR, in_flight, now, error)

    def hand_over(self, in_flight: RequestInFlight, target: str, now: float) -> None:
        """Moves a request that decodes on one instance to instance `target`."""
        self._fire(Event.HANDED_OVER, in_flight, now, target)

    def tick(self, now: float, early_s: float = 0.0) -> None:
        """Fires the events of time and of broken pairs, and deadlines that come within `early_s`. Call it a few times a
        second."""
        due = [broken for broken in self._broken if broken.due_s <= now]
        self._broken = [broken for broken in self._broken if broken.due_s > now]
        for broken in due:
            self._fire(Event.PAIR_LOST, broken.in_flight, now, broken)
        for in_flight in self._unsettled():
            self._fire(Event.TICK, in_flight, now)
            if in_flight.deadline_s is not None and in_flight.deadline_s <= now + early_s:
                self._fire(Event.DEADLINE, in_flight, now)

    # ---- events of the cluster

    def on_up(self, name: str, now: float, max_num_seqs: int = 0, kv_tokens: int = 0) -> None:
        """Marks the instance ready in its current role, which may have changed while it was down. `max_num_seqs`:
        requests that it has room for at once; `kv_tokens`: tokens in its KV cache; 0: not known."""
        self.instances.mark_up(name)
        self.instances[name].max_num_seqs, self.instances[name].kv_tokens = max_num_seqs, kv_tokens
        self.wake(now)

    def on_down(self, name: str, now: float, *, restarts: bool, since_s: float | None = None) -> None:
        """Moves requests away from an instance that has died, at `since_s` (None: now)."""
        self.instances.mark_down(name, restarts=restarts)
        has_stand_in = self.on_loss()
        for in_flight in self.poison_guard.left_lately(name, now):
            self._fire(Event.DIED_AFTERWARDS, in_flight, now, name)
        self._lose_all(name, now, now if since_s is None else since_s)
        if has_stand_in or not restarts:
            self.wake(now)  # fails the requests that no other instance can serve

    def on_silent(self, name: str, since_s: float | None, now: float) -> None:
        """Moves requests away from an instance that has been silent since `since_s`. If it answers again (None) it
        receives aborts for everything it holds."""
        if not self.instances[name].is_up:
            return
        if since_s is not None:
            self.instances[name].condition = Condition.SILENT
            has_stand_in = self.on_loss()
            self._lose_all(name, now, since_s)
            if has_stand_in:
                self.wake(now)
        else:
            self.instances.mark_up(name)
            self.instances.repeat_aborts(name)
            self.wake(now)

    def on_pair(self, one: str, other: str, up: bool, now: float) -> None:
        self.instances.set_pair(one, other, up)
        if up:
            self.wake(now)
            return
        pair = {one, other}
        for in_flight in self._by_age():
            attempt = in_flight.attempt
            if attempt is None or (attempt.decoder_ready and not attempt.jobs):
                continue
            if attempt.moves_between(pair) or attempt.jobs_between(pair):
                self._broken.append(Broken(in_flight, attempt, pair, set(attempt.jobs), now + PAIR_GRACE_S))

    def undrain(self, names: Iterable[str], now: float) -> None:
        self.instances.undrain(names)
        self.wake(now)

    def wake(self, now: float) -> None:
        """Retries waiting requests, the oldest first, after a change of the usable instances."""
        for in_flight in self._unsettled():
            self._fire(Event.WOKEN, in_flight, now)

    def holds_work(self, name: str) -> bool:
        return bool(self.instances[name].stale) or any(f.is_at(name) for f in list(self.requests.values()))

    def _unsettled(self) -> list[RequestInFlight]:
        """Requests that wait, move or have a deadline, the oldest first: no others have actions of TICK, DEADLINE and
        WOKEN. Thousands may decode while each of hundreds of connections comes up."""
        unsettled = [f for f in self.requests.values() if f.phase in _UNSETTLED or f.deadline_s is not None]
        return sorted(unsettled, key=lambda in_flight: in_flight.arrival_index)

    def _by_age(self) -> list[RequestInFlight]:
        return sorted(self.requests.values(), key=lambda in_flight: in_flight.arrival_index)

    def _lose_all(self, name: str, now: float, since_s: float) -> None:
        """Takes the instance from its requests. Who has to wait does so from `since_s`, when the fault was."""
        latest_s = since_s + self._cluster.recovery_s
        for in_flight in self._by_age():
            if in_flight.is_at(name):
                self._fire(Event.INSTANCE_LOST, in_flight, now, name)
                if in_flight.deadline_s is not None:
                    in_flight.deadline_s = min(in_flight.deadline_s, latest_s)

    # ---- messages of instances

    def on_message(self, name: str, message: ToFrontend, now: float) -> None:
        """Handles a message of instance `name` about requests."""
        match message:
            case Tokens():
                self._on_tokens(name, message, now)
            case Delta(number):
                self._fire_for_attempt(Event.TOKENS, name, number, now, name, message)
            case Finished():
                self._on_finished(name, message, now)
            case PromptScores(number):
                self._fire_for_attempt(Event.SCORES, name, number, now, message)
            case NeedImages(number, indices):
                self._fire_for_attempt(Event.IMAGES_NEEDED, name, number, now, indices)
            case NeedDecoder(number):
                self._fire_for_attempt(Event.DECODER_NEEDED, name, number, now)
            case _:
                logger.error("unexpected message %s of instance %s", type(message).__name__, name)

    def _fire_for_attempt(self, event: Event, name: str, number: RequestId, now: float, *facts: object) -> None:
        """Fires the event if `number` is a current attempt at instance `name`; else aborts it there."""
        in_flight = self.by_id.get(number)
        if in_flight is None or in_flight.attempt_at(name, number) is None:
            self.instances.reject(name, number)
        else:
            self._fire(event, in_flight, now, *facts)

    def _on_tokens(self, name: str, message: Tokens, now: float) -> None:
        """Shows plain next tokens, which are nearly all, without the table; fires TOKENS for the others. With the table
        a streamed token costs the server 10 % more (bench.frontend)."""
        columns = message.request_ids, message.positions, message.token_ids
        find, time_s, late = cast("dict[int, RequestInFlight]", self.by_id).get, message.time_s, message.late
        for number, position, token_id in zip(*columns, strict=True):
            in_flight = find(number)
            if in_flight is None or number in late or not in_flight.is_plain_next_token(name, number, position):
                delta = Delta(RequestId(number), position, (token_id,), time_s, late=late.get(number))
                self._fire_for_attempt(Event.TOKENS, name, delta.request_id, now, name, delta)
                continue
            active, attempt = in_flight.active, in_flight.attempt
            assert attempt is not None
            piece = active.on_tokens(position, (token_id,), time_s)
            assert piece is not None, "its text goes on"
            active.handle.feed(piece)
            attempt.decode_charge.grow(1)
            if active.stop_string is not None:
                self._close(in_flight, now)

    def _on_finished(self, name: str, finished: Finished, now: float) -> None:
        number = finished.request_id
        in_flight = self.by_id.get(number)
        if in_flight is not None and in_flight.attempt_at(name, number) is not None:
            self._fire(_PART_EVENTS.get(finished.reason, Event.FAILED), in_flight, now, name, finished)
        elif in_flight is not None and (job := in_flight.job_at(name, number)) is not None:
            self._fire(_JOB_EVENTS.get(finished.reason, Event.JOB_WITHDRAWN), in_flight, now, job, finished)
        else:
            owner = self.instances[name].stale.pop(number, None)
            given_up = None if owner is None else self.requests.get(owner)
            if given_up is not None:
                self._fire(Event.STALE_REPORT, given_up, now, finished)

    # ---- actions: attempts

    def start(self, in_flight: RequestInFlight, now: float) -> None:
        """Starts a new attempt, or lets the request wait for an instance or, if it is a suspect, for its turn."""
        if self.poison_guard.must_wait(in_flight):
            if in_flight.deadline_s is None:  # set once: the retries of `tick` do not extend it
                in_flight.deadline_s = now + self._cluster.recovery_s
            return
        route = self._router.route(in_flight.request, in_flight.preferred)
        if isinstance(route, Role):
            self._wait(in_flight, now)
            return
        number = in_flight.request.id if in_flight.attempts == 0 else self._next_id()
        request = in_flight.begin(number, route, self.instances, now).request
        self.by_id[number] = in_flight
        remote = tuple(range(len(request.images))) if route.remote_images else ()
        pixels = () if route.remote_images else in_flight.pixels
        self.instances.send(route.prefill, [Submit(request, pixels, route.stages, remote)])

    def start_suspect(self, in_flight: RequestInFlight, now: float) -> None:
        """Starts a suspect if no other suspect runs."""
        if self.poison_guard.is_suspect(in_flight):
            self.start(in_flight, now)

    def serve_waiting(self, in_flight: RequestInFlight, now: float) -> None:
        """Serves the stages for which the attempt had found no instance."""
        attempt = in_flight.current
        if in_flight.deadline_s is None:
            return
        if attempt.unserved:
            self._encode(in_flight, now)
        if attempt.asks_decoder and in_flight.attempt is attempt:
            self._choose_decoder(in_flight, now)

    def expire(self, in_flight: RequestInFlight, now: float) -> None:
        """Fails a request that has waited too long; while roles are switched, which ends by itself, it waits on."""
        if self.instances.draining:
            in_flight.deadline_s = now + self._cluster.recovery_s
        else:
            waited = f"no instance could continue this request within {self._cluster.recovery_s:g} s"
            self.fail(in_flight, _lost(waited), now)

    def _wait(self, in_flight: RequestInFlight, now: float) -> None:
        if missing_for_good(self.instances.values(), images=bool(in_flight.request.images)) is not None:
            self.fail(in_flight, _lost("every instance that could serve this request has failed"), now)
        elif in_flight.deadline_s is None:
            in_flight.deadline_s = now + self._cluster.recovery_s

    def _wait_or_stay(self, in_flight: RequestInFlight, stage: Role, now: float) -> None:
        """Waits for `stage`, which no other instance serves. If the prefilling instance has been given that stage
        since, replays the request, which then stays there."""
        if self.instances[in_flight.current.route.prefill].serves(stage):
            self._replay(in_flight, now)
        else:
            self._wait(in_flight, now)

    def _stop_waiting(self, in_flight: RequestInFlight) -> None:
        if not in_flight.current.is_unserved:
            in_flight.deadline_s = None

    def replay_preempted(self, in_flight: RequestInFlight, now: float, *_: object) -> None:
        """Starts again after a preemption at a decoder that cannot prefill."""
        in_flight.preempted = True
        self._replay(in_flight, now, "preemption")

    def replay(self, in_flight: RequestInFlight, now: float, *_: object) -> None:
        """Starts again after a transfer that nobody fetched."""
        self._replay(in_flight, now)

    def _replay(self, in_flight: RequestInFlight, now: float, blame: str = "transfer") -> None:
        """Aborts this attempt everywhere and starts another, within the limits on deaths and replays. `blame`: the
        cause that is recorded if the next token comes late."""
        died = blame == "lost"
        if not died and in_flight.attempt is not None:
            self.poison_guard.note_left(in_flight, in_flight.attempt.instances, now)
        self._leave(in_flight, blame)
        if not self._may_go_on(in_flight, now, died=died):
            return
        if in_flight.end_of_tokens() is not None:
            self._close(in_flight, now)
        else:
            self.start(in_flight, now)

    def _may_go_on(self, in_flight: RequestInFlight, now: float, *, died: bool) -> bool:
        """Counts one more attempt, or one more encode of an image. Returns False if that fails the request."""
        in_flight.deaths += died
        in_flight.replays += not died
        if self.poison_guard.is_poison(in_flight):
            reason = f"{in_flight.deaths} instances ended while they worked on this request; it is not tried again"
            self.fail(in_flight, RequestFailed(reason, code="request_poisoned"), now)
        elif in_flight.replays > MAX_REPLAYS:
            reason = f"the request was moved between instances {MAX_REPLAYS} times and did not finish; try again later"
            self.fail(in_flight, RequestFailed(reason), now)
        else:
            return True
        return False

    def _leave(self, in_flight: RequestInFlight, blame: str = "") -> None:
        """Ends the attempt and aborts what instances still hold of it. `blame`: why, if another attempt follows."""
        if (attempt := in_flight.attempt) is not None:
            for job in list(attempt.jobs.values()):
                self._drop_job(in_flight, job)
            for name in sorted(attempt.instances):
                self.abort_at(in_flight, name)
            del self.by_id[attempt.id]
            if attempt.prefilled_s:
                self._router.arrivals.on_answer(attempt.num_routed, in_flight.num_known - attempt.base - 1)
        in_flight.leave(blame)

    def _start_over_alone(self, in_flight: RequestInFlight, now: float) -> None:
        """Drops the attempt of a suspect, which then waits for its turn."""
        self._leave(in_flight, "lost")
        self.start(in_flight, now)

    def abort_at(self, in_flight: RequestInFlight, name: str) -> None:
        """Aborts the attempt at instance `name`, if it is there."""
        attempt = in_flight.attempt
        if attempt is not None and name in attempt.instances:
            attempt.instances.discard(name)
            self.instances.abort(name, attempt.id, in_flight.request.id)

    # ---- actions: losses

    def lose_instance(self, in_flight: RequestInFlight, now: float, name: str) -> None:
        """Starts again without the instance if the attempt needs it; else encodes again what was encoded there."""
        if in_flight.current.needs(name):
            in_flight.lose(name)
            self._replay(in_flight, now, "lost")
        else:
            self._encode_again(in_flight, self._leave_instance(in_flight, name), now, died=True)

    def lose_report(self, in_flight: RequestInFlight, now: float, name: str) -> None:
        """Stops waiting for the reports of the instance."""
        self._leave_instance(in_flight, name)
        self.conclude_if_idle(in_flight, now)

    def _leave_instance(self, in_flight: RequestInFlight, name: str) -> list[Job]:
        """Aborts the request at the instance. Returns its jobs there."""
        self.abort_at(in_flight, name)
        lost = [job for job in in_flight.current.jobs.values() if job.name == name]
        for job in lost:
            self._drop_job(in_flight, job)
        return lost

    def lose_pair(self, in_flight: RequestInFlight, now: float, broken: Broken) -> None:
        """Restarts transfers between two live instances that a broken connection has lost, even if they are connected
        again."""
        attempt = broken.attempt
        if in_flight.attempt is not attempt:
            return
        if attempt.moves_between(broken.pair):
            self._replay(in_flight, now)
            return
        lost = [job for job in attempt.jobs_between(broken.pair) if job.id in broken.jobs]
        able = prefillers(self.instances.values(), images=True)
        waits = lost or attempt.unserved  # for images: what was lost may have been withdrawn since
        if waits and not isinstance(able, Role) and attempt.route.prefill not in {one.name for one in able}:
            self._replay(in_flight, now)  # on one that still reaches an encoder
            return
        for job in lost:
            self._drop_job(in_flight, job)
        self._encode_again(in_flight, lost, now)

    def count_death(self, in_flight: RequestInFlight, now: float, name: str) -> None:
        """Counts the death of an instance that the request left shortly before, in place of the replay. The attempt
        started since goes on unless the request is now a suspect that must wait."""
        if in_flight.is_at(name):
            return
        in_flight.replays -= 1
        may_go_on = self._may_go_on(in_flight, now, died=True)
        if may_go_on and in_flight.attempt is not None and self.poison_guard.must_wait(in_flight):
            self._start_over_alone(in_flight, now)

    # ---- actions: encodes

    def encode(self, in_flight: RequestInFlight, now: float, indices: Sequence[int]) -> None:
        """Has these images encoded. Jobs that others still run for them are not repeated if they fail."""
        for job in in_flight.current.jobs.values():
            job.pending.difference_update(indices)
        self._encode(in_flight, now, indices)

    def _encode(self, in_flight: RequestInFlight, now: float, indices: Iterable[int] = ()) -> None:
        """Sends these images, and those still unserved, to encoders; without one they wait."""
        attempt, images = in_flight.current, in_flight.request.images
        attempt.unserved.update(indices)
        chosen = self._router.encoders(attempt.route.prefill, [(i, images[i]) for i in sorted(attempt.unserved)])
        if isinstance(chosen, Role):
            self._wait_or_stay(in_flight, chosen, now)
            return
        attempt.unserved.clear()
        self._stop_waiting(in_flight)
        for name, share in chosen.items():
            number = self._next_id()
            patches = sum(images[index].num_patches for index in share)
            attempt.jobs[number] = Job(number, name, set(share), Charge(self.instances[name], patches=patches))
            self.by_id[number] = in_flight
            self.instances.send(name, [in_flight.encode_message(number, share, attempt.route.prefill)])

    def end_job(self, in_flight: RequestInFlight, now: float, job: Job, finished: Finished) -> None:
        """Removes the job. Its image cache hits count; it has no prompt."""
        self._forget_job(in_flight, job)
        in_flight.reports.append(msgspec.structs.replace(finished, cached_tokens=0))

    def encode_again(self, in_flight: RequestInFlight, now: float, job: Job, _: Finished) -> None:
        """Encodes the images of the ended job that were not fetched."""
        self._encode_again(in_flight, [job], now)

    def _encode_again(self, in_flight: RequestInFlight, jobs: Sequence[Job], now: float, *, died: bool = False) -> None:
        """Encodes the images of these ended jobs, already removed from the request, that were not fetched."""
        indices = {index for job in jobs for index in job.pending}
        if not indices:
            return
        if not died:
            self.poison_guard.note_left(in_flight, {job.name for job in jobs}, now)
        if not self._may_go_on(in_flight, now, died=died):
            return
        if self.poison_guard.must_wait(in_flight):
            self._start_over_alone(in_flight, now)
        elif in_flight.attempt is not None:
            self._encode(in_flight, now, indices)

    def _drop_job(self, in_flight: RequestInFlight, job: Job) -> None:
        self._forget_job(in_flight, job)
        self.instances.abort(job.name, job.id, in_flight.request.id)

    def _forget_job(self, in_flight: RequestInFlight, job: Job) -> None:
        del in_flight.current.jobs[job.id]
        job.charge.release()
        del self.by_id[job.id]

    # ---- actions: decoders

    def choose_decoder(self, in_flight: RequestInFlight, now: float) -> None:
        """Chooses the decoder, when the prefill has begun; without one the request waits."""
        if not in_flight.current.decoder:
            self._choose_decoder(in_flight, now)

    def _choose_decoder(self, in_flight: RequestInFlight, now: float) -> None:
        attempt = in_flight.current
        chosen = self._router.decoder(attempt.route.prefill, in_flight.num_tokens, in_flight.num_left)
        attempt.asks_decoder = isinstance(chosen, Role)
        if isinstance(chosen, Role):
            self._wait_or_stay(in_flight, chosen, now)
        else:
            self._move(in_flight, attempt.request, attempt.route.prefill, chosen)
            self._stop_waiting(in_flight)

    def choose_late_decoder(self, in_flight: RequestInFlight, now: float) -> None:
        """Chooses another decoder, once, if the first has had no room for `PATIENCE_S` and another has some. Either may
        turn out to have the KV, since the source may have handed it over before it heard: the first to send a token has
        it, and the other is aborted."""
        attempt = in_flight.current
        source, full = attempt.route.prefill, attempt.decoder
        if attempt.replaced_decoder or not attempt.route.moves or source not in attempt.instances or not full:
            return
        if attempt.decoder_ready or attempt.early_tokens or attempt.final is not None:
            return
        if now - attempt.prefilled_s < PATIENCE_S or not self._any_has_room(full):
            return
        chosen = self._router.decoder(source, in_flight.num_tokens, in_flight.num_left)
        if isinstance(chosen, Role) or chosen == full or not _has_room(self.instances[chosen], self.instances[full]):
            return
        if attempt.id in self.instances[chosen].stale:
            return
        attempt.replaced_decoder = full
        self._move(in_flight, attempt.request, source, chosen)

    def _any_has_room(self, full: str) -> bool:
        """True if the router could choose another decoder than `full` that has room: asking it takes much longer."""
        instances = self.instances
        return any(one.serves(Role.D) and _has_room(one, instances[full]) for one in instances.values())

    def move_decode(self, in_flight: RequestInFlight, now: float, target: str) -> None:
        """Has the decoder hand the request over to `target`. Until it has, it may end the request or keep it. No-op
        while `target` still has to report the end of an earlier part under this id."""
        attempt = in_flight.current
        if attempt.id in self.instances[target].stale:
            return
        victim = attempt.victim = attempt.decoder
        in_flight.has_moved, attempt.late_victim_tokens = True, 0
        self._move(in_flight, in_flight.attempt_request(attempt.id), victim, target)
        in_flight.advance()

    def _move(self, in_flight: RequestInFlight, request: Request, source: str, target: str) -> None:
        """Makes `target` the decoder. It is informed before the source, so that it knows the offer when it arrives."""
        attempt = in_flight.current
        attempt.instances.add(target)
        attempt.decode_at(self.instances[target], in_flight.num_tokens, ready=False)
        self.instances.send(target, [Submit(request, stages="D", source=source)])
        self.instances.send(source, [HandOver(attempt.id, target)])

    def _settle_decoder(self, in_flight: RequestInFlight, attempt: Attempt, name: str) -> None:
        """Aborts the other one of two decoders after instance `name` has sent a token. If that is the one that was to
        be replaced, the source may still offer the KV to the other."""
        if name not in (attempt.decoder, attempt.replaced_decoder):
            return
        replaced, attempt.replaced_decoder = attempt.replaced_decoder, ""
        others = [replaced]
        if name == replaced:
            others = [attempt.decoder, attempt.route.prefill]
            attempt.decode_at(self.instances[name], in_flight.num_tokens, ready=True)
        for other in others:
            self.abort_at(in_flight, other)

    def _count_late_tokens(self, in_flight: RequestInFlight, num_tokens: int) -> None:
        """Counts tokens that the victim sends after the hand-over was asked for; above `MAX_LATE_TOKENS` it keeps the
        request."""
        attempt = in_flight.current
        attempt.late_victim_tokens += num_tokens
        if attempt.late_victim_tokens > MAX_LATE_TOKENS and not attempt.decoder_ready:
            self.abort_at(in_flight, attempt.decoder)
            attempt.decode_at(self.instances[attempt.victim], in_flight.num_tokens, ready=True)
            attempt.victim = ""
            in_flight.advance()

    # ---- actions: tokens

    def add_scores(self, in_flight: RequestInFlight, now: float, scores: PromptScores) -> None:
        """Adds log probabilities of the prompt."""
        in_flight.active.on_scores(scores.start, scores.logprobs)

    def receive_tokens(self, in_flight: RequestInFlight, now: float, name: str, delta: Delta) -> None:
        """Shows the tokens that come next, keeps those that come early, compares those that are known."""
        attempt, known = in_flight.current, in_flight.active.token_ids
        if attempt.replaced_decoder:
            self._settle_decoder(in_flight, attempt, name)
        if name == attempt.decoder:
            attempt.decoder_ready = True
            attempt.decode_charge.arrive()
        if delta.position == len(known):
            self._show(in_flight, attempt, delta, now)
        elif not in_flight.keep_early(delta):
            error = RequestFailed("an instance contradicted tokens that had been sent before; the request was ended")
            self.fail(in_flight, error, now)
        while attempt.early_tokens and in_flight.running and (early := attempt.early_tokens.pop(len(known), None)):
            self._show(in_flight, attempt, early, now)
        if not in_flight.running:
            return
        if attempt.lacks_tokens:
            self.fail(in_flight, _skipped(), now)
            return
        in_flight.advance()
        if attempt.decoder_ready:
            self.poison_guard.on_token(in_flight)
        if attempt.victim == name:
            self._count_late_tokens(in_flight, len(delta.token_ids))

    def _show(self, in_flight: RequestInFlight, attempt: Attempt, delta: Delta, now: float) -> None:
        """Gives the tokens to the reader, and begins to end the request after the last one."""
        active, num_known = in_flight.active, len(in_flight.active.token_ids)
        first = num_known == attempt.base
        if first and active.lacks_scores:
            self.fail(in_flight, _skipped(), now)
            return
        if delta.late is not None:
            active.on_late(delta.late)
        piece = active.on_tokens(num_known, delta.token_ids, delta.time_s, delta.logprobs)
        if first:
            attempt.prefilled_s, attempt.num_routed = delta.time_s, self._router.arrivals.count
            attempt.release_prefill()
        attempt.decode_charge.grow(len(delta.token_ids))
        if piece is not None:
            active.handle.feed(piece)
        if active.stop_string is not None:
            self._close(in_flight, now)
        elif attempt.final is not None:
            self._close_if_complete(in_flight, attempt.final, now)

    # ---- actions: the end of a part

    def add_report(self, in_flight: RequestInFlight, now: float, name: str, finished: Finished) -> None:
        """Keeps the report of an instance that has nothing of the attempt any more."""
        attempt = in_flight.current
        attempt.instances.discard(name)
        if name != attempt.route.prefill:  # only the prefilling instance knows cache hits
            finished = msgspec.structs.replace(finished, cached_tokens=0, cached_images=0)
        in_flight.reports.append(finished)

    def add_stale_report(self, in_flight: RequestInFlight, now: float, finished: Finished) -> None:
        """Keeps the report of an attempt that was given up: its time counts, but nothing of it was used."""
        spans = () if finished.request_id in in_flight.lost_attempts else finished.spans
        in_flight.reports.append(msgspec.structs.replace(finished, spans=spans, cached_tokens=0, cached_images=0))

    def finish(self, in_flight: RequestInFlight, now: float, _: str, finished: Finished) -> None:
        """Begins to end the request, whose last token has been sampled, once all its tokens are here."""
        in_flight.current.final = finished
        self._close_if_complete(in_flight, finished, now)

    def continue_at_decoder(self, in_flight: RequestInFlight, now: float, name: str, _: Finished) -> None:
        """Continues on the instance that has pulled the KV; starts again if that is gone or was never chosen."""
        attempt = in_flight.current
        if attempt.final is not None:
            self._close_if_complete(in_flight, attempt.final, now)
        elif name == attempt.decoder or attempt.decoder not in attempt.instances:
            self._replay(in_flight, now)
        elif attempt.lacks_tokens:
            self.fail(in_flight, _skipped(), now)

    def _close_if_complete(self, in_flight: RequestInFlight, final: Finished, now: float) -> None:
        """Closes the request, or waits for earlier tokens of another instance."""
        if in_flight.num_known >= final.num_generated:
            self._close(in_flight, now)
        elif not in_flight.current.instances:
            self.fail(in_flight, _skipped(), now)
        else:
            in_flight.advance()

    def fail_by_report(self, in_flight: RequestInFlight, now: float, _: object, finished: Finished) -> None:
        """Fails the request with the error of the report."""
        error = from_info(finished.error) if finished.error else RequestFailed("the request ended without a reason")
        self.fail(in_flight, error, now)

    # ---- actions: the end

    def cancel_request(self, in_flight: RequestInFlight, now: float) -> None:
        """Gives the reader RequestAborted and begins to end the request."""
        if not in_flight.active.closed:
            in_flight.active.cancelled = True
            in_flight.active.handle.fail(RequestAborted("the request was cancelled"))
            self._close(in_flight, now)

    def _close(self, in_flight: RequestInFlight, now: float) -> None:
        """Begins to end the request: aborts its work and waits for the reports of its instances."""
        in_flight.phase, in_flight.deadline_s = Phase.CLOSING, now + self._cluster.recovery_s
        if (attempt := in_flight.attempt) is not None:
            for name in attempt.instances:
                self.instances.send(name, [Abort(attempt.id)])
            for job in attempt.jobs.values():
                self.instances.send(job.name, [Abort(job.id)])
            for name in sorted(attempt.holders()):
                if self.instances[name].condition is Condition.SILENT and in_flight.is_at(name):
                    self._fire(Event.INSTANCE_LOST, in_flight, now, name)
        self.conclude_if_idle(in_flight, now)

    def conclude_if_idle(self, in_flight: RequestInFlight, now: float, *_: object) -> None:
        """Ends the request once all its instances have reported."""
        if in_flight.phase is Phase.CLOSING and (in_flight.attempt is None or in_flight.attempt.idle):
            self.conclude(in_flight, now)

    def conclude(self, in_flight: RequestInFlight, now: float) -> None:
        """Gives the result to the reader and to `report`."""
        active, attempt = in_flight.active, in_flight.attempt
        final = attempt.final if attempt is not None else in_flight.end_of_tokens()
        final = final or Finished(in_flight.request.id, FinishReason.ABORT.value, in_flight.num_known)
        self._end(in_flight)
        merged = in_flight.merge_reports(final, now)
        if active.cancelled:
            self._report(active, active.failed_result(merged, now, RequestAborted("the request was cancelled")))
            return
        piece = active.on_finished(merged, now)
        assert piece.result is not None
        active.handle.feed(piece)
        self._report(active, piece.result)

    def end_with_error(self, in_flight: RequestInFlight, now: float, error: HydraError) -> None:
        """Gives the error to the reader, aborts what still runs, and waits for nothing."""
        active = in_flight.active
        self._end(in_flight)
        if not active.handle.done:
            active.handle.fail(error)
        ended = Finished(in_flight.request.id, FinishReason.ERROR.value, in_flight.num_known)
        self._report(active, active.failed_result(in_flight.merge_reports(ended, now), now, error))

    def _end(self, in_flight: RequestInFlight) -> None:
        self._leave(in_flight)
        in_flight.phase = Phase.ENDED
        del self.requests[in_flight.request.id]


def _has_room(other: InstanceLoad, full: InstanceLoad) -> bool:
    """True if no request queues at `other`, and it has fewer decodes than `full`."""
    status = other.status
    queues = status is None or status.num_waiting + status.num_arriving > 0
    return other.usable and not queues and not other.nearly_full and other.decodes < full.decodes


def _lost(sentence: str) -> Unavailable:
    return Unavailable(f"{sentence}; try again later", code="instance_lost", retry_after_s=RETRY_AFTER_S)


def _skipped() -> RequestFailed:
    return RequestFailed("an instance skipped tokens or their scores; the request was ended")


# ---- the table

# Actions in their order, or a reason why nothing is done. A pair that is not in the table cannot happen.
Actions = tuple[Callable[..., None], ...] | str


def _running(*actions: Callable[..., None]) -> dict[Phase, Actions]:
    return dict.fromkeys(RUNNING, actions)


_D = Dispatcher
_ENDING = "it ends already"
_OVER = "its transfers are over"
_REPORTED: Actions = (_D.add_report, _D.conclude_if_idle)
_JOB_REPORTED: Actions = (_D.end_job, _D.conclude_if_idle)

TRANSITIONS: dict[Event, dict[Phase, Actions]] = {
    Event.SUBMITTED: {Phase.WAITING: (_D.start,)},
    Event.CANCELLED: {
        Phase.WAITING: (_D.cancel_request,),
        **_running(_D.cancel_request),
        Phase.CLOSING: _ENDING,
    },
    Event.ERROR: {
        Phase.WAITING: (_D.end_with_error,),
        **_running(_D.end_with_error),
        Phase.CLOSING: (_D.end_with_error,),
        Phase.ENDED: "answers to one prompt fail together",
    },
    Event.TICK: {
        Phase.WAITING: (_D.start_suspect,),
        Phase.PREFILLING: "nothing is late",
        Phase.MOVING: (_D.choose_late_decoder,),
        Phase.DECODING: "nothing is late",
        Phase.CLOSING: "it has a deadline",
        Phase.ENDED: "it ended in this tick",
    },
    Event.DEADLINE: {Phase.WAITING: (_D.expire,), **_running(_D.expire), Phase.CLOSING: (_D.conclude,)},
    Event.WOKEN: {
        Phase.WAITING: (_D.start,),
        **_running(_D.serve_waiting),
        Phase.CLOSING: "it waits for reports only",
        Phase.ENDED: "it ended meanwhile",
    },
    Event.INSTANCE_LOST: {**_running(_D.lose_instance), Phase.CLOSING: (_D.lose_report,)},
    Event.DIED_AFTERWARDS: {
        Phase.WAITING: (_D.count_death,),
        **_running(_D.count_death),
        Phase.CLOSING: _ENDING,
        Phase.ENDED: "it ended meanwhile",
    },
    Event.PAIR_LOST: {
        Phase.WAITING: _OVER,
        **_running(_D.lose_pair),
        Phase.CLOSING: _OVER,
        Phase.ENDED: _OVER,
    },
    Event.HANDED_OVER: {Phase.DECODING: (_D.move_decode,)},
    Event.TOKENS: {**_running(_D.receive_tokens), Phase.CLOSING: "tokens after the end are not shown"},
    Event.SCORES: {**_running(_D.add_scores), Phase.CLOSING: _ENDING},
    Event.IMAGES_NEEDED: {**_running(_D.encode), Phase.CLOSING: _ENDING},
    Event.DECODER_NEEDED: {**_running(_D.choose_decoder), Phase.CLOSING: _ENDING},
    Event.FINISHED: {**_running(_D.add_report, _D.finish), Phase.CLOSING: _REPORTED},
    Event.MOVED: {**_running(_D.add_report, _D.continue_at_decoder), Phase.CLOSING: _REPORTED},
    Event.RETURNED: {**_running(_D.add_report, _D.replay_preempted), Phase.CLOSING: _REPORTED},
    Event.WITHDRAWN: {**_running(_D.add_report, _D.replay), Phase.CLOSING: _REPORTED},
    Event.FAILED: {**_running(_D.add_report, _D.fail_by_report), Phase.CLOSING: _REPORTED},
    Event.FEATURES_MOVED: {**_running(_D.end_job), Phase.CLOSING: _JOB_REPORTED},
    Event.JOB_WITHDRAWN: {**_running(_D.end_job, _D.encode_again), Phase.CLOSING: _JOB_REPORTED},
    Event.JOB_FAILED: {**_running(_D.end_job, _D.fail_by_report), Phase.CLOSING: _JOB_REPORTED},
    Event.STALE_REPORT: {
        Phase.WAITING: (_D.add_stale_report,),
        **_running(_D.add_stale_report),
        Phase.CLOSING: (_D.add_stale_report,),
    },
}
