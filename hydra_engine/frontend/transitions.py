"""Dispatches requests in flight: where each runs, what is tried again when an instance is lost, how each ends.

Reads no clock and knows no event loop: `now` is passed in, messages leave through `send`. Every submitted request ends
exactly once. `frontend/incoming.py` handles the messages of instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Condition
from hydra_engine.core.media import PixelPayload
from hydra_engine.core.messages import Abort, Finished, Submit
from hydra_engine.core.outputs import FinishReason, Result
from hydra_engine.core.roles import Role
from hydra_engine.errors import HydraError, RequestAborted, RequestFailed, Unavailable
from hydra_engine.frontend.active import ActiveRequest
from hydra_engine.frontend.poison_guard import PoisonGuard
from hydra_engine.frontend.request import Attempt, Charge, Job, Phase, RequestInFlight
from hydra_engine.frontend.routing.instances import Instances, Send, missing_for_good
from hydra_engine.frontend.routing.late_decoder import LateDecoder
from hydra_engine.frontend.routing.router import Router

# Attempts that ended without a death: their causes pass (a full cache, a lost lease), but not if there are this many.
MAX_REPLAYS = 32
RETRY_AFTER_S = 5
# A connection usually breaks because one end has died, which is reported a moment later and counted as a death.
PAIR_GRACE_S = 0.3

Report = Callable[[ActiveRequest, Result], None]


class Broken(NamedTuple):
    """A broken pair of instances, and the attempt and jobs that may have had a transfer between them."""

    in_flight: RequestInFlight
    attempt: Attempt
    pair: set[str]
    jobs: set[RequestId]
    due_s: float


class Dispatcher:
    """The requests in flight and the table of instances. `next_id` returns unused numbers; `report` receives every
    result."""

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
        self.late_decoder = LateDecoder(self.instances, self._router)
        self._broken: list[Broken] = []
        # Called after an instance is lost, before its requests are. True: another instance has taken a stage over.
        self.on_loss: Callable[[], bool] = lambda: False

    # ---- instances

    def on_up(self, name: str, now: float) -> None:
        """Marks the instance ready in its current role, which may have changed while it was down."""
        self.instances.up(name)
        self.wake(now)

    def on_down(self, name: str, now: float, *, restarts: bool) -> None:
        self.instances.down(name, restarts=restarts)
        has_stand_in = self.on_loss()
        for in_flight in self.poison_guard.left_lately(name, now):
            self._count_death_after_leaving(in_flight, name, now)
        self._lose_all(name, now)
        if has_stand_in or not restarts:
            self.wake(now)  # fails the requests that no other instance can serve

    def on_silent(self, name: str, silent: bool, now: float) -> None:
        """Moves requests away from a silent instance. If it answers again it receives aborts for everything it
        holds."""
        if not self.instances[name].is_up:
            return
        if silent:
            self.instances[name].condition = Condition.SILENT
            has_stand_in = self.on_loss()
            self._lose_all(name, now)
            if has_stand_in:
                self.wake(now)
        else:
            self.instances.up(name)
            self.instances.repeat_aborts(name)
            self.wake(now)

    def on_pair(self, one: str, other: str, up: bool, now: float) -> None:
        self.instances.pair(one, other, up)
        if up:
            self.wake(now)
            return
        pair = {one, other}
        for in_flight in self._by_age():
            attempt = in_flight.attempt
            if attempt is not None and (attempt.moves_between(pair) or attempt.jobs_between(pair)):
                self._broken.append(Broken(in_flight, attempt, pair, set(attempt.jobs), now + PAIR_GRACE_S))

    def undrain(self, names: Iterable[str], now: float) -> None:
        self.instances.undrain(names)
        self.wake(now)

    def holds_work(self, name: str) -> bool:
        return bool(self.instances[name].stale) or any(f.is_at(name) for f in list(self.requests.values()))

    # ---- requests

    def submit(self, active: ActiveRequest, pixels: Sequence[PixelPayload], now: float, *, preferred: str = "") -> None:
        """Starts a new request. `preferred`: an instance that has computed this prompt, or empty."""
        in_flight = RequestInFlight(active, tuple(pixels), preferred)
        self.requests[active.request.id] = in_flight
        self.start(in_flight, now)

    def cancel(self, number: RequestId, now: float) -> None:
        in_flight = self.requests.get(number)
        if in_flight is not None and not in_flight.active.closed and in_flight.phase is not Phase.CLOSING:
            in_flight.active.cancelled = True
            in_flight.active.handle.fail(RequestAborted("the request was cancelled"))
            self.close(in_flight, now)

    def tick(self, now: float) -> None:
        """Ends requests past their deadline and transfers over broken pairs, and starts the next suspect. Call it a few
        times a second."""
        due = [broken for broken in self._broken if broken.due_s <= now]
        self._broken = [broken for broken in self._broken if broken.due_s > now]
        for broken in due:
            self._lose_pair(broken, now)
        for in_flight in self._by_age():
            if in_flight.phase is Phase.WAITING and self.poison_guard.is_suspect(in_flight):
                self.start(in_flight, now)
            if in_flight.deadline_s is not None and in_flight.deadline_s <= now:
                self._expire(in_flight, now)
            self.late_decoder.look_again(in_flight, now)

    def wake(self, now: float) -> None:
        """Retries waiting requests, the oldest first, after a change of the usable instances."""
        for in_flight in self._by_age():
            if in_flight.deadline_s is None:
                continue
            if in_flight.phase is Phase.WAITING:
                self.start(in_flight, now)
            elif in_flight.running and (attempt := in_flight.attempt) is not None:
                if attempt.unserved:
                    self.encode(in_flight, attempt, (), now)
                if attempt.asks_decoder and in_flight.attempt is attempt:
                    self.choose_decoder(in_flight, attempt, now)

    def _by_age(self) -> list[RequestInFlight]:
        return sorted(self.requests.values(), key=lambda in_flight: in_flight.age)

    # ---- attempts

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

    def choose_decoder(self, in_flight: RequestInFlight, attempt: Attempt, now: float) -> None:
        """Chooses the decoder; without one the request waits."""
        if not self.late_decoder.choose_decoder(in_flight, attempt):
            self._wait_or_stay(in_flight, attempt, Role.D, now)
        elif not attempt.is_unserved:
            in_flight.deadline_s = None

    def encode(self, in_flight: RequestInFlight, attempt: Attempt, indices: Iterable[int], now: float) -> None:
        """Sends these images, and those still unserved, to encoders; without one they wait."""
        attempt.unserved.update(indices)
        images = [(index, in_flight.request.images[index]) for index in sorted(attempt.unserved)]
        chosen = self._router.encoders(attempt.route.prefill, images)
        if isinstance(chosen, Role):
            self._wait_or_stay(in_flight, attempt, chosen, now)
            return
        attempt.unserved.clear()
        if not attempt.is_unserved:
            in_flight.deadline_s = None
        for name, share in chosen.items():
            number = self._next_id()
            patches = sum(in_flight.request.images[index].num_patches for index in share)
            attempt.jobs[number] = Job(number, name, set(share), Charge(self.instances[name], patches=patches))
            self.by_id[number] = in_flight
            self.instances.send(name, [in_flight.encode_message(number, share, attempt.route.prefill)])

    def _wait_or_stay(self, in_flight: RequestInFlight, attempt: Attempt, stage: Role, now: float) -> None:
        """Waits for `stage`, which no other instance serves. If the prefilling instance has been given that stage
        since, replays the request, which then stays there."""
        if self.instances[attempt.route.prefill].serves(stage):
            self.replay(in_flight, now)
        else:
            self._wait(in_flight, now)

    def _wait(self, in_flight: RequestInFlight, now: float) -> None:
        if missing_for_good(self.instances.values(), images=bool(in_flight.request.images)) is not None:
            self.fail(in_flight, _lost("every instance that could serve this request has failed"), now)
        elif in_flight.deadline_s is None:
            in_flight.deadline_s = now + self._cluster.recovery_s

    def _expire(self, in_flight: RequestInFlight, now: float) -> None:
        if in_flight.phase is Phase.CLOSING:
            self._conclude(in_flight, now)
        elif self.instances.draining:
            in_flight.deadline_s = now + self._cluster.recovery_s  # while roles are switched, which ends by itself
        else:
            waited = f"no instance could continue this request within {self._cluster.recovery_s:g} s"
            self.fail(in_flight, _lost(waited), now)

    def replay(self, in_flight: RequestInFlight, now: float, blame: str = "transfer") -> None:
        """Aborts this attempt everywhere and starts another, within the limits on deaths and replays. `blame`: the
        cause that is recorded if the next token comes late."""
        died = blame == "lost"
        if not died and in_flight.attempt is not None:
            self.poison_guard.note_left(in_flight, in_flight.attempt.instances, now)
        self._leave(in_flight, blame)
        if not self._may_go_on(in_flight, now, died=died):
            return
        if in_flight.end_of_tokens() is not None:
            self.close(in_flight, now)
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

    def encode_again(self, in_flight: RequestInFlight, jobs: Sequence[Job], now: float, *, died: bool = False) -> None:
        """Encodes the images of these ended jobs, already removed from the request, that were not fetched."""
        indices = {index for job in jobs for index in job.pending}
        if not indices:
            return
        if not died:
            self.poison_guard.note_left(in_flight, {job.name for job in jobs}, now)
        if not self._may_go_on(in_flight, now, died=died):
            return
        if self.poison_guard.must_wait(in_flight):
            self._leave(in_flight, "lost")
            self.start(in_flight, now)
        elif in_flight.attempt is not None:
            self.encode(in_flight, in_flight.attempt, indices, now)

    # ---- losses

    def _lose_all(self, name: str, now: float) -> None:
        for in_flight in self._by_age():
            self._lose(in_flight, name, now)

    def _count_death_after_leaving(self, in_flight: RequestInFlight, name: str, now: float) -> None:
        """Counts the death of instance `name` for a request that left it shortly before. The attempt started since goes
        on unless the request is now a suspect that must wait."""
        if in_flight.is_at(name):
            return
        in_flight.replays -= 1
        if (
            self._may_go_on(in_flight, now, died=True)
            and in_flight.attempt is not None
            and self.poison_guard.must_wait(in_flight)
        ):
            self._leave(in_flight, "lost")
            self.start(in_flight, now)

    def _lose(self, in_flight: RequestInFlight, name: str, now: float) -> None:
        attempt = in_flight.attempt
        if attempt is None or not in_flight.is_at(name):
            return
        if attempt.needs(name) and in_flight.running:
            in_flight.lose(name)
            self.replay(in_flight, now, "lost")
            return
        self.abort_at(in_flight, name)
        lost = [job for job in attempt.jobs.values() if job.name == name]
        for job in lost:
            self.drop_job(in_flight, job)
        if in_flight.phase is Phase.CLOSING:
            self.conclude_if_idle(in_flight, now)
        else:
            self.encode_again(in_flight, lost, now, died=True)

    def _lose_pair(self, broken: Broken, now: float) -> None:
        """Restarts transfers between two live instances that a broken connection has lost, even if they are connected
        again."""
        in_flight, attempt = broken.in_flight, broken.attempt
        if not in_flight.running or in_flight.attempt is not attempt:
            return
        if attempt.moves_between(broken.pair):
            self.replay(in_flight, now)
            return
        lost = [job for job in attempt.jobs_between(broken.pair) if job.id in broken.jobs]
        for job in lost:
            self.drop_job(in_flight, job)
        self.encode_again(in_flight, lost, now)

    def abort_at(self, in_flight: RequestInFlight, name: str) -> None:
        attempt = in_flight.attempt
        if attempt is not None and name in attempt.instances:
            attempt.instances.discard(name)
            self.instances.abort(name, attempt.id, in_flight.request.id)

    def drop_job(self, in_flight: RequestInFlight, job: Job) -> None:
        self.end_job(in_flight, job)
        self.instances.abort(job.name, job.id, in_flight.request.id)

    def end_job(self, in_flight: RequestInFlight, job: Job) -> None:
        assert in_flight.attempt is not None
        del in_flight.attempt.jobs[job.id]
        job.charge.release()
        del self.by_id[job.id]

    def _leave(self, in_flight: RequestInFlight, blame: str = "") -> None:
        """Ends the attempt and aborts what instances still hold of it. `blame`: why, if another attempt follows."""
        if (attempt := in_flight.attempt) is not None:
            for job in list(attempt.jobs.values()):
                self.drop_job(in_flight, job)
            for name in sorted(attempt.instances):
                self.abort_at(in_flight, name)
            del self.by_id[attempt.id]
        in_flight.leave(blame)

    # ---- the end

    def close(self, in_flight: RequestInFlight, now: float) -> None:
        """Begins to end the request: aborts its work and waits for the reports of its instances."""
        in_flight.phase, in_flight.deadline_s = Phase.CLOSING, now + self._cluster.recovery_s
        if (attempt := in_flight.attempt) is not None:
            for name in attempt.instances:
                self.instances.send(name, [Abort(attempt.id)])
            for job in attempt.jobs.values():
                self.instances.send(job.name, [Abort(job.id)])
            for name in sorted(attempt.holders()):
                if self.instances[name].condition is Condition.SILENT:
                    self._lose(in_flight, name, now)
        self.conclude_if_idle(in_flight, now)

    def conclude_if_idle(self, in_flight: RequestInFlight, now: float) -> None:
        if in_flight.phase is Phase.CLOSING and (in_flight.attempt is None or in_flight.attempt.idle):
            self._conclude(in_flight, now)

    def _conclude(self, in_flight: RequestInFlight, now: float) -> None:
        active, attempt = in_flight.active, in_flight.attempt
        final = attempt.final if attempt is not None else in_flight.end_of_tokens()
        final = final or Finished(in_flight.request.id, FinishReason.ABORT.value, in_flight.num_known)
        self._end(in_flight)
        merged = in_flight.merged(final, now)
        if active.cancelled:
            self._report(active, active.failed_result(merged, now, RequestAborted("the request was cancelled")))
            return
        piece = active.on_finished(merged, now)
        assert piece.result is not None
        active.handle.feed(piece)
        self._report(active, piece.result)

    def _end(self, in_flight: RequestInFlight) -> None:
        self._leave(in_flight)
        in_flight.phase = Phase.ENDED
        del self.requests[in_flight.request.id]

    def fail(self, in_flight: RequestInFlight, error: HydraError, now: float) -> None:
        """Gives the error to the reader at once and aborts what still runs. No-op if the request has ended, as other
        answers of one handle do when one of them fails."""
        if in_flight.phase is Phase.ENDED:
            return
        active = in_flight.active
        self._end(in_flight)
        if not active.handle.done:
            active.handle.fail(error)
        ended = Finished(in_flight.request.id, FinishReason.ERROR.value, in_flight.num_known)
        self._report(active, active.failed_result(in_flight.merged(ended, now), now, error))


def _lost(sentence: str) -> Unavailable:
    return Unavailable(f"{sentence}; try again later", code="instance_lost", retry_after_s=RETRY_AFTER_S)
