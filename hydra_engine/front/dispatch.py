"""Requests in flight over the instances: where each goes, what is tried again when an instance is lost, how each ends.

Reads no clock and knows no event loop: `now` is passed in, messages leave through `send`. Every request that is
submitted ends exactly once. What instances say about requests is taken in by `front/incoming.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hydra_engine.cluster.places import Missing, Place, missing_for_good, missing_now
from hydra_engine.cluster.router import Route, Router
from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Condition
from hydra_engine.core.media import PixelPayload
from hydra_engine.core.messages import Abort, Finished, Status, Submit
from hydra_engine.core.outputs import FinishReason, Result
from hydra_engine.core.roles import Role
from hydra_engine.errors import HydraError, RequestAborted, RequestFailed, Unavailable
from hydra_engine.front.active import ActiveRequest
from hydra_engine.front.flights import Flight, Job
from hydra_engine.front.holders import Holders, Send
from hydra_engine.front.suspects import Suspects

# Attempts without anybody's death: each has a cause that passes (a full cache, a lost lease). This many have another.
MAX_REPLAYS = 32
RETRY_AFTER_S = 5
# A connection usually breaks because one of its ends has died, which is told a moment later and counts otherwise.
PAIR_GRACE_S = 0.3

Report = Callable[[ActiveRequest, Result], None]


@dataclass(frozen=True, slots=True, eq=False)
class Broken:
    """An attempt, and jobs of it, for which something may have been on its way between a pair that was cut off."""

    flight: Flight
    attempt: RequestId
    pair: set[str]
    jobs: set[RequestId]
    due_s: float


class Dispatcher:
    """`next_id` gives numbers that nobody has; `report` gets every result."""

    def __init__(
        self,
        config: EngineConfig,
        roles: dict[str, Role],
        *,
        send: Send,
        next_id: Callable[[], RequestId],
        report: Report,
    ) -> None:
        self.flights: dict[RequestId, Flight] = {}  # by the user's request
        self.places = {name: Place(name, role) for name, role in roles.items()}
        self.holders = Holders(send)
        self.suspects = Suspects(self.flights, config.cluster.max_attempts)
        self._cluster = config.cluster
        self._next_id = next_id
        self._report = report
        self._router = Router(self.places, config.cluster.router)
        self._draining: set[str] = set()
        self._broken: list[Broken] = []

    # ---- instances

    def on_up(self, name: str, now: float) -> None:
        """It serves the role that it had, or was given meanwhile."""
        place = self.places[name]
        place.status = None
        place.condition = Condition.DRAINING if name in self._draining else Condition.READY
        self.holders.up(name)
        self.wake(now)

    def on_down(self, name: str, now: float, *, restarts: bool) -> None:
        place = self.places[name]
        place.condition = Condition.STARTING if restarts else Condition.FAILED
        place.status = None
        for other in place.pairs:
            self.places[other].pairs.discard(name)
        place.pairs.clear()
        self.holders.down(name)
        for flight in self.suspects.late(name, now):
            self._blame(flight, name, now)
        self._lose_all(name, now)
        if not restarts:
            self.wake(now)  # those that wait for it in vain are told

    def on_silent(self, name: str, silent: bool, now: float) -> None:
        """A silent instance may wake up: it is told that nothing it holds is wanted any more."""
        place = self.places[name]
        if not self.holders.is_up(name):
            return
        if silent:
            place.condition = Condition.SILENT
            self._lose_all(name, now)
            return
        place.condition = Condition.DRAINING if name in self._draining else Condition.READY
        self.holders.repeat_aborts(name)
        self.wake(now)

    def on_pair(self, one: str, other: str, up: bool, now: float) -> None:
        first, second = self.places[one], self.places[other]
        if up:
            first.pairs.add(other)
            second.pairs.add(one)
            self.wake(now)
            return
        first.pairs.discard(other)
        second.pairs.discard(one)
        for flight in self._by_age():
            if flight.attempt is not None and flight.crosses(one, other):
                broken = Broken(flight, flight.attempt, {one, other}, set(flight.jobs), now + PAIR_GRACE_S)
                self._broken.append(broken)

    def on_status(self, name: str, status: Status) -> None:
        self.places[name].status = status

    def set_role(self, name: str, role: Role) -> None:
        """Of an instance that holds no work."""
        self.places[name].role = role

    def drain(self, names: Iterable[str]) -> None:
        """No new requests there from now on, until `undrain`."""
        for name in names:
            self._draining.add(name)
            if self.places[name].usable:
                self.places[name].condition = Condition.DRAINING

    def undrain(self, names: Iterable[str], now: float) -> None:
        for name in names:
            self._draining.discard(name)
            if self.places[name].condition is Condition.DRAINING:
                self.places[name].condition = Condition.READY
        self.wake(now)

    def holds_work(self, name: str) -> bool:
        return bool(self.holders.num_stale(name)) or any(flight.is_at(name) for flight in list(self.flights.values()))

    def missing(self, images: bool, without: frozenset[str] = frozenset()) -> Missing | None:
        """The stage that nobody can serve at this moment."""
        places = list(self.places.values())
        return missing_now(places, images=images, usable=lambda place: place.usable and place.name not in without)

    def missing_for_good(self, images: bool) -> Missing | None:
        return missing_for_good(list(self.places.values()), images=images)

    # ---- requests

    def submit(self, active: ActiveRequest, pixels: Sequence[PixelPayload], now: float, *, near: str = "") -> None:
        """`near` an instance that has computed this prompt, if anybody has."""
        flight = Flight(active, tuple(pixels), near)
        self.flights[active.request.id] = flight
        self.start(flight, now)

    def cancel(self, number: RequestId, now: float) -> None:
        flight = self.flights.get(number)
        if flight is not None and not flight.active.closed and not flight.closing:
            flight.active.cancelled = True
            flight.active.handle.fail(RequestAborted("the request was cancelled"))
            self.close(flight, now)

    def tick(self, now: float) -> None:
        """A few times a second: ends what has waited too long and what a broken connection has cut off, and lets the
        next suspect begin."""
        due = [broken for broken in self._broken if broken.due_s <= now]
        self._broken = [broken for broken in self._broken if broken.due_s > now]
        for broken in due:
            self._lose_pair(broken, now)
        for flight in self._by_age():
            if flight.attempt is None and not flight.closing and self.suspects.is_suspect(flight):
                self.start(flight, now)
            if flight.deadline_s is not None and flight.deadline_s <= now:
                self._expire(flight, now)

    def wake(self, now: float) -> None:
        """Something can be used again: those that wait try, the oldest first."""
        for flight in self._by_age():
            if flight.closing or flight.deadline_s is None:
                continue
            if flight.attempt is None:
                self.start(flight, now)
            elif flight.unserved:
                self.encode(flight, (), now)

    def _by_age(self) -> list[Flight]:
        return sorted(self.flights.values(), key=lambda flight: flight.age)

    # ---- attempts

    def start(self, flight: Flight, now: float) -> None:
        """A new attempt, or it waits for an instance that can serve it, or for its turn."""
        if self.suspects.in_line(flight):
            if flight.deadline_s is None:  # from when it stands in line, however often its turn is looked for
                flight.deadline_s = now + self._cluster.recovery_s
            return
        route = self._router.route(flight.request, flight.near)
        if isinstance(route, Missing):
            self._wait(flight, now)
            return
        number = flight.request.id if flight.attempts == 0 else self._next_id()
        flight.attempt, flight.route, flight.deadline_s = number, route, None
        flight.attempts += 1
        flight.base = flight.num_known
        flight.decoder, flight.decoder_spoke = route.decode, not route.moves
        flight.parts = {route.prefill, route.decode}
        self.holders.know(number, flight)
        self._charge(flight, route)
        request = flight.attempt_request(number)
        if route.moves:
            self.holders.send(route.decode, [Submit(request, part="D", source=route.prefill)])
        remote = tuple(range(len(request.images))) if route.remote_images else ()
        pixels = () if route.remote_images else flight.pixels
        target = route.decode if route.moves else ""
        self.holders.send(route.prefill, [Submit(request, pixels, route.part, remote, target)])

    def _charge(self, flight: Flight, route: Route) -> None:
        num_tokens = flight.request.num_prompt + flight.num_known
        local = () if route.remote_images else flight.request.images
        flight.charge(self.places[route.prefill], prefill=num_tokens, patches=sum(image.num_patches for image in local))
        flight.charge(self.places[route.decode], decode=num_tokens)

    def encode(self, flight: Flight, indices: Iterable[int], now: float) -> None:
        """Has these images encoded, and those that nobody could encode before; or they wait."""
        assert flight.route is not None
        flight.unserved.update(indices)
        images = [(index, flight.request.images[index]) for index in sorted(flight.unserved)]
        chosen = self._router.encoders(flight.route.prefill, images)
        if isinstance(chosen, Missing):
            self._wait(flight, now)
            return
        flight.unserved.clear()
        flight.deadline_s = None
        for name, wanted in chosen.items():
            number = self._next_id()
            patches = sum(flight.request.images[index].num_patches for index in wanted)
            flight.jobs[number] = Job(number, name, set(wanted), flight.charge(self.places[name], patches=patches))
            self.holders.know(number, flight)
            self.holders.send(name, [flight.encode_message(number, wanted, flight.route.prefill)])

    def _wait(self, flight: Flight, now: float) -> None:
        if self.missing_for_good(bool(flight.request.images)) is not None:
            self.fail(flight, _lost("every instance that could serve this request has failed"), now)
        elif flight.deadline_s is None:
            flight.deadline_s = now + self._cluster.recovery_s

    def _expire(self, flight: Flight, now: float) -> None:
        if flight.closing:
            self._conclude(flight, now)
        elif self._draining:
            flight.deadline_s = now + self._cluster.recovery_s  # roles are being switched; that ends by itself
        else:
            waited = f"no instance could go on with this request within {self._cluster.recovery_s:g} s"
            self.fail(flight, _lost(waited), now)

    def replay(self, flight: Flight, now: float, *, died: bool = False) -> None:
        """Ends this attempt everywhere and begins another, as long as there is sense in it."""
        if not died:
            self.suspects.left(flight, flight.parts, now)
        self._leave(flight)
        if not self._may_go_on(flight, now, died=died):
            return
        end = flight.end_of_tokens()
        if end is not None:
            flight.final = end
            self.close(flight, now)
            return
        self.start(flight, now)

    def _may_go_on(self, flight: Flight, now: float, *, died: bool) -> bool:
        """Counts one more attempt, or one more encode of an image. False: the request has failed."""
        flight.deaths += died
        flight.replays += not died
        if self.suspects.is_poison(flight):
            told = f"{flight.deaths} instances ended while they worked on this request; it is not tried again"
            self.fail(flight, RequestFailed(told, code="request_poisoned"), now)
        elif flight.replays > MAX_REPLAYS:
            told = f"the request was moved between instances {MAX_REPLAYS} times and did not finish; try again later"
            self.fail(flight, RequestFailed(told), now)
        else:
            return True
        return False

    def encode_again(self, flight: Flight, jobs: Sequence[Job], now: float, *, died: bool = False) -> None:
        """These jobs, which are not the flight's any more, have ended without their images having been fetched."""
        indices = {index for job in jobs for index in job.pending}
        if not indices:
            return
        if not died:
            self.suspects.left(flight, {job.name for job in jobs}, now)
        if not self._may_go_on(flight, now, died=died):
            return
        if self.suspects.in_line(flight):
            self._leave(flight)
            self.start(flight, now)
        else:
            self.encode(flight, indices, now)

    # ---- losses

    def _lose_all(self, name: str, now: float) -> None:
        for flight in self._by_age():
            self._lose(flight, name, now)

    def _blame(self, flight: Flight, name: str, now: float) -> None:
        """It has left the instance `name`, which turns out to be dead; the attempt that has begun since goes on unless
        it has to be the only one of its kind."""
        if flight.is_at(name):
            return
        flight.replays -= 1
        if self._may_go_on(flight, now, died=True) and flight.attempt is not None and self.suspects.in_line(flight):
            self._leave(flight)
            self.start(flight, now)

    def _lose(self, flight: Flight, name: str, now: float) -> None:
        """Nothing is expected of instance `name` any more."""
        if not flight.is_at(name):
            return
        if flight.needs(name) and not flight.closing:
            self.replay(flight, now, died=True)
            return
        self.drop_part(flight, name)
        lost = [job for job in flight.jobs.values() if job.name == name]
        for job in lost:
            self.drop_job(flight, job)
        if flight.closing:
            self.conclude_if_idle(flight, now)
        else:
            self.encode_again(flight, lost, now, died=True)

    def _lose_pair(self, broken: Broken, now: float) -> None:
        """Both sides live, but what was on its way between them is gone, whether they are connected again or not."""
        flight = broken.flight
        if flight.closing or flight.attempt != broken.attempt:
            return
        if flight.moves_between(*broken.pair):
            self.replay(flight, now)
            return
        lost = [job for job in flight.jobs_between(*broken.pair) if job.id in broken.jobs]
        for job in lost:
            self.drop_job(flight, job)
        self.encode_again(flight, lost, now)

    def drop_part(self, flight: Flight, name: str) -> None:
        if name in flight.parts:
            assert flight.attempt is not None
            flight.parts.discard(name)
            self.holders.drop(name, flight.attempt, flight)

    def drop_job(self, flight: Flight, job: Job) -> None:
        self.end_job(flight, job)
        self.holders.drop(job.name, job.id, flight)

    def end_job(self, flight: Flight, job: Job) -> None:
        del flight.jobs[job.id]
        job.charge.release()
        self.holders.forget(job.id)

    def _leave(self, flight: Flight) -> None:
        """Nobody works on it any more: what is still held somewhere is aborted there."""
        for job in list(flight.jobs.values()):
            self.drop_job(flight, job)
        for name in sorted(flight.parts):
            self.drop_part(flight, name)
        if flight.attempt is not None:
            self.holders.forget(flight.attempt)
        flight.attempt, flight.route, flight.deadline_s = None, None, None
        flight.decoder, flight.victim, flight.final = "", "", None
        flight.unserved.clear()
        flight.early.clear()
        flight.release()

    # ---- the end

    def close(self, flight: Flight, now: float) -> None:
        """Nothing more is wanted of anybody but the reports of what has been done."""
        flight.closing = True
        flight.deadline_s = now + self._cluster.recovery_s
        for name in flight.parts:
            assert flight.attempt is not None
            self.holders.send(name, [Abort(flight.attempt)])
        for job in flight.jobs.values():
            self.holders.send(job.name, [Abort(job.id)])
        for name in sorted({*flight.parts, *(job.name for job in flight.jobs.values())}):
            if self.places[name].condition is Condition.SILENT:
                self._lose(flight, name, now)
        self.conclude_if_idle(flight, now)

    def conclude_if_idle(self, flight: Flight, now: float) -> None:
        if flight.idle and flight.request.id in self.flights:
            self._conclude(flight, now)

    def _conclude(self, flight: Flight, now: float) -> None:
        active = flight.active
        final = flight.final or Finished(flight.request.id, FinishReason.ABORT.value, flight.num_known)
        self._leave(flight)
        del self.flights[flight.request.id]
        merged = flight.merged(final)
        if active.cancelled:
            self._report(active, active.failed_result(merged, now, RequestAborted("the request was cancelled")))
            return
        piece = active.on_finished(merged, now)
        assert piece.result is not None
        active.handle.feed(piece)
        self._report(active, piece.result)

    def fail(self, flight: Flight, error: HydraError, now: float) -> None:
        """Told at once; what still runs somewhere is aborted. One that has ended meanwhile, as other answers of its
        handle do when one of them fails, is passed over."""
        if flight.request.id not in self.flights:
            return
        active = flight.active
        self._leave(flight)
        del self.flights[flight.request.id]
        if not active.handle.done:
            active.handle.fail(error)
        ended = Finished(flight.request.id, FinishReason.ERROR.value, flight.num_known)
        self._report(active, active.failed_result(flight.merged(ended), now, error))


def _lost(sentence: str) -> Unavailable:
    return Unavailable(f"{sentence}; try again later", code="instance_lost", retry_after_s=RETRY_AFTER_S)
