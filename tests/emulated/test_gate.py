"""The gate of a device that works behind the call, on its clock: what runs beside a step, what an encode loses to it,
and what it says of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.worker.vision import gate as gates
from hydra_engine.worker.vision.gate import DeviceGate
from tests.emulated.clock import Clock, Line, Machine, Mark, Work
from tests.examples import examples

MACHINE = Machine()
GAPS_S = MACHINE.graph_s + 4 * MACHINE.gap_s  # of a piece
SLACK_S = 100e-6  # threads that wake, launches between a decision and its kernel


def products(seconds: float) -> Work:
    return Work(flop=seconds * MACHINE.flop_per_s / 2)  # on half of the device


@dataclass
class LineMark:
    """`Mark` of backend/device.py."""

    clock: Clock
    mark: Mark

    def is_done(self) -> bool:
        return self.clock.is_done(self.mark)

    def wait(self) -> None:
        self.clock.wait(self.mark)

    def seconds_since(self, earlier: LineMark) -> float:
        assert self.mark.done_s is not None and earlier.mark.done_s is not None
        return self.mark.done_s - earlier.mark.done_s


@dataclass
class Step:
    allowance_s: float
    begun_s: float = 0.0
    ended_s: float = 0.0
    reported_s: float = 0.0

    def beside(self, line: Line) -> float:
        """Seconds of the line's kernels."""
        spans = ((max(begin, self.begun_s), min(end, self.ended_s)) for begin, end in line.spans)
        return sum(max(0.0, end - begin) for begin, end in spans)


@dataclass
class Lanes:
    """A vision and a language lane, each on half of a device: neither slows the other."""

    clock: Clock
    gate: DeviceGate
    vision: Line
    language: Line
    steps: list[Step] = field(default_factory=list)

    def encode(self, pieces: Sequence[float], num_patches: int = 4096) -> None:
        self.gate.enter(num_patches)
        for index, seconds in enumerate(pieces):
            if index:
                self.gate.checkpoint()
            self.clock.replay(self.vision, [products(seconds / 4)] * 4)
        self.gate.leave()

    def step(self, allowance_s: float, seconds: float) -> None:
        step = Step(allowance_s, self.clock.now())
        self.gate.begin(allowance_s)
        self.clock.replay(self.language, [products(seconds)])
        self.clock.wait(self.clock.record(self.language))
        step.reported_s = self.gate.end()
        step.ended_s = self.clock.now()
        self.steps.append(step)

    def run(self, *jobs: Callable[[], None]) -> None:
        threads = [self.clock.time.threading.Thread(target=job, name=f"job {i}") for i, job in enumerate(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.clock.wait(self.clock.record(self.vision))


@contextmanager
def lanes(*, paced: bool = True) -> Iterator[Lanes]:
    clock = Clock(MACHINE)
    half = MACHINE.multiprocessors // 2
    vision, language = clock.line(half), clock.line(half)
    with pytest.MonkeyPatch.context() as patch, clock.time:
        patch.setattr(gates, "threading", clock.time.threading)
        gate = DeviceGate(clock, lambda: LineMark(clock, clock.record(vision)), paced=paced)
        yield Lanes(clock, gate, vision, language)


SECONDS = st.floats(1e-4, 3e-3)
STEPS = st.lists(st.tuples(st.one_of(st.just(0.0), st.floats(0, 6e-3), st.just(inf)), SECONDS), min_size=1, max_size=12)


@settings(max_examples=examples(40), deadline=None)
@given(steps=STEPS, encodes=st.lists(st.tuples(st.integers(1, 12), SECONDS), min_size=1, max_size=4), pause_s=SECONDS)
def test_a_step_has_its_allowance_and_one_piece_beside_it(
    steps: list[tuple[float, float]], encodes: list[tuple[int, float]], pause_s: float
) -> None:
    """Pieces of an encode are alike; encodes are of any sizes, also of sizes that are not known yet."""
    with lanes() as both:

        def encode() -> None:
            for index, (count, seconds) in enumerate(encodes):
                both.encode([seconds] * count, num_patches=1 << index)
                both.clock.time.spend(pause_s if index % 2 else 0.0)

        def decode() -> None:
            for allowance_s, seconds in steps:
                both.step(allowance_s, seconds)

        both.run(encode, decode)
    longest_s = max(seconds for _, seconds in encodes) + GAPS_S
    for step in both.steps:
        beside_s = step.beside(both.vision)
        assert beside_s <= max(2 * longest_s, step.allowance_s + longest_s) + SLACK_S
        assert abs(step.reported_s - beside_s) <= 3 * SLACK_S
    assert sum(end - begin for begin, end in both.vision.spans) == pytest.approx(
        sum(count * (seconds + GAPS_S) for count, seconds in encodes)
    ), "all of it was computed"


@settings(max_examples=examples(40), deadline=None)
@given(steps=STEPS, pieces=st.lists(SECONDS, min_size=1, max_size=30))
def test_pieces_that_are_not_as_expected(steps: list[tuple[float, float]], pieces: list[float]) -> None:
    """A piece may take longer than all before it did."""
    with lanes() as both:
        both.run(lambda: both.encode(pieces), lambda: [both.step(*step) for step in steps] and None)
    longest_s = max(pieces) + GAPS_S
    max_unexpected_s = longest_s - min(pieces)
    for step in both.steps:
        max_s = max(2 * longest_s, step.allowance_s + longest_s + max_unexpected_s)
        assert step.beside(both.vision) <= max_s + SLACK_S


def test_an_encode_that_is_not_held_up_leaves_no_gap() -> None:
    """Marks and waits for the piece before the last cost the device nothing."""
    with lanes() as both:
        both.run(lambda: both.encode([0.5e-3] * 26))
        spans = both.vision.spans
        assert spans[-1][1] - spans[0][0] == pytest.approx(sum(end - begin for begin, end in spans), rel=1e-9)


def test_no_more_than_two_pieces_are_in_flight() -> None:
    """The limit holds while no step runs, too, for one may begin at any time."""
    with lanes() as both:

        def decode() -> None:
            both.clock.time.spend(3.2e-3)
            both.step(0.0, 20e-3)

        both.run(lambda: both.encode([1e-3] * 30), decode)
        (step,) = both.steps
        assert 1e-3 < step.beside(both.vision) <= 2e-3 + SLACK_S


def test_what_is_in_flight_counts_before_it_is_done() -> None:
    with lanes() as both:
        both.run(lambda: both.encode([1e-3] * 20), lambda: [both.step(2.5e-3, 20e-3) for _ in range(4)] and None)
        for step in both.steps[1:]:
            assert 2.5e-3 < step.beside(both.vision) <= 3.5e-3 + SLACK_S


def test_vision_goes_on_in_every_step() -> None:
    with lanes() as both:
        both.run(lambda: both.encode([1e-3] * 10), lambda: [both.step(0.0, 2e-3) for _ in range(12)] and None)
        ended_s = both.vision.spans[-1][1]
        assert all(step.beside(both.vision) > 0.5e-3 for step in both.steps if step.ended_s < ended_s)


def test_without_a_limit_an_encode_has_two_marks() -> None:
    with lanes(paced=False) as both:
        marks, mark = list[LineMark](), both.gate._mark

        def counted() -> LineMark:
            marks.append(mark())  # type: ignore[arg-type]
            return marks[-1]

        both.gate._mark = counted  # type: ignore[assignment]
        both.run(lambda: both.encode([1e-3] * 20), lambda: both.step(inf, 10e-3))
        assert len(marks) == 2
        (step,) = both.steps
        assert step.reported_s == pytest.approx(step.beside(both.vision), abs=SLACK_S)


def test_a_closed_gate_stays_open() -> None:
    with lanes() as both:

        def decode() -> None:
            both.gate.begin(0.0)
            both.clock.time.spend(5e-3)
            assert both.gate._waiting
            both.gate.close()
            both.clock.time.spend(50e-3)
            both.gate.end()

        both.run(lambda: both.encode([1e-3] * 10), decode)
        assert both.vision.spans[-1][1] < 20e-3
