"""Silence of instances, restarts and connected pairs, on a clock that tests move."""

from __future__ import annotations

import itertools
import time

import pytest

from hydra_engine.cluster.member import PACE, Change, OwnPauses, Restarts, Silence, StartProgress
from hydra_engine.cluster.pairs import Pairs
from hydra_engine.core.processes.status import ProcessStatus
from hydra_engine.core.units import describe_exit


def test_waits_grow_with_each_death_and_start_over_after_a_long_life() -> None:
    restarts = Restarts(PACE)
    waits = [restarts.record_death(served_s=5.0) for _ in range(8)]
    assert waits == [(usual, 0) for usual in (0, 1, 2, 4, 8, 16, 30, 30)], "the second if nobody does its work"
    assert restarts.record_death(served_s=60.0) == (0, 0)
    assert restarts.record_death(served_s=59.0) == (1, 0)
    assert restarts.total == 10


def test_starts_that_fail_wait_even_if_nobody_else_serves() -> None:
    restarts = Restarts(PACE)
    waits = [restarts.record_death(served_s) for served_s in (9.0, 0.0, 0.0, 0.0, 1.0)]
    assert waits == [(0, 0), (1, 1), (2, 2), (4, 4), (8, 0)]


def starting(cpu_s: float, *, stopped: bool = False, ready: bool = False) -> ProcessStatus:
    return ProcessStatus(stopped, ready, cpu_s)


def test_a_start_that_gives_signs_may_take_for_ever() -> None:
    """Processor time, a thread that would go on if it had a processor or its disk, a message, each on its own."""
    start = StartProgress(10.0)
    for now in range(0, 5000, 100):
        assert start.problem(now, starting(now / 1000)) is None
    for now in range(5000, 10000, 100):
        assert start.problem(now, starting(5.0, ready=True)) is None
    for now in range(10000, 15000, 100):
        start.record_sign(now)
        assert start.problem(now + 5, starting(5.0)) is None
    assert start.problem(15010, None) is None, "where the system does not tell"


def test_a_start_without_signs_is_fenced_and_a_stopped_one_sooner() -> None:
    start = StartProgress(10.0)
    assert start.problem(0.0, starting(1.0)) is None
    assert start.problem(119.9, starting(1.0)) is None
    assert start.problem(120.0, starting(1.0)) == "did nothing for 120 s while it started and was killed"
    start = StartProgress(10.0, now=100.0)
    assert start.problem(109.9, starting(1.0, stopped=True)) is None
    assert start.problem(110.0, starting(1.0, stopped=True)) == "was stopped for 10 s while it started and was killed"


def test_five_failed_starts_in_a_row_are_enough() -> None:
    restarts = Restarts(PACE)
    assert [restarts.record_death(0.0) is None for _ in range(5)] == [False] * 4 + [True]
    restarts = Restarts(PACE)
    served_s = (0.0, 0.0, 0.0, 0.0, 0.1) * 4
    assert all(restarts.record_death(s) is not None for s in served_s), "whatever ended it may have come from a client"


def test_silence_is_told_once_and_ends_with_a_word() -> None:
    silence = Silence(2.0, 10.0)
    silence.heartbeat(100.0)
    assert silence.change_due(101.9) is None
    assert silence.change_due(102.0) is Change.SILENT
    assert silence.change_due(105.0) is None
    assert silence.heartbeat(106.0) and not silence.heartbeat(106.1)
    assert silence.change_due(108.0) is None
    assert silence.change_due(108.1) is Change.SILENT
    assert silence.change_due(116.1) is Change.FENCE


def test_time_in_which_nobody_listened_does_not_count() -> None:
    silence = Silence(2.0, 10.0)
    silence.heartbeat(100.0)
    assert silence.change_due(102.5) is Change.SILENT
    silence.reset_timer(160.0)
    assert silence.silent, "it still has not been heard"
    assert silence.change_due(169.9) is None
    assert silence.change_due(170.0) is Change.FENCE


def test_own_pauses_are_noticed() -> None:
    pauses = OwnPauses(0.0, 1.0)
    assert [pauses.was_paused(now) for now in (0.05, 0.9, 1.9, 3.0, 3.05, 90.0)] == [
        False,
        False,
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "ended with exit code 0"), (-9, "was killed by SIGKILL"), (-11, "was killed by SIGSEGV"), (-60, "signal 60")],
)
def test_an_end_is_told_in_words(code: int, text: str) -> None:
    assert text in describe_exit(code)


def up(pairs: Pairs, one: str, other: str, now: float = 0.0) -> list[bool | None]:
    return [pairs.report(one, other, True, "", now), pairs.report(other, one, True, "", now)]


def make_pairs(*names: str) -> Pairs:
    """Pairs of instances that are all ready, connected and silent so far."""
    pairs = Pairs(names, PACE)
    for name in names:
        pairs.join(name, 0.0)
    for pair in pairs.pairs_due(0.0):
        pairs.connected(pair, 0.0)
    return pairs


def test_every_two_ready_instances_are_a_pair_in_the_order_of_the_topology() -> None:
    pairs = Pairs(("e0", "p0", "d0"), PACE)
    pairs.join("d0", 0.0)
    assert pairs.pairs_due(0.0) == [] and not pairs.complete
    pairs.join("e0", 0.0)
    assert pairs.pairs_due(0.0) == [("e0", "d0")]
    pairs.join("p0", 0.0)
    assert set(pairs.pairs_due(0.0)) == {("e0", "d0"), ("e0", "p0"), ("p0", "d0")}


def test_a_pair_is_up_when_both_have_said_so() -> None:
    pairs = make_pairs("e0", "p0", "d0")
    for one, other in itertools.combinations(("e0", "p0", "d0"), 2):
        assert not pairs.complete
        assert up(pairs, one, other) == [None, True]
    assert pairs.complete
    assert sorted(pairs.remove("p0")) == [("e0", "p0"), ("p0", "d0")]
    assert not pairs.complete
    assert pairs.report("e0", "p0", False, "it is gone", 1.0) is None, "of a life that is over"


def test_a_broken_pair_is_connected_again_after_a_second_and_once() -> None:
    pairs = make_pairs("e0", "p0")
    up(pairs, "e0", "p0")
    assert pairs.report("e0", "p0", False, "nonsense", 5.0) is False
    assert pairs.report("p0", "e0", False, "closed", 5.1) is None
    assert pairs.pairs_due(5.9) == []
    assert pairs.pairs_due(6.0) == [("e0", "p0")]
    pairs.connected(("e0", "p0"), 6.0)
    assert pairs.pairs_due(7.0) == []
    assert up(pairs, "e0", "p0", 6.1) == [None, True]


def test_late_words_about_the_old_connection_do_no_harm() -> None:
    """The end of the first connection is reported after the second one was made."""
    pairs = make_pairs("e0", "p0")
    up(pairs, "e0", "p0")
    pairs.report("e0", "p0", False, "nonsense", 5.0)
    pairs.connected(("e0", "p0"), 6.0)
    assert pairs.report("e0", "p0", True, "", 6.1) is None
    assert pairs.report("p0", "e0", False, "closed", 6.2) is None
    assert pairs.report("p0", "e0", True, "", 6.3) is True
    assert pairs.pairs_due(60.0) == []


def test_a_pair_that_says_nothing_is_connected_again() -> None:
    pairs = make_pairs("e0", "p0")
    assert pairs.report("e0", "p0", True, "", 0.1) is None
    assert pairs.pairs_due(14.9) == []
    assert pairs.pairs_due(15.0) == [] and pairs.pairs_due(16.0) == [("e0", "p0")]


def test_three_failures_in_a_row_are_hopeless() -> None:
    pairs = make_pairs("e0", "p0")
    for now in (1.0, 3.0):
        pairs.report("e0", "p0", False, "other blocks", now)
        assert pairs.find_hopeless() is None
        pairs.connected(("e0", "p0"), now + 1)
    pairs.record_failure(("e0", "p0"), "no descriptors left", 5.0)
    assert pairs.find_hopeless() == (("e0", "p0"), "no descriptors left")
    pairs.connected(("e0", "p0"), 6.0)
    up(pairs, "e0", "p0")
    assert pairs.find_hopeless() is None


def test_no_question_looks_at_all_pairs_of_many_instances() -> None:
    """They are asked with each report while instances start: twice as often as there are pairs."""
    names = [f"epd{number}" for number in range(128)]
    pairs = make_pairs(*names)
    up(pairs, *names[:2])
    began_s = time.thread_time()
    for _ in range(2_000):
        assert not pairs.complete and pairs.find_hopeless() is None and not pairs.pairs_due(1.0)
    assert time.thread_time() - began_s < 0.2
