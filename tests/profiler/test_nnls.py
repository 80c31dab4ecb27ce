"""Non-negative least squares against the best of all sets of columns."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.profiler.fit import Floats, nnls


def brute_force(matrix: Floats, target: Floats) -> float:
    """The least |Ax - b| over x >= 0: the minimum is an ordinary least-squares solution over some of the columns."""
    best = float(np.linalg.norm(target))
    columns = range(matrix.shape[1])
    for size in range(1, matrix.shape[1] + 1):
        for chosen in combinations(columns, size):
            part = matrix[:, chosen]
            x = np.linalg.lstsq(part, target, rcond=None)[0]
            if (x >= -1e-12).all():
                best = min(best, float(np.linalg.norm(part @ x - target)))
    return best


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 9))
def test_nothing_is_nearer(seed: int, num_columns: int, num_rows: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(num_rows, num_columns)) * 10.0 ** rng.integers(-6, 6, num_columns)
    target = rng.normal(size=num_rows)
    x = nnls(matrix, target)
    assert (x >= 0).all()
    assert np.linalg.norm(matrix @ x - target) == pytest.approx(brute_force(matrix, target), rel=1e-3, abs=1e-3)


def test_columns_of_zeros_and_equal_columns() -> None:
    column = np.array([1.0, 2.0, 3.0])
    x = nnls(np.column_stack([column, np.zeros(3), column]), 2 * column)
    assert x[1] == 0.0 and x[0] + x[2] == pytest.approx(2.0)
    assert nnls(np.zeros((3, 2)), column).tolist() == [0.0, 0.0]


def test_what_only_a_negative_coefficient_would_explain_gets_zero() -> None:
    assert nnls(np.array([[1.0], [1.0]]), np.array([-1.0, -2.0])).tolist() == [0.0]
