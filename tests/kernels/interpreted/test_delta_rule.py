"""The gated delta rule against the reference: rows that begin, go on and have no token, head dims that fill no tile,
states that stay in their place, gates at the ends of their range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import StateRows
from hydra_kernels.delta_rule import delta_rule
from tests.kernels.comparison import DTYPES
from tests.kernels.poison import poisoned_memory  # noqa: F401
from tests.kernels.states import Row, by_reference, places_of, state_rows

# Begins over a state of somebody else; one token in one place; without tokens; some tokens.
ROWS = [Row(1, 0, 0, 1), Row(1, 7, 2, 2), Row(0, 3, 3, 4), Row(0, 0, 5, 6), Row(6, 5, 7, 8)]
# Of values of about 1. The interpreter truncates to bfloat16 where a GPU rounds, results and strengths.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}


class Shape(NamedTuple):
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    rates: Tensor
    shift: Tensor

    def piece(self, begin: int, end: int) -> Inputs:
        return Inputs(*(x[begin:end] for x in self[:5]), self.rates, self.shift)


def inputs(tokens: int, shape: Shape, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Views of wider rows whose other columns are NaN, as they come from a fused projection."""
    generator = torch.Generator().manual_seed(seed)

    def made(heads: int, dim: int) -> Tensor:
        wide = torch.full((tokens, heads + 1, dim + 8), float("nan"), dtype=dtype)
        wide[:, 1:, :dim] = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
        return wide[:, 1:, :dim]

    key_heads, heads, key_dim, value_dim = shape
    a, b = (made(1, heads)[:, 0] for _ in range(2))
    vectors = torch.randn(2, heads, generator=generator)
    return Inputs(made(key_heads, key_dim), made(key_heads, key_dim), made(heads, value_dim), a, b, *vectors)


def run(given: Inputs, states: Tensor, rows: StateRows) -> Tensor:
    return delta_rule(*given, states[:, 1], rows.cu_q, rows.starts, rows.read_slots, rows.write_slots)


def check(given: Inputs, rows: Sequence[Row], shape: Shape) -> None:
    states, described = places_of(list(rows), shape[1:], torch.float32), state_rows(list(rows))
    expected, after = by_reference(states, described, *given)
    result = run(given, states, described)
    limit = TOLERANCE[given.v.dtype]
    assert result.is_contiguous() and result.dtype is given.v.dtype
    torch.testing.assert_close(result, expected, rtol=limit, atol=limit)
    loose = limit if given.v.dtype is torch.bfloat16 else 2e-6  # states are not rounded, but strengths are
    torch.testing.assert_close(states, after, rtol=loose, atol=loose, equal_nan=True)


@pytest.mark.quick("value_dim=48)-torch.float32", "value_dim=5)-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [Shape(1, 2, 32, 48), Shape(2, 2, 7, 5)], ids=str)
def test_rows_of_every_kind(shape: Shape, dtype: torch.dtype) -> None:
    check(inputs(sum(row.tokens for row in ROWS), shape, dtype), ROWS, shape)


@pytest.mark.quick("key_dim=96")
@pytest.mark.parametrize("shape", [Shape(1, 3, 64, 64), Shape(1, 1, 128, 128), Shape(1, 1, 96, 32)], ids=str)
def test_head_dims(shape: Shape) -> None:
    """Several blocks of columns; several value heads to a key head."""
    check(inputs(3, shape, torch.float32), [Row(2, 0, 0, 1), Row(1, 4, 2, 3)], shape)


def test_gates_at_the_ends_of_their_range() -> None:
    """Steps far below what 1 + exp(x) tells from 1, and beyond the threshold of softplus; no change and a full one."""
    shape, rows = Shape(1, 6, 16, 16), [Row(2, 3, 0, 1)]
    given = inputs(2, shape, torch.float32)
    shift = torch.tensor([-90.0, -20.0, -9.0, 19.99, 25.0, 0.0])
    rates = torch.tensor([2.0, 2.0, 2.0, -6.0, -6.0, -30.0])
    b = torch.tensor([[-100.0, 100.0, 0.0, 0.0, 0.0, 30.0]]).expand(2, 6)
    check(Inputs(given.q, given.k, given.v, torch.zeros(2, 6), b.contiguous(), rates, shift), rows, shape)
    decay = torch.exp(-rates.double().exp() * torch.nn.functional.softplus(shift.double()))
    states = places_of(rows, shape[1:], torch.float32)
    old = states[0, 1].clone()
    silent = Inputs(given.q[:1], given.k[:1], given.v[:1], torch.zeros(1, 6), torch.full((1, 6), -200.0), rates, shift)
    run(silent, states, state_rows([Row(1, 3, 0, 1)]))
    torch.testing.assert_close(states[1, 1].double(), old.double() * decay[:, None, None], rtol=3e-7, atol=0)


def test_keys_of_length_zero() -> None:
    shape = Shape(1, 1, 8, 8)
    given = inputs(2, shape, torch.float32)
    zero = Inputs(torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), *given[2:])
    check(zero, [Row(2, 1, 0, 1)], shape)


@pytest.mark.quick("6, 1")
@pytest.mark.parametrize("cuts", [(1, 1, 5), (6, 1)], ids=str)
def test_bits_do_not_depend_on_cuts_or_neighbours(cuts: tuple[int, ...]) -> None:
    shape = Shape(1, 2, 32, 16)
    given, other = inputs(7, shape, torch.float16), inputs(2, shape, torch.float16, seed=3)
    states = torch.full((4, 2, *shape[1:]), float("nan"))
    whole = run(given, states, state_rows([Row(7, 0, 0, 2)]))
    begin = 0
    for step, count in enumerate(cuts):
        piece = given.piece(begin, begin + count)
        packed = Inputs(*(torch.cat(pair) for pair in zip(other[:5], piece[:5], strict=True)), *given[5:])
        rows = state_rows([Row(2, 0, 3, 3), Row(count, begin, step % 2, 1 - step % 2)])
        assert torch.equal(run(packed, states, rows)[2:], whole[begin : begin + count])
        begin += count
    assert torch.equal(states[len(cuts) % 2, 1], states[2, 1])


def test_a_row_may_leave_no_state() -> None:
    shape = Shape(1, 1, 8, 8)
    states = places_of([Row(1, 2, 0, 0)], shape[1:], torch.float32)
    before = states.clone()
    run(inputs(1, shape, torch.float32), states, state_rows([Row(1, 2, 0, -1)]))
    assert torch.equal(states.nan_to_num(99.0), before.nan_to_num(99.0))


def test_nothing_in_nothing_out() -> None:
    shape = Shape(1, 2, 8, 8)
    states = torch.full((1, 2, *shape[1:]), float("nan"))
    assert run(inputs(0, shape, torch.float32), states, state_rows([])).shape == (0, 2, 8)


def test_messages() -> None:
    shape, rows = Shape(2, 4, 8, 8), state_rows([Row(3, 0, 0, 1)])
    given, states = inputs(3, shape, torch.float32), places_of([Row(3, 0, 0, 1)], shape[1:], torch.float32)
    wrong = {
        r"q: expected \[3, Hk, Dk\] torch.float32 on cpu like v, got \[3, 1, 8\]": {"q": given.q[:, :1]},
        r"k: expected \[3, Hk, Dk\] torch.float32": {"k": given.k.half()},
        r"v: expected a multiple of 2 key heads, got 3 heads": {"v": given.v[:, :3]},
        r"a: expected \[3, 4\] torch.float32 on cpu, got \[3, 3\]": {"a": given.a[:, :3]},
        r"b: expected \[T, C\] of a float type": {"b": given.b.int()},
        r"rates: expected contiguous \[4\] torch.float32": {"rates": given.rates.half()},
        r"shift: expected contiguous \[4\]": {"shift": given.shift[:3]},
    }
    for message, changed in wrong.items():
        with pytest.raises(ValueError, match=message):
            run(given._replace(**changed), states, rows)
    with pytest.raises(ValueError, match=r"states: expected \[N, 4, 8, 8\] torch.float32 on cpu with dense places"):
        run(given, states.transpose(3, 4), rows)
    with pytest.raises(ValueError, match=r"writes: expected contiguous \[1\] torch.int64"):
        run(given, states, replace(rows, write_slots=rows.write_slots.int()))
    wide = inputs(1, Shape(1, 1, 520, 1), torch.float32)
    with pytest.raises(ValueError, match="k: expected a head dim of at most 512, got 520"):
        run(wide, torch.zeros(2, 2, 1, 520, 1), state_rows([Row(1, 0, 0, 1)]))
