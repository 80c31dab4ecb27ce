"""Measured step times (`Samples`), the cost surface fitted to them, and the prefill that it allows within a limit.

The fit is non-negative least squares in relative error over piecewise linear features. A curve is a constant and a sum
of ramps, one per pair of neighbouring knots, each with a slope that is not negative: so it rises everywhere, and what
it predicts between knots and beyond the last one is positive. Noise on a shared machine only ever adds time, mostly in
bursts: repeats count by their lower median, and points that the others contradict by Huber's weights. Pure functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from statistics import median, median_low
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hydra_engine.core.cost import CostSurface, Curve, Slowdowns
from hydra_engine.core.plans import LanguageLoad, VisionLoad

TYPICAL_CONTEXT = 512  # keys of each decode, where a table needs one number
_ERROR_QUANTILE = 0.9
_MIN_SHARE = 0.25  # of the fastest step that was measured: no step costs less
_KNOT_RATIO = 1.25  # between neighbouring knots at least
_HUBER = 1.345  # of a standard deviation: 95 % efficient where noise is normal
_MIN_SPREAD = 0.02  # residuals below it cannot be distinguished from noise
_ROUNDS = 8
_FAR = 10.0  # times too long or too short: no more weight is won or lost beyond
_BURST = 3.0  # times the spread
_RIDGE = 1e-9  # of columns of length 1: makes the minimum unique, so that `nnls` ends
_TOLERANCE = 1e-10

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LanguageTimes:
    """Seconds of language steps of one load that had the machine to themselves."""

    load: LanguageLoad
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class VisionTimes:
    """Seconds of vision steps of one load that had the machine to themselves."""

    load: VisionLoad
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CorunTimes:
    """Seconds of language steps and of vision steps while both lanes were busy, on a partition of the device."""

    language: LanguageLoad
    vision: VisionLoad
    language_s: tuple[float, ...]
    vision_s: tuple[float, ...]
    partition: int = 0


@dataclass(frozen=True, slots=True)
class Samples:
    language: tuple[LanguageTimes, ...] = ()
    vision: tuple[VisionTimes, ...] = ()
    corun: tuple[CorunTimes, ...] = ()


@dataclass(frozen=True, slots=True)
class Allowance:
    """The work that fits into one language step beside its decodes within a limit."""

    step_s: float  # the decodes alone
    tokens_alone: int  # prefill tokens, the vision lane idle
    tokens_beside: int  # prefill tokens, the vision lane busy for the whole step
    vision_s: float  # of the vision lane beside the decodes; infinite: the whole step


def allowance(surface: CostSurface, num_decodes: int, context: int, tpot_limit_s: float, max_tokens: int) -> Allowance:
    """The work that fits beside `num_decodes` decodes of `context` keys each within `tpot_limit_s` seconds. Prompts
    have at most `max_tokens` in one chunk from position 0."""

    def load(tokens: int) -> LanguageLoad:
        pairs = tokens * (tokens + 1) / 2
        return LanguageLoad(num_decodes, num_decodes * context, tokens, pairs, int(tokens > 0))

    def most(vision_s: float) -> int:
        return bisect_right(range(1, max_tokens + 1), tpot_limit_s, key=lambda n: surface.corun_s(load(n), vision_s))

    alone, factor = surface.language_s(load(0)), surface.slowdown(load(0))
    if alone * factor <= tpot_limit_s:
        vision_s = float("inf")
    else:  # the step ends within the limit exactly, see `CostSurface.corun_s`
        vision_s = (tpot_limit_s - alone) / (1 - 1 / factor) if alone < tpot_limit_s else 0.0
    return Allowance(alone, most(0.0), most(float("inf")), vision_s)


class _Fitted(NamedTuple):
    curve: Curve
    prices: tuple[float, ...]


def fit(samples: Samples) -> CostSurface:
    """The surface that predicts `samples` best. Raises ValueError without a language step; without vision steps vision
    costs nothing, without steps of both lanes at once nothing slows down."""
    if not samples.language:
        raise ValueError("no language step was measured")
    rows, (per_decode, per_key, per_pair, per_chunk) = _fit_language(samples.language)
    patches, (per_patch_pair,) = _fit_vision(samples.vision)
    alone = CostSurface(
        rows=rows,
        per_decode_s=per_decode,
        per_key_s=per_key,
        per_pair_s=per_pair,
        per_chunk_s=per_chunk,
        patches=patches,
        per_patch_pair_s=per_patch_pair,
    )
    return _with_slowdowns(alone, samples)


def without_bursts(seconds: Sequence[float]) -> list[float]:
    """Repeats of one step but for those that something else on the machine delayed: farther above the lower median than
    the usual spread, which is taken from the repeats below it."""
    middle = median_low(seconds)
    spread = max(middle - min(seconds), _MIN_SPREAD * middle)
    return [s for s in seconds if s <= middle + _BURST * spread]


def _fit_language(times: Sequence[LanguageTimes]) -> _Fitted:
    loads = [point.load for point in times]
    plain = [load.num_rows for load in loads if not load.num_decodes or not load.prefill_tokens]
    knots = _knots(plain or [load.num_rows for load in loads])
    prices = [[load.num_decodes, load.decode_context, load.prefill_pairs, load.num_chunks] for load in loads]
    return _fit_curve(knots, [load.num_rows for load in loads], prices, [median_low(p.seconds) for p in times])


def _fit_vision(times: Sequence[VisionTimes]) -> _Fitted:
    if not times:
        return _Fitted(Curve((0.0,), (0.0,)), (0.0,))
    amounts = [point.load.num_patches for point in times]
    prices = [[point.load.pairs] for point in times]
    return _fit_curve(_knots(amounts), amounts, prices, [median_low(p.seconds) for p in times])


def _knots(amounts: Iterable[float]) -> list[float]:
    """The measured amounts, ascending, without those less than `_KNOT_RATIO` times the one before; always with the
    last."""
    ordered = sorted({float(amount) for amount in amounts})
    knots = [ordered[0]]
    for amount in ordered[1:]:
        if amount >= _KNOT_RATIO * knots[-1]:
            knots.append(amount)
    if knots[-1] != ordered[-1] and len(knots) > 1:
        knots[-1] = ordered[-1]
    return knots


def _fit_curve(
    knots: Sequence[float], amounts: Sequence[float], prices: Sequence[Sequence[float]], seconds: Sequence[float]
) -> _Fitted:
    """Fits seconds = curve(amount) + prices . weights: the curve and the weights, all >= 0, by relative error."""
    amount = np.asarray(amounts, dtype=np.float64)
    ramps = [np.clip(amount, low, high) - low for low, high in pairwise(knots)]
    if ramps:
        ramps[-1] = np.maximum(amount, knots[-2]) - knots[-2]  # the last slope goes on
    features = np.column_stack([np.ones_like(amount), *ramps, np.asarray(prices, dtype=np.float64)])
    x = _huber(features / np.asarray(seconds, dtype=np.float64)[:, None])
    heights = np.cumsum([x[0], *(x[1 : len(knots)] * np.diff(knots))])
    min_s = _MIN_SHARE * min(seconds)
    curve = Curve(tuple(knots), tuple(max(float(height), min_s) for height in heights))
    return _Fitted(curve, tuple(float(price) for price in x[len(knots) :]))


def _huber(features: Floats) -> Floats:
    """x >= 0 that brings features @ x, predicted over measured, near 1 at every point.

    The error is relative to the geometric mean of the two, so that half and twice as long are as bad as each other;
    errors beyond the usual spread count linearly only.
    """
    weights = np.ones(len(features))
    x = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        roots = np.sqrt(weights)
        x = nnls(features * roots[:, None], roots)
        ratios = np.clip(features @ x, 1 / _FAR, _FAR)
        errors = np.abs(ratios - 1) / np.sqrt(ratios)
        limit = _HUBER * max(1.4826 * float(np.median(errors)), _MIN_SPREAD)
        weights = np.minimum(1.0, limit / np.maximum(errors, 1e-12)) / ratios
    return x


def nnls(matrix: Floats, target: Floats) -> Floats:
    """x >= 0 [n] that minimises |matrix x - target|: matrix [m, n], target [m]. A column of zeros gets 0.

    The active-set method of Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23, on columns of length
    1, so that units do not matter.
    """
    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    scaled = matrix / norms
    gram, moment = scaled.T @ scaled + _RIDGE * np.eye(len(norms)), scaled.T @ target
    x = np.zeros(len(norms))
    tolerance = _TOLERANCE * max(1.0, float(np.abs(moment).max()))
    # Each round lowers the error, so no set of free coefficients comes back; rounding alone can exhaust the rounds.
    for _ in range(10 * len(x) + 10):
        gradient = np.where(x > 0, -np.inf, moment - gram @ x)
        if gradient.max() <= tolerance:
            break
        free = (x > 0) | (np.arange(len(x)) == gradient.argmax())
        while True:  # towards the minimum over the free coefficients; those that reach zero are fixed there
            minimum = np.zeros_like(x)
            minimum[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            below = np.flatnonzero(free & (minimum <= 0))
            if not below.size:
                break
            shares = x[below] / (x[below] - minimum[below])
            x = x + shares.min() * (minimum - x)
            x[below[(x[below] <= _TOLERANCE) | (shares == shares.min())]] = 0.0
            free &= x > 0
        x = minimum
    coefficients: npt.NDArray[np.float64] = x / norms
    return coefficients


def _with_slowdowns(alone: CostSurface, samples: Samples) -> CostSurface:
    corun = samples.corun
    most = max((point.partition for point in corun), default=0)
    whole, *splits = (_slowdowns(alone, [p for p in corun if p.partition == number]) for number in range(most + 1))
    surface = replace(
        alone,
        decode_slowdown=whole.decode,
        prefill_slowdown=whole.prefill,
        vision_slowdown=whole.vision,
        splits=tuple(splits),
    )
    return replace(
        surface,
        language_error=_error((surface.language_s(p.load), without_bursts(p.seconds)) for p in samples.language),
        vision_error=_error((surface.vision_s(p.load), without_bursts(p.seconds)) for p in samples.vision),
        corun_error=_error(chain.from_iterable(_corun_pairs(surface, p) for p in corun)),
    )


def _slowdowns(alone: CostSurface, corun: Sequence[CorunTimes]) -> Slowdowns:
    decodes = [point for point in corun if not point.language.prefill_tokens] or corun
    chunks = [point for point in corun if not point.language.num_decodes] or corun
    return Slowdowns(
        decode=_slowdown(decodes, lambda p: alone.language_s(p.language), lambda p: p.language_s),
        prefill=_slowdown(chunks, lambda p: alone.language_s(p.language), lambda p: p.language_s),
        vision=_slowdown(corun, lambda p: alone.vision_s(p.vision), lambda p: p.vision_s),
    )


def _slowdown(
    points: Iterable[CorunTimes],
    alone: Callable[[CorunTimes], float],
    seconds: Callable[[CorunTimes], Sequence[float]],
) -> float:
    ratios = [median(measured) / alone(point) for point in points if (measured := seconds(point))]
    return max(1.0, median(ratios)) if ratios else 1.0


def _corun_pairs(surface: CostSurface, point: CorunTimes) -> list[tuple[float, Sequence[float]]]:
    surface = surface.for_partition(point.partition)
    language_s = surface.corun_s(point.language, float("inf"))
    return [(language_s, point.language_s), (surface.vision_s(point.vision) * surface.vision_slowdown, point.vision_s)]


def _error(pairs: Iterable[tuple[float, Sequence[float]]]) -> float:
    """The `_ERROR_QUANTILE` quantile of the steps' errors, relative to the predicted seconds."""
    errors = [abs(measured - predicted) / predicted for predicted, seconds in pairs for measured in seconds]
    return float(np.quantile(errors, _ERROR_QUANTILE)) if errors else 0.0
