"""Paged caches on a CUDA device, by the native extension: the counterpart of cpu/ops.py, with the same checks.

Work is launched on torch's current stream of the cache's device; only `gather_cache` of a quantized cache waits. Slots
and rows in host memory are checked before the launch and sent along. Slots and rows on the device are for callers that
checked them once per step (`step_indices`) and use them in every layer: a kernel skips what is out of range, and the
next call, or `_C.cuda_check_faults`, raises ValueError (with HYDRA_CUDA_SYNC=1 the call itself). Pairs of blocks are in
host memory. An int8 cache is written by Triton, which skips such slots without a report; its blocks are copied by the
extension. Does not know which ops exist; allocates results with torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.base import SCALE_BYTES, HeadNorms, PagedCache, Rotary
from hydra_engine.backend.cpu.linear import DTYPE_CODES
from hydra_engine.backend.cpu.ops import CacheOps, desc_arguments
from hydra_kernels.quantized_cache import rope_and_write_quantized, write_quantized

_HOST = -1  # in place of a device's number: see `_C.CudaCacheDesc`


def make_desc(cache: PagedCache, device: int | None = None) -> _C.CudaCacheDesc:
    """Returns the extension's descriptor of a cache. With a quantized cache, or one in host memory, it only copies
    blocks.

    device: index of the GPU whose kernels use the cache, if the memory is another GPU's (a peer's mapped pool). Raises
    ValueError for a quantized cache with an odd head dim, and as `desc_arguments`.
    """
    arguments = desc_arguments(cache)
    head_dim, dtype = arguments[6:]
    if cache.scales is not None:
        # Only for copies: blocks of the same size in bytes.
        head_dim, dtype = head_dim + SCALE_BYTES, DTYPE_CODES[torch.bfloat16]
        if head_dim % 2:
            raise ValueError(f"cache: expected an even head dim beside scales, got {head_dim - SCALE_BYTES}")
        head_dim //= 2
    on = cache.data.get_device() if device is None else device
    return _C.CudaCacheDesc(*arguments[:6], head_dim, dtype, on if cache.data.is_cuda else _HOST)


def step_indices(name: str, indices: Tensor, device: torch.device, *, least: int, size: int) -> Tensor:
    """Returns slots or rows [M] int64 on `device`. Indices in host memory are checked, least <= i < size, and sent;
    indices on the device are returned unchanged, and their values are not checked. Raises ValueError that names
    `name`."""
    checks.check_indices(name, indices)
    if not indices.is_cpu:
        checks.check_device(device, ((name, indices),))
        return indices
    _C.check_range(name, indices.data_ptr(), indices.shape[0], least, size)
    return indices.to(device, non_blocking=True)


class _OnStream:
    """A descriptor with the interface of `_C.CacheDesc` that launches on the current stream of its cache's device.

    Methods take the extension's arguments. All but `copy_to` raise ValueError for a cache in host memory.
    """

    def __init__(self, desc: _C.CudaCacheDesc, device: torch.device) -> None:
        self._desc = desc
        self._device = device

    def write(self, *arguments: int) -> None:
        """Launches `_C.CudaCacheDesc.write`: writes rows to cache slots."""
        self._desc.write(_stream(self._device), *arguments)

    def rope_and_write(self, layer: int, *arguments: Any) -> None:
        """Launches `_C.CudaCacheDesc.rope_and_write`: rotates queries and keys, and writes keys and values to cache
        slots."""
        self._desc.rope_and_write(_stream(self._device), layer, *arguments)

    def merge(self, plane: int, *arguments: Any) -> None:
        """Launches `_C.CudaCacheDesc.merge`: sets rows of a tensor to image features of the cache, or adds them."""
        self._desc.merge(_stream(self._device), plane, *arguments)

    def gather(self, *arguments: int) -> None:
        """Launches `_C.CudaCacheDesc.gather`: copies rows from cache slots to a tensor."""
        self._desc.gather(_stream(self._device), *arguments)

    def copy_to(self, target: _OnStream, pairs: int, count: int) -> None:
        """Launches the copy of `count` blocks. pairs: host address of int64 [count, 2], (source block, target block).

        Runs on the target's device, since the source may be a peer's memory; on the source's if the target is in host
        memory. Raises ValueError if both are.
        """
        device = self._device if target._device.type == "cpu" else target._device
        self._desc.copy_to(_stream(device), target._desc, pairs, count)


class CudaCacheOps(CacheOps):
    """The cache ops of `Ops`, launched on the current stream of the cache's device.

    Use a cache once before a graph with it is captured: its descriptor must exist by then. device: the device whose
    kernels use the caches, if one of them is a peer's on another device; None: the cache's own.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self._kernel_device = None if device is None else device.index

    def _new_desc(self, cache: PagedCache) -> _OnStream:
        return _OnStream(make_desc(cache, self._kernel_device), cache.data.device)

    def write_cache(self, cache: PagedCache, layer: int, rows: Sequence[Tensor], slots: Tensor) -> None:
        """Implements `Ops.write_cache`. A quantized cache is written by Triton, which does not report slots on the
        device that are out of range."""
        checks.check_device(cache.data.device, [(f"rows[{x}]", source) for x, source in enumerate(rows)])
        on_device = slots_on_device(cache, slots)
        if cache.scales is None:
            super().write_cache(cache, layer, rows, on_device)
            return
        checks.check_new_cache(cache)
        checks.check_write(cache, layer, rows, on_device)
        k, v = rows
        write_quantized(cache.data, cache.scales, layer, k, v, on_device)

    def rope_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: Rotary,
        cache: PagedCache,
        layer: int,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Implements `Ops.rope_and_write`. A quantized cache is written by Triton, which does not report slots on the
        device that are out of range."""
        tensors = [("q", q), ("k", k), ("v", v), ("cos", rotary[0]), ("sin", rotary[1])]
        if norms is not None:
            weights = (("q_norm", norms.q), ("k_norm", norms.k))
            tensors += [(name, weight) for name, weight in weights if weight is not None]
        checks.check_device(cache.data.device, tensors)
        on_device = slots_on_device(cache, slots)
        if cache.scales is None:
            return super().rope_and_write(q, k, v, rotary, cache, layer, on_device, norms)
        checks.check_new_cache(cache)
        checks.check_rope(q, k, v, rotary, cache, layer, on_device)
        if norms is not None:
            checks.check_head_norms(norms, q.shape[2], q.dtype)
        used = (None, None, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
        result: Tensor = rope_and_write_quantized(cache.data, cache.scales, layer, q, k, v, rotary, on_device, used)
        return result

    def merge_image_tokens(
        self, hidden: Tensor, rows: Tensor, cache: PagedCache, slots: Tensor, plane: int = 0
    ) -> None:
        """Implements `Ops.merge_image_tokens`: sets, or with a `plane` above 0 adds to, rows of `hidden` in place."""
        device = cache.data.device
        checks.check_device(device, (("hidden", hidden),))
        rows = step_indices("rows", rows, device, least=0, size=hidden.shape[0])
        super().merge_image_tokens(hidden, rows, cache, slots_on_device(cache, slots), plane)

    def gather_cache(self, cache: PagedCache, layer: int, index: int, slots: Tensor) -> Tensor:
        """Implements `Ops.gather_cache`: returns new rows [M, H, D]; a row of slot -1 is uninitialised memory. A
        quantized cache is read by torch, which waits for the device."""
        checks.check_plane(cache, layer, index)
        return super().gather_cache(cache, layer, index, slots_on_device(cache, slots))

    def copy_blocks(self, source: PagedCache, target: PagedCache, pairs: Tensor) -> None:
        """Implements `Ops.copy_blocks`, on the target's device: `source` may be a peer's mapped pool. If one of the two
        is in host memory, pinned or not, the copy engines of the other one's device move its blocks."""
        checks.check_device(torch.device("cpu"), (("pairs", pairs),))
        super().copy_blocks(source, target, pairs)


def slots_on_device(cache: PagedCache, slots: Tensor) -> Tensor:
    """Returns slots [M] int64 on the cache's device; -1 skips a row. Slots in host memory are checked and sent. Raises
    ValueError if one of these is outside of the cache."""
    return step_indices("slots", slots, cache.data.device, least=-1, size=cache.num_blocks * cache.block_size)


def _stream(device: torch.device) -> int:
    """The raw current stream of `device`, faster than torch.cuda.current_stream. Raises ValueError for the CPU."""
    if device.type == "cpu":
        raise ValueError(
            f"cache: expected one on a GPU, got one on {device}; allocate it there, or take the ops of {device}"
        )
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream
