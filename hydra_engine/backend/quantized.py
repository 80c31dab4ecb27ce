"""Weights in 8 or 4 bits: the one form that checkpoints are read into and kernels pack from, and its arithmetic.

    w[n, k] = scales[n, g] * (values[n, k] - zero) + offsets[n, g]      g = k // group_size; zero: 8 for 4 bits, else 0

A product with such a weight rounds each group of each row of x to 8 bits and sums integers, whose sum does not depend
on its order; what is float32 is one fused multiply-add per group, in the order of the groups:

    s[t, g] = max |x[t, k in g]| / 127        xq[t, k] = rint(x[t, k] * (127 / max |x[t, k in g]|)), ties to even
    y[t, n] = fma over g of  (sum over k of xq (values - zero)) * (scales[n, g] s[t, g])
                             and behind it  offsets[n, g] * (s[t, g] * sum over k of xq)

So every implementation gives the same bits, whatever the processor, the batch or the number of threads. A group with a
number that is not finite gives NaN; one without a magnitude of 2^-100 counts as zeros, for 127 / max might be infinite.
On CUDA x is not rounded: products there are those with the dequantised weight, with sums in float32 (W4A16, W8A16).
Does not know checkpoints or memory layouts of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SMALLEST = 2.0**-100
MIN_GROUP = 16  # inputs; a group is a multiple of it, or a whole row of the weight
_CHUNK = 1 << 20  # numbers that are dequantised at once, so that little memory is taken beside the result
_ZERO = {8: 0, 4: 8}
_LARGEST = {8: 127, 4: 7}
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [num_out, K] in `num_bits` 8 or 4.

    values: 8 bits: int8 [num_out, K]; 4 bits: uint8 [num_out, K / 2], of two numbers 0..15 that of the even k is in the
    lower half. scales: [num_out, G] of one of SCALE_DTYPES, which kernels keep. offsets: float32 [num_out, G], or None
    for zeros. G divides K. Raises ValueError naming the field."""

    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    num_bits: int = 8

    def __post_init__(self) -> None:
        if self.num_bits not in _ZERO:
            raise ValueError(f"num_bits: expected 8 or 4, got {self.num_bits}")
        dtype = torch.int8 if self.num_bits == 8 else torch.uint8
        if self.values.dim() != 2 or self.values.dtype is not dtype:
            raise ValueError(f"values: expected 2 dimensions of {dtype}, got {_described(self.values)}")
        rows, groups = self.values.shape[0], self.scales.shape[-1]
        if self.scales.shape != (rows, groups) or self.scales.dtype not in SCALE_DTYPES:
            raise ValueError(f"scales: expected [{rows}, G] of a float type, got {_described(self.scales)}")
        if self.offsets is not None and (
            self.offsets.shape != self.scales.shape or self.offsets.dtype is not torch.float32
        ):
            raise ValueError(f"offsets: expected {list(self.scales.shape)} float32, got {_described(self.offsets)}")
        if groups < 1 or self.num_in % groups or (groups > 1 and self.group_size % MIN_GROUP):
            raise ValueError(
                f"scales: expected one per row, or per group of a multiple of {MIN_GROUP} of the {self.num_in} inputs, "
                f"got {groups} per row"
            )

    @property
    def num_out(self) -> int:
        return self.values.shape[0]

    @property
    def num_in(self) -> int:
        return self.values.shape[1] * 8 // self.num_bits

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_out, self.num_in

    @property
    def group_size(self) -> int:
        return self.num_in // self.scales.shape[1]

    @property
    def form(self) -> tuple[object, ...]:
        """Weights of one form can be stacked."""
        return self.num_bits, self.num_in, self.group_size, self.offsets is None, self.scales.dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.values, self.scales, self.offsets) if part is not None)

    def numbers(self) -> Tensor:
        """values - zero, int8 [num_out, K]"""
        if self.num_bits == 8:
            return self.values
        return torch.stack((self.values & 15, self.values >> 4), dim=2).flatten(1).to(torch.int8) - _ZERO[4]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[num_out, K], computed in float32 and rounded once."""
        result = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        step = max(_CHUNK // self.num_in, 1)
        for begin in range(0, self.num_out, step):
            some = self.rows(slice(begin, begin + step))
            wide = some.numbers().float().unflatten(1, (-1, self.group_size)) * some.scales.float()[:, :, None]
            if some.offsets is not None:
                wide += some.offsets[:, :, None]
            result[begin : begin + step] = wide.flatten(1)
        return result

    def to(self, device: torch.device) -> QuantizedWeight:
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, values=self.values.to(device), scales=self.scales.to(device), offsets=offsets)

    def rows(self, order: Tensor | slice) -> QuantizedWeight:
        """The outputs `order`, [M] int64 or from one to another."""
        offsets = None if self.offsets is None else self.offsets[order]
        return replace(self, values=self.values[order], scales=self.scales[order], offsets=offsets)

    def scaled(self, factors: Tensor) -> QuantizedWeight:
        """Every output times its factor, [num_out]; the scales become float32."""
        wide = factors.float()[:, None]
        offsets = None if self.offsets is None else self.offsets * wide
        return replace(self, scales=self.scales.float() * wide, offsets=offsets)


def stacked(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The outputs of all parts, which have one form, one after another."""
    if len(parts) == 1:
        return parts[0]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return QuantizedWeight(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(offsets) if offsets else None,
        parts[0].num_bits,
    )


def quantized(weight: Tensor, num_bits: int, group_size: int, scale_dtype: torch.dtype) -> QuantizedWeight:
    """weight [num_out, K] of a float type, rounded to the nearest of -127..127 (4 bits: -7..7) steps per group. A step
    is the largest magnitude of the group / 127 (7), rounded to `scale_dtype` before it divides."""
    wide = weight.float().unflatten(1, (-1, group_size))
    largest = _LARGEST[num_bits]
    scales = (wide.abs().amax(-1) / largest).to(scale_dtype)
    steps = scales.float()[:, :, None]
    numbers = torch.where(steps > 0, wide / steps, 0.0).round_().clamp_(-largest, largest).to(torch.int8).flatten(1)
    return QuantizedWeight(packed_numbers(numbers, num_bits), scales, None, num_bits)


def packed_numbers(numbers: Tensor, num_bits: int) -> Tensor:
    """numbers int8 [num_out, K], values - zero -> `values` of a QuantizedWeight."""
    if num_bits == 8:
        return numbers
    pairs = (numbers + _ZERO[4]).to(torch.uint8).unflatten(1, (-1, 2))
    return pairs[:, :, 0] | pairs[:, :, 1] << 4


def quantized_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """x [T, K] of a float type -> xq int8 [T, G, group_size] and s float32 [T, G], as the module's formulas say."""
    wide = x.float().unflatten(1, (-1, group_size))
    top = wide.abs().amax(-1)
    # A number / tensor would be that number times the rounded reciprocal.
    inverse = torch.where(top >= SMALLEST, torch.tensor(127.0, device=x.device) / top, 0.0)
    numbers = (wide * inverse[:, :, None]).round()
    finite = top.isfinite()
    steps = torch.where(finite, top / 127.0, torch.nan)
    return torch.where(finite[:, :, None], numbers, 0.0).to(torch.int8), steps


def reference_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """y [T, num_out] float32 of the module's formulas, in plain torch. Float64 stands in for fused multiply-adds: it
    holds every product exactly, and the second rounding changes the last bit of a sum now and then."""
    rows, steps = quantized_rows(x, weight.group_size)
    numbers = weight.numbers().unflatten(1, (-1, weight.group_size)).double()
    sums = torch.einsum("tgk,ngk->gtn", rows.double(), numbers).float()
    scales = weight.scales.float()
    total = torch.zeros(x.shape[0], weight.num_out)
    for group in range(steps.shape[1]):
        step = steps[:, group, None]
        factors = (step * scales[None, :, group]).double()
        total = (sums[group].double() * factors + total.double()).float()
        if weight.offsets is not None:
            row_sums = step * rows[:, group].float().sum(-1, keepdim=True)
            total = (row_sums.double() * weight.offsets[None, :, group].double() + total.double()).float()
    return total


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"
