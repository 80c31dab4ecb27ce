"""Matrices of 8-bit floating-point numbers (E4M3) with scales of blocks, of rows, or of the whole.

    w[n, k] = scale[n / block, k / block] * weight[n, k]

A GPU computes with them unchanged. Processors without arithmetic in 8-bit floats convert them to the compute dtype, and
so does a GPU for a matrix whose inputs are not whole blocks. transformers' `fp8` names the scale
weight_scale_inv, but it multiplies too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hydra_engine.backend.quantized import MIN_GROUP, QuantizedWeight
from hydra_engine.models.loading.checkpoint import StoredTensor, TensorEntry
from hydra_engine.models.loading.formats.parts import SCALES, Parts
from hydra_engine.models.specs.quantization import Quantization

_NAMES = ("weight_scale_inv", "weight_scale")
_Block = tuple[int, int]


class Float8:
    """The format that transformers calls `fp8`."""

    leaves: tuple[str, ...] = ("weight", *_NAMES)
    unread: tuple[str, ...] = ("input_scale", "activation_scale")

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    def is_quantized(self, entries: Mapping[str, TensorEntry]) -> bool:
        return "weight" in entries and entries["weight"].dtype == "F8_E4M3"

    def describe(self, parts: Parts, read: Callable[[str], Tensor]) -> StoredTensor:
        shape = parts.shape("weight", ("F8_E4M3",), 2)
        if shape is not None:
            check_scales(parts, _NAMES[1] if _NAMES[1] in parts else _NAMES[0], shape, self._quantization.block)
        return parts.described(shape or ())

    def build(self, parts: Mapping[str, Tensor]) -> Tensor | QuantizedWeight:
        return restore_weight(
            parts["weight"], next(parts[name] for name in _NAMES if name in parts), self._quantization
        )


def check_scales(parts: Parts, leaf: str, shape: tuple[int, ...], block: _Block | None) -> None:
    rows, columns = shape
    allowed = [(), (1,), (1, 1), (rows,), (rows, 1)]
    if block is not None:
        allowed.append((-(-rows // block[0]), -(-columns // block[1])))
    parts.check_part(leaf, SCALES, *allowed)


def restore_weight(weight: Tensor, scales: Tensor, quantization: Quantization) -> Tensor | QuantizedWeight:
    """Returns the weight in 8-bit floats if `keeps_floats` and its blocks allow it, else float32 [N, K]. Raises
    ValueError if nonzero numbers have only zero scales."""
    if not scales.float().any() and weight.float().any():
        raise ValueError("its scales are all zero")
    by_rows = _by_rows(weight, scales.float(), quantization.block) if quantization.keeps_floats else None
    if by_rows is None:
        return _dequantized(weight.float(), scales.float(), quantization.block)
    return QuantizedWeight(weight.contiguous(), by_rows.contiguous())


def _by_rows(weight: Tensor, scales: Tensor, block: _Block | None) -> Tensor | None:
    """Expands scales to [N, G], one per row and group of inputs. None if the last group would be smaller than the
    others, or the groups do not suit the kernels."""
    rows, columns = weight.shape
    if scales.dim() == 2 and block is not None and scales.shape == _blocks(weight, block):
        groups = scales.shape[1]
        if groups > 1 and (columns != groups * block[1] or block[1] % MIN_GROUP):
            return None
        return scales.repeat_interleave(block[0], dim=0)[:rows]
    return scales.reshape(-1, 1).expand(rows, 1)


def _dequantized(wide: Tensor, scales: Tensor, block: _Block | None) -> Tensor:
    """Multiplies `wide` by its scales in place: float32 [N, K]."""
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
