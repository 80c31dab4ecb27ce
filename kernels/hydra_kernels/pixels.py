"""Converts bytes of pixels to floats by a table for each colour. Bound by memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import FLOATS, described
from hydra_kernels._launch import Launch, cached_launch
from hydra_kernels._sizes import cdiv

_COLUMNS = 1024  # per program
_WARPS = 4


@triton.jit
def _pixel_rows_kernel(
    pixels: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    STRIDE_ROW: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Stores some columns of a row of `pixel_rows`. Grid (P, WIDTH / COLUMNS). The table, 768 numbers, stays in the L1
    cache."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    held = column < VALUES
    value = tl.load(pixels + row * STRIDE_ROW + column, mask=held, other=0).to(tl.int32)
    number = tl.load(table + value * 3 + column % 3, mask=held, other=0.0)
    tl.store(out + row * WIDTH + column, number, mask=column < WIDTH)


def pixel_rows(pixels: Tensor, table: Tensor, width: int) -> Tensor:
    """Returns table[b, c] for every byte b of colour c, then zeros up to `width`: new contiguous [P, width] of the
    table's dtype.

    pixels: [P, K] uint8 with three interleaved colours, K a multiple of 3, rows at any stride; table: [256, 3]
    contiguous of a float type; width: K or more.
    """
    dense = pixels.dim() == 2 and (pixels.stride(1) == 1 or pixels.shape[1] == 1)
    if not dense or pixels.dtype is not torch.uint8 or pixels.shape[1] % 3:
        raise ValueError(f"pixels: expected [P, 3 * pixels] uint8 with dense rows, got {described(pixels)}")
    good = table.shape == (256, 3) and table.dtype in FLOATS and table.is_contiguous()
    if not good or table.device != pixels.device:
        raise ValueError(
            f"table: expected contiguous [256, 3] of a float type on {pixels.device}, got {described(table)}"
        )
    num_rows, num_values = pixels.shape
    if width < num_values:
        raise ValueError(f"width: expected at least {num_values}, got {width}")
    out = torch.empty((num_rows, width), dtype=table.dtype, device=pixels.device)
    if out.numel():
        grid = num_rows, cdiv(width, _COLUMNS), 1
        _launches(pixels.stride(0), num_values, width)(_pixel_rows_kernel, grid, pixels, table, out)
    return out


@cached_launch
def _launches(stride: int, num_values: int, width: int) -> Launch:
    return Launch(STRIDE_ROW=stride, VALUES=num_values, WIDTH=width, COLUMNS=_COLUMNS, num_warps=_WARPS)
