"""The cache ops of a device for test cases whose tensors lie in host memory.

Every call takes its tensors to the device with their strides, runs there and brings back what it wrote, also when it
raises. Indices stay in host memory, where the wrappers check them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hydra_engine.backend.base import HeadNorms, PagedCache, Rotary
from hydra_engine.backend.cuda.cache import CudaCacheOps


class OnDevice:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ops = CudaCacheOps()

    def moved(self, host: Tensor) -> Tensor:
        """The same view of a copy of the whole memory behind it."""
        memory = torch.empty(0, dtype=host.dtype).set_(host.untyped_storage())
        return memory.to(self._device).as_strided(host.shape, host.stride(), host.storage_offset())

    def cache(self, host: PagedCache) -> PagedCache:
        return PagedCache(self.moved(host.data))

    def write_cache(self, cache: PagedCache, layer: int, rows: Sequence[Tensor], slots: Tensor) -> None:
        there = self.cache(cache)
        try:
            self._ops.write_cache(there, layer, [self.moved(r) for r in rows], slots)
        finally:
            cache.data.copy_(there.data)

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
        there = self.cache(cache)
        q, k, v, cos, sin = (self.moved(x) for x in (q, k, v, *rotary))
        if norms is not None:
            weights = (None if weight is None else self.moved(weight) for weight in (norms.q, norms.k))
            norms = HeadNorms(*weights, norms.eps)
        try:
            return self._ops.rope_and_write(q, k, v, (cos, sin), there, layer, slots, norms).cpu()
        finally:
            cache.data.copy_(there.data)

    def merge_image_tokens(
        self, hidden: Tensor, rows: Tensor, cache: PagedCache, slots: Tensor, plane: int = 0
    ) -> None:
        there, target = self.cache(cache), self.moved(hidden)
        try:
            self._ops.merge_image_tokens(target, rows, there, slots, plane)
        finally:
            hidden.copy_(target)

    def gather_cache(self, cache: PagedCache, layer: int, index: int, slots: Tensor) -> Tensor:
        there = self.cache(cache)
        return self._ops.gather_cache(there, layer, index, slots).cpu()

    def copy_blocks(self, source: PagedCache, target: PagedCache, pairs: Tensor) -> None:
        from_there = self.cache(source)
        to_there = from_there if source is target else self.cache(target)
        try:
            self._ops.copy_blocks(from_there, to_there, pairs)
        finally:
            target.data.copy_(to_there.data)
