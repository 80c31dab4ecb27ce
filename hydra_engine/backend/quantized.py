"""Weights in 8, 6 or 4 bits: the one format between checkpoints and kernels, and its arithmetic.

    w[n, k] = scales[n, g] * (values[n, k] - zero) + offsets[n, g]      g = k // group_size; zero: 8 for 4 bits, else 0

Two-level scales are integers beside a float16 scale for each block b of 256 inputs, as in GGUF's K types. They stand
for float32 scales and offsets as follows, each product and each sum rounded; kernels compute them on the fly:

    scale[n, g] = block_scales[n, b, 0] * scales[n, g]
    offset[n, g] = zero * scale[n, g] - block_scales[n, b, 1] * offsets[n, g]

A product with such a weight quantises x too, and sums integers, whose sum does not depend on the order. Inputs of x are
quantised in parts p of a group: 128 inputs, the last part the rest of the group. A part has 8 bits, or 16 if a few
large inputs (outlier channels) would leave too few bits for the others:

    top = max |x[t, k in p]|       s[t, p] = top / 127       q[t, k] = rint(x[t, k] * (127 / top)), ties to even
    where (sum over k in p of min(|q[t, k]|, 32)^2) < 64 (inputs of p + 20):
                                                     q[t, k] = rint(x[t, k] * (32512 / top)) / 256

Float32 sums are fused multiply-adds, one per part and per group, in this order:

    y[t, n] = fma over g of  a[t, n, g] scales[n, g],   then of   offsets[n, g] r[t, g]
    a[t, n, g] = fma over p of g of  (sum over k in p of q (values - zero)) * s[t, p]
    r[t, g] = fma over p of g of  (sum over k in p of q) * s[t, p]

So every CPU implementation gives the same bits, on any processor, for any batch and number of threads. A part with a
number that is not finite gives NaN; one without a magnitude of 2^-100 counts as zeros, since 127 / top might overflow.
On CUDA x is not quantised: products are those with the dequantised weight, with sums in float32 (W4A16, W8A16). Values
that are 8-bit floats (E4M3) are kept on CUDA only, where products of many rows round x too, dynamically (W8A8):

    s[t, g] = max |x[t, k in g]| / 448        xq[t, k] = e4m3(x[t, k] * (448 / max |x[t, k in g]|)), ties to even
    y[t, n] = sum over g of  (sum over k in g of xq[t, k] values[n, k]) * (s[t, g] * scales[n, g])

A group is then a row of the weight, or 128 inputs if scales are of blocks of 128 x 128. NaN and small groups are
treated as above. This is what tensor cores compute (torch's `_scaled_mm`), except for the order of sums.

Does not know checkpoints or memory layouts of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

SMALLEST = 2.0**-100
MIN_GROUP = 16  # inputs; a group is a multiple of this, or a whole row of the weight
BLOCK = 256  # inputs that share a block scale
PART = 128  # inputs of a group that share a quantisation step in a row of x
_CHUNK = 1 << 20  # numbers that are dequantised at once, to bound temporary memory
_ZERO = {8: 0, 6: 0, 4: 8}
_LARGEST = {8: 127, 4: 7}
FLOAT8 = torch.float8_e4m3fn
FLOAT8_BLOCK = 128  # outputs, and inputs, that share a scale
_FLOAT8_MAX = 448.0
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [num_out, K] in `num_bits` 8, 6 or 4.

    values: 8 bits: int8 or FLOAT8 [num_out, K]; 6 bits: int8 from -32 to 31; 4 bits: uint8 [num_out, K / 2], two
    numbers 0..15 per byte, the even k in the lower half. scales: [num_out, G] of one of SCALE_DTYPES, G groups of K / G
    inputs. offsets: float32 [num_out, G], or None for zeros. Two levels (block_scales is not None; 6 or 4 bits):
    scales and offsets are int8, block_scales float16 [num_out, K / 256, 1, or 2 with offsets], and groups do not cross
    blocks. w is computed from them by the module's formulas. Raises ValueError that names the field.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    num_bits: int = 8
    block_scales: Tensor | None = None

    def __post_init__(self) -> None:
        levels = 1 if self.block_scales is None else 2
        if self.num_bits not in ((8, 4), (6, 4))[levels - 1]:
            expected = "8 or 4" if levels == 1 else "6 or 4 with block_scales"
            raise ValueError(f"num_bits: expected {expected}, got {self.num_bits}")
        dtype = torch.uint8 if self.num_bits == 4 else torch.int8
        floats = self.is_float and self.num_bits == 8 and levels == 1
        if self.values.dim() != 2 or (self.values.dtype is not dtype and not floats):
            raise ValueError(f"values: expected 2 dimensions of {dtype}, got {_described(self.values)}")
        rows, groups = self.values.shape[0], self.scales.shape[-1]
        kinds, kind = (SCALE_DTYPES, "a float type") if levels == 1 else ((torch.int8,), "int8")
        if self.scales.shape != (rows, groups) or self.scales.dtype not in kinds:
            raise ValueError(f"scales: expected [{rows}, G] of {kind}, got {_described(self.scales)}")
        offset_dtype = torch.float32 if levels == 1 else torch.int8
        if self.offsets is not None and (
            self.offsets.shape != self.scales.shape or self.offsets.dtype is not offset_dtype
        ):
            dtype_name = str(offset_dtype).removeprefix("torch.")
            raise ValueError(
                f"offsets: expected {list(self.scales.shape)} {dtype_name}, got {_described(self.offsets)}"
            )
        if groups < 1 or self.num_in % groups or (groups > 1 and self.group_size % MIN_GROUP):
            raise ValueError(
                f"scales: expected one per row, or per group of a multiple of {MIN_GROUP} of the {self.num_in} inputs, "
                f"got {groups} per row"
            )
        if self.block_scales is not None:
            self._check_blocks(self.block_scales)

    def _check_blocks(self, block_scales: Tensor) -> None:
        """Requires block scales of this format's shape, float16, and groups that do not cross blocks."""
        shape = self.num_out, self.num_in // BLOCK, 1 if self.offsets is None else 2
        if block_scales.shape != shape or block_scales.dtype is not torch.float16:
            raise ValueError(f"block_scales: expected {list(shape)} float16, got {_described(block_scales)}")
        if self.num_in % BLOCK or BLOCK % self.group_size:
            raise ValueError(
                f"block_scales: expected whole groups in blocks of {BLOCK} of the {self.num_in} inputs, "
                f"got groups of {self.group_size}"
            )

    @property
    def num_out(self) -> int:
        return self.values.shape[0]

    @property
    def num_in(self) -> int:
        return self.values.shape[1] * (2 if self.num_bits == 4 else 1)

    @property
    def is_float(self) -> bool:
        """True if the values are 8-bit floats (FLOAT8), False if integers."""
        return self.values.dtype is FLOAT8

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_out, self.num_in

    @property
    def group_size(self) -> int:
        """Inputs that share a scale; all K inputs of an output if it has one scale."""
        return self.num_in // self.scales.shape[1]

    @property
    def stack_key(self) -> tuple[object, ...]:
        """The format as a key: weights with equal keys can be `stacked`."""
        scale_dtype = self.scales.dtype  # int8: two levels
        return self.num_bits, self.is_float, self.num_in, self.group_size, self.offsets is None, scale_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held here. Kernels pack 6-bit values, a byte each here, into 3/4 of their bytes."""
        parts = self.values, self.scales, self.offsets, self.block_scales
        return sum(part.nbytes for part in parts if part is not None)

    def numbers(self) -> Tensor:
        """The values minus the format's zero (8 for 4 bits, else 0), unpacked: int8 or FLOAT8 [num_out, K]."""
        if self.num_bits != 4:
            return self.values
        return torch.stack((self.values & 15, self.values >> 4), dim=2).flatten(1).to(torch.int8) - _ZERO[4]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The matrix [num_out, K] in `dtype`, computed in float32 and rounded once."""
        result = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        step = max(_CHUNK // self.num_in, 1)
        for begin in range(0, self.num_out, step):
            some = self.rows(slice(begin, begin + step)).flatten_scales()
            wide = some.numbers().float().unflatten(1, (-1, self.group_size)) * some.scales.float()[:, :, None]
            if some.offsets is not None:
                wide += some.offsets[:, :, None]
            result[begin : begin + step] = wide.flatten(1)
        return result

    def flatten_scales(self) -> QuantizedWeight:
        """Returns the weight with one level of scales: block scales are multiplied into float32 scales and offsets of
        groups, and 6-bit values are declared 8-bit. The weight itself if it has one level."""
        if self.block_scales is None:
            return self
        steps = self.block_scales.float()[:, :, :, None]
        scales = (steps[:, :, 0] * self.scales.unflatten(1, (steps.shape[1], -1))).flatten(1)
        offsets = None
        if self.offsets is not None:
            offsets = -(steps[:, :, 1] * self.offsets.unflatten(1, (steps.shape[1], -1))).flatten(1)
            if zero := _ZERO[self.num_bits]:
                offsets += zero * scales
        return QuantizedWeight(self.values, scales, offsets, 4 if self.num_bits == 4 else 8)

    def to(self, device: torch.device) -> QuantizedWeight:
        return self._each(lambda part: part.to(device))

    def rows(self, order: Tensor | slice) -> QuantizedWeight:
        """Returns the weight of the selected outputs only. order: [M] int64, or a slice."""
        return self._each(lambda part: part[order])

    def padded(self, num_out: int, num_in: int) -> QuantizedWeight:
        """Returns the weight with `num_out` more outputs, all of whose weights are 0, and `num_in` more inputs.

        x must be zero at the new inputs: their values are zero, but their weights have the offsets. Raises ValueError
        for new inputs if an output has several groups.
        """
        if num_in and self.scales.shape[1] > 1:
            raise ValueError(f"num_in: expected 0 for inputs in groups of {self.group_size}, got {num_in}")
        longer = self._each(lambda part: pad(part, (*[0, 0] * (part.dim() - 1), 0, num_out)))
        if not num_in:
            return longer
        octets = longer.values.view(torch.uint8)
        zero = _ZERO[self.num_bits] * 0x11  # two 4-bit zeros
        wider = pad(octets, (0, num_in * self.num_bits // 8), value=zero).view(self.values.dtype)
        return replace(longer, values=wider)

    def _each(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """Returns the weight with each of its tensors changed."""
        offsets, block_scales = (None if part is None else change(part) for part in (self.offsets, self.block_scales))
        return QuantizedWeight(change(self.values), change(self.scales), offsets, self.num_bits, block_scales)

    def scaled(self, factors: Tensor) -> QuantizedWeight:
        """Returns the weight with every output multiplied by its factor, [num_out], with one level of float32
        scales."""
        plain, wide = self.flatten_scales(), factors.float()[:, None]
        offsets = None if plain.offsets is None else plain.offsets * wide
        return replace(plain, scales=plain.scales.float() * wide, offsets=offsets)


def stacked(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenates the outputs of weights, at least one, which must have equal `stack_key` (not checked)."""
    if len(parts) == 1:
        return parts[0]
    return QuantizedWeight(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        _joined([part.offsets for part in parts if part.offsets is not None]),
        parts[0].num_bits,
        _joined([part.block_scales for part in parts if part.block_scales is not None]),
    )


def _joined(parts: list[Tensor]) -> Tensor | None:
    """The parts, concatenated along outputs; None if there are none."""
    return torch.cat(parts) if parts else None


def quantized(weight: Tensor, num_bits: int, group_size: int, scale_dtype: torch.dtype) -> QuantizedWeight:
    """Quantises weight [num_out, K] of a float type to 8 or 4 bits: symmetric per group of `group_size` inputs, a
    divisor of K.

    The scale of a group is its largest magnitude / 127 (4 bits: / 7), rounded to `scale_dtype` before it divides;
    numbers are rounded to nearest, ties to even, and clamped to +-127 (4 bits: +-7). Zeros if the scale is 0.
    """
    wide = weight.float().unflatten(1, (-1, group_size))
    largest = _LARGEST[num_bits]
    scales = (wide.abs().amax(-1) / largest).to(scale_dtype)
    steps = scales.float()[:, :, None]
    numbers = torch.where(steps > 0, wide / steps, 0.0).round_().clamp_(-largest, largest).to(torch.int8).flatten(1)
    return QuantizedWeight(packed_numbers(numbers, num_bits), scales, None, num_bits)


def packed_numbers(numbers: Tensor, num_bits: int) -> Tensor:
    """Packs int8 numbers [num_out, K] as `QuantizedWeight.values`, the inverse of `QuantizedWeight.numbers`: with 4
    bits -8 to 7, two per byte, so K is even; with 8 and 6 bits they are returned as they are."""
    if num_bits != 4:
        return numbers
    pairs = (numbers + _ZERO[4]).to(torch.uint8).unflatten(1, (-1, 2))
    return pairs[:, :, 0] | pairs[:, :, 1] << 4


def quantized_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Quantises x [T, K] of a float type by the module's formulas. Returns (q float32 [T, G, P, 128], s float32 [T, G,
    P]), P parts of 128 inputs per group.

    The last part of a group is zero-padded. A part with a number that is not finite has zeros and a NaN as s.
    """
    wide = x.float().unflatten(1, (-1, group_size))
    wide = pad(wide, (0, -group_size % PART)).unflatten(2, (-1, PART))
    top = wide.abs().amax(-1)
    # `127.0 / top` would be computed as 127 times the rounded reciprocal.
    inverse = torch.where(top >= SMALLEST, torch.tensor(127.0, device=x.device) / top, 0.0)[..., None]
    numbers = (wide * inverse).round()
    counts = torch.full((wide.shape[2],), PART, device=x.device)
    counts[-1:] -= -group_size % PART
    energies = numbers.abs().clamp_max(32).square().sum(-1)
    fine = (energies < 64 * (counts + 20))[..., None]
    numbers = torch.where(fine, (wide * (inverse * 256)).round() / 256, numbers)
    finite = top.isfinite()
    return torch.where(finite[..., None], numbers, 0.0), torch.where(finite, top / 127.0, torch.nan)


def reference_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The product y [T, num_out] float32 of x [T, K] by the module's formulas for integers, in plain torch on the CPU.

    Float64 stands in for fused multiply-adds: it holds every product exactly, and its second rounding changes the last
    bit of a sum now and then.
    """
    weight = weight.flatten_scales()
    rows, steps = quantized_rows(x, weight.group_size)
    numbers = weight.numbers().unflatten(1, (-1, weight.group_size))
    numbers = pad(numbers, (0, -weight.group_size % PART)).unflatten(2, (-1, PART))
    scales = weight.scales.float()
    total = torch.zeros(x.shape[0], weight.num_out)
    for group in range(steps.shape[1]):
        part_sum, row_sum = torch.zeros_like(total), torch.zeros(x.shape[0], 1)
        for part in range(steps.shape[2]):
            step, row = steps[:, group, part, None], rows[:, group, part].double()
            part_sum = _fma((row @ numbers[:, group, part].double().T).float(), step, part_sum)
            row_sum = _fma(row.sum(-1, keepdim=True).float(), step, row_sum)
        total = _fma(part_sum, scales[None, :, group], total)
        if weight.offsets is not None:
            total = _fma(row_sum, weight.offsets[None, :, group], total)
    return total


def float8_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Rounds x [T, K] of a float type to (xq FLOAT8 [T, K], s float32 [T, K / group_size]) by the module's formulas."""
    wide = x.float().unflatten(1, (-1, group_size))
    top = wide.abs().amax(-1)
    inverse = torch.where(top < SMALLEST, 0.0, torch.tensor(_FLOAT8_MAX, device=x.device) / top)
    rounded = (wide * inverse[:, :, None]).flatten(1).to(FLOAT8)
    return rounded, torch.where(top < SMALLEST, 0.0, top / _FLOAT8_MAX)


def float8_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The product y [T, num_out] float32 of x [T, K], rounded to 8-bit floats, and a weight of 8-bit floats, by the
    module's formulas, in plain torch."""
    assert weight.is_float
    rows, steps = float8_rows(x, weight.group_size)
    groups = (part.float().unflatten(1, (-1, weight.group_size)) for part in (rows, weight.values))
    sums = torch.einsum("tgk,ngk->tgn", *groups)
    return torch.einsum("tgn,tg,ng->tn", sums, steps, weight.scales.float())


def float8_block_scales(scales: Tensor) -> Tensor | None:
    """Returns the scales of blocks, [ceil(num_out / FLOAT8_BLOCK), G], of scales [num_out, G]; None unless each
    FLOAT8_BLOCK consecutive outputs have equal ones. Waits for the device."""
    first = scales[::FLOAT8_BLOCK]
    same = torch.equal(first.repeat_interleave(FLOAT8_BLOCK, dim=0)[: scales.shape[0]], scales)
    return first.contiguous() if same else None


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in float64, rounded to float32."""
    return (a.double() * b.double() + c.double()).float()


def _described(tensor: Tensor) -> str:
    """Shape and dtype of the tensor, for error messages."""
    return f"{list(tensor.shape)} {tensor.dtype}"
