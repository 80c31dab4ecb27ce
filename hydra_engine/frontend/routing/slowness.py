"""How much slower an instance is than the fastest one, by what steps of equal size take on each. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from statistics import fmean

# Equal devices differ by less than this from one moment to the next, which is no reason to treat them differently.
ALIKE = 1.25
_ROUNDS = 10  # of the fit; what is left after them is less than what steps vary by


def slowness(seconds: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """By instance, from the seconds of its steps by size: at least 1, the fastest; 1 also where nothing can be
    compared. An instance and a size each have a factor, of which the seconds are products, as well as that can be: so
    instances are comparable too that have no size in common but one each with a third."""
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
