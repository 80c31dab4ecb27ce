"""Matrices as GPTQ and AWQ store them, inputs before outputs.

    GPTQ: qweight int32 [K * bits / 32, N], the lowest bits are the first input     AWQ: qweight int32 [K, N / 8]
    qzeros int32 [G, N * bits / 32]     scales [G, N]     g_idx int32 [K], GPTQ alone, optional: the group of each input

    w[n, k] = scales[g, n] * (q[k, n] - zero[g, n])

GPTQ's first format stores zero - 1. With act-order (`desc_act`) a group's inputs are not neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

import torch
from torch import Tensor

from hydra_engine.backend.devices import load_extension
from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.models.loading.checkpoint import StoredTensor, TensorEntry
from hydra_engine.models.loading.formats.parts import (
    SCALES,
    ZERO,
    Parts,
    in_order,
    integers,
    middle,
    ungrouped,
    unpacked,
)
from hydra_engine.models.specs.quantization import Quantization

_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where the eight outputs of a word stand, from the lowest bits


class Gptq:
    leaves: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    unread: tuple[str, ...] = ()

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    def is_quantized(self, entries: Mapping[str, TensorEntry]) -> bool:
        return "qweight" in entries

    def describe(self, parts: Parts, read: Callable[[str], Tensor]) -> StoredTensor:
        packed = parts.shape("qweight", ("I32",), 2)
        scales, zeros = parts.shape("scales", SCALES, 2), parts.shape("qzeros", ("I32",), 2)
        if packed is None or scales is None or zeros is None:
            return parts.described()
        bits = self._num_bits(packed[1], zeros[1])
        if not bits:
            widths = " or ".join(map(str, self._quantization.num_bits))
            parts.complain("qzeros", f"is {list(zeros)}, which are not numbers of {packed[1]} outputs in {widths} bits")
            return parts.described()
        num_in, num_out = packed[0] * 32 // bits, packed[1]
        if num_out * bits % 32:
            parts.complain("qweight", f"has {num_out} outputs; supported are multiples of {32 // bits}")
        parts.check_part("scales", SCALES, (scales[0], num_out))
        parts.check_groups("scales", num_in, scales[0], self._quantization)
        parts.check_part("qzeros", ("I32",), (scales[0], zeros[1]))
        if "g_idx" in parts:
            parts.check_part("g_idx", ("I32", "I64"), (num_in,))
        return parts.described((num_out, num_in))

    def _num_bits(self, num_out: int, num_words: int) -> int:
        """Infers the bits from a group's zero points, because g_idx may be missing. 0 if no width fits."""
        return next((bits for bits in self._quantization.num_bits if -(-num_out * bits // 32) == num_words), 0)

    def build(self, parts: Mapping[str, Tensor]) -> Tensor | QuantizedWeight:
        packed, scales, groups = parts["qweight"], parts["scales"].T, parts.get("g_idx")
        bits = self._num_bits(packed.shape[1], parts["qzeros"].shape[1])
        zeros, words = self._zeros(parts["qzeros"], bits), _by_outputs(packed)
        if groups is not None and not in_order(groups, scales.shape[1]):
            return ungrouped(unpacked(words, bits), scales, middle(scales, bits) if zeros is None else zeros, groups)
        return integers(words.view(torch.uint8), scales, zeros, bits)

    def _zeros(self, packed: Tensor, bits: int) -> Tensor | None:
        """Unpacks the zero points, [N, G]; None if all are the middle of the range, as in symmetric checkpoints."""
        stored = ZERO[bits] - self._quantization.zero_offset
        if (packed.view(torch.uint8) == (stored | stored << 4 if bits == 4 else stored)).all():
            return None
        zeros = unpacked(packed, bits).to(torch.int16).T
        return (zeros + self._quantization.zero_offset) & ((1 << bits) - 1)


class Awq:
    leaves: tuple[str, ...] = ("qweight", "qzeros", "scales")
    unread: tuple[str, ...] = ()

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    def is_quantized(self, entries: Mapping[str, TensorEntry]) -> bool:
        return "qweight" in entries

    def describe(self, parts: Parts, read: Callable[[str], Tensor]) -> StoredTensor:
        packed, scales = parts.shape("qweight", ("I32",), 2), parts.shape("scales", SCALES, 2)
        if packed is None or scales is None:
            parts.shape("qzeros", ("I32",), 2)
            return parts.described()
        num_in, num_out = packed[0], packed[1] * 8
        if num_in % 2:
            parts.complain("qweight", f"has {num_in} inputs; supported are even numbers")
        parts.check_part("scales", SCALES, (scales[0], num_out))
        parts.check_groups("scales", num_in, scales[0], self._quantization)
        if self._quantization.has_zeros or "qzeros" in parts:
            parts.check_part("qzeros", ("I32",), (scales[0], num_out // 8))
        return parts.described((num_out, num_in))

    def build(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        numbers, zeros = _numbers(parts["qweight"]).T, parts.get("qzeros")
        pairs = numbers.unflatten(1, (-1, 2))
        octets = pairs[:, :, 0] | pairs[:, :, 1] << 4
        return integers(octets, parts["scales"].T, None if zeros is None else _numbers(zeros).T, 4)


def _by_outputs(words: Tensor) -> Tensor:
    """Transposes int32 [R, N] to [N, R], contiguous."""
    if load_extension()[0] is None:
        return words.T.contiguous()
    transposed: Tensor = import_module("hydra_engine.backend.cpu.rounding").transposed_words(words)
    return transposed


def _numbers(words: Tensor) -> Tensor:
    """Unpacks AWQ's words, int32 [R, N / 8] -> uint8 [R, N]."""
    return unpacked(words, 4).unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1)
