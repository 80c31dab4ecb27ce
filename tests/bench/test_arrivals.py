"""Arrival times: the asked rate exactly, the asked burstiness, fixed by the seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_planner.workload.arrivals import Arrivals

PROCESSES = ("poisson", "gamma:2.5", "onoff:0.5,1.5")


@given(st.sampled_from(PROCESSES), st.floats(0.1, 200), st.integers(1, 300), st.integers(0, 1000))
def test_all_requests_arrive_in_order_within_the_span_of_their_rate(kind: str, rate: float, n: int, seed: int) -> None:
    times = Arrivals.parse(kind).times(rate, n, seed)
    assert len(times) == n
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0 and times[-1] <= n / rate * (1 + 1e-9)


@pytest.mark.parametrize("kind", PROCESSES)
def test_the_seed_fixes_the_times(kind: str) -> None:
    arrivals = Arrivals.parse(kind)
    assert (arrivals.times(4, 50, 7) == arrivals.times(4, 50, 7)).all()
    assert not (arrivals.times(4, 50, 7) == arrivals.times(4, 50, 8)).all()


@pytest.mark.parametrize("kind", ["poisson", "gamma:2.5"])
def test_another_rate_stretches_the_same_pattern(kind: str) -> None:
    arrivals = Arrivals.parse(kind)
    np.testing.assert_allclose(arrivals.times(8, 40, 1) * 4, arrivals.times(2, 40, 1))


def test_gaps_vary_as_much_as_was_asked() -> None:
    def variation(kind: str) -> float:
        gaps = np.diff(Arrivals.parse(kind).times(1, 20_000, 0))
        return float(gaps.std() / gaps.mean())

    assert variation("poisson") == pytest.approx(1, abs=0.05)
    assert variation("gamma:0.5") == pytest.approx(0.5, abs=0.05)
    assert variation("gamma:3") == pytest.approx(3, abs=0.2)


def test_nothing_arrives_while_off() -> None:
    times = Arrivals.parse("onoff:0.5,1.5").times(10, 500, 3)
    assert (times % 2 <= 0.5 + 1e-9).all()
    assert len(np.unique(times // 2)) == 25  # every one of the 25 bursts of 50 seconds has requests


@pytest.mark.parametrize("text", ["uniform", "gamma:0", "gamma:x", "onoff:1", "onoff:0,1", "poisson:2"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Arrivals.parse(text)


def test_a_process_is_written_as_it_is_read() -> None:
    for text in PROCESSES:
        assert str(Arrivals.parse(text)) == text
