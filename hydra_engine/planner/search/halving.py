"""Successive halving: many candidates on short loads, the better ones of them on longer loads at a rate nearer to what
the best can keep, until few are left; of those the goodput is measured with every seed.

Jamieson and Talwalkar's scheme (2016) over loads instead of training epochs, with a third instead of a half kept. Who
loses a round keeps the point that it lost by, so that a plan can say why.

Simulations of one call of `Measure` run side by side, so the time of a plan on many cores is that of its longest chain
of calls: few pilots, two or three rounds, and the bisection, in which all finalists and seeds go together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from hydra_engine.planner.search.candidates import Candidate
from hydra_engine.planner.search.estimate import Bound
from hydra_engine.planner.search.measure import SHARE, Point
from hydra_engine.planner.slo import Goodput, goodput

_FIRST_SHARE = 0.8  # of the best bound: the rate of the first pilot
_PILOTS = 2  # candidates, those with the highest bounds, that look for the rate of the first round
_FASTER, _SLOWER = 1.3, 0.75  # from one load to the next, by whether the best one kept the limits
_KEPT = 1 / 3  # of the candidates of a round
_STEPS = 2  # of a bisection
_NEAR = 1.15  # instead of _FASTER where another seed has found the goodput; one step is enough then
_BEYOND = 1.5  # times the bound: a load that is kept there is too short to tell
_STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # 97.5 % of t, by number of seeds


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much is simulated. `seconds`: how long the longest loads last; None: by how long a request takes at its
    limits (`plan.lasting`). `requests`: fewest and most of a load; `offline`: of one that comes at once."""

    seconds: float | None = None
    requests: tuple[int, int] = (60, 3000)
    offline: int = 300
    finalists: int = 3
    seeds: int = 3
    workers: int = 1


Progress = Callable[[str, int], None]  # what is done now, and how many simulations it has at most


class Measure(Protocol):
    """Points of several (candidate, rate, number of requests, seed), in their order."""

    def __call__(self, jobs: Sequence[tuple[Candidate, float | None, int, int]]) -> list[Point]: ...


@dataclass(slots=True)
class Entry:
    """A candidate on its way. `points`: in the order of measuring; `goodputs`: of finalists, one for each seed."""

    candidate: Candidate
    bound: Bound
    points: list[Point] = field(default_factory=list)
    goodputs: list[Goodput] = field(default_factory=list)
    rounds: int = 0  # that it was in

    @property
    def goodput(self) -> float:
        """Requests per second, the mean over seeds; 0 for one that was not measured or kept no rate."""
        rates = [0.0 if one.bound == "at_most" else one.rate for one in self.goodputs]
        return sum(rates) / len(rates) if rates else 0.0

    @property
    def uncertainty(self) -> float:
        """Half of the 95 % confidence interval of `goodput`, over seeds; infinite from one seed."""
        rates = [0.0 if one.bound == "at_most" else one.rate for one in self.goodputs]
        if len(rates) < 2:
            return math.inf
        mean = sum(rates) / len(rates)
        variance = sum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1)
        return _STUDENT.get(len(rates), 2.0) * math.sqrt(variance / len(rates))


def requests_at(rate: float, effort: Effort, share: float = 1.0) -> int:
    """So many that the load lasts for a share of the longest one's seconds, within bounds."""
    assert effort.seconds is not None
    least, most = effort.requests
    return max(int(min(rate * effort.seconds, most) * share), least)


def race(
    entries: Sequence[Entry], measure: Measure, effort: Effort, progress: Progress, rate: float | None = None
) -> list[Entry]:
    """The finalists, the best first. `rate`: of the first round; None: pilots look for it."""
    running = sorted(entries, key=lambda entry: -entry.bound.rate)
    finalists = effort.finalists
    num_rounds = max(math.ceil(math.log(max(len(running) / finalists, 1), 1 / _KEPT)), 1)
    shares = [(number + 1) / (num_rounds + 1) for number in range(num_rounds)]
    rate = rate or _pilot(running[:_PILOTS], measure, effort, progress, shares[0])
    for number, share in enumerate(shares):
        count = requests_at(rate, effort, share)
        progress(f"round {number + 1}: {len(running)} topologies at {rate:.3g} requests/s", len(running))
        points = measure([(entry.candidate, rate, count, number) for entry in running])
        for entry, point in zip(running, points, strict=True):
            entry.points.append(point)
            entry.rounds = number + 1
        running.sort(key=_merit, reverse=True)
        good = running[0].points[-1].kept
        running = running[: max(finalists, math.ceil(_KEPT * len(running)))]
        rate *= _FASTER if good else _SLOWER
    return running[:finalists]


def _pilot(pilots: Sequence[Entry], measure: Measure, effort: Effort, progress: Progress, share: float) -> float:
    """A rate that the best of few can just not keep, so that a round at it tells the good from the bad."""
    rate, floor = _FIRST_SHARE * pilots[0].bound.rate, pilots[0].bound.rate / 64
    before: bool | None = None
    while floor <= rate <= _BEYOND * pilots[0].bound.rate:
        progress(f"{len(pilots)} topologies at {rate:.3g} requests/s, for a start", len(pilots))
        count = requests_at(rate, effort, share)
        kept = any(point.kept for point in measure([(entry.candidate, rate, count, 0) for entry in pilots]))
        if before is not None and kept != before:
            return rate if not kept else rate * _FASTER
        before, rate = kept, rate * (_FASTER if kept else _SLOWER)
    return rate


def _merit(entry: Entry) -> tuple[float, float, float]:
    point = entry.points[-1]
    return round(min(judged(point), SHARE), 2), point.slack, entry.bound.rate


def judged(point: Point) -> float:
    """Attainment; of one that falls behind less than is needed, by how fast it does."""
    return min(point.attainment, SHARE / (1 + point.growth)) if point.falls_behind else point.attainment


def measure_goodputs(
    entries: Sequence[Entry], measure: Measure, effort: Effort, progress: Progress, seeds: Sequence[int] | None = None
) -> None:
    """Of every entry, for each of these seeds, all by default: bracketed from the rate of its latest point, then
    bisected."""
    seeds = range(effort.seeds) if seeds is None else seeds
    if not seeds:
        return
    progress(f"goodput of {len(entries)} topologies", len(entries) * len(seeds) * (_STEPS + 2))
    searches = [_Search(entry, seed) for entry in entries for seed in seeds]
    while open_ones := [search for search in searches if not search.done]:
        for search, point in zip(open_ones, measure([one.next_job(effort) for one in open_ones]), strict=True):
            search.take(point)
    for search in searches:
        search.entry.goodputs.append(goodput([(p.rate or 0.0, judged(p)) for p in search.points], SHARE))


class _Search:
    """Raises or lowers the rate until the share is crossed, then halves the interval in its logarithm."""

    def __init__(self, entry: Entry, seed: int) -> None:
        self.entry = entry
        self.points: list[Point] = []
        self._seed = seed
        self._rate = min(entry.goodput or entry.points[-1].rate or entry.bound.rate / 2, entry.bound.rate)
        self._low: float | None = None
        self._high: float | None = None
        near = bool(entry.goodputs)
        self._faster, self._slower = (_NEAR, 1 / _NEAR) if near else (_FASTER, _SLOWER)
        self._steps = 1 if near else _STEPS  # that are left
        self._floor = self._rate / 64

    @property
    def done(self) -> bool:
        narrow = self._low is not None and self._high is not None and self._steps < 0
        hopeless = self._low is None and self._high is not None and self._high <= self._floor
        boundless = self._high is None and self._rate > _BEYOND * self.entry.bound.rate
        return narrow or hopeless or boundless

    def next_job(self, effort: Effort) -> tuple[Candidate, float | None, int, int]:
        return self.entry.candidate, self._rate, requests_at(self._rate, effort), self._seed

    def take(self, point: Point) -> None:
        self.points.append(point)
        self.entry.points.append(point)
        if point.kept:
            self._low = self._rate if self._low is None else max(self._low, self._rate)
        else:
            self._high = self._rate if self._high is None else min(self._high, self._rate)
        if self._low is not None and self._high is not None:
            self._steps -= 1
            self._rate = math.sqrt(self._low * self._high)
        else:
            self._rate *= self._faster if self._high is None else self._slower
