"""Successive halving: many candidates on short loads, the better ones of them on longer loads at a rate nearer to what
the best can keep, until few are left; of those the goodput is measured with every seed.

Jamieson and Talwalkar's scheme (2016) over loads instead of training epochs, with a third instead of a half kept. Who
loses a round keeps the point that it lost by, so that a plan can say why.

Simulations of one call of `Measure` run side by side, so the time of a plan on many cores is that of its longest chain
of calls: few pilots, two or three rounds, and the bisection, in which all finalists and seeds go together. Where there
are more cores than that, each one tries several rates at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from hydra_planner.search.candidates import Candidate
from hydra_planner.search.estimate import Bound
from hydra_planner.search.measure import SHARE, Point
from hydra_planner.slo import Goodput, goodput

_FIRST_SHARE = 0.8  # of the best bound: the rate of the first pilot
_PILOTS = 2  # candidates, those with the highest bounds, that look for the rate of the first round
_FASTER, _SLOWER = 1.3, 0.75  # from one load of pilots to the next, by whether the best one kept the limits
_NEAR = 1.15  # behind them: from round to round
_NEARER = 1.07  # the first step of a finalist's search from load to load; the second one is twice as large, and so on
_KEPT = 1 / 3  # of the candidates of a round
_NARROW = 1.075  # ends a bisection: the lowest rate that was not kept over the highest one that was
_WIDEST = 3  # rates at once
_LOADS = 3  # of one search, about
_BEYOND = 1.5  # times the bound: a load that is kept there is too short to tell
_STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # 97.5 % of t, by number of seeds


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """Amount of simulation. `seconds`: duration of the longest loads; None: the duration of a request at its limits
    (`plan.lasting`). `requests`: fewest and most of a load; `offline`: requests of a load that comes at once."""

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
    """Number of requests that last for a share of the longest load's seconds, within bounds."""
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
        good = running[0].points[-1].keeps_limits
        running = running[: max(finalists, math.ceil(_KEPT * len(running)))]
        rate *= _NEAR if good else 1 / _NEAR
    return running[:finalists]


def _pilot(pilots: Sequence[Entry], measure: Measure, effort: Effort, progress: Progress, share: float) -> float:
    """A rate that the best of few can just not keep, so that a round at it tells the good from the bad."""
    best, width = pilots[0].bound.rate, _width(effort, len(pilots))
    bracket = _Bracket(_FIRST_SHARE * best, _BEYOND * best, _FASTER, _SLOWER)
    while not bracket.closed:
        rates = bracket.rates(width)
        progress(f"{len(pilots)} topologies at {rates[0]:.3g} requests/s, for a start", len(pilots) * len(rates))
        jobs = [(one.candidate, rate, requests_at(rate, effort, share), 0) for rate in rates for one in pilots]
        points = measure(jobs)
        for place, rate in enumerate(rates):
            bracket.take(
                rate, any(point.keeps_limits for point in points[place * len(pilots) : (place + 1) * len(pilots)])
            )
    return bracket.high or bracket.rates(1)[0]


def _width(effort: Effort, num_searches: int) -> int:
    """Rates that each of so many searches tries at once, so that no worker waits."""
    return max(min(effort.workers // num_searches, _WIDEST), 1)


def _merit(entry: Entry) -> tuple[float, float, float]:
    point = entry.points[-1]
    return round(min(judged(point), SHARE), 2), point.slack, entry.bound.rate


def judged(point: Point) -> float:
    """Attainment; of one that falls behind less than is needed, by how fast it does."""
    return min(point.attainment, SHARE / (1 + point.growth)) if point.falls_behind else point.attainment


def measure_goodputs(
    entries: Sequence[Entry], measure: Measure, effort: Effort, progress: Progress, seeds: Sequence[int] | None = None
) -> None:
    """Measures the goodput of every entry for each seed (default: all): brackets it from the rate of its latest point,
    then bisects."""
    seeds = range(effort.seeds) if seeds is None else seeds
    if not seeds:
        return
    progress(f"goodput of {len(entries)} topologies", len(entries) * len(seeds) * _LOADS)
    searches = [_Search(entry, seed) for entry in entries for seed in seeds]
    while open_ones := [search for search in searches if not search.done]:
        jobs = [search.jobs(effort, _width(effort, len(open_ones))) for search in open_ones]
        points = iter(measure([job for some in jobs for job in some]))
        for search, some in zip(open_ones, jobs, strict=True):
            for _ in some:
                search.take(next(points))
    for search in searches:
        search.entry.goodputs.append(goodput([(p.rate or 0.0, judged(p)) for p in search.points], SHARE))


class _Bracket:
    """Two rates, of which the lower one is kept and the higher one is not: looked for upwards or downwards from the
    first, between a 64th of it and `most`, then narrowed in the logarithm. `quickens`: with larger and larger steps."""

    def __init__(self, first: float, most: float, faster: float, slower: float, *, quickens: bool = False) -> None:
        self._first, self._least, self._most = first, first / 64, most
        self._faster, self._slower = faster, slower
        self._quickens = quickens
        self._tried: dict[float, bool] = {}

    def take(self, rate: float, kept: bool) -> None:
        self._tried[rate] = kept

    @property
    def high(self) -> float | None:
        """The lowest rate that was not kept."""
        return min((rate for rate, kept in self._tried.items() if not kept), default=None)

    @property
    def low(self) -> float | None:
        """The highest rate below it that was: what is kept beyond one that was not is luck."""
        high = self.high or math.inf
        return max((rate for rate, kept in self._tried.items() if kept and rate < high), default=None)

    @property
    def closed(self) -> bool:
        """True if both bounds are found, or the missing one lies outside of the rates that may be tried."""
        low, high = self.low, self.high
        if low is None and high is None:
            return False
        return (low is not None or (high or 0.0) <= self._least) and (high is not None or (low or 0.0) > self._most)

    @property
    def narrow(self) -> bool:
        low, high = self.low, self.high
        return self.closed and (low is None or high is None or high <= _NARROW * low)

    def rates(self, count: int) -> list[float]:
        """The next rates to try."""
        low, high = self.low, self.high
        if low is not None and high is not None:
            return [low * (high / low) ** ((place + 1) / (count + 1)) for place in range(count)]
        step = len(self._tried) if self._quickens else 1
        if low is not None:
            return [low * self._faster ** (step * (place + 1)) for place in range(count)]
        if high is not None:
            return [high * self._slower ** (step * (place + 1)) for place in range(count)]
        return [self._first, self._first * self._faster, self._first * self._slower][:count]


def _start(entry: Entry) -> float:
    """Near what the last round says; longer loads keep less than its."""
    if not entry.points:
        return entry.bound.rate / 2
    point = entry.points[-1]
    assert point.rate is not None
    return point.rate if point.keeps_limits else point.rate / _NEARER


class _Search:
    """The search for the goodput of a finalist under one seed."""

    def __init__(self, entry: Entry, seed: int) -> None:
        self.entry = entry
        self.points: list[Point] = []
        self._seed = seed
        first, most = entry.goodput or _start(entry), _BEYOND * entry.bound.rate
        self._bracket = _Bracket(first, most, _NEARER, 1 / _NEARER, quickens=True)

    @property
    def done(self) -> bool:
        return self._bracket.narrow

    def jobs(self, effort: Effort, count: int) -> list[tuple[Candidate, float | None, int, int]]:
        """Loads at so many rates."""
        rates = self._bracket.rates(count)
        return [(self.entry.candidate, rate, requests_at(rate, effort), self._seed) for rate in rates]

    def take(self, point: Point) -> None:
        assert point.rate is not None
        self.points.append(point)
        self.entry.points.append(point)
        self._bracket.take(point.rate, point.keeps_limits)
