"""Limits, who met them, and goodput: HydraInfer's measures (sections 2.3 and 5.1). Does not know servers.

A request meets its limits if its first token comes within the TTFT limit and 90 % of the gaps between its tokens are
within the TPOT limit. Attainment is the share of requests that do; goodput the highest rate with an attainment of at
least 90 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra_planner.records import Record

SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. `source` says where they come from: given, table 3, or measured on the idle server."""

    ttft_s: float
    tpot_limit_s: float
    source: str = "given"

    def ttft_met(self, record: Record) -> bool:
        return record.ttft_s is not None and record.ttft_s <= self.ttft_s

    def tpot_met(self, record: Record) -> bool:
        """True if 90 % of the gaps are within the limit, or there are none. A request that still runs is judged by its
        gaps so far, and by its wait for the next token once that is late."""
        gaps = record.gaps()
        if record.stamps and record.num_tokens < record.wanted_tokens:
            waits_s = record.end_s - record.stamps[-1]
            gaps += [waits_s] if waits_s > self.tpot_limit_s else []
        return sum(gap <= self.tpot_limit_s for gap in gaps) >= SHARE * len(gaps)

    def met(self, record: Record) -> bool:
        return record.ok and self.ttft_met(record) and self.tpot_met(record)

    def attainment(self, records: Sequence[Record]) -> float:
        return sum(map(self.met, records)) / len(records)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests per second. `bound`: exact (crossed between two measured rates), at_least (every measured rate was
    good) or at_most (not even the lowest was)."""

    rate: float
    bound: str

    def __str__(self) -> str:
        sign = {"exact": "", "at_least": ">= ", "at_most": "< "}[self.bound]
        return f"{sign}{self.rate:.3g}"


def goodput(points: Sequence[tuple[float, float]], share: float = SHARE) -> Goodput:
    """Rate where the curve of (rate, attainment) points first falls below `share`, interpolated between two points.

    The first crossing counts, so that a lucky point at a high rate does not.
    """
    ordered = sorted(points)
    before: tuple[float, float] | None = None
    for rate, attained in ordered:
        if attained < share:
            if before is None:
                return Goodput(rate, "at_most")
            low_rate, low = before
            return Goodput(low_rate + (rate - low_rate) * (low - share) / (low - attained), "exact")
        before = (rate, attained)
    return Goodput(ordered[-1][0], "at_least")


def search(
    measure: Callable[[float], float],
    start: float,
    steps: int,
    doublings: int = 8,
    share: float = SHARE,
) -> list[tuple[float, float]]:
    """(rate, attainment) points around goodput: doubles or halves `start` until it is between two rates, then halves
    that interval `steps` times, in the logarithm of the rate. `measure` runs a load and gives its attainment."""
    points = [(start, measure(start))]
    factor = 2.0 if points[0][1] >= share else 0.5
    while (points[-1][1] >= share) == (factor > 1) and len(points) <= doublings:
        rate = points[-1][0] * factor
        points.append((rate, measure(rate)))
    if (points[-1][1] >= share) == (factor > 1):
        return points  # never crossed: goodput() says which bound that is
    low, high = sorted(rate for rate, _ in points[-2:])
    for _ in range(steps):
        rate = (low * high) ** 0.5
        attained = measure(rate)
        points.append((rate, attained))
        low, high = (rate, high) if attained >= share else (low, rate)
    return points
