"""`Ops.sample` against the host's sampler, row by row; every implementation of this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hydra_engine.backend.base import Ops, SamplingTensors
from hydra_engine.backend.cpu.ops import NativeOps
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.core.request import SamplingParams
from hydra_engine.worker.language.sampler import MAX_NUMBER, draw

IMPLEMENTATIONS: list[Ops] = [ReferenceOps(), NativeOps()]
# Numbers that float32 holds as they are: the host's parameters are float64.
TEMPERATURES = (0.0, 0.125, 0.5, 1.0, 1.75)
TOP_K = (0, 1, 2, 7, 40, 1000)
TOP_P = (1.0, 0.0625, 0.5, 0.875, 0.9990234375)
MIN_P = (0.0, 0.03125, 0.5, 1.0)
NUMBERS = (0.0, 0.25, 0.5, 0.75, MAX_NUMBER)

pytestmark = pytest.mark.parametrize("ops", IMPLEMENTATIONS, ids=lambda ops: ops.name)


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
