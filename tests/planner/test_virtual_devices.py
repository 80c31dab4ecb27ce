"""Virtual time, devices that steps share and links that copies share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from typing import Any

import pytest

from hydra_planner.simulator.agenda import Agenda
from hydra_planner.simulator.links import Links
from hydra_planner.simulator.machine import LANGUAGE, VISION, Job, Machine, shares
from tests.planner.sites import DEVICE, gpus

RATES = replace(DEVICE, link_bytes_per_s=100.0, copy_bytes_per_s=400.0)


def play(agenda: Agenda) -> None:
    while agenda.step():
        pass


def test_events_happen_in_order_and_those_of_one_moment_as_they_were_scheduled() -> None:
    agenda, seen = Agenda(), []
    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        agenda.schedule_at(time_s, lambda name=name: seen.append((agenda.now(), name)))
    agenda.schedule_at(1.0, lambda: agenda.schedule_at(0.5, lambda: seen.append((agenda.now(), "late"))))
    play(agenda)
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "late"), (2.0, "c")]


# ---- devices


def factor(job: Job, other: Job) -> float:
    return {VISION: 2.0, LANGUAGE: 3.0}[other.kind]


def job(ended: dict[str, float], agenda: Agenda, name: str, kind: str, seconds: float, **rest: Any) -> Job:
    return Job(name, kind, seconds, lambda _: ended.update({kind: agenda.now()}), factor, **rest)


def test_lanes_of_one_device_slow_each_other_by_the_measured_factors() -> None:
    agenda, ended = Agenda(), {}
    machine = Machine(agenda)
    machine.run(job(ended, agenda, "a", VISION, 1.0))
    machine.run(job(ended, agenda, "a", LANGUAGE, 1.0))
    play(agenda)
    # Language takes twice as long beside vision; vision has done 2/3 by then and the rest alone.
    assert ended == {LANGUAGE: pytest.approx(2.0), VISION: pytest.approx(2.0 + 1 / 3)}
    assert machine.busy_s == {("a", VISION): pytest.approx(2 + 1 / 3), ("a", LANGUAGE): pytest.approx(2.0)}


@pytest.mark.parametrize(("cores", "threads", "expected_s"), [(2, 2, 4.0), (8, 2, 1.0), (4, 2, 2.0), (0, 2, 1.0)])
def test_cores_are_never_shared_out_twice(cores: int, threads: int, expected_s: float) -> None:
    agenda, ended = Agenda(), {}
    machine = Machine(agenda, cores)
    for number in range(4):
        done: Callable[[Job], None] = lambda j: ended.update({j.instance: agenda.now()})  # noqa: E731
        machine.run(Job(f"i{number}", LANGUAGE, 1.0, done, threads=threads))
    play(agenda)
    assert list(ended.values()) == [pytest.approx(expected_s)] * 4


def test_processes_on_a_gpu_take_turns_and_lanes_of_one_do_not() -> None:
    agenda, ended = Agenda(), {}
    machine = Machine(agenda, time_sliced=True)
    for name, seconds in (("a", 1.0), ("b", 2.0)):
        done: Callable[[Job], None] = lambda j: ended.update({j.instance: agenda.now()})  # noqa: E731
        machine.run(Job(name, LANGUAGE, seconds, done, factor))
    play(agenda)
    assert ended == {"a": pytest.approx(2.0), "b": pytest.approx(3.0)}, "as long as one after the other"
    machine.run(job(ended, agenda, "a", VISION, 1.0))
    machine.run(job(ended, agenda, "a", LANGUAGE, 1.0))
    machine.run(Job("b", VISION, 1.0, lambda _: None, factor))
    machine._settle()
    assert [factor for _, factor, _ in machine._running] == [6.0, 4.0, 2.0]


def test_vision_waits_at_the_gate_when_its_seconds_are_used_up() -> None:
    agenda, ended = Agenda(), {}
    machine = Machine(agenda)
    step = job(ended, agenda, "a", LANGUAGE, 1.0, allowance_s=0.5)
    machine.run(job(ended, agenda, "a", VISION, 1.0))
    machine.run(step)
    play(agenda)
    # Half a second side by side does a quarter of the step and a sixth of the encode; then the step runs alone.
    assert step.vision_s == 0.5
    assert ended == {LANGUAGE: pytest.approx(0.5 + 0.75), VISION: pytest.approx(1.25 + 5 / 6)}


def test_steps_of_a_dead_instance_are_never_done_and_slow_nobody() -> None:
    agenda, ended = Agenda(), {}
    machine = Machine(agenda)
    machine.run(job(ended, agenda, "a", VISION, 1.0))
    machine.run(job(ended, agenda, "b", LANGUAGE, 1.0))
    agenda.schedule_at(0.5, lambda: machine.drop("a"))
    play(agenda)
    assert ended == {LANGUAGE: pytest.approx(0.5 + 0.75)}


# ---- links


def copied_s(*copies: tuple[int, int, int], fabric: float = 0.0, drop: str = "") -> list[float]:
    """Seconds at which copies that begin together have ended: (source, target, bytes) by devices' numbers. `drop`: the
    instance that loses its copies after half a second; that of copy i is called i."""
    agenda, ended, numbers = Agenda(), {}, count()
    links = Links(agenda, gpus(4, RATES), fabric)
    for (source, target, num_bytes), number in zip(copies, numbers, strict=False):
        done: Callable[[], None] = lambda number=number: ended.update({number: agenda.now()})  # noqa: E731
        links.copy(f"cuda:{source}", f"cuda:{target}", num_bytes, done, str(number))
    if drop:
        agenda.schedule_at(0.5, lambda: links.drop(drop))
    play(agenda)
    return [ended[number] for number in sorted(ended)]


def test_copies_share_the_ways_that_they_have_in_common() -> None:
    assert copied_s((0, 1, 100)) == [pytest.approx(1.0)]
    assert copied_s((0, 1, 100), (2, 3, 100)) == [pytest.approx(1.0)] * 2, "nothing in common"
    assert copied_s((0, 2, 100), (1, 2, 100)) == [pytest.approx(2.0)] * 2, "one way in"
    assert copied_s((0, 1, 100), (0, 2, 100)) == [pytest.approx(2.0)] * 2, "one way out"
    assert copied_s((0, 1, 100), (1, 0, 100)) == [pytest.approx(1.0)] * 2, "each direction for itself"
    # When the short one has ended, at 1 s, the long one has 150 bytes left and the way to itself.
    assert copied_s((0, 2, 50), (1, 2, 200)) == [pytest.approx(1.0), pytest.approx(2.5)]


def test_a_fabric_that_all_links_go_through_is_shared_by_all() -> None:
    assert copied_s((0, 1, 100), fabric=150.0) == [pytest.approx(1.0)]
    assert copied_s((0, 1, 100), (2, 3, 100), fabric=150.0) == [pytest.approx(4 / 3)] * 2


def test_copies_within_a_device_use_no_link() -> None:
    assert copied_s((0, 0, 100), (0, 1, 100), fabric=100.0) == [pytest.approx(0.25), pytest.approx(1.0)]
    assert copied_s((0, 0, 100), (0, 0, 100), (1, 1, 100)) == [pytest.approx(t) for t in (0.5, 0.5, 0.25)]


def test_a_copy_of_nothing_ends_at_once() -> None:
    assert copied_s((0, 1, 0)) == [0.0]


@pytest.mark.parametrize("late_s", [10.0, 75.9, 1000.0, 30000.0])
def test_what_rounding_leaves_late_in_a_run_ends_too(late_s: float) -> None:
    """A copy's last thousandth of a byte takes less time than a clock that is far on can tell."""
    agenda, ended = Agenda(), list[float]()
    links = Links(agenda, gpus(4, replace(RATES, link_bytes_per_s=2.4e11)))

    def start(target: str) -> None:
        links.copy("cuda:0", target, 10**6 + 7, lambda: ended.append(agenda.now()))

    for number in range(8):
        agenda.schedule_at(late_s + 1.3e-6 * number, partial(start, f"cuda:{number % 3 + 1}"))
    for _ in range(1000):
        agenda.step()
    assert len(ended) == 8


def test_copies_of_a_dead_instance_leave_the_way_to_the_others() -> None:
    # 25 bytes each in the first half second, then 75 at the full rate.
    assert copied_s((0, 2, 100), (1, 2, 100), drop="0") == [pytest.approx(0.5 + 0.75)]


def test_more_copies_at_once_never_end_sooner() -> None:
    ends = [max(copied_s(*[(source, 3, 60) for source in range(number)])) for number in (1, 2, 3)]
    assert all(one < other for one, other in pairwise(ends))


@pytest.mark.parametrize(
    ("threads", "niceness", "cores", "expected"),
    [
        ((1, 1), (0, 0), 2, (1.0, 1.0)),
        ((1, 1, 1), (0, 0, 0), 2, (2 / 3, 2 / 3, 2 / 3)),
        ((2, 2), (0, 0), 2, (0.5, 0.5)),
        # Weights 1, 0.33 and 0.33: the first one has a core of its own, the others share the second.
        ((1, 1, 1), (0, 5, 5), 2, (1.0, 0.5, 0.5)),
        ((1, 1), (0, 5), 1, (1.25**5 / (1 + 1.25**5), 1 / (1 + 1.25**5))),
    ],
)
def test_cores_are_shared_by_threads_and_niceness(
    threads: tuple[int, ...], niceness: tuple[int, ...], cores: int, expected: tuple[float, ...]
) -> None:
    jobs = [
        Job(f"i{place}", LANGUAGE, 1.0, lambda _: None, threads=count, niceness=nice)
        for place, (count, nice) in enumerate(zip(threads, niceness, strict=True))
    ]
    assert shares(jobs, cores) == pytest.approx(expected)
