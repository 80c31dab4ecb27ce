"""The gated activation against the reference: every function, odd widths, strides, empty inputs, messages."""

import pytest
import torch

from hydra_engine.backend.base import Activation
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_kernels.activation import ACTIVATIONS, act_and_mul, sigmoid_mul
from tests.kernels.comparison import DTYPES, assert_close, assert_same_rounding, strided


@pytest.mark.quick("silu-", "gelu-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_act_and_mul(act: Activation, dtype: torch.dtype) -> None:
    for rows, width in ((1, 33), (3, 1034)):
        gate_up = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(rows)) * 3
        gate_up = strided(gate_up.to(dtype))
        result = act_and_mul(gate_up, act)
        assert result.is_contiguous()
        assert_close(result, ReferenceOps().act_and_mul(gate_up, act), ulps=3, atol=1e-5)


def test_the_activated_gate_is_rounded_before_the_product() -> None:
    gate_up = torch.randn(2, 2000, generator=torch.Generator().manual_seed(0)).half()
    for act in ACTIVATIONS:
        assert_same_rounding(act_and_mul(gate_up, act), ReferenceOps().act_and_mul(gate_up, act))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sigmoid_mul(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    fused = strided((torch.randn(7, 8, 80, generator=generator) * 3).to(dtype))
    x, gate = fused[:, 1:4], fused[:, 5:]
    result, expected = sigmoid_mul(x, gate), ReferenceOps().sigmoid_mul(x, gate)
    assert result.is_contiguous()
    assert_close(result, expected, ulps=1)
    if dtype is torch.float16:
        assert_same_rounding(result, expected)


def test_extreme_values_stay_exact() -> None:
    gate_up = torch.tensor([[-1e4, -60.0, 0.0, 60.0, 1e4, 2.0, 2.0, 2.0, 2.0, 2.0]])
    for act in ACTIVATIONS:
        result = act_and_mul(gate_up, act)
        assert torch.isfinite(result).all()
        assert torch.equal(result[0, 2:], torch.tensor([0.0, 120.0, 2e4]))
        assert result[0, :2].abs().max() < 1e-20


def test_nothing_in_nothing_out() -> None:
    assert act_and_mul(torch.empty(0, 64), "silu").shape == (0, 32)
    assert sigmoid_mul(torch.empty(0, 2, 64), torch.empty(0, 2, 64)).shape == (0, 2, 64)


def test_messages() -> None:
    with pytest.raises(ValueError, match=r"gate_up: expected \[T, 2 \* F\], got \[2, 5\]"):
        act_and_mul(torch.ones(2, 5), "silu")
    with pytest.raises(ValueError, match="act: expected one of silu, gelu, gelu_tanh, quick_gelu, got 'relu'"):
        act_and_mul(torch.ones(2, 4), "relu")
    with pytest.raises(ValueError, match=r"gate_up: expected .* of a float type"):
        act_and_mul(torch.ones(2, 4, dtype=torch.int32), "silu")
    with pytest.raises(ValueError, match=r"gate: expected \[2, 3, 8\] like x, got \[2, 1, 8\]"):
        sigmoid_mul(torch.ones(2, 3, 8), torch.ones(2, 1, 8))
