"""Bytes looked up under their colours, bit for bit: widths that fill no program, rows at a stride, messages."""

import pytest
import torch

from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_kernels.pixels import pixel_rows
from tests.kernels.comparison import DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_values", "width"), [(3, 3), (588, 592), (1176, 1176), (1020, 1032)])
def test_pixel_rows(num_values: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    pixels = torch.randint(256, (7, num_values + 5), dtype=torch.uint8, generator=generator)[:, 1 : num_values + 1]
    table = torch.randn(256, 3, generator=generator).to(dtype)
    found = pixel_rows(pixels, table, width)
    assert found.is_contiguous() and torch.equal(found, ReferenceOps().pixel_rows(pixels, table, width))
    assert not found[:, num_values:].any()


def test_nothing_in_nothing_out() -> None:
    assert pixel_rows(torch.empty(0, 6, dtype=torch.uint8), torch.ones(256, 3), 8).shape == (0, 8)


def test_messages() -> None:
    pixels, table = torch.zeros(2, 6, dtype=torch.uint8), torch.ones(256, 3)
    with pytest.raises(ValueError, match=r"pixels: expected \[P, 3 \* pixels\] uint8"):
        pixel_rows(pixels[:, :5], table, 8)
    with pytest.raises(ValueError, match=r"table: expected contiguous \[256, 3\] of a float type on cpu"):
        pixel_rows(pixels, table.T, 8)
    with pytest.raises(ValueError, match="width: expected at least 6, got 5"):
        pixel_rows(pixels, table, 5)
