"""Packed attention by kernels other than Triton's plain ones: the candidates, and the inputs that each supports.

A call that a kernel does not support falls back to Triton. cuDNN is called by its own operator, since `sdpa_kernel`
sets flags of the process, under which the other lane's attention would find no kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hydra_engine.backend.base import PackedPlan, Segments
from hydra_engine.backend.cuda.attention import CudaAttention
from hydra_engine.backend.cuda.attention_choice import (
    CAPTURED_PICTURES,
    CAPTURED_WINDOWS,
    CUDNN,
    FLASHINFER,
    PICTURES,
    TRITON_TMA,
    VARLEN,
    WINDOWS,
    ChosenAttention,
)
from hydra_engine.backend.cuda.flashinfer_attention import FlashInferAttention
from hydra_kernels.tma_attention import can_read

WINDOW = 64  # rows; segments are windows if none is longer
_WIDTH = 8  # head dims of torch's kernels are multiples of this
_MAX_WIDTH = 128


class Kernel(NamedTuple):
    """A packed-attention kernel and the inputs that it supports. Called with q, k, v, segments; `attend` also scale."""

    supports: Callable[[Tensor, Tensor, Tensor, Segments], bool]
    attend: Callable[[Tensor, Tensor, Tensor, Segments, float], Tensor]


def kernels(by_triton: CudaAttention, by_flashinfer: FlashInferAttention | None) -> dict[str, Kernel]:
    """Kernels for packed attention other than Triton's plain one, by their names in attention_choice.py; FlashInfer's
    only if it is given."""

    def by_varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        """Computes attention by torch's kernel for segments of any lengths."""
        if isinstance(segments, PackedPlan):
            bounds, longest = segments.cu_seqlens, min(segments.max_length, q.shape[0])
        else:
            bounds, longest = by_triton.segments(q, k, v, segments)
        varlen: Any = importlib.import_module("torch.nn.attention.varlen")
        mixed: Tensor = varlen.varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale)
        return mixed.contiguous()

    found = {
        TRITON_TMA: Kernel(lambda _q, k, v, _segments: can_read(k, v), partial(by_triton.attend_packed, tma=True)),
        CUDNN: Kernel(lambda q, _k, _v, segments: _length(q, segments) > 0, _by_cudnn),
        VARLEN: Kernel(lambda q, _k, _v, _segments: _fits(q), by_varlen),
    }
    if by_flashinfer is not None:
        planned = by_flashinfer.supports_packed
        found[FLASHINFER] = Kernel(lambda q, _k, _v, segments: planned(q, segments), by_flashinfer.attend_packed)
    return found


class TowerAttention:
    """`Ops.attention_packed` by the kernel selected for each use case. found: kernels by name, from `kernels`; use
    cases whose selected kernel is not among them take Triton."""

    def __init__(self, chosen: ChosenAttention, by_triton: CudaAttention, found: Mapping[str, Kernel]) -> None:
        self._by_triton = by_triton
        uses = (PICTURES, WINDOWS), (CAPTURED_PICTURES, CAPTURED_WINDOWS)
        self._by_host, self._captured = (tuple(found.get(chosen.kernel_for(use)) for use in pair) for pair in uses)

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments, scale: float) -> Tensor:
        """Implements `Ops.attention_packed`. Segments are windows if the longest (of a plan: `max_length`) has at most
        WINDOW rows, else pictures. What the selected kernel does not support takes Triton."""
        if isinstance(cu_seqlens, PackedPlan):
            kernel = self._captured[cu_seqlens.max_length <= WINDOW]
        else:
            _, longest = self._by_triton.segments(q, k, v, cu_seqlens)
            kernel = self._by_host[longest <= WINDOW]
        if kernel is None or not q.shape[0] or not kernel.supports(q, k, v, cu_seqlens):
            return self._by_triton.attend_packed(q, k, v, cu_seqlens, scale)
        return kernel.attend(q, k, v, cu_seqlens, scale)


def _fits(q: Tensor) -> bool:
    """True if the kernels of torch and cuDNN support q: 16 bits, and a head dim of up to _MAX_WIDTH that is a multiple
    of _WIDTH."""
    return q.dtype.itemsize == 2 and q.shape[2] <= _MAX_WIDTH and q.shape[2] % _WIDTH == 0


def _length(q: Tensor, segments: Segments) -> int:
    """The common length of all segments; 0 if cuDNN cannot compute them: lengths differ or are known to the device
    only, it does not support dtype or head dim, or the segments are empty."""
    if isinstance(segments, PackedPlan) or not _fits(q):
        return 0
    lengths = {end - begin for begin, end in pairwise(segments)}
    return lengths.pop() if len(lengths) == 1 else 0


def _by_cudnn(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """Computes attention as a batch of segments, which all have the length `_length`."""
    length = _length(q, segments)
    batch = [x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v)]  # [segments, H, length, D] each
    attend: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
    mixed = attend(*batch, None, False, 0.0, False, False, scale=scale)[0]
    return mixed.transpose(1, 2).reshape(q.shape)
