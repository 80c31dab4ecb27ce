"""Cost of a launch on the emulated device, from the shapes of its inputs and results, in the units of `clock.Machine`.
Products and attention count multiplications; all else is bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from tests.emulated.clock import Work

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear")
_LINEAR = ("small_linear", "invariant_linear", "small_quantized_linear", "invariant_quantized_linear")


def work_of_op(name: str, given: Sequence[Any], made: Sequence[Any]) -> Work:
    """An op of torch's. A view that it is given counts with what it shows."""
    tensors = [value for value in given if isinstance(value, Tensor)]
    flop = 0.0
    if name in _PRODUCTS:
        left = tensors[-2]  # behind a bias, if there is one
        flop = 2.0 * left.numel() * tensors[-1].shape[-1]
    elif name == "aten::_scaled_mm":
        flop = 1.0 * tensors[0].numel() * tensors[1].shape[1]  # at twice the rate of 16 bits
    elif name == "aten::convolution":
        weight = tensors[1]
        flop = 2.0 * sum(out.numel() for out in made) * weight.numel() / weight.shape[0]
    return Work(flop, _bytes((*tensors, *made)))


def work_of_kernel(name: str, args: Sequence[Any], given: Sequence[Any], made: Sequence[Any]) -> Work:
    """A function of the package of kernels."""
    if name in _LINEAR:
        x = args[0]
        return Work(2.0 * x.numel() * sum(out.shape[-1] for out in made), _bytes((*given, *made)))
    if name in ("gated_linear", "rope_linear"):
        x, weight = args[0], args[1]
        written = x.shape[0] * weight.shape[0] * x.element_size()
        return Work(2.0 * x.numel() * weight.shape[0], _bytes((x, weight)) + written)
    if name == "packed_attention":
        q, cu_seqlens = args[0], args[3]
        pairs = sum((end - begin) ** 2 for begin, end in pairwise(cu_seqlens.held.tolist()))
        return Work(4.0 * pairs * q.shape[1] * q.shape[2], _bytes((*given, *made)))
    if name in ("decode_attention", "prefill_attention"):
        q, k_cache, num_context = args[0], args[1], args[4 if name == "decode_attention" else 5]
        tokens = int(num_context.held.sum())
        heads, head_dim = k_cache.shape[-2:]
        rows = q.shape[0] / max(1, num_context.shape[0])
        read = 2 * tokens * heads * head_dim * k_cache.element_size()
        return Work(4.0 * tokens * rows * q.shape[1] * head_dim, read + _bytes((q, *made)))
    return Work(0.0, _bytes((*given, *made)))


def _bytes(tensors: Sequence[Any]) -> float:
    return float(sum(value.numel() * value.element_size() for value in tensors if isinstance(value, Tensor)))
