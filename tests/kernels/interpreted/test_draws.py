"""Draws against the sampler on the host: filters, ties, edges of the distribution, rows that are not finite.

The sampler computes in float64. The numbers here are fixed and lie further from any boundary between two tokens than
float32 is from that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from hydra_engine.core.sampling import SamplingParams
from hydra_kernels.sampling import greedy, sample
from tests.kernels.comparison import strided
from tests.kernels.poison import poisoned_memory  # noqa: F401
from tests.worker.host_sampler import draw


class Row(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    number: float = 0.5


def sampled(logits: Tensor, rows: list[Row]) -> tuple[list[int], list[bool]]:
    temperature, top_k, top_p, min_p, number = zip(*rows, strict=True)
    floats = [torch.tensor(x, dtype=torch.float32) for x in (temperature, top_p, min_p, number)]
    tokens, finite = sample(logits, floats[0], torch.tensor(top_k, dtype=torch.int32), *floats[1:])
    assert tokens.dtype is torch.int64 and finite.dtype is torch.bool
    return tokens.tolist(), finite.tolist()


def expected(logits: Tensor, rows: list[Row]) -> list[int]:
    return [on_host(scores, row) for scores, row in zip(logits.double().numpy(), rows, strict=True)]


def on_host(scores: np.ndarray, row: Row) -> int:
    if row.temperature == 0:
        return int(scores.argmax())
    # In the precision in which the kernel gets them.
    temperature, top_p, min_p, number = (float(np.float32(x)) for x in (row[0], row[2], row[3], row[4]))
    params = SamplingParams(temperature=temperature, top_k=row.top_k, top_p=top_p, min_p=min_p)
    return draw(scores, params, number)


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


FILTERS = [
    Row(temperature=0.0, top_k=3, top_p=0.5, number=0.9),
    Row(number=0.37),
    Row(temperature=0.7, top_k=40, number=0.81),
    Row(top_p=0.9, number=0.62),
    Row(temperature=1.5, min_p=0.02, number=0.93),
    Row(temperature=0.9, top_k=50, top_p=0.8, min_p=0.05, number=0.48),
]


@pytest.mark.quick("[33]")
@pytest.mark.parametrize("vocabulary", [1, 33, 300])
def test_filters(vocabulary: int) -> None:
    logits = logits_of(len(FILTERS), vocabulary)
    assert sampled(strided(logits), FILTERS) == (expected(logits, FILTERS), [True] * len(FILTERS))


@pytest.mark.slow
def test_parts_and_steps() -> None:
    """Four parts whose lists, of flat logits, are longer than a step; in the last part a step is not full. In the last
    row hundreds of logits each are equal, in all parts."""
    rows = [Row(number=0.97), Row(temperature=2.0, top_p=0.999, number=0.71), Row(top_k=4000, number=0.93)]
    rows += [Row(top_p=0.7, number=0.7)]
    logits = logits_of(len(rows), 6001, seed=1) * 0.3
    logits[-1] = (logits[-1] * 2).round() / 2
    assert sampled(logits, rows)[0] == expected(logits, rows)


@pytest.mark.slow
def test_more_of_the_best_than_groups_of_columns() -> None:
    """A top_k that no maxima of groups bound, one of all but one, one of all, and one that the sampler calls off."""
    rows = [Row(top_k=k, number=0.999) for k in (65, 199, 200, -1)]
    logits = logits_of(len(rows), 200, seed=2) * 0.1
    tokens, _ = sampled(logits, rows)
    assert tokens == [on_host(x, r._replace(top_k=max(0, r.top_k))) for x, r in zip(logits.numpy(), rows, strict=True)]


@pytest.mark.slow
def test_ties_with_the_kth_best_stay_and_of_those_at_the_end_of_a_nucleus_the_lowest_ids() -> None:
    logits = torch.full((20,), -2.0)
    logits[[3, 7, 11, 16]] = 1.0
    logits[13] = 2.0
    several = [Row(top_k=2, number=x) for x in (0.0, 0.99)]
    # exp(1) : 1 against the best, which weighs exp(2): the nucleus of 0.65 takes the best and two of the four
    several += [Row(top_k=2, top_p=0.65, number=x) for x in (0.0, 0.45, 0.99)]
    several += [Row(top_p=0.6, number=0.99), Row(min_p=0.36, number=0.99), Row(min_p=0.37, number=0.99)]
    tokens, _ = sampled(logits.expand(8, 20), several)
    assert tokens == expected(logits.expand(8, 20), several)
    assert tokens == [3, 16, 3, 13, 13, 13, 16, 13]


@pytest.mark.slow
def test_edges() -> None:
    logits = torch.full((7, 40), -300.0)
    logits[:, [4, 9]] = torch.tensor([0.0, -0.0])
    logits[0, 30] = -3.0e38
    almost_one = 1 - 2.0**-24
    rows = [
        Row(number=almost_one),  # behind the last weight there are only zeros
        Row(temperature=1e-30, number=almost_one),
        Row(top_k=1, number=almost_one),  # 0 and -0 are the same logit
        Row(top_p=0.0, number=almost_one),
        Row(min_p=1.0, number=almost_one),
        Row(temperature=1e30, number=0.99),
        Row(number=0.0),
    ]
    tokens, _ = sampled(logits, rows)
    assert tokens == [9, 9, 9, 4, 9, 39, 4]
    assert tokens[:5] == expected(logits[:5], rows[:5])  # it takes no temperature above 2


def test_temperature_zero_is_greedy() -> None:
    logits = logits_of(3, 2500, seed=3)
    logits[1, [2400, 1300, 20]] = 50.0
    rows = [Row(temperature=0.0, top_k=2, top_p=0.1, min_p=0.5, number=0.99)] * 3
    tokens, finite = sampled(logits, rows)
    assert tokens == greedy(logits)[0].tolist() and tokens[1] == 20 and all(finite)


@pytest.mark.quick("top_k=5")
@pytest.mark.parametrize("row", [Row(), Row(top_k=5, top_p=0.9), Row(temperature=0.0)], ids=str)
def test_rows_that_are_not_finite_fail_alone(row: Row) -> None:
    logits = logits_of(5, 100, seed=4)
    for place, value in ((1, float("nan")), (2, float("inf")), (3, float("-inf"))):
        logits[place, 99] = value
    logits[4] = float("nan")
    tokens, finite = sampled(logits, [row] * 5)
    assert finite == [True, False, False, False, False]
    assert tokens[0] == expected(logits[:1], [row])[0] and all(0 <= token < 100 for token in tokens)


@pytest.mark.slow
def test_a_row_is_drawn_alike_alone_and_among_others() -> None:
    rows = [FILTERS[1], FILTERS[5]]
    logits = logits_of(3, 100, seed=5)
    together, _ = sampled(logits, [*rows, FILTERS[0]])
    assert [sampled(logits[i : i + 1], [row])[0][0] for i, row in enumerate(rows)] == together[:2]


@pytest.mark.slow
def test_every_token_of_the_distribution_is_drawn_as_often_as_it_weighs() -> None:
    weights = torch.tensor([1.0, 4.0, 0.5, 2.5])
    rows = [Row(number=(i + 0.5) / 16) for i in range(16)]
    tokens, _ = sampled(weights.log().expand(16, 4), rows)
    assert tokens == [0] * 2 + [1] * 8 + [2] + [3] * 5


def test_nothing_in_nothing_out() -> None:
    nothing = torch.empty(0)
    tokens, finite = sample(torch.empty(0, 7), nothing, nothing.int(), nothing, nothing, nothing)
    assert tokens.shape == (0,) and finite.shape == (0,)


def test_messages() -> None:
    logits, ones = torch.zeros(2, 3), torch.ones(2)
    with pytest.raises(ValueError, match=r"logits: expected .* V > 0"):
        sample(torch.empty(2, 0), ones, ones.int(), ones, ones, ones)
    with pytest.raises(ValueError, match=r"temperatures: expected contiguous \[2\] torch.float32"):
        sample(logits, ones[:1], ones.int(), ones, ones, ones)
    with pytest.raises(ValueError, match=r"top_k: expected contiguous \[2\] torch.int32"):
        sample(logits, ones, ones.long(), ones, ones, ones)
    with pytest.raises(ValueError, match="numbers: expected"):
        sample(logits, ones, ones.int(), ones, ones, ones.double())
    with pytest.raises(ValueError, match="logits: expected at most 1048064 columns, got 1048065"):
        sample(torch.zeros(2, 1048065), ones, ones.int(), ones, ones, ones)
