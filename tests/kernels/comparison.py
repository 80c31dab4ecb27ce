"""Comparisons of kernels with the reference, and inputs with the engine's strides."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def strided(x: Tensor) -> Tensor:
    """The same rows inside a wider buffer whose other columns are NaN."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 16), float("nan"), dtype=x.dtype)
    wide[..., 8:-8] = x
    return wide[..., 8:-8]


def assert_close(result: Tensor, expected: Tensor, *, ulps: float, atol: float = 1e-6) -> None:
    """Allows `ulps` units of the dtype's precision, relative to the expected value. The interpreter truncates to
    bfloat16 where a GPU rounds, which alone is one unit."""
    assert result.shape == expected.shape and result.dtype is expected.dtype
    precision = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(result, expected, rtol=ulps * max(precision, 1e-6), atol=max(atol, precision * 1e-2))


def assert_same_rounding(result: Tensor, expected: Tensor) -> None:
    """float16 results that are rounded where the reference rounds: nearly all bits agree. With one rounding more or
    less about a third would not."""
    assert expected.dtype is torch.float16 and result.dtype is torch.float16
    assert (result == expected).float().mean() > 0.98


# Of a mean of values of size 1: the kernels round weights to 16 bits before the second product.
_ATTENTION_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_attention_close(result: Tensor, expected: Tensor) -> None:
    assert result.is_contiguous() and result.shape == expected.shape and result.dtype is expected.dtype
    torch.testing.assert_close(result, expected, rtol=0, atol=_ATTENTION_TOLERANCE[expected.dtype])
