"""Epilogues of a matrix product, against their formula in float64: bias, activation, residual, one rounding."""

import pytest
import torch

from hydra_engine.backend.base import Activation
from hydra_engine.backend.reference.ops import activation
from hydra_kernels.epilogue import finish
from tests.kernels.comparison import DTYPES, assert_close, assert_same_rounding, strided


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.quick("True-True-gelu_tanh-torch.bfloat16", "silu-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["none", "silu", "gelu", "gelu_tanh", "quick_gelu"])
@pytest.mark.parametrize(("with_bias", "with_residual"), [(False, False), (True, False), (False, True), (True, True)])
def test_finish(act: Activation, dtype: torch.dtype, with_bias: bool, with_residual: bool) -> None:
    for from_dtype in {dtype, torch.float32}:
        product = strided(random(3, 1100, dtype=from_dtype, seed=0))
        bias = random(1100, dtype=dtype, seed=1) if with_bias else None
        residual = strided(random(3, 1100, dtype=dtype, seed=2)) if with_residual else None
        expected = product.double() if bias is None else product.double() + bias.double()
        expected = activation(expected, act)
        if residual is not None:
            expected = expected + residual.double()
        result = finish(product, bias, residual, act, dtype)
        assert result.is_contiguous()
        assert_close(result, expected.to(dtype), ulps=3, atol=1e-5)
        if dtype is torch.float16 and act != "gelu":  # whose small values are differences from 1
            assert_same_rounding(result, expected.to(dtype))


def test_nothing_in_nothing_out() -> None:
    assert finish(torch.empty(0, 64), torch.ones(64), None, "silu").shape == (0, 64)


def test_messages() -> None:
    product = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"act: expected none, silu, .* got 'relu'"):
        finish(product, None, None, "relu")
    with pytest.raises(ValueError, match="out_dtype: expected a float type"):
        finish(product, None, None, "none", torch.int32)
    with pytest.raises(ValueError, match=r"bias: expected contiguous \[4\]"):
        finish(product, torch.ones(3), None)
    with pytest.raises(ValueError, match=r"residual: expected \[2, 4\] torch\.bfloat16"):
        finish(product, None, product, "none", torch.bfloat16)
