"""Sampling ops against the host's sampler and the reference, row by row; every implementation of this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hydra_engine.backend.base import LOWEST_LOGIT, Adjustments, Ops, SamplingTensors
from hydra_engine.backend.cpu.ops import NativeOps
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.worker.language.sampler import MAX_NUMBER
from tests.worker.host_sampler import draw

IMPLEMENTATIONS: list[Ops] = [ReferenceOps(), NativeOps()]
# Numbers that float32 holds exactly: the host's parameters are float64.
TEMPERATURES = (0.0, 0.125, 0.5, 1.0, 1.75)
TOP_K = (0, 1, 2, 7, 40, 1000)
TOP_P = (1.0, 0.0625, 0.5, 0.875, 0.9990234375)
MIN_P = (0.0, 0.03125, 0.5, 1.0)
NUMBERS = (0.0, 0.25, 0.5, 0.75, MAX_NUMBER)

every_ops = pytest.fixture(params=IMPLEMENTATIONS, ids=lambda ops: ops.name)


@every_ops
def ops(request: pytest.FixtureRequest) -> Ops:
    chosen: Ops = request.param
    return chosen


def draws_of(rows: list[tuple[float, int, float, float, float]]) -> SamplingTensors:
    temperatures, top_k, top_p, min_p, numbers = (torch.tensor(column) for column in zip(*rows, strict=True))
    return SamplingTensors(temperatures.float(), top_k.int(), top_p.float(), min_p.float(), numbers.float())


def on_host(logits: np.ndarray, row: tuple[float, int, float, float, float]) -> int:
    temperature, top_k, top_p, min_p, number = row
    if temperature == 0:
        return int(logits.argmax())
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return draw(logits.astype(np.float64), params, number)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 2, 33, 517])
def test_tokens_are_the_hosts(ops: Ops, vocabulary: int, ties: bool) -> None:
    rng = np.random.default_rng(vocabulary)
    rows = [
        (
            float(rng.choice(TEMPERATURES)),
            int(rng.choice(TOP_K)),
            float(rng.choice(TOP_P)),
            float(rng.choice(MIN_P)),
            float(rng.choice([*NUMBERS, np.float32(rng.random())])),
        )
        for _ in range(150)
    ]
    logits = rng.normal(0, 3, (len(rows), vocabulary)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    tokens, finite = ops.sample(torch.from_numpy(logits), draws_of(rows))
    assert tokens.dtype == torch.int64 and finite.all()
    assert tokens.tolist() == [on_host(logits[i], row) for i, row in enumerate(rows)]


def test_a_row_depends_on_itself_alone(ops: Ops) -> None:
    rows = [(1.0, 0, 0.9, 0.0, 0.3), (0.0, 0, 1.0, 0.0, 0.0), (0.7, 5, 1.0, 0.1, 0.9)]
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)) * 4
    together = ops.sample(logits, draws_of(rows))[0].tolist()
    assert together == [int(ops.sample(logits[i : i + 1], draws_of([row]))[0]) for i, row in enumerate(rows)]
    wide = torch.zeros(3, 130)
    wide[:, :100] = logits
    assert ops.sample(wide[:, :100], draws_of(rows))[0].tolist() == together


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_told_and_get_some_token(ops: Ops, bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 9)
    logits[1, 4] = bad
    tokens, finite = ops.sample(logits, draws_of([(temperature, 0, 1.0, 0.0, 0.5)] * 3))
    assert finite.tolist() == [True, False, True] and 0 <= int(tokens[1]) < 9
    assert tokens[0] == tokens[2] == (4 if temperature else 0)


def test_large_numbers_are_finite(ops: Ops) -> None:
    logits = torch.full((1, 8), 3e38)
    tokens, finite = ops.sample(logits, draws_of([(1.0, 0, 1.0, 0.0, 0.5)]))
    assert finite.all() and tokens.tolist() == [4]


def test_no_rows(ops: Ops) -> None:
    empty = SamplingTensors(*(torch.zeros(0, dtype=torch.int32 if i == 1 else torch.float32) for i in range(5)))
    tokens, finite = ops.sample(torch.zeros(0, 7), empty)
    assert tokens.shape == finite.shape == (0,)


def test_wrong_shapes_are_named(ops: Ops) -> None:
    good = draws_of([(1.0, 0, 1.0, 0.0, 0.5)])
    with pytest.raises(ValueError, match="logits: expected"):
        ops.sample(torch.zeros(1, 7, dtype=torch.float64), good)
    with pytest.raises(ValueError, match="top_k: expected"):
        ops.sample(torch.zeros(1, 7), good._replace(top_k=good.top_k.long()))
    with pytest.raises(ValueError, match="numbers: expected"):
        ops.sample(torch.zeros(2, 7), draws_of([(1.0, 0, 1.0, 0.0, 0.5)] * 2)._replace(numbers=good.numbers))


@pytest.mark.parametrize("vocabulary", [1, 3, 7, 8, 31, 64, 65, 511, 512, 513, 2049, 32_064])
def test_best_tokens_are_the_first_of_the_largest(ops: Ops, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    wide = torch.from_numpy(rng.integers(-9, 9, (9, vocabulary + 5)).astype(np.float32))  # full of ties
    wide[1] = -wide[1].abs() - 1
    wide[2] = 0.0
    wide[3, ::2] = -0.0  # equal to the zeros between
    wide[4, vocabulary - 1] = 3e38  # finite, though its sum with another is not
    wide[5, rng.integers(vocabulary)] = 10.0
    wide[6] = torch.from_numpy(rng.standard_normal(vocabulary + 5).astype(np.float32))
    wide[:, vocabulary:] = torch.nan  # of no row
    tokens = ops.best_tokens(wide[:, :vocabulary])
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == wide[:, :vocabulary].numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_best_tokens_tell_rows_that_are_not_finite(ops: Ops, bad: float) -> None:
    vocabulary = 1031
    places = [*range(70), 511, 512, 1023, 1024, 1030]
    logits = torch.zeros(len(places) + 2, vocabulary)
    for row, place in enumerate(places):
        logits[row, place] = bad
    logits[-2] = bad
    logits[-1] = torch.arange(vocabulary) * 3e35
    assert ops.best_tokens(logits).tolist() == [-1] * (len(places) + 1) + [vocabulary - 1]


def test_best_tokens_of_no_rows_and_of_wrong_shapes(ops: Ops) -> None:
    assert ops.best_tokens(torch.zeros(0, 7)).shape == (0,)
    for logits in (torch.zeros(2, 0), torch.zeros(7), torch.zeros(2, 7).double(), torch.zeros(7, 2).t()):
        with pytest.raises(ValueError, match="logits: expected"):
            ops.best_tokens(logits)


@pytest.mark.parametrize("vocabulary", [1, 7, 64, 1031, 32_064])
def test_float64_logits_and_parameters_are_not_rounded(ops: Ops, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    num_rows = 40 if vocabulary > 2000 else 400
    rows = [
        (
            float(rng.choice([0.0, rng.uniform(0.01, 2)])),
            int(rng.choice(TOP_K)),
            float(rng.choice([1.0, rng.random()])),
            float(rng.choice([0.0, 0.1 * rng.random()])),
            float(np.float32(rng.random())),
        )
        for _ in range(num_rows)
    ]
    logits = rng.normal(0, rng.uniform(0.5, 6), (num_rows, vocabulary))
    temperatures, top_k, top_p, min_p, numbers = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    draws = SamplingTensors(temperatures, top_k.int(), top_p, min_p, numbers)
    tokens, finite = ops.sample(torch.from_numpy(logits), draws)
    expected = [int(on_host(values, row)) for values, row in zip(logits, rows, strict=True)]
    assert finite.all() and tokens.tolist() == expected
    exact = logits.astype(np.float32)  # parameters of 64 bits, logits of 32
    tokens, finite = ops.sample(torch.from_numpy(exact), draws)
    assert tokens.tolist() == [on_host(values, row) for values, row in zip(exact, rows, strict=True)]


# ---- biases, penalties, masks and scores


def adjustments_of(rng: np.random.Generator, num_rows: int, vocabulary: int) -> Adjustments:
    """Rows ask for all, some or none of it."""
    lengths = rng.choice([0, 0, 1, 5], num_rows)
    ends = np.cumsum(lengths).astype(np.int32)
    ids = rng.integers(0, vocabulary + 2, int(ends[-1]) if num_rows else 0).astype(np.int32)
    penalties = np.stack([rng.choice([1.0, 1.3, 0.7], num_rows), *rng.normal(0, 1, (2, num_rows))], axis=1)
    return Adjustments(
        torch.from_numpy((ends - lengths).astype(np.int32)),
        torch.from_numpy(ends),
        torch.from_numpy(ids),
        torch.from_numpy(rng.normal(0, 30, len(ids))),
        torch.from_numpy(penalties),
        torch.from_numpy(rng.integers(-1, 3, num_rows).astype(np.int32)),
        torch.from_numpy((rng.integers(0, 7, (3, vocabulary)) * rng.integers(0, 2, (3, vocabulary))).astype(np.int32)),
        torch.from_numpy(rng.integers(-1, 2, num_rows).astype(np.int32)),
        torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, (2, -(-vocabulary // 32))).astype(np.int32)),
    )


def poisoned(logits: np.ndarray) -> torch.Tensor:
    """The same values as rows of a wider tensor of NaN."""
    wide = torch.full((len(logits), logits.shape[1] + 3), float("nan"), dtype=torch.from_numpy(logits).dtype)
    wide[:, 1:-2] = torch.from_numpy(logits)
    return wide[:, 1:-2]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocabulary", [1, 2, 31, 32, 33, 517])
def test_logits_are_adjusted_as_by_the_reference(ops: Ops, vocabulary: int, dtype: type) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(0, 5, (60, vocabulary)).astype(dtype)
    logits[3, 0], logits[4, -1], logits[5, 0] = np.nan, np.inf, -np.inf
    logits[6, 0] = np.finfo(np.float32).max
    adjustments = adjustments_of(rng, 60, vocabulary)
    given = poisoned(logits)
    found, expected = ops.adjust_logits(given, adjustments), ReferenceOps().adjust_logits(given, adjustments)
    assert found.dtype is given.dtype and found.shape == given.shape and found.is_contiguous()
    rtol = 1e-14 if dtype is np.float64 else 1e-7  # a sum of two products may be rounded once
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol, equal_nan=True)
    assert torch.equal(found == LOWEST_LOGIT, expected == LOWEST_LOGIT)
    np.testing.assert_array_equal(given.numpy(), logits)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocabulary", [1, 2, 33, 1031])
def test_tokens_are_scored_as_by_the_reference(ops: Ops, vocabulary: int, dtype: type) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = np.round(rng.normal(0, 5, (40, vocabulary))).astype(dtype)  # full of ties
    logits[:9] = rng.normal(0, 5, (9, vocabulary))
    tokens = torch.from_numpy(rng.integers(0, vocabulary, 40))
    num_top = torch.from_numpy(rng.integers(-1, 21, 40).astype(np.int32))
    given = poisoned(logits)
    numbers, places = ops.score_tokens(given, tokens, num_top, 20)
    wanted_numbers, wanted_places = ReferenceOps().score_tokens(given, tokens, num_top, 20)
    assert numbers.dtype is given.dtype and places.dtype is torch.int32
    for row, count in enumerate(num_top.tolist()):
        if count >= 0:
            listed = min(count, vocabulary)
            assert places[row, : 1 + listed].tolist() == wanted_places[row, : 1 + listed].tolist()
            rtol = 1e-12 if dtype is np.float64 else 1e-6  # sums are taken in another order
            torch.testing.assert_close(numbers[row, : 3 + listed], wanted_numbers[row, : 3 + listed], rtol=rtol, atol=0)


def test_nothing_is_adjusted_or_scored_in_no_rows(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    assert ops.adjust_logits(torch.zeros(0, 7), adjustments_of(rng, 0, 7)).shape == (0, 7)
    numbers, places = ops.score_tokens(torch.zeros(0, 7), torch.zeros(0).long(), torch.zeros(0).int(), 20)
    assert (numbers.shape, places.shape) == ((0, 23), (0, 21))


def test_entries_outside_of_their_lists_are_named() -> None:
    rng, native = np.random.default_rng(1), NativeOps()
    logits, adjustments = torch.zeros(4, 7), adjustments_of(rng, 4, 7)
    for name, value in (("bias_ends", 1000), ("counted", 3), ("masked", 2)):
        with pytest.raises(ValueError, match="expected"):
            native.adjust_logits(logits, adjustments._replace(**{name: torch.full((4,), value, dtype=torch.int32)}))
    with pytest.raises(ValueError, match="tokens: expected less than 7"):
        native.score_tokens(logits, torch.full((4,), 7), torch.zeros(4).int(), 20)
    with pytest.raises(ValueError, match="num_top: expected at most 20"):
        native.score_tokens(logits, torch.zeros(4).long(), torch.full((4,), 21).int(), 20)
