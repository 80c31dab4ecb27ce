"""Matrices of 8-bit floating-point numbers (E4M3) with scales of blocks, of rows, or of the whole.

    w[n, k] = scale[n / block, k / block] * weight[n, k]

Processors without arithmetic in 8-bit floats compute with them in the compute dtype. `fp8` of transformers calls the
scale weight_scale_inv and has it multiply all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hydra_engine.models.loading.checkpoint import StoredTensor
from hydra_engine.models.loading.formats.parts import SCALES, Parts
from hydra_engine.models.loading.safetensors_file import TensorEntry
from hydra_engine.models.specs.quantization import Quantization

_NAMES = ("weight_scale_inv", "weight_scale")
_Block = tuple[int, int]


class Float8:
    """`fp8` of transformers."""

    leaves: tuple[str, ...] = ("weight", *_NAMES)
    unread: tuple[str, ...] = ("input_scale", "activation_scale")

    def __init__(self, quantization: Quantization) -> None:
        self._block = quantization.block

    def is_quantized(self, entries: Mapping[str, TensorEntry]) -> bool:
        return "weight" in entries and entries["weight"].dtype == "F8_E4M3"

    def describe(self, parts: Parts, read: Callable[[str], Tensor]) -> StoredTensor:
        shape = parts.shape("weight", ("F8_E4M3",), 2)
        if shape is not None:
            check_scales(parts, _NAMES[1] if _NAMES[1] in parts else _NAMES[0], shape, self._block)
        return parts.described(shape or ())

    def build(self, parts: Mapping[str, Tensor]) -> Tensor:
        return dequantized(parts["weight"], next(parts[name] for name in _NAMES if name in parts), self._block)


def check_scales(parts: Parts, leaf: str, shape: tuple[int, ...], block: _Block | None) -> None:
    rows, columns = shape
    allowed = [(), (1,), (1, 1), (rows,), (rows, 1)]
    if block is not None:
        allowed.append((-(-rows // block[0]), -(-columns // block[1])))
    parts.expect(leaf, SCALES, *allowed)


def dequantized(weight: Tensor, scales: Tensor, block: _Block | None) -> Tensor:
    """float32 [N, K]. Raises ValueError where numbers have scales of zero alone."""
    wide, scales = weight.float(), scales.float()
    if not scales.any() and wide.any():
        raise ValueError("its scales are all zero")
    if scales.dim() == 1 and scales.shape[0] == wide.shape[0]:
        scales = scales[:, None]
    if scales.dim() == 2 and block is not None and scales.shape == _blocks(wide, block):
        tall = scales.repeat_interleave(block[0], dim=0)[: wide.shape[0]]
        for column in range(scales.shape[1]):
            wide[:, column * block[1] : (column + 1) * block[1]] *= tall[:, column, None]
        return wide
    return wide.mul_(scales)


def _blocks(wide: Tensor, block: _Block) -> torch.Size:
    return torch.Size(-(-size // step) for size, step in zip(wide.shape, block, strict=True))
