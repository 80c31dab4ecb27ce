"""Rows rounded to 8-bit floats against the formula in torch, bit for bit: every magnitude there is, rows that end
inside of a word, groups, numbers that are not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.quantized import FLOAT8, QuantizedWeight, float8_product, float8_rows
from hydra_kernels.float8_rows import BLOCK, PART, round_rows
from hydra_kernels.quantized_linear import pack
from tests.kernels.comparison import DTYPES, strided
from tests.kernels.poison import poisoned_memory  # noqa: F401

SHAPES = [(7, 64, 64), (3, 588, 588), (1, 40, 40), (6, 256, BLOCK), (9, 640, BLOCK)]  # rows, inputs, of a group


def rows_of(num_rows: int, num_in: int, dtype: torch.dtype) -> Tensor:
    """Rows of magnitudes far apart, so that many numbers become subnormal and others zero."""
    generator = torch.Generator().manual_seed(0)
    numbers, sizes = torch.randn(2, num_rows, num_in, generator=generator)
    return strided((numbers * torch.exp2(4 * sizes)).to(dtype))


def width_of(num_in: int) -> int:
    return -(-num_in // (2 * PART)) * PART


def in_order(numbers: Tensor) -> Tensor:
    """Bytes of the words, in the order of a row's inputs."""
    return numbers.view(torch.uint8).unflatten(1, (-1, PART, 2)).mT.flatten(1)


def check(x: Tensor, group_size: int) -> None:
    num_rows, num_in = x.shape
    numbers, steps = round_rows(x, width_of(num_in), group_size)
    expected, expected_steps = float8_rows(x, group_size)
    octets = in_order(numbers)
    assert torch.equal(steps[:num_rows], expected_steps)
    assert torch.equal(octets[:num_rows, :num_in].view(FLOAT8).float(), expected.float())
    assert not octets[num_rows:].any() and not octets[:, num_in:].any(), "what a product reads besides is 0"


@pytest.mark.quick("(3, 588, 588)-torch.bfloat16", "(9, 640, 128)-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(rows_of(*shape[:2], dtype), shape[2])


def test_every_number_of_sixteen_bits_is_rounded_to_the_nearest() -> None:
    """Numbers of bfloat16 up to 448, each beside 448 itself, so that scaling does not change them; ties too."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.abs() <= 448].float()
    x = torch.cat((numbers, torch.zeros(-len(numbers) % 4095))).view(-1, 4095)
    check(torch.cat((x, torch.full((len(x), 1), 448.0)), dim=1), 4096)


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # infinity times 0
def test_what_is_not_finite_stays_so_and_what_is_tiny_is_zero() -> None:
    x = rows_of(6, 256, torch.float32).clone()
    x[0, 3], x[1, 200], x[2, 7] = float("nan"), float("inf"), -float("inf")
    x[3] = 0
    x[4] = 1e-32
    weight = QuantizedWeight(torch.ones(5, 256).to(FLOAT8), torch.ones(5, 1))
    numbers, steps = round_rows(x, 128, 256)
    sums = in_order(numbers).view(FLOAT8).float().sum(1) * steps[:, 0]
    assert sums[:3].isnan().all() and torch.equal(sums[3:5], torch.zeros(2)) and sums[5].isfinite()
    found = float8_product(x, weight)
    assert found[:3].isnan().all() and torch.equal(found[3:5], torch.zeros(2, 5))


@pytest.mark.parametrize("group_size", [256, BLOCK])
def test_rows_and_words_of_a_weight_are_in_one_order(group_size: int) -> None:
    """The product of rounded rows and packed words is the formula's, whatever their order is."""
    x = rows_of(4, 256, torch.bfloat16)
    numbers = torch.randn(20, 256, generator=torch.Generator().manual_seed(1)).to(FLOAT8)
    weight = QuantizedWeight(numbers, torch.rand(20, 256 // group_size))
    packed = pack(weight.values, weight.scales, None, 8)
    rows, steps = round_rows(x, packed.words.shape[1], group_size)
    operands = (part.view(FLOAT8).float().unflatten(1, (-1, group_size)) for part in (rows, packed.words))
    sums = torch.einsum("tgk,ngk->tgn", *operands)
    found = torch.einsum("tgn,tg,ng->tn", sums, steps, weight.scales)
    torch.testing.assert_close(found, float8_product(x, weight), rtol=1e-4, atol=1e-4)  # sums in another order


def test_steps_lie_as_tensor_cores_read_them() -> None:
    _, by_rows = round_rows(torch.ones(5, 64), 32, 64)
    assert by_rows.shape == (5, 1) and by_rows.is_contiguous()
    numbers, of_blocks = round_rows(torch.ones(5, 256), 128, BLOCK)
    assert numbers.shape == (8, 256) and of_blocks.shape == (8, 2) and of_blocks.stride() == (1, 8)


def test_nothing_in_nothing_out() -> None:
    numbers, steps = round_rows(torch.empty(0, 256), 128, BLOCK)
    assert numbers.shape == (0, 256) and steps.shape == (0, 2)


@pytest.mark.parametrize(("width", "group_size"), [(128, 64), (96, 256), (129, 256), (100, 200)])
def test_messages(width: int, group_size: int) -> None:
    with pytest.raises(ValueError, match=r"x: expected \[M, K\] of whole groups of"):
        round_rows(torch.ones(2, 256), width, group_size)
