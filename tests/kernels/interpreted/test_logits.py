"""Biases, penalties, masks and log probabilities against the reference ops, which tests/worker/test_special.py compares
with the host's sampler: parts and tiles, odd vocabularies, rows that ask for nothing, rows that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hydra_engine.backend import base
from hydra_engine.backend.base import Adjustments
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_kernels import logits as kernels
from hydra_kernels.logits import adjust_logits, score_tokens
from tests.kernels.comparison import strided
from tests.kernels.poison import poisoned_memory  # noqa: F401

OPS = ReferenceOps()


def random_logits(rows: int, vocabulary: int, seed: int) -> Tensor:
    """Logits with ties, and a row each with NaN, inf and -inf."""
    logits = (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 8).round() / 2
    for row, value in zip(range(rows - 1, rows - 4, -1), ("nan", "inf", "-inf"), strict=False):
        logits[row, vocabulary // 2] = float(value)
    return logits


def random_adjustments(rows: int, vocabulary: int, seed: int) -> Adjustments:
    """Rows of every mixture; biases name some token twice, and some that there is not."""
    rng = np.random.default_rng(seed)
    bounds = np.append(0, rng.integers(0, 6, rows).cumsum())
    counts = rng.integers(0, 7, (4, vocabulary)) * rng.integers(0, 2, (4, vocabulary))
    masks = rng.integers(-(1 << 31), 1 << 31, (3, -(-vocabulary // 32)))
    penalties = np.stack((rng.choice([1.0, 1.3, 0.7], rows), rng.normal(size=rows), rng.normal(size=rows)), axis=1)
    columns = (bounds[:-1], bounds[1:], rng.integers(0, vocabulary + 3, bounds[-1]), rng.integers(-1, 4, rows))
    begins, ends, ids, counted = (torch.from_numpy(column.astype(np.int32)) for column in columns)
    if len(ids) > 1:
        ids[1] = ids[0]
    values = torch.from_numpy(rng.normal(0, 3, bounds[-1]))
    counts, masks = torch.from_numpy(counts.astype(np.int32)), torch.from_numpy(masks.astype(np.int32))
    masked = torch.from_numpy(rng.integers(-1, 3, rows).astype(np.int32))
    return Adjustments(begins, ends, ids, values, torch.from_numpy(penalties), counted, counts, masked, masks)


@pytest.mark.quick("33", "2100")
@pytest.mark.parametrize("vocabulary", [1, 31, 33, 2100, 4097])
def test_adjusted_logits(vocabulary: int) -> None:
    logits, adjustments = random_logits(9, vocabulary, 1), random_adjustments(9, vocabulary, vocabulary)
    found, expected = adjust_logits(strided(logits), *adjustments), OPS.adjust_logits(logits, adjustments)
    assert found.is_contiguous() and torch.equal(found.nan_to_num(7e37), expected.nan_to_num(7e37))
    assert kernels.LOWEST_LOGIT == base.LOWEST_LOGIT


def test_rows_that_ask_for_nothing_stay_as_they_are() -> None:
    logits, none = random_logits(5, 70, 2), torch.full((5,), -1, dtype=torch.int32)
    zeros, nothing = torch.zeros(5, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    penalties, tables = torch.full((5, 3), float("nan")).double(), (torch.empty(0, 70), torch.empty(0, 3))
    counts, masks = (table.int() for table in tables)
    found = adjust_logits(logits, zeros, zeros, nothing, nothing.double(), penalties, none, counts, none, masks)
    assert torch.equal(found.nan_to_num(7e37), logits.nan_to_num(7e37))


def test_what_leaves_the_range_of_float32_is_held_at_its_end() -> None:
    logits, adjustments = torch.tensor([[3e38, -3e38, 1.0]]), random_adjustments(1, 3, 5)
    adjustments = adjustments._replace(
        bias_ends=adjustments.bias_begins,
        penalties=torch.tensor([[0.01, 0.0, 0.0]]).double(),
        counts=torch.ones(1, 3, dtype=torch.int32),
        counted=torch.zeros(1, dtype=torch.int32),
        masked=torch.full((1,), -1, dtype=torch.int32),
    )
    highest = -kernels.LOWEST_LOGIT
    torch.testing.assert_close(adjust_logits(logits, *adjustments), torch.tensor([[highest, -3e36, 100.0]]))


@pytest.mark.quick("33", "4100")
@pytest.mark.parametrize("vocabulary", [1, 33, 4100, 8200])
def test_scores(vocabulary: int) -> None:
    """Vocabularies of one, two and four parts, the last not full; lists longer than the vocabulary."""
    logits = random_logits(9, vocabulary, 3)
    rng = np.random.default_rng(4)
    tokens = torch.from_numpy(rng.integers(0, vocabulary, 9))
    tokens[0] = logits[0].argmax()
    num_top = torch.tensor([20, 0, -1, 5, 1, 20, 3, 3, 3], dtype=torch.int32)
    numbers, places = score_tokens(strided(logits), tokens, num_top, 20)
    wanted_numbers, wanted_places = OPS.score_tokens(logits, tokens, num_top, 20)
    assert numbers.shape == (9, 23) and places.shape == (9, 21)
    for row in (0, 1, 3, 4, 5):  # finite, and asked for
        listed = min(int(num_top[row]), vocabulary)
        torch.testing.assert_close(numbers[row, : 3 + listed], wanted_numbers[row, : 3 + listed], rtol=1e-6, atol=0)
        assert torch.equal(numbers[row, 3 : 3 + listed], wanted_numbers[row, 3 : 3 + listed])
        assert torch.equal(places[row, : 1 + listed], wanted_places[row, : 1 + listed])
    assert places[0, 0] == 1


def test_nothing_in_nothing_out() -> None:
    nothing = torch.empty(0, dtype=torch.int32)
    numbers, places = score_tokens(torch.empty(0, 7), nothing.long(), nothing, 20)
    assert numbers.shape == (0, 23) and places.shape == (0, 21)
    tables = torch.empty(0, 3).double(), nothing, torch.empty(0, 7).int(), nothing, torch.empty(0, 1).int()
    assert adjust_logits(torch.empty(0, 7), nothing, nothing, nothing, nothing.double(), *tables).shape == (0, 7)


def test_messages() -> None:
    logits, adjustments = torch.zeros(2, 40), random_adjustments(2, 40, 1)
    with pytest.raises(ValueError, match=r"masks: expected contiguous \[M, 2\] torch.int32"):
        adjust_logits(logits, *adjustments._replace(masks=adjustments.masks[:, :1]))
    with pytest.raises(ValueError, match=r"penalties: expected contiguous \[2, 3\] torch.float64"):
        adjust_logits(logits, *adjustments._replace(penalties=adjustments.penalties.float()))
    with pytest.raises(ValueError, match=r"counted: expected contiguous \[2\] torch.int32"):
        adjust_logits(logits, *adjustments._replace(counted=adjustments.counted[:1]))
    with pytest.raises(ValueError, match=r"tokens: expected contiguous \[2\] torch.int64"):
        score_tokens(logits, torch.zeros(3, dtype=torch.int64), adjustments.counted, 20)
    with pytest.raises(ValueError, match="logits: expected 1 to 1048576 columns, got 0"):
        score_tokens(logits[:, :0], torch.zeros(2, dtype=torch.int64), adjustments.counted, 20)
