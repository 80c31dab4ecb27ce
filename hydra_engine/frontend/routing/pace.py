"""The durations of steps on unlike instances, as lines over their sizes, from the step times that instances report.

Pure numbers: does not know instances or requests. Reads no clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from hydra_engine.core.reports import BudgetReport, Status

# Equal devices differ by less than this from one moment to the next.
ALIKE = 1.25
_ROUNDS = 10  # of the fit of factors; the rest is smaller than the variation of steps


class Line(NamedTuple):
    """Seconds of a step: `base_s`, whatever its size, and `each_s` per row or patch."""

    base_s: float
    each_s: float

    def seconds(self, amount: float) -> float:
        return self.base_s + self.each_s * amount

    def times(self, factor: float) -> Line:
        return Line(factor * self.base_s, factor * self.each_s)


# Before anything is measured only ratios matter: a step reads the weights, which takes as long as computing some
# hundred rows, and a patch passes through a tower of a tenth of the decoder's size.
_ROW_S = 1e-4
_LANGUAGE = Line(256 * _ROW_S, _ROW_S)
_VISION = Line(64 * _ROW_S, 0.1 * _ROW_S)
_CHUNK_TOKENS = 2048  # of a step, until an instance has reported its own
_PRIOR_WEIGHT = 0.02  # of each prior point, where a measured size counts 1
_PRIOR_SIZES = (1, 6, 11)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of an instance's steps and copies. `is_measured`: False before the first reported step of any."""

    prefill: Line = _LANGUAGE
    decode: Line = _LANGUAGE
    vision: Line = _VISION
    kv_token_s: float = 0.0  # to copy a token's KV
    feature_s: float = 0.0  # to copy an image token's features
    context: float = 512.0  # tokens of a decode, on the mean
    limit_s: float = math.inf  # TPOT limit
    chunk_s: float = _CHUNK_TOKENS * _ROW_S  # of the most prompt tokens that a step computes
    is_measured: bool = False


def paces(statuses: Mapping[str, Status], context: float) -> dict[str, Pace]:
    """Returns the pace of each instance, from the latest reports of all."""
    speeds = {name: status.speeds for name, status in statuses.items()}
    prefill, prefill_s = slowness({name: one.prefill for name, one in speeds.items()})
    decode, decode_s = slowness({name: one.decode for name, one in speeds.items()})
    vision, vision_s = slowness({name: one.vision for name, one in speeds.items()})
    prefill_scale, decode_scale = _scale(prefill_s, _LANGUAGE), _scale(decode_s, _LANGUAGE)
    language = prefill_scale or decode_scale or 1.0
    prefill_line = _fit(prefill_s, _LANGUAGE, prefill_scale or language)
    decode_line = _fit(decode_s, _LANGUAGE, decode_scale or language)
    vision_line = _fit(vision_s, _VISION, _scale(vision_s, _VISION) or language)
    copies, is_measured = _copies(statuses), bool(prefill_s or decode_s)

    def pace(name: str, budget: BudgetReport) -> Pace:
        one = speeds[name]  # of two kinds of language steps, one stands for the other that has not been seen here
        own = prefill_line.times((prefill if one.prefill else decode)[name])
        has_limit = is_measured and budget.tpot_limit_s > 0  # seconds without a scale keep no limit
        tokens = _CHUNK_TOKENS if has_limit else budget.token_budget or _CHUNK_TOKENS
        return Pace(
            own,
            decode_line.times((decode if one.decode else prefill)[name]),
            vision_line.times(vision[name]),
            *copies[name],
            context,
            budget.tpot_limit_s if has_limit else math.inf,
            tokens * own.each_s,
            is_measured,
        )

    return {name: pace(name, status.budget) for name, status in statuses.items()}


def slowness(seconds: Mapping[str, Mapping[int, float]]) -> tuple[dict[str, float], dict[int, float]]:
    """Returns per instance how many times as long its steps take as the fastest one's, from its step durations [s] by
    size; 1.0 below `ALIKE` and where nothing can be compared. Then the durations by size on the fastest. Fits duration
    = factor(instance) * factor(size), so instances without a common size are comparable through a third; one that has
    no size in common with any counts as slow only as far as no equal one could be."""
    logs = {
        name: {size: math.log(taken_s) for size, taken_s in own.items() if taken_s > 0} for name, own in seconds.items()
    }
    sizes = Counter(size for own in logs.values() for size in own)
    shared = {name: {size: taken for size, taken in own.items() if sizes[size] > 1} for name, own in logs.items()}
    known = {name: own for name, own in shared.items() if own}
    factors = dict.fromkeys(known, 0.0)
    for _ in range(_ROUNDS):
        typical = _typical(known, factors)
        factors = {name: fmean(taken - typical[size] for size, taken in own.items()) for name, own in known.items()}
    least = min(factors.values(), default=0.0)
    factors = {name: factors.get(name, least) - least for name in seconds}
    ceilings = _ceilings(logs, factors)
    for name in logs.keys() - known.keys():
        factors[name] = _min_factor(logs[name], ceilings)
    found = {name: math.exp(factor) for name, factor in factors.items()}
    slow = {name: ratio if ratio >= ALIKE else 1.0 for name, ratio in found.items()}
    by_size = _typical(logs, {name: math.log(ratio) for name, ratio in slow.items()})
    return slow, {size: math.exp(taken) for size, taken in by_size.items()}


def _ceilings(logs: Mapping[str, Mapping[int, float]], factors: Mapping[str, float]) -> dict[int, float]:
    """Logarithm of the least duration of each size, without the factors of the instances."""
    found: dict[int, float] = {}
    for name, own in logs.items():
        for size, taken in own.items():
            found[size] = min(taken - factors[name], found.get(size, math.inf))
    return found


def _min_factor(own: Mapping[int, float], ceilings: Mapping[int, float]) -> float:
    """Logarithm of how many times as long an instance takes at least that has no size in common with others: a step of
    twice the rows takes as long at least, and twice as long at most."""
    others = [(size, ceiling) for size, ceiling in ceilings.items() if size not in own]
    if not others:
        return 0.0
    bounds = (
        taken - min(ceiling + max(0, size - other) * math.log(2) for other, ceiling in others)
        for size, taken in own.items()
    )
    return max(0.0, *bounds) if own else 0.0


def _typical(logs: Mapping[str, Mapping[int, float]], factors: Mapping[str, float]) -> dict[int, float]:
    """Mean logarithm of the duration of each size, without the factors of the instances."""
    by_size: dict[int, list[float]] = {}
    for name, own in logs.items():
        for size, taken in own.items():
            by_size.setdefault(size, []).append(taken - factors[name])
    return {size: fmean(rests) for size, rests in by_size.items()}


def _amount(size: int) -> float:
    """The middle of the amounts with this bit length."""
    return 0.75 * (1 << size)


def _scale(seconds: Mapping[int, float], prior: Line) -> float | None:
    """Mean ratio of measured durations to those of `prior`; None if there are none."""
    ratios = [math.log(taken_s / prior.seconds(_amount(size))) for size, taken_s in seconds.items()]
    return math.exp(fmean(ratios)) if ratios else None


def _fit(seconds: Mapping[int, float], prior: Line, scale: float) -> Line:
    """Returns the line with the least squares of relative errors, neither part of it negative. `prior`, times `scale`,
    stands in where too few sizes are measured."""
    points = [(_amount(size), taken_s, 1.0) for size, taken_s in seconds.items()]
    points += [(_amount(size), scale * prior.seconds(_amount(size)), _PRIOR_WEIGHT) for size in _PRIOR_SIZES]
    ones = sum(weight / taken_s**2 for _, taken_s, weight in points)
    firsts = sum(weight * amount / taken_s**2 for amount, taken_s, weight in points)
    squares = sum(weight * (amount / taken_s) ** 2 for amount, taken_s, weight in points)
    right, right_first = (
        sum(weight / taken_s for _, taken_s, weight in points),
        sum(weight * amount / taken_s for amount, taken_s, weight in points),
    )
    determinant = ones * squares - firsts**2
    base_s = (right * squares - right_first * firsts) / determinant
    each_s = (right_first * ones - right * firsts) / determinant
    if base_s < 0:
        return Line(0.0, right_first / squares)
    if each_s < 0:
        return Line(right / ones, 0.0)
    return Line(base_s, each_s)


def _copies(statuses: Mapping[str, Status]) -> dict[str, tuple[float, float]]:
    """Mean seconds to copy the KV of a token and the features of an image token, by the instance that reads them; of
    all where it has read none, 0.0 before the first copy."""
    moved = {name: status.transfer for name, status in statuses.items()}
    kv_s = sum(one.kv_s for one in moved.values()) / max(sum(one.kv_tokens for one in moved.values()), 1)
    feature_s = sum(one.pull_s - one.kv_s for one in moved.values())
    feature_s /= max(sum(one.feature_tokens for one in moved.values()), 1)
    return {
        name: (
            one.kv_s / one.kv_tokens if one.kv_tokens else kv_s,
            (one.pull_s - one.kv_s) / one.feature_tokens if one.feature_tokens else feature_s,
        )
        for name, one in moved.items()
    }
