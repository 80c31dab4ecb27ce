"""Compares the speed of instances by the durations of steps of equal size. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from statistics import fmean

# Equal devices differ by less than this from one moment to the next.
ALIKE = 1.25
_ROUNDS = 10  # of the fit; the rest is smaller than the variation of steps


def slowness(seconds: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Returns per instance how many times as long its steps take as the fastest one's, from its step durations [s] by
    size; 1.0 below `ALIKE` and where nothing can be compared. Fits duration = factor(instance) * factor(size), so
    instances without a common size are comparable through a third."""
    sizes = Counter(size for own in seconds.values() for size in own)
    logs = {
        name: {size: math.log(taken_s) for size, taken_s in own.items() if sizes[size] > 1 and taken_s > 0}
        for name, own in seconds.items()
    }
    known = {name: own for name, own in logs.items() if own}
    factors = dict.fromkeys(known, 0.0)
    for _ in range(_ROUNDS):
        by_size: dict[int, list[float]] = {}
        for name, own in known.items():
            for size, taken in own.items():
                by_size.setdefault(size, []).append(taken - factors[name])
        typical = {size: fmean(rests) for size, rests in by_size.items()}
        factors = {name: fmean(taken - typical[size] for size, taken in own.items()) for name, own in known.items()}
    least = min(factors.values(), default=0.0)
    found = {name: math.exp(factors.get(name, least) - least) for name in seconds}
    return {name: ratio if ratio >= ALIKE else 1.0 for name, ratio in found.items()}
