"""Rotation against the reference: head dims whose halves fill no tile, strides, empty inputs, messages."""

import pytest
import torch

from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_kernels.rotary import rotate
from tests.kernels.comparison import DTYPES, assert_close, strided


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 64, 72, 80, 128])
def test_rotate(dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    fused = strided(torch.randn(19, 9, dim, generator=generator).to(dtype))
    angles = torch.rand(19, dim // 2, generator=generator) * 6
    x, cos, sin = fused[:, 1:6], strided(angles.cos()), angles.sin()
    result = rotate(x, cos, sin)
    assert result.is_contiguous()
    assert_close(result, ReferenceOps().rotate(x, cos, sin), ulps=1, atol=torch.finfo(dtype).eps * 0.1)


def test_nothing_in_nothing_out() -> None:
    assert rotate(torch.empty(0, 2, 8), torch.empty(0, 4), torch.empty(0, 4)).shape == (0, 2, 8)


def test_messages() -> None:
    x, angles = torch.ones(3, 2, 8), torch.ones(3, 4)
    with pytest.raises(ValueError, match="x: expected an even head dim for rotation, got 7"):
        rotate(x[..., :7], angles, angles)
    with pytest.raises(ValueError, match=r"cos: expected \[3, 4\] torch.float32 on cpu with dense rows, got \[2, 4\]"):
        rotate(x, angles[:2], angles)
    with pytest.raises(ValueError, match="sin: expected"):
        rotate(x, angles, angles.half())
