"""Arithmetic of products of rows and weights that are both 8-bit floats (E4M3), in plain torch.

    s[t, g] = max |x[t, k in g]| / 448        xq[t, k] = e4m3(x[t, k] * (448 / max |x[t, k in g]|)), ties to even
    y[t, n] = sum over g of  (sum over k in g of xq[t, k] values[n, k]) * (s[t, g] * scales[n, g])

A group is a row of the weight, or 128 inputs if scales are those of blocks of 128 x 128 (`block_scales`). A group of x
with a number that is not finite gives NaN; one without a magnitude of 2^-100 counts as zeros. This is what tensor cores
compute (torch's `_scaled_mm`), except for the order of sums. Activations are rounded dynamically (W8A8). Does not know
kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydra_engine.backend.quantized import FLOAT8, SMALLEST, QuantizedWeight

BLOCK = 128  # outputs, and inputs, that share a scale
LARGEST = 448.0  # of E4M3


def rounded_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Rounds x [T, K] of a float type to (xq FLOAT8 [T, K], s float32 [T, K / group_size]) by the module's formulas."""
    wide = x.float().unflatten(1, (-1, group_size))
    top = wide.abs().amax(-1)
    inverse = torch.where(top < SMALLEST, 0.0, torch.tensor(LARGEST, device=x.device) / top)
    rounded = (wide * inverse[:, :, None]).flatten(1).to(FLOAT8)
    return rounded, torch.where(top < SMALLEST, 0.0, top / LARGEST)


def product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The product y [T, num_out] float32 by the module's formulas."""
    assert weight.is_float
    rows, steps = rounded_rows(x, weight.group_size)
    of_groups = (part.float().unflatten(1, (-1, weight.group_size)) for part in (rows, weight.values))
    sums = torch.einsum("tgk,ngk->tgn", *of_groups)
    return torch.einsum("tgn,tg,ng->tn", sums, steps, weight.scales.float())


def block_scales(scales: Tensor) -> Tensor | None:
    """Scales [num_out, G] -> [ceil(num_out / BLOCK), G] if each BLOCK consecutive outputs share theirs, else None.
    Waits for the device."""
    first = scales[::BLOCK]
    same = torch.equal(first.repeat_interleave(BLOCK, dim=0)[: scales.shape[0]], scales)
    return first.contiguous() if same else None
