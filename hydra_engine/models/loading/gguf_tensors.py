"""Decodes the blocks of ggml's tensor types to tensors and `QuantizedWeight`s.

A block is a run of numbers of one row with its own scale; its layout is that of ggml-common.h. All have an even number
of bytes and are read as words of 16 bits; the native extension decodes the common types, with the same bits. Only sums
of two float32 numbers are rounded. Does not know files or names.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from hydra_engine.backend.devices import load_extension
from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.models.specs.gguf_file import TensorType

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Blocks(NamedTuple):
    """Decoded blocks in the layout of `QuantizedWeight`: values [B, bytes], scales and offsets [B, groups],
    block_scales [B, 1 or 2]."""

    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    num_bits: int = 8
    block_scales: Tensor | None = None


def decoded(data: Tensor, kind: TensorType, shape: tuple[int, ...]) -> Tensor | QuantizedWeight:
    """Decodes uint8 [bytes]. Quantised tensors that are not matrices are dequantised to float32."""
    if kind.name in _PLAIN:
        return data.view(_PLAIN[kind.name]).view(shape)
    rows = data.numel() // kind.num_bytes * kind.num_values // shape[-1]
    weight = None
    if load_extension()[0] is not None:
        native = import_module("hydra_engine.backend.cpu.rounding")
        weight = native.decoded_blocks(data, kind.name, rows) if kind.name in native.GGML_TYPES else None
    if weight is None:
        weight = decode_in_torch(data, kind, rows)
    return weight if len(shape) == 2 else weight.dequantized(torch.float32).view(shape)


def decode_in_torch(data: Tensor, kind: TensorType, rows: int) -> QuantizedWeight:
    """Decodes a quantised type in plain torch, with the same bits as the native extension."""
    blocks = _READERS[kind.name](data.view(torch.int16).view(-1, kind.num_bytes // 2))
    offsets, tops = blocks.offsets, blocks.block_scales
    return QuantizedWeight(
        blocks.values.reshape(rows, -1),
        blocks.scales.reshape(rows, -1),
        None if offsets is None else offsets.reshape(rows, -1),
        blocks.num_bits,
        None if tops is None else tops.reshape(rows, -1, tops.shape[1]),
    )


def _halves(words: Tensor) -> Tensor:
    """Views int16 [B, n] as float16 [B, n]."""
    return words.contiguous().view(torch.float16)


def _bytes(words: Tensor) -> Tensor:
    """Views int16 [.., n] as uint8 [.., 2 n]."""
    return words.contiguous().view(torch.uint8)


def _nibbles(words: Tensor) -> tuple[Tensor, Tensor]:
    """Splits int16 [.., n] into the lower and the upper halves of all bytes, two tensors of the same shape."""
    return words & 0x0F0F, words >> 4 & 0x0F0F


def _pairs(words: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `_nibbles` as 4-bit values, uint8 [.., n]."""
    return (words & 0x0F | words >> 4 & 0xF0).to(torch.uint8), (words >> 4 & 0x0F | words >> 8 & 0xF0).to(torch.uint8)


def _signed(words: Tensor, zero: int) -> Tensor:
    """Subtracts `zero` from bytes of 0 to 127: int16 [B, n] -> int8 [B, 2 n]."""
    return words.contiguous().view(torch.int8).sub_(zero)


# A byte -> eight bytes, of each bit 16 or 0, the lowest bit first.
_FIFTH_BITS = torch.tensor([[(byte >> bit & 1) << 4 for bit in range(8)] for byte in range(256)], dtype=torch.uint8)


def _fifths(words: Tensor) -> Tensor:
    """Expands 32 bits, int16 [B, 2], to bytes of 16 or 0, int16 [B, 16]."""
    return _FIFTH_BITS.view(torch.int64)[_bytes(words).int(), 0].view(torch.int16)


def _q8_0(blocks: Tensor) -> _Blocks:
    return _Blocks(_signed(blocks[:, 1:], 0), _halves(blocks[:, :1]))


def _q4_0(blocks: Tensor) -> _Blocks:
    return _Blocks(torch.cat(_pairs(blocks[:, 1:]), dim=1), _halves(blocks[:, :1]), num_bits=4)


def _q4_1(blocks: Tensor) -> _Blocks:
    """Decodes d q + m = d (q - 8) + (8 d + m)."""
    scales, least = _halves(blocks[:, :2]).float().split(1, dim=1)
    return _Blocks(torch.cat(_pairs(blocks[:, 2:]), dim=1), scales, 8 * scales + least, num_bits=4)


def _q5_0(blocks: Tensor) -> _Blocks:
    numbers = torch.cat(_nibbles(blocks[:, 3:]), dim=1).bitwise_or_(_fifths(blocks[:, 1:3]))
    return _Blocks(_signed(numbers, 16), _halves(blocks[:, :1]))


def _q5_1(blocks: Tensor) -> _Blocks:
    scales, least = _halves(blocks[:, :2]).float().split(1, dim=1)
    numbers = torch.cat(_nibbles(blocks[:, 4:]), dim=1).bitwise_or_(_fifths(blocks[:, 2:4]))
    return _Blocks(_signed(numbers, 0), scales, least)


def _eight_groups(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unpacks sc and m of Q4_K and Q5_K, int8 [B, 8], from 6 bits each in 12 bytes; returns them with d and dmin, [B,
    2]."""
    first, second, rest = _bytes(blocks[:, 2:8]).split(4, dim=1)
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=1)
    least = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=1)
    return scales.view(torch.int8), least.view(torch.int8), _halves(blocks[:, :2])


def _q4_k(blocks: Tensor) -> _Blocks:
    """Decodes d sc q - dmin m = d sc (q - 8) + (8 d sc - dmin m). Each 32 bytes hold 32 numbers in their lower halves,
    then 32 in their upper halves."""
    scales, offsets, block_scales = _eight_groups(blocks)
    numbers = torch.stack(_pairs(blocks[:, 8:].unflatten(1, (4, 16))), dim=2)
    return _Blocks(numbers.flatten(1), scales, offsets, 4, block_scales)


def _q5_k(blocks: Tensor) -> _Blocks:
    """Decodes like `_q4_k`; bit g of byte i of the preceding 32 bytes is the fifth bit of number i of group g."""
    scales, offsets, block_scales = _eight_groups(blocks)
    numbers = torch.stack(_nibbles(blocks[:, 24:].unflatten(1, (4, 16))), dim=2).flatten(1, 2)  # [B, 8, 16]
    for group in range(8):
        numbers[:, group] |= (blocks[:, 8:24] >> group & 0x0101) << 4
    return _Blocks(_signed(numbers.flatten(1), 0), scales, offsets, 6, block_scales)


def _q6_k(blocks: Tensor) -> _Blocks:
    """Decodes sixteen groups of 16. Each half of the block has 64 bytes of lower four bits and 32 bytes of upper
    two."""
    numbers = torch.stack(_nibbles(blocks[:, :64].unflatten(1, (2, 32))), dim=2).unflatten(3, (2, 16)).flatten(2, 3)
    high = blocks[:, 64:96].unflatten(1, (2, 16))
    for quarter in range(4):  # [B, 2, 4, 16]
        numbers[:, :, quarter] |= (high >> 2 * quarter & 0x0303) << 4
    scales = _bytes(blocks[:, 96:104]).view(torch.int8)
    return _Blocks(_signed(numbers.flatten(1), 32), scales, None, 6, _halves(blocks[:, 104:]))


_READERS: dict[str, Callable[[Tensor], _Blocks]] = {
    **{"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1},
    **{"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
}
