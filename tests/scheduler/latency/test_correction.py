"""Ratios of measured over predicted step times: quantiles of a window, stalls, drift, kinds, pauses."""

from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.scheduler.latency.correction import FEW, HIGHEST, LOWEST, WINDOW, Correction, Kind
from hydra_engine.scheduler.step_stats import Window


def after(ratios: list[float], kind: Kind = Kind.CHUNKS, error: float = 0.0) -> Correction:
    correction = Correction(error, error)
    for ratio in ratios:
        correction.add_ratio(kind, ratio)
    return correction


def noisy(count: int, middle: float = 1.0, spread: float = 0.05, seed: int = 0) -> list[float]:
    return list(np.random.default_rng(seed).normal(middle, spread, count))


@given(st.lists(st.floats(0, 10), min_size=1, max_size=300), st.integers(1, 50), st.floats(0, 0.999))
def test_a_window_has_the_quantiles_of_its_latest_values(values: list[float], size: int, share: float) -> None:
    window = Window(size)
    for value in values:
        window.add(value)
    latest = sorted(values[-size:])
    found = window.quantile(share)
    assert len(window) == len(latest)
    assert found in latest
    at_most = bisect_right(latest, found)
    assert at_most == len(latest) or at_most > share * (len(latest) + 1) - 1


def test_it_starts_from_the_error_bars() -> None:
    """90 % of the residuals lie within them, so nearly all steps lie within half as much again."""
    correction = Correction(0.1, 0.2)
    assert correction.middle(Kind.CHUNKS) == pytest.approx(1.0, abs=0.02)
    assert 1.2 < correction.high(Kind.CHUNKS) < 1.35  # of all kinds, while there are few steps of this one
    assert Correction(0.0, 0.0).high(Kind.VISION) == pytest.approx(1.0)


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.1])
def test_nearly_all_steps_stay_below_it(spread: float) -> None:
    correction, above = after(noisy(WINDOW, spread=spread)), 0
    for ratio in (future := noisy(4000, spread=spread, seed=1)):
        above += ratio > correction.high(Kind.CHUNKS)
        correction.add_ratio(Kind.CHUNKS, ratio)
    assert above / len(future) < 0.015
    assert correction.high(Kind.CHUNKS) < 1 + 3.5 * spread


@given(st.integers(0, WINDOW), st.floats(3, 1000))
def test_a_stalled_step_moves_nothing(place: int, ratio: float) -> None:
    usual = noisy(WINDOW)
    stalled = [*usual[:place], ratio, *usual[place:]]
    assert after(stalled).high(Kind.CHUNKS) == after(usual).high(Kind.CHUNKS)


@pytest.mark.parametrize("slower", [1.5, 2.5])
def test_a_machine_that_becomes_slower_is_followed_within_a_few_steps(slower: float) -> None:
    correction = after(noisy(WINDOW))
    steps = 0
    while correction.high(Kind.CHUNKS) < slower:
        correction.add_ratio(Kind.CHUNKS, slower * noisy(1, seed=steps)[0])
        steps += 1
    assert steps <= 16


def test_a_machine_that_becomes_faster_is_believed_after_a_window() -> None:
    correction = after([*noisy(WINDOW, 1.5), *noisy(WINDOW - 3)])
    assert correction.high(Kind.CHUNKS) > 1.4
    for ratio in noisy(WINDOW // 2, seed=2):
        correction.add_ratio(Kind.CHUNKS, ratio)
    assert correction.high(Kind.CHUNKS) < 1.25


@pytest.mark.parametrize(("ratio", "bound"), [(0.01, LOWEST), (50.0, HIGHEST)])
def test_it_is_bounded(ratio: float, bound: float) -> None:
    correction = after([ratio] * 2 * WINDOW)
    assert correction.high(Kind.CHUNKS) == correction.middle(Kind.CHUNKS) == bound


def test_kinds_err_differently_once_there_are_enough_steps_of_each() -> None:
    correction = after([1.0] * WINDOW, Kind.DECODES)
    for step in range(WINDOW):
        if step < FEW:
            assert correction.high(Kind.VISION) == correction.high(Kind.CHUNKS)
        correction.add_ratio(Kind.VISION, 1.4)
    assert correction.middle(Kind.VISION) == pytest.approx(1.4)
    assert correction.middle(Kind.CHUNKS) == pytest.approx(1.4)  # what all do, while none of them has come
    assert correction.high(Kind.DECODES) == pytest.approx(1.0)


def test_the_pause_is_the_usual_one_of_late() -> None:
    correction = Correction(0.0, 0.0)
    assert correction.pause_s == 0.0
    for seconds in (0.001, 0.0012, 0.5, 0.0011, -0.1):
        correction.add_pause(seconds)
    assert correction.pause_s == 0.0011
