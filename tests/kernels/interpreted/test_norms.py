"""Norms against the reference: widths that fill no tile, strides, heads, in-place residual, empty inputs, messages."""

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_kernels.norms import add_layer_norm, add_rms_norm, gated_rms_norm, layer_norm, rms_norm
from tests.kernels.comparison import DTYPES, assert_close, assert_same_rounding, strided

OPS = ReferenceOps()
# (rows, columns): one row, several per program with a partial last one, a width past a power of two
SHAPES = [(1, 64), (35, 80), (3, 1100), (2, 2048)]


def rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.3).to(dtype)


@pytest.mark.quick("(35, 80)-torch.bfloat16", "(3, 1100)-torch.float32")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = strided(rows(shape, dtype)), rows(shape[1:], dtype, 1)
    result = rms_norm(x, weight, 1e-5)
    assert result.is_contiguous()
    assert_close(result, OPS.rms_norm(x, weight, 1e-5), ulps=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_heads(dtype: torch.dtype) -> None:
    """Queries inside a fused projection: a row is a head, heads at a stride of their own."""
    fused, weight = strided(rows((5, 9, 48), dtype)), rows((48,), dtype, 1)
    x = fused[:, 2:7]
    assert_close(rms_norm(x, weight, 1e-6), OPS.rms_norm(x, weight, 1e-6), ulps=2)


@pytest.mark.quick("(35, 80)-torch.bfloat16", "(3, 1100)-torch.float32")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm_updates_the_residual(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = strided(rows(shape, dtype)), strided(rows(shape, dtype, 1))
    weight = rows(shape[1:], dtype, 2)
    normed, total = OPS.add_rms_norm(x, residual.clone(), weight, 1e-5)
    result = add_rms_norm(x, residual, weight, 1e-5)
    assert_close(residual, total, ulps=1)
    assert_close(result, normed, ulps=4 if dtype is torch.bfloat16 else 2)


@pytest.mark.quick("(35, 80)-torch.bfloat16", "(3, 1100)-torch.float32")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Layer norms are right around a large mean, where a difference of squares would lose every digit."""
    x = strided(rows(shape, dtype) + (0 if dtype is torch.bfloat16 else 100))
    weight, bias = rows(shape[1:], dtype, 1), rows(shape[1:], dtype, 2)
    result = layer_norm(x, weight, bias, 1e-5)
    assert result.is_contiguous()
    assert_close(result, OPS.layer_norm(x, weight, bias, 1e-5), ulps=2, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_layer_norm_updates_the_residual(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = strided(rows(shape, dtype)), strided(rows(shape, dtype, 1))
    weight, bias, total = rows(shape[1:], dtype, 2), rows(shape[1:], dtype, 3), x + residual
    result = add_layer_norm(x, residual, weight, bias, 1e-5)
    assert_close(residual, total, ulps=1)
    assert torch.equal(result, layer_norm(residual, weight, bias, 1e-5))


def test_rounding_is_that_of_transformers() -> None:
    """RMSNorm rounds before the weight, LayerNorm only at the end."""
    x, residual, weight = (rows(shape, torch.float16, seed) for seed, shape in enumerate([(4, 500), (4, 500), (500,)]))
    normed, _ = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert_same_rounding(rms_norm(x, weight, 1e-5), OPS.rms_norm(x, weight, 1e-5))
    assert_same_rounding(layer_norm(x, weight, weight, 1e-5), OPS.layer_norm(x, weight, weight, 1e-5))
    assert_same_rounding(add_rms_norm(x, residual, weight, 1e-5), normed)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_before_a_wider_weight_nothing_is_rounded(dtype: torch.dtype) -> None:
    x, residual, weight = rows((4, 500), dtype), rows((4, 500), dtype, 1), rows((500,), torch.float32, 2)
    normed, _ = OPS.add_rms_norm(x, residual.clone(), weight, 1e-5)
    for result, expected in (
        (rms_norm(x, weight, 1e-5), OPS.rms_norm(x, weight, 1e-5)),
        (add_rms_norm(x, residual, weight, 1e-5), normed),
    ):
        assert_close(result, expected, ulps=4 if dtype is torch.bfloat16 else 1)
        if dtype is torch.float16:
            assert_same_rounding(result, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_rms_norm(dtype: torch.dtype) -> None:
    x, gate = strided(rows((5, 9, 48), dtype))[:, 2:7], strided(rows((5, 6, 48), dtype, 1))[:, 1:]
    weight = rows((48,), dtype, 2)
    result, expected = gated_rms_norm(x, weight, gate, 1e-6), OPS.gated_rms_norm(x, weight, gate, 1e-6)
    assert result.is_contiguous()
    assert_close(result, expected, ulps=4)
    if dtype is torch.float16:
        assert_same_rounding(result, expected)


def test_a_row_does_not_see_its_neighbours() -> None:
    x, weight = rows((20, 80), torch.float32), rows((80,), torch.float32, 1)
    alone = rms_norm(x[7:8], weight, 1e-5)
    x[8:] = float("nan")
    assert torch.equal(rms_norm(x, weight, 1e-5)[7:8], alone)


def test_nothing_in_nothing_out() -> None:
    empty, weight = torch.empty(0, 64), torch.ones(64)
    assert rms_norm(empty, weight, 1e-5).shape == (0, 64)
    assert rms_norm(torch.empty(0, 3, 64), weight, 1e-5).shape == (0, 3, 64)
    assert add_rms_norm(empty, empty.clone(), weight, 1e-5).shape == (0, 64)
    assert layer_norm(empty, weight, weight, 1e-5).shape == (0, 64)
    assert gated_rms_norm(torch.empty(0, 3, 64), weight, torch.empty(0, 3, 64), 1e-5).shape == (0, 3, 64)


def test_messages() -> None:
    x, weight = torch.ones(2, 64), torch.ones(64)
    with pytest.raises(ValueError, match=r"weight: expected contiguous \[64\] torch.float32 on cpu, got \[32\]"):
        rms_norm(x, weight[:32], 1e-5)
    with pytest.raises(ValueError, match=r"x: expected \[T, C\] of a float type"):
        rms_norm(x.int(), weight, 1e-5)
    with pytest.raises(ValueError, match=r"x: expected \[T, C\] .* dense last dimension"):
        layer_norm(x.t(), weight[:2], weight[:2], 1e-5)
    with pytest.raises(ValueError, match=r"residual: expected \[2, 64\] torch.float32"):
        add_rms_norm(x, x.half(), weight, 1e-5)
    with pytest.raises(ValueError, match="bias: expected"):
        layer_norm(x, weight, weight.half(), 1e-5)
    heads = torch.ones(2, 3, 64)
    with pytest.raises(ValueError, match=r"gate: expected \[2, 3, 64\] like x, got \[1, 3, 64\]"):
        gated_rms_norm(heads, weight, heads[:1], 1e-5)
    with pytest.raises(ValueError, match=r"weight: expected contiguous \[64\] torch.float16"):
        gated_rms_norm(heads.half(), weight, heads.half(), 1e-5)
