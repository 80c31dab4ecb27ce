"""Greedy choice: several steps of columns, ties, strides, rows that are not finite."""

import pytest
import torch

from hydra_kernels.sampling import greedy
from tests.kernels.comparison import DTYPES, strided

WIDTH = 20_001


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_highest_logit(dtype: torch.dtype) -> None:
    logits = strided((torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)) * 5 - 40).to(dtype))
    logits[0, WIDTH - 1] = 1.0
    tokens, finite = greedy(logits)
    assert tokens.dtype is torch.int64 and finite.tolist() == [True] * 4
    assert tokens[0] == WIDTH - 1
    assert torch.equal(logits.gather(1, tokens[:, None])[:, 0], logits.amax(1))


def test_the_lowest_of_equal_ids() -> None:
    logits = torch.full((3, WIDTH), -1.0)
    logits[0, [9000, 700, 17_000]] = 2.0
    logits[1, [8192, 8191]] = 2.0
    tokens, finite = greedy(logits)
    assert tokens.tolist() == [700, 8191, 0] and finite.all()


def test_rows_that_are_not_finite_fail_alone() -> None:
    logits = torch.zeros(5, WIDTH)
    logits[:, 3] = 1.0
    for row, value in ((1, float("nan")), (2, float("inf")), (3, float("-inf"))):
        logits[row, WIDTH - 1] = value
    logits[4] = float("nan")
    tokens, finite = greedy(logits)
    assert finite.tolist() == [True, False, False, False, False]
    assert tokens[0] == 3 and ((tokens >= 0) & (tokens < WIDTH)).all()


def test_nothing_in_nothing_out() -> None:
    tokens, finite = greedy(torch.empty(0, 7))
    assert tokens.shape == (0,) and finite.shape == (0,)


def test_messages() -> None:
    with pytest.raises(ValueError, match=r"logits: expected .* V > 0"):
        greedy(torch.empty(2, 0))
    with pytest.raises(ValueError, match=r"logits: expected \[T, C\] of a float type"):
        greedy(torch.zeros(2, 3, dtype=torch.int64))
