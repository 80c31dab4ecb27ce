"""The gate between the lanes: against an oracle on a clock of its own, and with threads that do all they can to get
lost. Nothing here measures time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.worker.vision.gate import LaneGate
from tests.examples import examples
from tests.virtual_clock import VirtualClock

PATIENCE_S = 60.0  # until a thread counts as stuck


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads change places as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class VisionThread:
    """Runs its calls one after another; `settle` returns when it has done all or waits at the gate."""

    def __init__(self, gate: LaneGate) -> None:
        self._gate = gate
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._given = self._done = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def order(self, call: Callable[[], None]) -> None:
        self._given += 1
        self._orders.put(call)

    def settle(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self._done < self._given and not self._gate._waiting:
            assert time.monotonic() < deadline, "the vision thread is stuck"
            time.sleep(0)

    def stop(self) -> None:
        self._orders.put(None)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._orders.get()) is not None:
            call()
            self._done += 1


class Oracle:
    """The gate's contract without threads. Whole seconds, so that sums are exact."""

    def __init__(self) -> None:
        self.allowance: float | None = None  # of the step that runs
        self.used = 0.0
        self.inside = self.waiting = False

    def begin(self, allowance: float) -> None:
        self.allowance, self.used, self.waiting = allowance, 0.0, False

    def end(self) -> float:
        self.allowance, self.waiting = None, False
        return self.used

    def compute(self, seconds: float) -> None:
        if self.allowance is not None:
            self.used += seconds

    def checkpoint(self) -> None:
        self.waiting = self.allowance is not None and self.used >= self.allowance


ACTIONS = st.one_of(
    st.tuples(st.just("language"), st.sampled_from([0.0, 1.0, 3.0, 10.0, inf])),
    st.tuples(st.just("piece"), st.integers(0, 5)),
    st.tuples(st.just("idle"), st.integers(0, 5)),
    st.tuples(st.just("step"), st.just(0)),
)


@settings(max_examples=examples(150), deadline=None)
@given(actions=st.lists(ACTIONS, max_size=40))
def test_the_gate_does_what_the_oracle_says(actions: list[tuple[str, float]]) -> None:
    """language: begins a step, or ends the one that runs. step: begins or ends a vision step. piece: computes, then
    meets a checkpoint. idle: time in which vision computes nothing."""
    clock = VirtualClock()
    gate, oracle = LaneGate(clock), Oracle()
    vision = VisionThread(gate)
    for action, amount in actions:
        if action == "language" and oracle.allowance is None:
            gate.begin(amount)
            oracle.begin(amount)
        elif action == "language":
            assert gate.end() == oracle.end()
        elif oracle.waiting or (action == "idle" and oracle.inside) or (action == "piece" and not oracle.inside):
            continue  # a thread that waits takes no orders; inside a vision step all its time counts
        elif action == "idle":
            clock.advance(amount)
        elif action == "piece":
            vision.order(lambda seconds=amount: clock.advance(seconds) and None)
            vision.order(gate.checkpoint)
            oracle.compute(amount)
            oracle.checkpoint()
        elif oracle.inside:
            vision.order(gate.leave)
            oracle.inside = False
        else:
            vision.order(gate.enter)
            oracle.inside = True
            oracle.checkpoint()
        vision.settle()
        assert gate._waiting == oracle.waiting
    if oracle.allowance is not None:
        assert gate.end() == oracle.end()
    vision.stop()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0)


@pytest.mark.slow
def test_vision_advances_in_every_step_whatever_the_allowance(eager_switches: None) -> None:
    """10,000 steps, each as soon as vision waits in the one before. Between two it may compute more than once."""
    gate, pieces, stop = LaneGate(VirtualClock()), 0, threading.Event()

    def vision() -> None:
        nonlocal pieces
        gate.enter()
        while not stop.is_set():
            pieces += 1
            gate.checkpoint()
        gate.leave()

    gate.begin(0.0)
    thread = threading.Thread(target=vision, daemon=True)
    thread.start()
    before = -1
    for _ in range(10_000):
        wait_until(lambda: gate._waiting)
        assert pieces > before, "vision waits twice without a piece between"
        before = pieces
        gate.end()
        gate.begin(0.0)
    stop.set()
    gate.end()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.quick("7.0", "inf")
@pytest.mark.parametrize("allowance", [0.0, 2.5, 7.0, inf])
def test_no_wake_up_is_lost_and_every_second_counts_once(allowance: float, eager_switches: None) -> None:
    """Vision steps of a few pieces against language steps as fast as both can. A piece of n seconds advances the clock
    at one moment, so it lies inside a step or outside, and the sums must be equal to the last second."""
    clock, moment = VirtualClock(), threading.Lock()
    gate, num_pieces, longest = LaneGate(clock), 10_000, 4
    inside, expected, first_step, finished = False, 0.0, threading.Event(), threading.Event()

    def vision() -> None:
        nonlocal expected
        done = 0
        first_step.wait(PATIENCE_S)  # or all pieces are over before it
        while done < num_pieces:
            gate.enter()
            for _ in range(1 + done % 7):
                seconds = done % (longest + 1)
                with moment:
                    clock.advance(seconds)
                    expected += seconds if inside else 0
                done += 1
                gate.checkpoint()
            gate.leave()
        finished.set()

    thread = threading.Thread(target=vision, daemon=True)
    thread.start()
    consumed, deadline, steps = 0.0, time.monotonic() + PATIENCE_S, 0
    while not finished.is_set():
        with moment:
            gate.begin(allowance)
            inside = True
        if steps % 3 == 0:
            time.sleep(0)
        with moment:
            used = gate.end()
            inside = False
        assert used <= allowance + longest
        consumed += used
        steps += 1
        first_step.set()
        assert time.monotonic() < deadline, "a wake-up was lost"
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert consumed == expected and steps > 0


def test_nobody_waits_while_no_language_step_runs() -> None:
    clock = VirtualClock()
    gate = LaneGate(clock)
    gate.enter()
    for _ in range(100):
        clock.advance(10)
        gate.checkpoint()
    gate.begin(0.0)
    assert gate.end() == 0.0, "time before a step does not count"
    clock.advance(10)
    gate.checkpoint()
    gate.leave()
    gate.begin(5.0)
    clock.advance(10)
    assert gate.end() == 0.0, "nor does time in which vision has nothing to do"


def test_a_vision_step_that_begins_late_waits_at_its_entry() -> None:
    """Two vision steps in one language step share its allowance."""
    clock = VirtualClock()
    gate = LaneGate(clock)
    vision = VisionThread(gate)
    gate.begin(4.0)
    for call in (gate.enter, lambda: clock.advance(4) and None, gate.leave, gate.enter):
        vision.order(call)
    wait_until(lambda: gate._waiting)
    clock.advance(100)  # a wait costs nothing
    assert gate.end() == 4.0
    vision.order(gate.leave)
    vision.stop()


@pytest.mark.parametrize("how", ["end", "begin", "close"])
def test_what_ends_a_wait(how: str) -> None:
    gate = LaneGate(VirtualClock())
    vision = VisionThread(gate)
    gate.begin(0.0)
    vision.order(gate.enter)
    wait_until(lambda: gate._waiting)
    if how == "close":
        gate.close()
    else:
        gate.end()
        if how == "begin":
            gate.begin(0.0)
    vision.order(gate.leave)
    vision.stop()


def test_a_closed_gate_stays_open() -> None:
    clock = VirtualClock()
    gate = LaneGate(clock)
    gate.close()
    gate.begin(0.0)
    gate.enter()
    clock.advance(3)
    gate.checkpoint()
    gate.leave()
    assert gate.end() == 3.0, "seconds are counted all the same"


def test_calls_in_the_wrong_order_are_bugs() -> None:
    gate = LaneGate(VirtualClock())
    for call in (gate.end, gate.leave):
        with pytest.raises(AssertionError):
            call()
    gate.begin(0.0)
    for call in (gate.begin, gate.checkpoint, lambda: gate.begin(-1.0)):
        with pytest.raises(AssertionError):
            call()
    gate.end()
    gate.enter()
    with pytest.raises(AssertionError):
        gate.enter()
