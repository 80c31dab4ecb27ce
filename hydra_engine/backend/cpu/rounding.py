"""Native quantisation and conversion of weights: from float types, from ggml's blocks, and from words stored
inputs-first.

The formulas are in hydra_engine/models/loading/quantize.py and gguf_tensors.py; threads and instruction sets in
csrc/cpu/quantized. Importing this needs hydra_engine._C.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.cpu.linear import DTYPE_CODES
from hydra_engine.backend.quantized import QuantizedWeight

_GROUP = 32  # inputs that share a scale, in 4 bits


class _Blocks(NamedTuple):
    """A type of ggml blocks, and the format that its blocks are unpacked to."""

    code: int  # of the extension
    num_bytes: int  # this and the next two are per block
    num_values: int
    num_groups: int
    num_bits: int  # of a value, unpacked
    block_scales: int = 0  # float16 scales of a block: 1, or 2 with offsets; 0: its groups have float16 scales


GGML_TYPES = {
    "Q4_0": _Blocks(0, 18, 32, 1, 4),
    "Q8_0": _Blocks(1, 34, 32, 1, 8),
    "Q4_K": _Blocks(2, 144, 256, 8, 4, block_scales=2),
    "Q5_K": _Blocks(3, 176, 256, 8, 6, block_scales=2),
    "Q6_K": _Blocks(4, 210, 256, 16, 6, block_scales=1),
}


def rounded_matrix(weight: Tensor, num_bits: int) -> QuantizedWeight:
    """Quantises weight [num_out, K] of a float type, on the CPU: to 8 bits with one scale per row, to 4 bits with one
    per 32 inputs.

    Scales have the weight's dtype if that has 16 bits, else float32. Raises ValueError with 4 bits if K is no multiple
    of 32.
    """
    weight = (weight if weight.dtype in DTYPE_CODES else weight.float()).contiguous()
    num_out, num_in = weight.shape
    checks.check_rows("weight", weight, num_in, weight.dtype)
    values = torch.empty(num_out, num_in * num_bits // 8, dtype=torch.int8 if num_bits == 8 else torch.uint8)
    scales = torch.empty(num_out, 1 if num_bits == 8 else num_in // _GROUP, dtype=weight.dtype)
    addresses = values.data_ptr(), scales.data_ptr()
    _C.round_matrix(weight.data_ptr(), DTYPE_CODES[weight.dtype], num_out, num_in, num_bits, *addresses)
    return QuantizedWeight(values, scales, None, num_bits)


def decoded_blocks(data: Tensor, kind: str, rows: int) -> QuantizedWeight:
    """Unpacks the ggml blocks of a weight with `rows` outputs: `data`, uint8 [bytes] contiguous on the CPU.

    kind: a key of GGML_TYPES. Raises ValueError unless blocks are whole and their number is the same in each row.
    """
    form = GGML_TYPES[kind]
    if data.numel() % (rows * form.num_bytes):
        raise ValueError(f"data: expected whole blocks of {form.num_bytes} bytes in {rows} rows, got {data.numel()}")
    count = data.numel() // form.num_bytes
    values = torch.empty(rows, count * form.num_values // rows // (2 if form.num_bits == 4 else 1), dtype=torch.uint8)
    groups, blocks = (rows, count * form.num_groups // rows), (rows, count // rows, form.block_scales)
    scales = torch.empty(groups, dtype=torch.int8 if form.block_scales else torch.float16)
    offsets = torch.empty(groups, dtype=torch.int8) if form.block_scales == 2 else None
    block_scales = torch.empty(blocks, dtype=torch.float16) if form.block_scales else None
    addresses = (0 if part is None else part.data_ptr() for part in (values, scales, offsets, block_scales))
    _C.decode_blocks(form.code, data.data_ptr(), count, *addresses)
    if form.num_bits != 4:
        values = values.view(torch.int8)
    return QuantizedWeight(values, scales, offsets, form.num_bits, block_scales)


def transposed_words(words: Tensor) -> Tensor:
    """Transposes words int32 [R, C] to contiguous [C, R]. Raises ValueError unless they are contiguous int32."""
    if words.dtype is not torch.int32 or words.dim() != 2 or not words.is_contiguous():
        raise ValueError(f"words: expected contiguous rows of int32, got {checks.described(words)}")
    rows, columns = words.shape
    result = torch.empty(columns, rows, dtype=torch.int32)
    _C.transpose_words(words.data_ptr(), rows, columns, result.data_ptr())
    return result
