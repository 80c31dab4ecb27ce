"""Quantises float matrices, for `--quantization` while a model is loaded and for `hydra-engine quantize`.

8 bits: a scale per output, its largest magnitude / 127. 4 bits: numbers -8..7 in groups of 32 inputs, each with the
scale of least squared error among three. Not symmetric around 0, because the sum of squared errors of a group is a
sixth less with all sixteen numbers. A matrix whose inputs are no multiple of 32 has 8 bits. Works row by row, so that a
row's numbers do not depend on what it is fused with.

    for each c of 7.4, 8, 8.6:    q = clamp(rint(-c w / m), -8, 7)    m: the number of the group that is largest
    of these the q with the largest (w.q)^2 / q.q, for which the best scale is w.q / q.q

w.q is summed in float32, each product rounded before it is added: first in eight sums of every eighth number, then
these, in order; -c / m is -c times the rounded 1 / m.
"""

from __future__ import annotations

import functools
from importlib import import_module

import torch
from torch import Tensor

from hydra_engine.backend.devices import load_extension
from hydra_engine.backend.quantized import QuantizedWeight, packed_numbers, quantized, stacked
from hydra_engine.models.specs.quantization import AT_LOAD_GROUP

_TRIED = (7.4, 8.0, 8.6)  # more of them gain less than 1 % of the error
# Weights per chunk: few enough for the CPU cache; on a GPU, so many that computing takes longer than launching.
_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 22


def quantized_matrix(weight: Tensor, num_bits: int) -> QuantizedWeight:
    """Quantises a float weight [N, K]; scales have its dtype if that has 16 bits, else float32. On the CPU it runs in
    the native extension, if present, on its threads."""
    if weight.device.type == "cpu" and load_extension()[0] is not None:
        native: QuantizedWeight = import_module("hydra_engine.backend.cpu.rounding").rounded_matrix(
            weight, 8 if weight.shape[1] % AT_LOAD_GROUP else num_bits
        )
        return native
    return quantize_in_torch(weight, num_bits)


def quantize_in_torch(weight: Tensor, num_bits: int) -> QuantizedWeight:
    """Computes `quantized_matrix` in plain torch, with the same bits."""
    dtype = weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else torch.float32
    num_in = weight.shape[1]
    by_rows = num_bits == 8 or num_in % AT_LOAD_GROUP
    chunks = weight.split(max((_CHUNK if weight.device.type == "cpu" else _DEVICE_CHUNK) // num_in, 1))
    if by_rows:
        return stacked([quantized(chunk, 8, num_in, dtype) for chunk in chunks])
    return stacked([_in_four_bits(chunk, dtype) for chunk in chunks])


def _in_four_bits(weight: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    wide = weight.float().unflatten(1, (-1, AT_LOAD_GROUP))
    top = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))
    best, step = torch.full_like(top, -1.0), torch.zeros_like(top)
    for tried in _TRIED:
        numbers = (wide * (-tried / top)).round_().clamp_(-8, 7)
        product, square = _in_order(wide * numbers), numbers.square().sum(-1, keepdim=True)
        gain = product.square() / square
        better = gain > best  # of zeros alone, whose gain is NaN, the step stays 0
        best, step = torch.where(better, gain, best), torch.where(better, product / square, step)
    scales = step.to(dtype)
    kept = scales.float()
    numbers = torch.where(kept != 0, wide / kept, 0.0).round_().clamp_(-8, 7).to(torch.int8).flatten(1)
    return QuantizedWeight(packed_numbers(numbers, 4), scales.squeeze(-1), None, 4)


def _in_order(products: Tensor) -> Tensor:
    """Sums [.., 32] to [.., 1] in a fixed order; the order of torch's own sum depends on the processor."""
    eighths = products.unflatten(-1, (4, 8)).unbind(-2)
    lanes = (eighths[0] + eighths[1] + eighths[2] + eighths[3]).split(1, dim=-1)
    return functools.reduce(torch.add, lanes)
