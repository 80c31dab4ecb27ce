"""The transition table, row by row: each pair of an event and a phase is brought about and compared with `EXPECTED`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hydra_engine.core.messages import NeedDecoder, PromptScores
from hydra_engine.core.outputs import Departure, FinishReason
from hydra_engine.errors import RequestFailed
from hydra_engine.frontend.request import Phase, RequestInFlight
from hydra_engine.frontend.transitions import PATIENCE_S, TRANSITIONS, Broken, Dispatcher, Event
from tests.frontend.rig import Rig
from tests.frontend.test_router import status
from tools.frontend_table import table

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
W, P, M, D, C, E = Phase


class Case:
    """A picture request in a phase, on its second attempt; its encode job has not ended. The decoder of the first
    attempt has not reported its end."""

    def __init__(self, phase: Phase) -> None:
        self.rig = Rig("2E+P+2D", recovery_s=5.0)
        self.rig.submit(1, images=[16])
        self.in_flight: RequestInFlight = self.rig.dispatcher.requests[1]
        self.first_decoder = self.in_flight.current.decoder
        self.rig.finish("p0", 1, Departure.WITHDRAWN)
        attempt = self.in_flight.current
        self.number, self.decoder = attempt.id, attempt.decoder
        self.rig.need("p0", self.number, 0)
        (self.job,) = attempt.jobs.values()
        if phase in (M, D, C, E):
            self.rig.speak("p0", attempt.request, 0)
        if phase is W:
            self.rig.down("p0")
        elif phase is D:
            self.rig.finish("p0", self.number, Departure.MOVED, 1)
            self.rig.speak(self.decoder, attempt.request, 1)
        elif phase in (C, E):
            self.rig.handles[1].cancel()
        if phase is E:
            for name in sorted(attempt.instances):
                self.rig.finish(name, self.number, FinishReason.ABORT)
            self.rig.finish(self.job.name, self.job.id, FinishReason.ABORT)
        assert self.in_flight.phase is phase
        for messages in self.rig.sent.values():
            messages.clear()
        self.num_reports = len(self.in_flight.reports)

    @property
    def sender(self) -> str:
        """An instance that works on the attempt, the prefilling one if it still does."""
        return "p0" if "p0" in self.in_flight.current.instances else self.decoder

    def effects(self) -> str:
        """The messages since the phase was reached, by role, and whether a report was kept."""
        sent = ((name, type(message).__name__) for name, messages in self.rig.sent.items() for message in messages)
        kept = ["report"] * (len(self.in_flight.reports) - self.num_reports)
        return ", ".join([*(f"{name[0]} {kind}" for name, kind in sent), *kept])

    def finish(self, reason: FinishReason | Departure) -> None:
        self.rig.finish(self.sender, self.number, reason, self.in_flight.num_known)

    def end_job(self, reason: FinishReason | Departure) -> None:
        self.rig.finish(self.job.name, self.job.id, reason)

    def lose_instance(self) -> None:
        self.rig.down(self.decoder if self.in_flight.phase is D else "p0")

    def die_afterwards(self) -> None:
        """Lets the instance die once more than allowed."""
        idle = next(name for name in ("e0", "e1") if name != self.job.name)
        self.in_flight.deaths = self.rig.config.cluster.max_attempts - 1
        self.rig.dispatcher.poison_guard.note_left(self.in_flight, [idle], self.rig.now)
        self.rig.down(idle)

    def break_pair(self) -> None:
        attempt, pair = self.in_flight.attempt, {self.job.name, "p0"}
        self.rig.dispatcher._broken.append(Broken(self.in_flight, attempt, pair, {self.job.id}, self.rig.now))
        self.rig.wait(0.0)

    def pass_deadline(self) -> None:
        self.in_flight.deadline_s = self.rig.now
        self.rig.wait(0.0)

    def wake(self) -> None:
        """The instance that it waits for is there again; a running one waits for an encoder."""
        names = ("p0",) if self.in_flight.phase is W else ("e0", "e1")
        for name in names:
            self.rig.down(name)
        for messages in self.rig.sent.values():
            messages.clear()
        self.rig.up(names[0])

    def tick(self) -> None:
        """The other decoder has room. A request that waits is a suspect that may be tried now; one that runs waits for
        an instance, or no tick looks at it."""
        if self.in_flight.phase in (P, D):
            self.in_flight.deadline_s = self.rig.now + 60
        instances = self.rig.dispatcher.instances
        for name, instance in instances.items():
            instance.status = status(num_waiting=9) if name == self.decoder else status()
        if self.in_flight.phase is W:
            self.in_flight.deaths = self.rig.config.cluster.max_attempts - 1
            instances.mark_up("p0")
            for name in ("e0", "e1", "d0", "d1"):
                instances.set_pair("p0", name, True)
        self.rig.wait(PATIENCE_S)

    def speak(self) -> None:
        """The next token; a known one once it decodes, since a plain next token does not go through the table."""
        name = self.decoder if self.in_flight.phase in (M, D) else "p0"
        self.rig.speak(name, self.in_flight.current.request, {P: 0, M: 1, D: 1, C: 1}[self.in_flight.phase])


EVENTS: dict[Event, Callable[[Case], object]] = {
    Event.SUBMITTED: lambda case: case.rig.submit(2),
    Event.CANCELLED: lambda case: case.rig.handles[1].cancel(),
    Event.ERROR: lambda case: case.rig.dispatcher.fail(case.in_flight, RequestFailed("a bug"), case.rig.now),
    Event.TICK: Case.tick,
    Event.DEADLINE: Case.pass_deadline,
    Event.WOKEN: Case.wake,
    Event.INSTANCE_LOST: Case.lose_instance,
    Event.DIED_AFTERWARDS: Case.die_afterwards,
    Event.PAIR_LOST: Case.break_pair,
    Event.HANDED_OVER: lambda case: case.rig.dispatcher.hand_over(
        case.in_flight, {"d0": "d1", "d1": "d0"}[case.decoder], case.rig.now
    ),
    Event.TOKENS: Case.speak,
    Event.SCORES: lambda case: case.rig.dispatcher.on_message(
        case.sender, PromptScores(case.number, 1, ()), case.rig.now
    ),
    Event.IMAGES_NEEDED: lambda case: case.rig.need(case.sender, case.number, 0),
    Event.DECODER_NEEDED: lambda case: case.rig.dispatcher.on_message(
        case.sender, NeedDecoder(case.number), case.rig.now
    ),
    Event.FINISHED: lambda case: case.finish(FinishReason.LENGTH),
    Event.MOVED: lambda case: case.finish(Departure.MOVED),
    Event.RETURNED: lambda case: case.finish(Departure.RETURNED),
    Event.WITHDRAWN: lambda case: case.finish(Departure.WITHDRAWN),
    Event.FAILED: lambda case: case.finish(FinishReason.ERROR),
    Event.FEATURES_MOVED: lambda case: case.end_job(Departure.MOVED),
    Event.JOB_WITHDRAWN: lambda case: case.end_job(Departure.WITHDRAWN),
    Event.JOB_FAILED: lambda case: case.end_job(FinishReason.ERROR),
    Event.STALE_REPORT: lambda case: case.rig.finish(case.first_decoder, 1, FinishReason.ABORT),
}

# The phase after each event, what is sent to (e)ncoders, (p)refilling instances and (d)ecoders, and whether a report is
# kept.
EXPECTED: dict[tuple[Event, Phase], tuple[Phase, str]] = {
    (Event.SUBMITTED, W): (P, "p Submit, d Submit"),
    (Event.CANCELLED, W): (E, ""),
    (Event.CANCELLED, P): (C, "e Abort, p Abort, d Abort"),
    (Event.CANCELLED, M): (C, "e Abort, p Abort, d Abort"),
    (Event.CANCELLED, D): (C, "e Abort, d Abort"),
    (Event.CANCELLED, C): (C, ""),
    (Event.ERROR, W): (E, ""),
    (Event.ERROR, P): (E, "e Abort, p Abort, d Abort"),
    (Event.ERROR, M): (E, "e Abort, p Abort, d Abort"),
    (Event.ERROR, D): (E, "e Abort, d Abort"),
    (Event.ERROR, C): (E, "e Abort, p Abort, d Abort"),
    (Event.ERROR, E): (E, ""),
    (Event.TICK, W): (P, "p Submit, d Submit"),
    (Event.TICK, P): (P, ""),
    (Event.TICK, M): (M, "p HandOver, d Submit"),
    (Event.TICK, D): (D, ""),
    (Event.TICK, C): (C, ""),
    (Event.TICK, E): (E, ""),
    (Event.DEADLINE, W): (E, ""),
    (Event.DEADLINE, P): (E, "e Abort, p Abort, d Abort"),
    (Event.DEADLINE, M): (E, "e Abort, p Abort, d Abort"),
    (Event.DEADLINE, D): (E, "e Abort, d Abort"),
    (Event.DEADLINE, C): (E, "e Abort, p Abort, d Abort"),
    (Event.WOKEN, W): (P, "p Submit, d Submit"),
    (Event.WOKEN, P): (P, "e Encode"),
    (Event.WOKEN, M): (M, "e Encode"),
    (Event.WOKEN, D): (D, "e Encode"),
    (Event.WOKEN, C): (C, ""),
    (Event.WOKEN, E): (E, ""),
    (Event.INSTANCE_LOST, P): (W, "e Abort, d Abort"),
    (Event.INSTANCE_LOST, M): (W, "e Abort, d Abort"),
    (Event.INSTANCE_LOST, D): (P, "e Abort, p Submit, d Submit"),
    (Event.INSTANCE_LOST, C): (C, ""),
    (Event.DIED_AFTERWARDS, W): (E, ""),
    (Event.DIED_AFTERWARDS, P): (E, "e Abort, p Abort, d Abort"),
    (Event.DIED_AFTERWARDS, M): (E, "e Abort, p Abort, d Abort"),
    (Event.DIED_AFTERWARDS, D): (E, "e Abort, d Abort"),
    (Event.DIED_AFTERWARDS, C): (C, ""),
    (Event.DIED_AFTERWARDS, E): (E, ""),
    (Event.PAIR_LOST, W): (W, ""),
    (Event.PAIR_LOST, P): (P, "e Abort, e Encode"),
    (Event.PAIR_LOST, M): (M, "e Abort, e Encode"),
    (Event.PAIR_LOST, D): (D, "e Abort, e Encode"),
    (Event.PAIR_LOST, C): (C, ""),
    (Event.PAIR_LOST, E): (E, ""),
    (Event.HANDED_OVER, D): (M, "d Submit, d HandOver"),
    (Event.TOKENS, P): (M, ""),
    (Event.TOKENS, M): (D, ""),
    (Event.TOKENS, D): (D, ""),
    (Event.TOKENS, C): (C, ""),
    (Event.SCORES, P): (P, ""),
    (Event.SCORES, M): (M, ""),
    (Event.SCORES, D): (D, ""),
    (Event.SCORES, C): (C, ""),
    (Event.IMAGES_NEEDED, P): (P, "e Encode"),
    (Event.IMAGES_NEEDED, M): (M, "e Encode"),
    (Event.IMAGES_NEEDED, D): (D, "e Encode"),
    (Event.IMAGES_NEEDED, C): (C, ""),
    (Event.DECODER_NEEDED, P): (P, ""),
    (Event.DECODER_NEEDED, M): (M, ""),
    (Event.DECODER_NEEDED, D): (D, ""),
    (Event.DECODER_NEEDED, C): (C, ""),
    (Event.FINISHED, P): (C, "e Abort, d Abort, report"),
    (Event.FINISHED, M): (C, "e Abort, d Abort, report"),
    (Event.FINISHED, D): (C, "e Abort, report"),
    (Event.FINISHED, C): (C, "report"),
    (Event.MOVED, P): (P, "report"),
    (Event.MOVED, M): (M, "report"),
    (Event.MOVED, D): (P, "e Abort, p Submit, d Submit, report"),
    (Event.MOVED, C): (C, "report"),
    (Event.RETURNED, P): (P, "e Abort, p Submit, d Submit, d Abort, report"),
    (Event.RETURNED, M): (P, "e Abort, p Submit, d Submit, d Abort, report"),
    (Event.RETURNED, D): (P, "e Abort, p Submit, d Submit, report"),
    (Event.RETURNED, C): (C, "report"),
    (Event.WITHDRAWN, P): (P, "e Abort, p Submit, d Submit, d Abort, report"),
    (Event.WITHDRAWN, M): (P, "e Abort, p Submit, d Submit, d Abort, report"),
    (Event.WITHDRAWN, D): (P, "e Abort, p Submit, d Submit, report"),
    (Event.WITHDRAWN, C): (C, "report"),
    (Event.FAILED, P): (E, "e Abort, d Abort, report"),
    (Event.FAILED, M): (E, "e Abort, d Abort, report"),
    (Event.FAILED, D): (E, "e Abort, report"),
    (Event.FAILED, C): (C, "report"),
    (Event.FEATURES_MOVED, P): (P, "report"),
    (Event.FEATURES_MOVED, M): (M, "report"),
    (Event.FEATURES_MOVED, D): (D, "report"),
    (Event.FEATURES_MOVED, C): (C, "report"),
    (Event.JOB_WITHDRAWN, P): (P, "e Encode, report"),
    (Event.JOB_WITHDRAWN, M): (M, "e Encode, report"),
    (Event.JOB_WITHDRAWN, D): (D, "e Encode, report"),
    (Event.JOB_WITHDRAWN, C): (C, "report"),
    (Event.JOB_FAILED, P): (E, "p Abort, d Abort, report"),
    (Event.JOB_FAILED, M): (E, "p Abort, d Abort, report"),
    (Event.JOB_FAILED, D): (E, "d Abort, report"),
    (Event.JOB_FAILED, C): (C, "report"),
    (Event.STALE_REPORT, W): (W, "report"),
    (Event.STALE_REPORT, P): (P, "report"),
    (Event.STALE_REPORT, M): (M, "report"),
    (Event.STALE_REPORT, D): (D, "report"),
    (Event.STALE_REPORT, C): (C, "report"),
}

PAIRS = [(event, phase) for event, row in TRANSITIONS.items() for phase in row]


@pytest.mark.parametrize(("event", "phase"), PAIRS, ids=[f"{event.name}-{phase.name}" for event, phase in PAIRS])
def test_an_event_in_a_phase(event: Event, phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    case, fired = Case(P if event is Event.SUBMITTED else phase), []
    fire = Dispatcher._fire

    def noted(dispatcher: Dispatcher, event: Event, in_flight: RequestInFlight, now: float, *facts: object) -> None:
        fired.append((event, in_flight.phase))
        fire(dispatcher, event, in_flight, now, *facts)

    monkeypatch.setattr(Dispatcher, "_fire", noted)
    if phase is E:  # it ends between the choice of the requests and its own turn
        case.rig.dispatcher._fire(event, case.in_flight, case.rig.now)
    else:
        EVENTS[event](case)
    assert (event, phase) in fired
    in_flight = case.rig.dispatcher.requests[2] if event is Event.SUBMITTED else case.in_flight
    assert (in_flight.phase, case.effects()) == EXPECTED[event, phase]
    if isinstance(TRANSITIONS[event][phase], str):
        assert (in_flight.phase, case.effects()) == (phase, ""), "nothing is done"


def test_each_pair_has_a_case_and_each_event_a_row() -> None:
    assert set(EXPECTED) == set(PAIRS)
    assert set(TRANSITIONS) == set(EVENTS) == set(Event)


@pytest.mark.parametrize("phase", Phase)
def test_a_pair_that_is_not_in_the_table_cannot_happen(phase: Phase) -> None:
    for event, row in TRANSITIONS.items():
        if phase not in row:
            case = Case(phase)
            with pytest.raises(AssertionError, match="cannot happen"):
                case.rig.dispatcher._fire(event, case.in_flight, case.rig.now)


def test_the_page_shows_the_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "run python -m tools.frontend_table"


def test_requests_that_run_cost_nothing_when_a_connection_comes_up_or_time_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of them may run while each of hundreds of connections comes up."""
    rig, fired = Rig("2EPD"), list[object]()
    for number in range(1, 5):
        rig.submit(number)
    monkeypatch.setattr(Dispatcher, "_fire", lambda *event: fired.append(event))
    rig.dispatcher.on_pair("epd0", "epd1", True, rig.now)
    rig.dispatcher.tick(rig.now)
    assert not fired
