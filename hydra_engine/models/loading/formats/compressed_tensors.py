"""Matrices as compressed-tensors stores them: numbers of 4 or 8 bits packed into words, int8, or 8-bit floats.

weight_packed     int32 [N, K * bits / 32]  the lowest bits first, 0 in the middle of the range
weight            int8 or F8_E4M3 [N, K]    instead of it
weight_scale      [N, G]; [N] or [N, 1]: of rows; [] or [1]: of the matrix; floats also [blocks, blocks]
weight_zero_point int8 [N, G], or int32 [N * bits / 32, G] beside packed numbers
weight_shape      (N, K), beside packed numbers
weight_g_idx      int32 [K], the groups of inputs, where neighbours do not make them up
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.models.loading.checkpoint import StoredTensor, TensorEntry
from hydra_engine.models.loading.formats.float8 import check_scales, restore_weight
from hydra_engine.models.loading.formats.parts import (
    SCALES,
    Parts,
    from_signed,
    in_order,
    integers,
    middle,
    ungrouped,
    unpacked,
)
from hydra_engine.models.specs.quantization import Quantization

_PACKED = "weight_packed"


class CompressedTensors:
    leaves: tuple[str, ...] = ("weight", _PACKED, "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    unread: tuple[str, ...] = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    def is_quantized(self, entries: Mapping[str, TensorEntry]) -> bool:
        return _PACKED in entries or ("weight" in entries and entries["weight"].dtype in ("I8", "F8_E4M3"))

    def describe(self, parts: Parts, read: Callable[[str], Tensor]) -> StoredTensor:
        if _PACKED in parts:
            return self._describe_packed(parts, read)
        shape = parts.shape("weight", ("I8", "F8_E4M3"), 2)
        if shape is None:
            return parts.described()
        if parts.dtype("weight") == "F8_E4M3":
            check_scales(parts, "weight_scale", shape, self._quantization.block)
        else:
            self._check_groups(parts, shape, None)
        return parts.described(shape)

    def _describe_packed(self, parts: Parts, read: Callable[[str], Tensor]) -> StoredTensor:
        packed = parts.shape(_PACKED, ("I32",), 2)
        if not parts.check_part("weight_shape", ("I64", "I32"), (2,)) or packed is None:
            return parts.described()
        shape = tuple(read("weight_shape").tolist())
        bits = self._num_bits(packed[1], shape[1]) if shape[0] == packed[0] else 0
        if not bits:
            widths = " or ".join(map(str, self._quantization.num_bits))
            parts.complain(_PACKED, f"is {list(packed)}, which are not {list(shape)} numbers of {widths} bits")
            return parts.described()
        if "weight" in parts:
            parts.complain("weight", f"is there besides {_PACKED}")
        if shape[1] * bits % 32:
            parts.complain(_PACKED, f"ends inside a word; supported are multiples of {32 // bits} inputs")
        self._check_groups(parts, shape, bits)
        return parts.described(shape)

    def _num_bits(self, num_words: int, num_in: int) -> int:
        return next((b for b in self._quantization.num_bits if num_in > 0 and -(-num_in * b // 32) == num_words), 0)

    def _check_groups(self, parts: Parts, shape: tuple[int, ...], packed_bits: int | None) -> None:
        num_out, num_in = shape
        num_groups = parts.num_columns("weight_scale", SCALES, num_out)
        if num_groups is None:
            return
        parts.check_groups("weight_scale", num_in, num_groups, self._quantization)
        if "weight_zero_point" in parts:
            if packed_bits is None:
                parts.check_part("weight_zero_point", ("I8",), (num_out, num_groups), (num_out,), (1,), ())
            else:
                parts.check_part("weight_zero_point", ("I32",), (-(-num_out * packed_bits // 32), num_groups))
        elif self._quantization.has_zeros and len(self._quantization.num_bits) == 1:
            parts.shape("weight_zero_point", ("I32",), 2)  # which is missing
        if "weight_g_idx" in parts:
            parts.check_part("weight_g_idx", ("I32", "I64"), (num_in,))

    def build(self, parts: Mapping[str, Tensor]) -> Tensor | QuantizedWeight:
        scales, weight = parts["weight_scale"], parts.get("weight")
        if weight is not None and weight.dtype is torch.float8_e4m3fn:
            return restore_weight(weight, scales, self._quantization)
        zeros = parts.get("weight_zero_point")
        if weight is not None:
            rows = weight.shape[0]
            zeros = None if zeros is None else _columns(zeros, rows)
            return from_signed(weight, _columns(scales, rows), zeros, 8)
        packed, (num_out, num_in) = parts[_PACKED], parts["weight_shape"].tolist()
        bits, scales = self._num_bits(packed.shape[1], num_in), _columns(scales, packed.shape[0])
        if zeros is not None:
            zeros = unpacked(zeros.T, bits).T[:num_out]
        groups = parts.get("weight_g_idx")
        if groups is not None and not in_order(groups, scales.shape[1]):
            return ungrouped(unpacked(packed, bits), scales, middle(scales, bits) if zeros is None else zeros, groups)
        return integers(packed.view(torch.uint8), scales, zeros, bits)


def _columns(tensor: Tensor, rows: int) -> Tensor:
    """Expands scales of a matrix or of rows to [rows, G]."""
    return tensor.reshape(-1, tensor.shape[1] if tensor.dim() == 2 else 1).expand(rows, -1)
