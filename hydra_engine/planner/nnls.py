"""Least squares with coefficients that are not negative: the active-set method of Lawson and Hanson.

Solving Least Squares Problems (1974), chapter 23. Small and dense: a cost surface has some dozens of coefficients.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_RIDGE = 1e-9  # of columns of length 1: makes the minimum unique, so that the method ends
_TOLERANCE = 1e-10


def nnls(matrix: Floats, target: Floats) -> Floats:
    """x >= 0 [n] that minimises |matrix x - target|: matrix [m, n], target [m]. A column of zeros gets 0.

    Columns are brought to length 1 first, so their units do not matter.
    """
    norms = np.linalg.norm(matrix, axis=0)
    used = norms > 0
    solution = np.zeros(matrix.shape[1])
    if used.any():
        scaled = matrix[:, used] / norms[used]
        gram = scaled.T @ scaled + _RIDGE * np.eye(scaled.shape[1])
        solution[used] = _solve(gram, scaled.T @ target) / norms[used]
    return solution


def _solve(gram: Floats, moment: Floats) -> Floats:
    """The minimum of x G x / 2 - m x over x >= 0, G positive definite."""
    count = len(moment)
    x = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    tolerance = _TOLERANCE * max(1.0, float(np.abs(moment).max()))
    for _ in range(10 * count + 10):  # each round lowers the objective, so no set of free coefficients comes back
        gradient = np.where(free, -np.inf, moment - gram @ x)
        best = int(np.argmax(gradient))
        if free.all() or gradient[best] <= tolerance:
            return x
        free[best] = True
        x = _descend(gram, moment, x, free)
    return x  # rounding alone moves coefficients to and fro here


def _descend(gram: Floats, moment: Floats, x: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    """Towards the minimum over the free coefficients; those that reach zero on the way are free no more."""
    while True:
        minimum = np.zeros_like(x)
        minimum[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
        below = free & (minimum <= 0)
        if not below.any():
            return minimum
        shares = x[below] / (x[below] - minimum[below])
        share = float(shares.min())
        x = x + share * (minimum - x)
        x[below & (x <= _TOLERANCE)] = 0.0
        x[np.flatnonzero(below)[shares.argmin()]] = 0.0
        free &= x > 0
