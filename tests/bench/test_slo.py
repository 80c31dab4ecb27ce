"""Limits met, attainment, goodput, and the search for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_planner.records import Record, quantile
from hydra_planner.slo import Goodput, Limits, goodput, search


def record(ttft_s: float, gaps_s: list[float], *, error: str | None = None, counts: list[int] | None = None) -> Record:
    stamps = [10 + ttft_s]
    for gap_s in gaps_s:
        stamps.append(stamps[-1] + gap_s)
    counts = counts or [1] * len(stamps)
    return Record(0, "text", 10.0, 10.1, stamps[-1], sum(counts), tuple(stamps), tuple(counts), error=error)


LIMITS = Limits(ttft_s=1.0, tpot_limit_s=0.1)


def test_latency_counts_from_when_a_request_was_due() -> None:
    late = record(0.5, [0.25])
    assert late.ttft_s == pytest.approx(0.5) and late.latency_s == pytest.approx(0.75)
    assert late.late_s == pytest.approx(0.1)


def test_nine_gaps_of_ten_must_be_within_the_limit() -> None:
    assert LIMITS.met(record(0.9, [0.05] * 9 + [0.5]))
    assert not LIMITS.met(record(0.9, [0.05] * 8 + [0.5] * 2))
    assert not LIMITS.met(record(1.1, [0.05] * 10))


def test_a_single_token_has_no_gap_and_meets_the_tpot_limit() -> None:
    assert LIMITS.met(record(0.9, []))
    assert not LIMITS.met(record(1.1, []))


def test_what_failed_or_never_answered_has_not_met_its_limits() -> None:
    assert not LIMITS.met(record(0.1, [0.01], error="HTTP 503"))
    assert not LIMITS.ttft_met(Record(0, "text", 0.0, 0.0, 1.0, 4))
    assert LIMITS.attainment([record(0.1, []), record(0.1, [], error="x")]) == 0.5


def test_joined_tokens_share_the_wait_of_their_event() -> None:
    joined = record(0.5, [0.3, 0.08], counts=[2, 3, 1])
    assert joined.gaps() == pytest.approx([0.1, 0.1, 0.1, 0.08])
    assert joined.tpot_s == pytest.approx(0.38 / 4)
    assert joined.num_tokens == 6


def test_gaps_can_be_taken_from_a_window() -> None:
    flow = record(0.0, [1, 1, 1, 1])
    assert len(flow.gaps(since_s=11.5)) == 3  # the one under way then counts
    assert len(flow.gaps(since_s=11.5, until_s=13)) == 2


def test_goodput_is_interpolated_at_the_first_crossing() -> None:
    assert goodput([(4, 0.8), (1, 1.0), (2, 1.0)]) == Goodput(3.0, "exact")
    assert goodput([(1, 1.0), (2, 0.7), (3, 0.95)]).rate == pytest.approx(1 + 1 / 3)
    assert goodput([(1, 0.9), (2, 0.95)]) == Goodput(2, "at_least")
    assert goodput([(1, 0.5), (2, 0.95)]) == Goodput(1, "at_most")


@given(st.floats(0.01, 100), st.floats(0.5, 50), st.integers(0, 5))
def test_a_search_ends_around_the_goodput(capacity: float, start: float, steps: int) -> None:
    points = search(lambda rate: 1.0 if rate <= capacity else 0.0, start, steps, doublings=20)
    good = max(rate for rate, attained in points if attained == 1.0)
    bad = min(rate for rate, attained in points if attained == 0.0)
    assert good <= capacity < bad
    assert bad / good == pytest.approx(2 ** (0.5**steps))
    found = goodput(points)
    assert found.bound == "exact" and good <= found.rate <= bad


def test_a_search_gives_up_on_what_never_crosses() -> None:
    assert goodput(search(lambda _: 1.0, 1, 3, doublings=4)) == Goodput(16, "at_least")
    assert goodput(search(lambda _: 0.0, 1, 3, doublings=4)) == Goodput(1 / 16, "at_most")


def test_quantiles_interpolate() -> None:
    assert quantile([3, 1, 2], 0.5) == 2 and quantile([1, 2], 0.75) == 1.75
    assert quantile([], 0.5) is None
