"""Linears against the reference: sizes that fill no tile, epilogues, strides, split inputs, rows that keep bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import Activation
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_kernels._common import small_launch
from hydra_kernels.activation import ACTIVATIONS
from hydra_kernels.linear import MAX_SMALL_ROWS, invariant_linear, small_linear
from tests.kernels.comparison import DTYPES, assert_close, assert_same_rounding, strided
from tests.kernels.poison import poisoned_memory  # noqa: F401

LINEARS = [small_linear, invariant_linear]
OPS = ReferenceOps()
# (rows, outputs, inputs): a vector, inputs of two rows of patches, a full tile with a rest of inputs, split inputs
SHAPES = [(1, 37, 200), (3, 70, 588), (16, 33, 257), (2, 20, 1100)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(num_out: int, num_in: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (random(num_out, num_in, seed=1) * num_in**-0.5).to(dtype)


@pytest.mark.quick("(1, 37, 200)-torch.bfloat16", "(3, 70, 588)-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("linear", LINEARS)
def test_linear(linear: Callable[..., Tensor], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_rows, num_out, num_in = shape
    x, weight = strided(random(num_rows, num_in).to(dtype)), weight_of(num_out, num_in, dtype)
    bias, residual = random(num_out, seed=2).to(dtype), strided(random(num_rows, num_out, seed=3).to(dtype))
    result = linear(x, weight, bias, residual)
    assert result.is_contiguous()
    assert_close(result, OPS.linear(x, OPS.pack_linear(weight, bias), residual=residual), ulps=4, atol=4e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]], ids=str)
def test_a_rounded_product_has_the_bits_of_one_that_was_stored(shape: tuple[int, int, int]) -> None:
    num_rows, num_out, num_in = shape
    x, weight = random(num_rows, num_in).half(), weight_of(num_out, num_in, torch.float16)
    bias, residual = random(num_out, seed=2).half(), strided(random(num_rows, num_out, seed=3).half())
    stored = residual + small_linear(x, weight, bias)
    assert torch.equal(small_linear(x, weight, bias, residual, rounded=True), stored)
    assert not torch.equal(small_linear(x, weight, bias, residual), stored)


@pytest.mark.quick("small_linear-2-gelu]", "invariant_linear-2-silu")
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("linear", "num_rows"), [(small_linear, 1), (small_linear, 2), (invariant_linear, 2)])
def test_epilogue(linear: Callable[..., Tensor], num_rows: int, act: Activation) -> None:
    """Logits in float32 from 16-bit values, with a float32 bias; everything else is left out once."""
    x, weight, bias = random(num_rows, 64).bfloat16(), weight_of(20, 64, torch.bfloat16), random(20, seed=2)
    result = linear(x, weight, bias, act=act, out_dtype=torch.float32)
    packed = OPS.pack_linear(weight, bias)
    assert_close(result, OPS.linear(x, packed, act=act, out_dtype=torch.float32), ulps=8, atol=4e-6)


@pytest.mark.quick("[small_linear-16", "[invariant_linear-16")
@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("linear", LINEARS)
def test_everything_is_rounded_once(linear: Callable[..., Tensor], num_rows: int) -> None:
    x, weight = random(num_rows, 96).half(), weight_of(200, 96, torch.float16)
    bias, residual = random(200, seed=2).half(), random(num_rows, 200, seed=3).half()
    expected = OPS.linear(x, OPS.pack_linear(weight, bias), act="gelu_tanh", residual=residual)
    assert_same_rounding(linear(x, weight, bias, residual, "gelu_tanh"), expected)


def test_the_inputs_of_few_outputs_are_split() -> None:
    """The shapes above therefore run both ways."""
    assert small_launch(2, 20, 1100, torch.float32, 90).splits > 1
    assert small_launch(2, 33, 257, torch.bfloat16, 90).splits == 1
    assert all(small_launch(2, size, 4096, torch.bfloat16, 90).splits == 1 for size in (3584, 4096, 22016))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_every_step(dtype: torch.dtype) -> None:
    """Two tiles of rows and more tiles than programs; what the other rows hold does not matter either."""
    x, weight, residual = random(135, 80).to(dtype), weight_of(260, 80, dtype), random(135, 260, seed=3).to(dtype)
    full = invariant_linear(x, weight, None, residual, "silu")
    for rows in (slice(0, 1), slice(126, 131)):
        part = x.clone()
        part[: rows.start] = float("nan")
        part[rows.stop :] = float("nan")
        assert torch.equal(invariant_linear(part, weight, None, residual, "silu")[rows], full[rows])
        assert torch.equal(invariant_linear(x[rows], weight, None, residual[rows], "silu"), full[rows])


@pytest.mark.quick("[3]")
@pytest.mark.parametrize("num_sms", [1, 3, 100])
def test_every_tile_is_computed_by_any_number_of_programs(num_sms: int) -> None:
    """Ten tiles of rows, of which eight make a group."""
    x, weight = random(600, 16), weight_of(150, 16)
    result = invariant_linear(x, weight, num_sms=num_sms)
    assert_close(result, x @ weight.T, ulps=4, atol=4e-6)


@pytest.mark.slow  # the same of quantised weights is quick
def test_few_rows_do_not_see_each_other() -> None:
    x, weight = random(16, 1100), weight_of(20, 1100)
    full = small_linear(x, weight)
    assert torch.equal(small_linear(x[3:5], weight), full[3:5])
    x[5:] = float("nan")
    assert torch.equal(small_linear(x, weight)[:5], full[:5])


def test_nothing_in_nothing_out() -> None:
    for linear in LINEARS:
        assert linear(torch.empty(0, 8), torch.ones(5, 8)).shape == (0, 5)
        assert linear(torch.ones(3, 8), torch.ones(0, 8)).shape == (3, 0)


def test_messages() -> None:
    x, weight = torch.ones(2, 8), torch.ones(4, 8)
    with pytest.raises(ValueError, match=f"x: expected at most {MAX_SMALL_ROWS} rows, got 17"):
        small_linear(torch.ones(17, 8), weight)
    for linear in LINEARS:
        with pytest.raises(ValueError, match=r"x: expected \[T, C\] of a float type"):
            linear(x.int(), weight)
        with pytest.raises(ValueError, match=r"weight: expected contiguous \[N, 8\] torch.float32, got \[4, 7\]"):
            linear(x, weight[:, :7])
        with pytest.raises(ValueError, match="weight: expected contiguous"):
            linear(x, weight.half())
        with pytest.raises(ValueError, match=r"bias: expected contiguous \[4\] torch.float32"):
            linear(x, weight, weight[0])
        with pytest.raises(ValueError, match=r"residual: expected \[2, 4\] torch.float16 on cpu"):
            linear(x, weight, None, torch.ones(2, 4), out_dtype=torch.float16)
        with pytest.raises(ValueError, match=r"act: expected one of none, silu, .*, got 'relu'"):
            linear(x, weight, act="relu")
        with pytest.raises(ValueError, match=r"out_dtype: expected a float type, got torch.int32"):
            linear(x, weight, out_dtype=torch.int32)
