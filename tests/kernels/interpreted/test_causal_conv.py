"""The convolution against the reference: rows shorter than the filter, without tokens, over several tiles; states that
stay in their place; widths that fill no block."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import StateRows
from hydra_kernels.causal_conv import TILE, causal_conv
from tests.kernels.comparison import DTYPES, assert_close, strided
from tests.kernels.poison import poisoned_memory  # noqa: F401
from tests.kernels.states import Row, by_reference, places_of, state_rows

# Begins over a state of somebody else; shorter than the filter, in one place and in two; without tokens; long.
ROWS = [
    Row(2, 0, 0, 1),
    Row(1, 7, 2, 2),
    Row(2, 9, 4, 3),
    Row(0, 3, 5, 6),
    Row(0, 0, 7, 8),
    Row(2 * TILE + 3, 5, 9, 9),
    Row(TILE, 0, 10, 10),
]
DECODES = [Row(1, 4, 0, 1), Row(1, 9, 2, 3), Row(1, 0, 4, 5)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(x: Tensor, weight: Tensor, states: Tensor, rows: StateRows, tile: int = TILE) -> Tensor:
    """Results with the states of layer 1."""
    counts = rows.cu_q.diff().tolist()
    tiles = [[row, first] for row, count in enumerate(counts) for first in range(0, max(count, 1), tile)]
    table = torch.tensor(tiles, dtype=torch.int32).view(-1, 2)
    vectors = rows.cu_q, rows.starts, rows.read_slots, rows.write_slots
    return causal_conv(x, weight, states[:, 1], table, *vectors, tokens=tile)


@pytest.mark.quick("37-4-torch.float32")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "taps"), [(37, 4), (300, 2)])
def test_rows_of_every_kind(channels: int, taps: int, dtype: torch.dtype) -> None:
    rows, states = state_rows(ROWS), places_of(ROWS, (taps - 1, channels), dtype)
    x, weight = strided(random(int(rows.cu_q[-1]), channels, dtype=dtype)), random(channels, taps, dtype=dtype, seed=1)
    expected, after = by_reference(states, rows, x, weight)
    result = run(x, weight, states, rows)
    assert result.is_contiguous()
    assert_close(result, expected, ulps=2, atol=2e-6)
    assert torch.equal(states.nan_to_num(99.0), after.nan_to_num(99.0))


@pytest.mark.quick("bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decodes_take_tiles_of_one_token(dtype: torch.dtype) -> None:
    rows, states = state_rows(DECODES), places_of(DECODES, (3, 37), dtype)
    x, weight = strided(random(3, 37, dtype=dtype)), random(37, 4, dtype=dtype, seed=1)
    before = states.clone()
    expected, after = by_reference(states, rows, x, weight)
    result = run(x, weight, states, rows, 1)
    assert_close(result, expected, ulps=2, atol=2e-6)
    assert torch.equal(states.nan_to_num(99.0), after.nan_to_num(99.0))
    assert torch.equal(run(x, weight, before, rows, TILE), result)


@pytest.mark.quick("1, 2, 35")
@pytest.mark.parametrize("cuts", [(1, 2, 35), (TILE, 22), (37, 1)], ids=str)
def test_bits_do_not_depend_on_cuts(cuts: tuple[int, ...]) -> None:
    x, weight = random(38, 20, dtype=torch.float16), random(20, 4, dtype=torch.float16, seed=1)
    states = torch.full((3, 2, 3, 20), float("nan"), dtype=torch.float16)
    whole = run(x, weight, states, state_rows([Row(38, 0, 0, 2)]))
    begin = 0
    for step, count in enumerate(cuts):
        rows = state_rows([Row(count, begin, step % 2, 1 - step % 2)])
        part = run(x[begin : begin + count], weight, states, rows, 1 if count == 1 else TILE)
        assert torch.equal(part, whole[begin : begin + count])
        begin += count
    assert torch.equal(states[len(cuts) % 2, 1], states[2, 1])


@pytest.mark.quick("37-4-torch.float32")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "taps"), [(37, 4), (300, 2)])
def test_programs_find_their_rows(channels: int, taps: int, dtype: torch.dtype) -> None:
    """Bits as of tiles that the host made, with empty rows and tokens behind the last row as padding. Rows without
    tokens leave nothing."""
    filled = [row for row in ROWS if row.tokens]
    rows = state_rows([*filled, *(Row(0, 0, 0, -1),) * 3])
    states = places_of(ROWS, (taps - 1, channels), dtype)
    num_tokens = int(rows.cu_q[-1])
    x, weight = strided(random(num_tokens + 9, channels, dtype=dtype)), random(channels, taps, dtype=dtype, seed=1)
    x[num_tokens:] = float("nan")
    after = states.clone()
    expected = run(x[:num_tokens], weight, after, state_rows(filled))
    vectors = rows.cu_q, rows.starts, rows.read_slots, rows.write_slots
    result = causal_conv(x, weight, states[:, 1], None, *vectors, tokens=TILE)
    assert torch.equal(result[:num_tokens], expected)
    assert torch.equal(states.nan_to_num(99.0), after.nan_to_num(99.0))
    nothing = causal_conv(x, weight, states[:, 1], None, torch.zeros_like(vectors[0]), *vectors[1:], tokens=TILE)
    assert nothing.shape == x.shape and torch.equal(states.nan_to_num(99.0), after.nan_to_num(99.0))


def test_a_row_may_leave_no_state() -> None:
    rows, states = state_rows([Row(3, 2, 0, -1)]), places_of([Row(3, 2, 0, 0)], (3, 20), torch.float32)
    before = states.clone()
    run(random(3, 20), random(20, 4, seed=1), states, rows)
    assert torch.equal(states.nan_to_num(99.0), before.nan_to_num(99.0))


def test_nothing_in_nothing_out() -> None:
    states = torch.full((1, 2, 3, 20), float("nan"))
    assert run(torch.empty(0, 20), random(20, 4), states, state_rows([])).shape == (0, 20)


def test_messages() -> None:
    rows, states = state_rows(DECODES), places_of(DECODES, (3, 8), torch.float32)
    x, weight = random(3, 8), random(8, 4)
    with pytest.raises(ValueError, match=r"weight: expected contiguous \[8, 2 to 16\] torch.float32 on cpu, got \[7,"):
        run(x, weight[:7], states, rows)
    with pytest.raises(ValueError, match="weight: expected"):
        run(x, random(8, 17), states, rows)
    with pytest.raises(ValueError, match=r"states: expected \[N, 3, 8\] torch.float32 on cpu with dense places"):
        run(x, weight, states.half(), rows)
    with pytest.raises(ValueError, match=r"states: expected \[N, 2, 8\]"):
        run(x, weight[:, :3].contiguous(), states, rows)
    with pytest.raises(ValueError, match=r"reads: expected contiguous \[3\] torch.int64"):
        run(x, weight, states, replace(rows, read_slots=rows.cu_q))
    with pytest.raises(ValueError, match="tokens: expected 1 or 16, got 8"):
        run(x, weight, states, rows, 8)
    vectors = rows.cu_q, rows.starts, rows.read_slots, rows.write_slots
    with pytest.raises(ValueError, match=r"tiles: expected \[M, 2\] for 3 rows with tiles of 1 tokens, got None"):
        causal_conv(x, weight, states[:, 1], None, *vectors, tokens=1)
    many = torch.zeros(1026, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"tiles: expected \[M, 2\] for 1025 rows"):
        causal_conv(x, weight, states[:, 1], None, many, *(many[:1025],) * 3, tokens=TILE)
    for bad in (torch.zeros(3, 3).int(), torch.zeros(3, 2).long()):
        with pytest.raises(ValueError, match=r"tiles: expected contiguous \[.*\] torch.int32"):
            causal_conv(x, weight, states[:, 1], bad, *vectors, tokens=1)
