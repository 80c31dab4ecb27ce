"""Rounding of weights to 8 and 4 bits: the native extension against the formulas, at every level and thread count;
and words that are stored inputs first."""

from __future__ import annotations

import pytest
import torch

from hydra_engine import _C
from hydra_engine.backend.cpu.linear import DTYPE_CODES
from hydra_engine.backend.cpu.rounding import rounded_matrix, transposed_words
from hydra_engine.models.loading.quantize import quantize_in_torch, quantized_matrix

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def matrix(rows: int, columns: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    if kind == "ties":  # the same magnitude twice with either sign, and halves of a step
        weight = (weight * 4).round() / 4
    if kind == "small":  # 1 / the largest number is infinite, or steps vanish in the type
        weight[0, ::3] = 0
        weight[-1] = 0
        weight *= 1e-7 if dtype is torch.float16 else 1e-38
    if kind == "large":
        weight *= 1e4 if dtype is torch.float16 else 1e30
    if kind == "not finite":
        weight[0, 0], weight[0, -1], weight[-1, columns // 2] = torch.nan, torch.inf, -torch.inf
    return weight.to(dtype)


SHAPES = [(1, 32), (3, 96), (41, 864), (1, 1), (5, 33), (300, 1024)]


@pytest.mark.quick("41-864", "5-33")
@pytest.mark.parametrize("kind", ["normal", "ties", "small", "large", "not finite"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_native_bits_are_those_of_the_formulas(
    isa: str, threads: int, shape: tuple[int, int], dtype: torch.dtype, kind: str
) -> None:
    weight = matrix(*shape, kind, dtype)
    for num_bits in (8, 4):
        expected, result = quantize_in_torch(weight, num_bits), quantized_matrix(weight, num_bits)
        assert result.stack_key == expected.stack_key
        assert torch.equal(result.values, expected.values)
        torch.testing.assert_close(result.scales, expected.scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_nothing_beside_the_result_is_written(isa: str, num_bits: int) -> None:
    weight, guard = torch.randn(7, 96), 64
    expected = quantize_in_torch(weight, num_bits)
    values = torch.full((expected.values.nbytes + 2 * guard,), 0xA5, dtype=torch.uint8)
    scales = torch.full((expected.scales.numel() + 2 * guard,), -7.0)
    places = values[guard:].data_ptr(), scales[guard:].data_ptr()
    _C.round_matrix(weight.data_ptr(), DTYPE_CODES[weight.dtype], 7, 96, num_bits, *places)
    assert torch.equal(values[guard:-guard], expected.values.view(torch.uint8).flatten())
    assert torch.equal(scales[guard:-guard], expected.scales.flatten())
    assert (values[:guard] == 0xA5).all() and (values[-guard:] == 0xA5).all()
    assert (scales[:guard] == -7).all() and (scales[-guard:] == -7).all()


def test_rows_may_lie_apart_or_be_wider_than_float32() -> None:
    weight = torch.randn(6, 128, dtype=torch.float64)
    assert torch.equal(rounded_matrix(weight[:, 32:96], 4).values, quantize_in_torch(weight[:, 32:96], 4).values)
    assert rounded_matrix(weight, 8).scales.dtype is torch.float32


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32 inputs"):
        rounded_matrix(torch.randn(4, 48), 4)
    with pytest.raises(ValueError, match="weight: expected"):
        rounded_matrix(torch.zeros(4, 32, dtype=torch.int8).to("meta").float(), 8)


@pytest.mark.parametrize("shape", [(16, 16), (1, 1), (5, 700), (33, 17), (0, 3), (512, 256), (40, 513)])
def test_words_are_transposed_and_nothing_beside_them_is_written(threads: int, shape: tuple[int, int]) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
    assert torch.equal(transposed_words(words), words.T)
    target = torch.full((words.numel() + 2,), -7, dtype=torch.int32)
    _C.transpose_words(words.data_ptr(), *shape, target[1:].data_ptr())
    assert torch.equal(target[1:-1], words.T.flatten()) and target[0] == target[-1] == -7


def test_words_of_another_type_or_layout_are_refused() -> None:
    words = torch.zeros(4, 8, dtype=torch.int32)
    for wrong in (words.T, words.long(), words.view(-1)):
        with pytest.raises(ValueError, match="words: expected contiguous rows of int32"):
            transposed_words(wrong)
