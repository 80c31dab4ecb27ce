"""Matrices of a float type rounded to 8 or 4 bits by the native extension. Importing this needs hydra_engine._C.

The formulas are in hydra_engine/models/loading/quantize.py; threads and instruction sets in csrc/cpu/quantized.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.cpu.linear import DTYPE_CODES
from hydra_engine.backend.quantized import QuantizedWeight

_GROUP = 32  # inputs that share a scale, in 4 bits


def rounded_matrix(weight: Tensor, num_bits: int) -> QuantizedWeight:
    """weight [N, K] of a float type, on the CPU; 8 bits: a scale per row; 4: per 32 inputs, of which K is a multiple.
    Scales in its dtype where that has 16 bits, else in float32. Raises ValueError for another shape."""
    weight = (weight if weight.dtype in DTYPE_CODES else weight.float()).contiguous()
    num_out, num_in = weight.shape
    checks.check_rows("weight", weight, num_in, weight.dtype)
    values = torch.empty(num_out, num_in * num_bits // 8, dtype=torch.int8 if num_bits == 8 else torch.uint8)
    scales = torch.empty(num_out, 1 if num_bits == 8 else num_in // _GROUP, dtype=weight.dtype)
    addresses = values.data_ptr(), scales.data_ptr()
    _C.round_matrix(weight.data_ptr(), DTYPE_CODES[weight.dtype], num_out, num_in, num_bits, *addresses)
    return QuantizedWeight(values, scales, None, num_bits)
