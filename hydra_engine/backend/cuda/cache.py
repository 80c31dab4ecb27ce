"""Paged caches on a CUDA device, on the native extension: what cpu/cache.py does there, with the same checks.

Work goes to torch's current stream of the cache's device; nothing waits for it. Slots and rows may lie in host memory:
then they are checked before anything is launched and sent along. Or they lie on the device, for callers that checked
them once per step (`step_indices`) and use them in every layer: then a kernel skips what is out of range, and the next
call, or `_C.cuda_check_faults`, raises ValueError. With HYDRA_CUDA_SYNC=1 the call itself does. Pairs of blocks lie in
host memory. Does not know which ops exist; allocates results with torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.cpu.linear import DTYPE_CODES

_NO_ADDRESS = 0


def make_desc(cache: PagedCache, device: int | None = None) -> _C.CudaCacheDesc:
    """`device`: whose kernels use the cache, where that is another one than its memory's: for a peer's mapped pool."""
    checks.check_new_cache(cache)
    data = cache.data
    if not data.is_cuda:
        raise ValueError(f"cache: expected a CUDA device, got {data.device}")
    num_blocks, num_layers, num_tensors, block_size, num_heads, head_dim = data.shape
    return _C.CudaCacheDesc(
        data.data_ptr(),
        num_blocks,
        num_layers,
        num_tensors,
        block_size,
        num_heads,
        head_dim,
        DTYPE_CODES[data.dtype],
        data.get_device() if device is None else device,
    )


def step_indices(name: str, indices: Tensor, device: torch.device, *, least: int, size: int) -> Tensor:
    """Slots or rows [M] int64 on `device`. From host memory they are checked, least <= i < size, and sent; those that
    lie on the device are taken as they are. Raises ValueError naming `name`."""
    checks.check_indices(name, indices)
    if not indices.is_cpu:
        checks.check_device(device, ((name, indices),))
        return indices
    _C.check_range(name, indices.data_ptr(), indices.shape[0], least, size)
    return indices.to(device, non_blocking=True)


class CudaCacheOps:
    """The ops of `Ops` on caches, with one `_C.CudaCacheDesc` per cache, made at first use and forgotten with its
    tensor; a graph is captured once it is made. `device`: whose kernels use the caches, where one is a peer's that lies
    on another."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = None if device is None else device.index
        self._known: dict[int, tuple[weakref.ref[Tensor], _C.CudaCacheDesc]] = {}

    def desc(self, cache: PagedCache) -> _C.CudaCacheDesc:
        data = cache.data
        known = self._known.get(id(data))
        if known is not None:
            return known[1]
        desc = make_desc(cache, self._device)
        key = id(data)
        # Removed when the tensor dies, so an id that is given out again never finds the old descriptor.
        self._known[key] = (weakref.ref(data, lambda _: self._known.pop(key, None)), desc)
        return desc

    def write_cache(self, cache: PagedCache, layer: int, rows: Sequence[Tensor], slots: Tensor) -> None:
        desc = self.desc(cache)
        tokens, strides = checks.check_write(cache, layer, rows, slots)
        device = cache.data.device
        checks.check_device(device, [(f"rows[{x}]", source) for x, source in enumerate(rows)])
        slots = step_indices("slots", slots, device, least=-1, size=_num_slots(cache))
        second, second_stride = (_NO_ADDRESS, 0) if len(rows) == 1 else (rows[1].data_ptr(), strides[1])
        stream = _stream(device)
        desc.write(stream, layer, rows[0].data_ptr(), strides[0], second, second_stride, slots.data_ptr(), tokens)

    def rope_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: PagedCache,
        layer: int,
        slots: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        desc = self.desc(cache)
        strides = checks.check_rope(q, k, v, cos, sin, cache, layer, slots)
        tokens, num_heads, dim = shape = q.shape
        device = cache.data.device
        checks.check_device(device, (("q", q), ("k", k), ("v", v), ("cos", cos), ("sin", sin)))
        if q_norm is not None or k_norm is not None:
            checks.check_head_norms(q_norm, k_norm, dim, q.dtype)
            norms = (("q_norm", q_norm), ("k_norm", k_norm))
            checks.check_device(device, [(name, weight) for name, weight in norms if weight is not None])
        slots = step_indices("slots", slots, device, least=-1, size=_num_slots(cache))
        out = torch.empty(shape, dtype=q.dtype, device=device)
        desc.rope_and_write(
            _stream(device),
            layer,
            q.data_ptr(),
            strides.q,
            num_heads,
            k.data_ptr(),
            strides.k,
            v.data_ptr(),
            strides.v,
            cos.data_ptr(),
            strides.cos,
            sin.data_ptr(),
            strides.sin,
            slots.data_ptr(),
            tokens,
            out.data_ptr(),
            _NO_ADDRESS if q_norm is None else q_norm.data_ptr(),
            _NO_ADDRESS if k_norm is None else k_norm.data_ptr(),
            eps,
        )
        return out

    def merge_image_tokens(
        self,
        hidden: Tensor,
        rows: Tensor,
        cache: PagedCache,
        slots: Tensor,
        plane: int = 0,
        *,
        accumulate: bool = False,
    ) -> None:
        desc = self.desc(cache)
        count = checks.check_merge(hidden, rows, cache, slots, plane)
        device = cache.data.device
        checks.check_device(device, (("hidden", hidden),))
        slots = step_indices("slots", slots, device, least=0, size=_num_slots(cache))
        rows = step_indices("rows", rows, device, least=0, size=hidden.shape[0])
        addresses = (slots.data_ptr(), rows.data_ptr())
        desc.merge(_stream(device), plane, *addresses, count, hidden.data_ptr(), hidden.shape[0], accumulate)

    def gather_cache(self, cache: PagedCache, layer: int, index: int, slots: Tensor) -> Tensor:
        desc = self.desc(cache)
        count = checks.check_indices("slots", slots)
        shape, device = cache.data.shape, cache.data.device
        checks.check_plane(cache, layer, index)
        slots = step_indices("slots", slots, device, least=0, size=_num_slots(cache))
        out = torch.empty((count, shape[4], shape[5]), dtype=cache.data.dtype, device=device)
        desc.gather(_stream(device), layer, index, slots.data_ptr(), count, out.data_ptr())
        return out

    def copy_blocks(self, source: PagedCache, target: PagedCache, pairs: Tensor) -> None:
        """`source` may be a peer's pool that is mapped here; the copy runs on the target's device."""
        source_desc, target_desc = self.desc(source), self.desc(target)
        count = checks.check_copy(source, target, pairs)
        checks.check_device(torch.device("cpu"), (("pairs", pairs),))
        source_desc.copy_to(_stream(target.data.device), target_desc, pairs.data_ptr(), count)


def _num_slots(cache: PagedCache) -> int:
    return cache.num_blocks * cache.block_size


def _stream(device: torch.device) -> int:
    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream
