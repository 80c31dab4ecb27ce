"""Paged caches on the native extension: writes, rotation with write, gathers, image merges, block copies.

Checks shapes, dtypes and strides, and passes addresses. The extension checks contents (slots, block ids) before
anything is written.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.base import HeadNorms, PagedCache, Rotary
from hydra_engine.backend.cpu.linear import DTYPE_CODES
from hydra_engine.backend.reference.ops import ReferenceOps

_NO_ADDRESS = 0


def desc_arguments(cache: PagedCache) -> tuple[int, int, int, int, int, int, int, int]:
    """Arguments of the extension's cache descriptor."""
    checks.check_new_cache(cache)
    data = cache.data
    num_blocks, num_layers, num_tensors, block_size, num_heads, head_dim = data.shape
    dtype = DTYPE_CODES[cache.row_dtype]
    return data.data_ptr(), num_blocks, num_layers, num_tensors, block_size, num_heads, head_dim, dtype


class CacheOps:
    """The cache ops of `Ops`; one `_C.CacheDesc` per cache, made at first use and dropped with its tensor."""

    def __init__(self) -> None:
        self._descs: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def desc(self, cache: PagedCache) -> Any:
        key = id(cache.data)
        entry = self._descs.get(key)
        if entry is None:
            # Removed when the tensor dies, so a reused id never finds the old descriptor.
            forget = weakref.ref(cache.data, lambda _: self._descs.pop(key, None))
            entry = self._descs[key] = forget, self._new_desc(cache)
        return entry[1]

    def _new_desc(self, cache: PagedCache) -> Any:
        return _C.CacheDesc(*desc_arguments(cache), cache.scales is not None)

    def write_cache(self, cache: PagedCache, layer: int, rows: Sequence[Tensor], slots: Tensor) -> None:
        desc = self.desc(cache)
        tokens, strides = checks.check_write(cache, layer, rows, slots)
        first = rows[0].data_ptr()
        if len(rows) == 1:
            desc.write(layer, first, strides[0], _NO_ADDRESS, 0, slots.data_ptr(), tokens)
        else:
            desc.write(layer, first, strides[0], rows[1].data_ptr(), strides[1], slots.data_ptr(), tokens)

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
        desc = self.desc(cache)
        q_stride, k_stride, v_stride, cos_stride, sin_stride = checks.check_rope(q, k, v, rotary, cache, layer, slots)
        tokens, num_heads, dim = shape = q.shape
        normed: tuple[int, int, float] | tuple[()] = ()
        if norms is not None:
            checks.check_head_norms(norms, dim, q.dtype)
            q_norm, k_norm = (_NO_ADDRESS if weight is None else weight.data_ptr() for weight in norms[:2])
            normed = q_norm, k_norm, norms.eps
        cos, sin = rotary
        out = q.new_empty(shape)
        desc.rope_and_write(
            layer,
            q.data_ptr(),
            q_stride,
            num_heads,
            k.data_ptr(),
            k_stride,
            v.data_ptr(),
            v_stride,
            cos.data_ptr(),
            cos_stride,
            sin.data_ptr(),
            sin_stride,
            slots.data_ptr(),
            tokens,
            out.data_ptr(),
            *normed,
        )
        return out

    def merge_image_tokens(
        self, hidden: Tensor, rows: Tensor, cache: PagedCache, slots: Tensor, plane: int = 0
    ) -> None:
        desc = self.desc(cache)
        count = checks.check_merge(hidden, rows, cache, slots, plane)
        desc.merge(plane, slots.data_ptr(), rows.data_ptr(), count, hidden.data_ptr(), hidden.shape[0], plane > 0)

    def gather_cache(self, cache: PagedCache, layer: int, index: int, slots: Tensor) -> Tensor:
        if cache.scales is not None:
            return ReferenceOps().gather_cache(cache, layer, index, slots)
        desc = self.desc(cache)
        count = checks.check_indices("slots", slots)
        shape = cache.data.shape
        out = cache.data.new_empty((count, shape[4], shape[5]))
        desc.gather(layer, index, slots.data_ptr(), count, out.data_ptr())
        return out

    def copy_blocks(self, source: PagedCache, target: PagedCache, pairs: Tensor) -> None:
        source_desc, target_desc = self.desc(source), self.desc(target)
        count = checks.check_copy(source, target, pairs)
        source_desc.copy_to(target_desc, pairs.data_ptr(), count)
