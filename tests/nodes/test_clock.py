"""The frontend's clock as another node sees it: right within the error that it shows, and never going back."""

from __future__ import annotations

import random

import pytest

from hydra_nodes.clock import MAX_DRIFT, SyncedClock


class Nodes:
    """Two clocks that differ by hours and drift. `frontend_s` is true; the node's own runs `1 + drift` times as
    fast."""

    def __init__(self, ahead_s: float, drift: float) -> None:
        self.ahead_s, self.drift = ahead_s, drift
        self.frontend_s = 1000.0
        self.rng = random.Random(3)

    def now(self) -> float:
        return self.ahead_s + self.frontend_s * (1 + self.drift)

    def ping(self, there_s: float, back_s: float) -> tuple[float, float, float]:
        sent_s = self.now()
        self.frontend_s += there_s
        answered_s = self.frontend_s
        self.frontend_s += back_s
        return sent_s, answered_s, self.now()


@pytest.mark.parametrize("drift", [MAX_DRIFT, -MAX_DRIFT, 0.0])
@pytest.mark.parametrize("ahead_s", [5 * 3600.0, -5 * 3600.0])
def test_clocks_that_differ_by_hours_and_drift_agree_within_the_error(ahead_s: float, drift: float) -> None:
    nodes = Nodes(ahead_s, drift)
    clock = SyncedClock(nodes.ping(0.09, 0.001), nodes)  # a slow handshake
    last_s = 0.0
    for turn in range(400):
        # one way is slower than the other, and now and then very slow
        there_s = nodes.rng.uniform(0.0001, 0.0003) + (0.4 if turn % 7 == 3 else 0.0)
        clock.observe(nodes.ping(there_s, nodes.rng.uniform(0.0001, 0.002)))
        for _ in range(5):
            nodes.frontend_s += 0.1
            now_s = clock.now()
            assert abs(now_s - nodes.frontend_s) <= clock.error_s
            assert now_s > last_s
            last_s = now_s
    assert clock.error_s < 0.002


def test_a_span_is_as_long_as_it_was_within_the_error() -> None:
    nodes = Nodes(-7200.0, 0.0)
    clock = SyncedClock(nodes.ping(0.05, 0.0), nodes)
    for _ in range(50):
        clock.observe(nodes.ping(0.0002, 0.0002))
        begun_s, error_s = clock.now(), clock.error_s
        nodes.frontend_s += 0.02
        assert abs(clock.now() - begun_s - 0.02) <= error_s


def test_a_correction_backwards_is_spread_and_never_goes_back() -> None:
    nodes = Nodes(0.0, 0.0)
    clock = SyncedClock((nodes.frontend_s - 0.1, nodes.frontend_s, nodes.frontend_s), nodes)  # 50 ms ahead
    before_s = clock.now()
    assert before_s == pytest.approx(nodes.frontend_s + 0.05)
    clock.observe(nodes.ping(0.0001, 0.0001))
    assert clock.now() >= before_s
    assert clock.error_s >= abs(clock.now() - nodes.frontend_s) > 0.049
    nodes.frontend_s += 2.0
    assert abs(clock.now() - nodes.frontend_s) < 0.001


def test_a_node_that_was_suspended_catches_up_at_once() -> None:
    nodes = Nodes(0.0, 0.0)
    clock = SyncedClock(nodes.ping(0.0001, 0.0001), nodes)
    nodes.ahead_s -= 600.0  # its clock stood still for ten minutes
    clock.observe(nodes.ping(0.001, 0.001))
    assert abs(clock.now() - nodes.frontend_s) <= clock.error_s < 0.0011


def test_an_answer_that_cannot_be_is_ignored() -> None:
    nodes = Nodes(0.0, 0.0)
    clock = SyncedClock(nodes.ping(0.0001, 0.0001), nodes)
    for sample in ((nodes.now(), float("nan"), nodes.now()), (nodes.now() + 5, 0.0, nodes.now())):
        clock.observe(sample)
    assert abs(clock.now() - nodes.frontend_s) <= clock.error_s < 0.0002
