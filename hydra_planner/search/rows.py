"""A candidate in the table of a plan: what was measured of it, and why it was not chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from hydra_planner.search.candidates import Candidate
from hydra_planner.search.halving import Entry, judged
from hydra_planner.search.measure import SHARE, Point, Question
from hydra_planner.search.settings import Setting


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate in the plan's table. Rates in requests per second; `goodput` None: it did not come so far, and
    `reason` says why. `point`: the last one below or at its goodput, else the last one."""

    name: str
    topology: str
    family: str
    bound: float
    binds: str
    goodput: float | None
    uncertainty: float | None
    point: Point | None
    reason: str
    hour_price: float | None
    price: float | None
    settings: tuple[Setting, ...] = ()
    curve: list[tuple[float, float]] = []  # (rate, attainment) of every load that was simulated


def row_of(question: Question, entry: Entry, best: Entry) -> Row:
    candidate = entry.candidate
    measured = bool(entry.goodputs)
    uncertainty = entry.uncertainty if measured and math.isfinite(entry.uncertainty) else None
    return Row(
        name=question.name_of(candidate),
        topology=str(candidate.topology),
        family=candidate.family,
        bound=entry.bound.rate,
        binds=entry.bound.stage,
        goodput=entry.goodput if measured else None,
        uncertainty=uncertainty,
        point=shown_point(entry),
        reason="" if entry is best else reason(entry, best),
        hour_price=hour_price(question, candidate.devices),
        price=buying_price(question, candidate.devices),
        settings=candidate.settings,
        curve=[(point.rate, judged(point)) for point in entry.points if point.rate is not None],
    )


def shown_point(entry: Entry) -> Point | None:
    kept = [point for point in entry.points if point.keeps_limits and point.rate is not None]
    if kept:
        return max(kept, key=lambda point: point.rate or 0.0)
    return entry.points[-1] if entry.points else None


def reason(entry: Entry, best: Entry) -> str:
    """The reason why `entry` was not chosen, as a sentence without a capital."""
    bound = entry.bound
    if not entry.points:
        return f"not simulated: its estimate is {bound.rate:.3g} requests/s, where {bound.stage} has no time left"
    if entry.points[-1].rate is None:
        return _later(entry, best)
    failed = [point for point in entry.points if not point.keeps_limits]
    point = failed[0] if failed else entry.points[-1]
    if entry.goodputs:
        less = 1 - entry.goodput / best.goodput if best.goodput else 0.0
        if less <= 0 and best.goodput:
            return f"{-less:.0%} more goodput, which may be chance, with more kinds of instances or more instances"
        return f"{less:.0%} less goodput; above it {misses(point)}" if failed else f"{less:.0%} less goodput"
    if failed:
        return f"out in round {entry.rounds}: at {point.rate:.3g} requests/s {misses(point)}"
    return f"out in round {entry.rounds}: kept the limits with less to spare than others"


def _later(entry: Entry, best: Entry) -> str:
    """Returns the reason in a plan for requests that are there at once: by how much the last answer is later."""
    point = entry.points[-1]
    rivals = [one for one in best.points if one.requests == point.requests]
    role = max(point.busy, key=lambda role: max(point.busy[role]))
    later = max(point.span_s / rivals[0].span_s - 1, 0.0)
    return f"the last of {point.requests} answers {later:.0%} later; {role} busy {max(point.busy[role]):.0%}"


def misses(point: Point) -> str:
    stage, role, share = binding(point)
    if point.falls_behind and point.attainment >= SHARE:
        late = f"first tokens come {point.growth:.2g} s later with every second"
        return f"it falls behind: {late}; {stage} binds ({role} busy {share:.0%})"
    return (
        f"{point.ttft_met:.0%} of the requests keep the TTFT limit and {point.tpot_met:.0%} the TPOT limit; "
        f"{stage} binds ({role} busy {share:.0%})"
    )


def binding(point: Point) -> tuple[str, str, float]:
    """(stage, role, busy share): what most probably misses the limit that is missed more. A late first token is for
    want of decoded pictures, encodes or prefills, a late next one for want of time beside decodes."""
    if point.tpot_met < point.ttft_met:
        role, share = _busiest(point, "D", 1)
        return "decode", role, share
    encoders, prefillers = _busiest(point, "E", 0), _busiest(point, "P", 1)
    if point.preprocessing > max(encoders[1], prefillers[1]):
        return "preprocessing", "decode workers", point.preprocessing
    if encoders[1] > prefillers[1]:
        return "encode", *encoders
    return "prefill", *prefillers


def _busiest(point: Point, stage: str, lane: int) -> tuple[str, float]:
    shares = {role: busy[lane] for role, busy in point.busy.items() if stage in role}
    if not shares:
        return stage, 0.0
    role = max(shares, key=lambda role: shares[role])
    return role, shares[role]


def hour_price(question: Question, devices: Sequence[str]) -> float | None:
    """Dollars for an hour of all of them; None where one has no price."""
    prices = [question.kinds[name].hour_price for name in devices]
    return None if any(price is None for price in prices) else sum(price or 0.0 for price in prices)


def buying_price(question: Question, devices: Sequence[str]) -> float | None:
    prices = [question.kinds[name].price for name in devices]
    return None if any(price is None for price in prices) else sum(price or 0.0 for price in prices)


def device_price(question: Question, devices: Sequence[str]) -> tuple[float, int]:
    """Sort key of a set of devices: price by the hour if every kind has one, else price to buy, else their number."""
    every = list(question.kinds)
    for price in (hour_price, buying_price):
        if price(question, every) is not None:
            return price(question, devices) or 0.0, len(devices)
    return float(len(devices)), len(devices)


def refused_row(question: Question, candidate: Candidate, reason: str) -> Row:
    return Row(
        name=question.name_of(candidate),
        topology=str(candidate.topology),
        family=candidate.family,
        bound=0.0,
        binds="memory",
        goodput=None,
        uncertainty=None,
        point=None,
        reason=reason,
        hour_price=hour_price(question, candidate.devices),
        price=buying_price(question, candidate.devices),
    )
