"""Linears with weights of 8 bits (integers and floats) and of 4 against the product with the dequantised weight: sizes
that fill no tile, group sizes, offsets, epilogues, split inputs, rows that keep bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import Activation
from hydra_engine.backend.quantized import FLOAT8, SCALE_DTYPES, QuantizedWeight, quantized
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_kernels._common import few_rows_quantized_launch
from hydra_kernels.activation import ACTIVATIONS
from hydra_kernels.quantized_linear import (
    MAX_SMALL_ROWS,
    PackedWeight,
    invariant_quantized_linear,
    pack,
    small_quantized_linear,
)
from tests.kernels.comparison import DTYPES, assert_close, assert_same_rounding, strided
from tests.kernels.poison import poisoned_memory  # noqa: F401
from tests.kernels.quantized import dequantized

LINEARS = [small_quantized_linear, invariant_quantized_linear]
OPS = ReferenceOps()
# (rows, outputs, inputs, inputs of a group): whole rows that end inside of a block, groups smaller than a part, as
# large as a part, that no block holds a whole number of, and as large as a block; split inputs
SHAPES = [(1, 37, 588, 588), (3, 70, 144, 16), (16, 33, 288, 32), (2, 20, 384, 96), (17, 130, 256, 128)]
SPLIT = (33, 20, 1152, 128)
FLOATS = 0  # in place of a number of bits: 8-bit floats


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(
    num_out: int,
    num_in: int,
    group_size: int,
    num_bits: int,
    *,
    scale_dtype: torch.dtype = torch.float16,
    offsets: bool = False,
) -> QuantizedWeight:
    numbers = random(num_out, num_in, seed=1)
    if num_bits == FLOATS:
        steps = random(num_out, num_in // group_size, seed=4).exp() * num_in**-0.5
        return QuantizedWeight(numbers.to(FLOAT8), steps.to(scale_dtype))
    weight = quantized(numbers * num_in**-0.5, num_bits, group_size, scale_dtype)
    if not offsets:
        return weight
    shifts = random(*weight.scales.shape, seed=4) * num_in**-0.5
    return QuantizedWeight(weight.values, weight.scales, shifts, num_bits)


def packed(weight: QuantizedWeight) -> PackedWeight:
    return pack(weight.values, weight.scales, weight.offsets, weight.num_bits)


def expected_of(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: Activation = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    plain = OPS.pack_linear(weight.dequantized(torch.float32), bias)
    return OPS.linear(x.float(), plain, act=act, residual=None if residual is None else residual.float()).to(
        out_dtype or x.dtype
    )


@pytest.mark.parametrize("num_bits", [4, 8, FLOATS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_packed_is_the_weight(shape: tuple[int, int, int, int], num_bits: int) -> None:
    weight = weight_of(*shape[1:], num_bits, offsets=True)
    found = packed(weight)
    assert found.words.dtype is torch.int16 and found.words.is_contiguous() and found.scales.is_contiguous()
    assert torch.equal(dequantized(found), weight.dequantized(torch.float32))


@pytest.mark.quick("32)-4-torch.bfloat16", "small_quantized_linear-(2, 20, 384, 96)-0-torch.float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_bits", [4, 8, FLOATS])
@pytest.mark.parametrize("shape", [*SHAPES, SPLIT], ids=str)
@pytest.mark.parametrize("linear", LINEARS)
def test_linear(
    linear: Callable[..., Tensor], shape: tuple[int, int, int, int], num_bits: int, dtype: torch.dtype
) -> None:
    num_rows, num_out, num_in, group_size = shape
    weight = weight_of(num_out, num_in, group_size, num_bits, offsets=num_rows % 2 == 1)
    x, bias = strided(random(num_rows, num_in).to(dtype)), random(num_out, seed=2).to(dtype)
    residual = strided(random(num_rows, num_out, seed=3).to(dtype))
    result = linear(x, packed(weight), bias, residual)
    assert result.is_contiguous()
    assert_close(result, expected_of(x, weight, bias, residual), ulps=4, atol=8e-6)


@pytest.mark.quick("64-torch.bfloat16")
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [64, 256])
def test_scales_of_any_dtype_and_offsets_are_not_rounded(group_size: int, scale_dtype: torch.dtype) -> None:
    x = random(2, 256)
    for num_bits in (4, 8, FLOATS):
        weight = weight_of(20, 256, group_size, num_bits, scale_dtype=scale_dtype, offsets=True)
        assert packed(weight).scales.dtype is scale_dtype
        for linear in LINEARS:
            assert_close(linear(x, packed(weight)), expected_of(x, weight), ulps=4, atol=4e-6)


@pytest.mark.slow
def test_every_number_is_multiplied_exactly() -> None:
    """Covers all numbers at every place of a word, also -8 and -128, to which nothing is rounded, and subnormal
    ones."""
    eight = QuantizedWeight(torch.arange(-128, 128, dtype=torch.int8).view(4, 64), torch.ones(4, 1))
    four = QuantizedWeight(torch.arange(256, dtype=torch.int16).to(torch.uint8).view(4, 64), torch.ones(4, 1), None, 4)
    octets = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    octets[octets & 127 == 127] = 0  # NaN, which no weight has
    floats = QuantizedWeight(octets.view(FLOAT8).view(4, 64), torch.ones(4, 1))
    for weight in (eight, four, floats):
        unit = torch.eye(weight.num_in)[:64]
        for linear, dtype in product(LINEARS, DTYPES):
            found = linear(unit.to(dtype), packed(weight), out_dtype=torch.float32)
            assert torch.equal(found, weight.numbers().float().T[:64])


@pytest.mark.quick("gelu_tanh")
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("linear", LINEARS)
def test_epilogue(linear: Callable[..., Tensor], act: Activation) -> None:
    """Logits in float32 from 16-bit values, with a float32 bias; everything else is left out once."""
    x, weight, bias = random(2, 64).bfloat16(), weight_of(20, 64, 32, 4), random(20, seed=2)
    result = linear(x, packed(weight), bias, act=act, out_dtype=torch.float32)
    expected = expected_of(x, weight, bias, act=act, out_dtype=torch.float32)
    assert_close(result, expected, ulps=8, atol=4e-6)


@pytest.mark.parametrize("linear", LINEARS)
def test_everything_is_rounded_once(linear: Callable[..., Tensor]) -> None:
    x, weight = random(16, 96).half(), weight_of(200, 96, 32, 4, offsets=True)
    bias, residual = random(200, seed=2).half(), random(16, 200, seed=3).half()
    expected = expected_of(x, weight, bias, residual, "gelu_tanh")
    assert_same_rounding(linear(x, packed(weight), bias, residual, "gelu_tanh"), expected)


def test_the_inputs_of_few_outputs_are_split() -> None:
    """The shapes above therefore run both ways. The split is the same for every number of rows."""
    assert few_rows_quantized_launch(33, 20, 1152, torch.bfloat16).splits > 1
    assert all(few_rows_quantized_launch(1, shape[1], shape[2], torch.bfloat16).splits == 1 for shape in SHAPES[:4])
    splits = {few_rows_quantized_launch(rows, 4096, 4096, torch.bfloat16).splits for rows in (1, 2, 16)}
    assert splits == {4}
    assert few_rows_quantized_launch(16, 152064, 3584, torch.bfloat16).splits == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_bits", [4, 8, FLOATS])
def test_a_row_has_the_same_bits_in_every_step(num_bits: int, dtype: torch.dtype) -> None:
    """Several tiles of rows and more tiles than programs; what the other rows hold does not matter either."""
    x, residual = random(67, 96).to(dtype), random(67, 290, seed=3).to(dtype)
    weight = packed(weight_of(290, 96, 48, num_bits, offsets=True))
    full = invariant_quantized_linear(x, weight, None, residual, "silu")
    for rows in (slice(0, 1), slice(62, 67)):
        part = x.clone()
        part[: rows.start] = float("nan")
        part[rows.stop :] = float("nan")
        assert torch.equal(invariant_quantized_linear(part, weight, None, residual, "silu")[rows], full[rows])
        assert torch.equal(invariant_quantized_linear(x[rows], weight, None, residual[rows], "silu"), full[rows])


@pytest.mark.slow
@pytest.mark.parametrize("num_sms", [1, 3, 100])
def test_every_tile_is_computed_by_any_number_of_programs(num_sms: int) -> None:
    x, weight = random(300, 16), weight_of(150, 16, 16, 8)
    result = invariant_quantized_linear(x, packed(weight), num_sms=num_sms)
    assert_close(result, expected_of(x, weight), ulps=4, atol=4e-6)


@pytest.mark.slow
def test_few_rows_do_not_see_each_other() -> None:
    x, weight = random(16, 1152).half(), packed(weight_of(20, 1152, 128, 4, offsets=True))
    full = small_quantized_linear(x, weight)
    assert torch.equal(small_quantized_linear(x[3:5], weight), full[3:5])
    x[5:] = float("nan")
    assert torch.equal(small_quantized_linear(x, weight)[:5], full[:5])


def test_nothing_in_nothing_out() -> None:
    for linear in LINEARS:
        assert linear(torch.empty(0, 64), packed(weight_of(5, 64, 32, 4))).shape == (0, 5)
        assert linear(
            torch.ones(3, 64), packed(weight_of(5, 64, 32, 4).rows(torch.empty(0, dtype=torch.int64)))
        ).shape == (3, 0)


def test_messages() -> None:
    x, weight = torch.ones(2, 64), packed(weight_of(4, 64, 32, 8))
    with pytest.raises(ValueError, match=f"x: expected at most {MAX_SMALL_ROWS} rows, got 65"):
        small_quantized_linear(torch.ones(65, 64), weight)
    with pytest.raises(
        ValueError, match="scales: expected one for each output, or for each multiple of 16 of 64 inputs"
    ):
        pack(torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 8), None, 8)
    for linear in LINEARS:
        with pytest.raises(ValueError, match=r"x: expected \[T, C\] of a float type"):
            linear(x.int(), weight)
        with pytest.raises(ValueError, match=r"x: expected \[T, 64\] on cpu, got \[2, 63\]"):
            linear(x[:, 1:], weight)
        with pytest.raises(ValueError, match=r"bias: expected contiguous \[4\] torch.float32"):
            linear(x, weight, x[0])
        with pytest.raises(ValueError, match=r"residual: expected \[2, 4\] torch.float16 on cpu"):
            linear(x, weight, None, torch.ones(2, 4), out_dtype=torch.float16)
        with pytest.raises(ValueError, match=r"act: expected one of none, silu, .*, got 'relu'"):
            linear(x, weight, act="relu")
