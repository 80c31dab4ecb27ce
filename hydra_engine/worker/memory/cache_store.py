"""Allocates the tensors behind the two paged caches and the recurrent states, and says what peers may map of them.

Host memory comes zero-filled and lazily: a page costs nothing until it is written. Does not know which request uses
which block.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import PagedCache, StateCache
from hydra_engine.backend.device import SharedMemory
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.worker.memory.plan import CachePlan

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load
_CPU = torch.device("cpu")

Share = Callable[[int], SharedMemory]  # `Device.share`


def allocate_kv_cache(
    spec: ModelSpec,
    plan: CachePlan,
    block_size: int,
    dtype: torch.dtype,
    *,
    quantized: bool = False,
    device: torch.device = _CPU,
    share: Share | None = None,
) -> PagedCache:
    """Allocates the KV cache [N, L, 2, S, Hkv, D] of `dtype`; `quantized`: of int8, with scales for rows of `dtype`.
    `share`: allocates memory that peers can map; give it if they read this cache (instances that compute prefill).
    Without it the memory is private, and the system gives it larger pages."""
    language = spec.language
    shape = (plan.num_kv_blocks, language.num_kv_layers, 2, block_size, language.num_kv_heads, language.head_dim)
    if not quantized:
        return _paged(shape, dtype, device, share)
    per_token = language.kv_bytes_per_token(1, scaled=True)
    num_bytes = plan.num_kv_blocks * block_size * per_token
    if share is None or num_bytes == 0:
        return PagedCache.quantized(_allocate((num_bytes,), torch.uint8, device), shape, dtype)
    memory = share(num_bytes)
    return PagedCache.quantized(memory.tensor()[:num_bytes], shape, dtype, memory)


def allocate_image_cache(
    spec: ModelSpec,
    plan: CachePlan,
    block_size: int,
    dtype: torch.dtype,
    *,
    device: torch.device = _CPU,
    share: Share | None = None,
) -> PagedCache | None:
    """Allocates the image cache [N, planes, 1, S, 1, C]; None if the instance never holds features. `share`: allocates
    memory that peers can map; give it if they read this cache (instances that encode)."""
    if spec.vision is None or plan.num_image_blocks == 0:
        return None
    shape = (plan.num_image_blocks, spec.vision.num_planes, 1, block_size, 1, spec.vision.feature_size)
    return _paged(shape, dtype, device, share)


def allocate_states(
    spec: ModelSpec, plan: CachePlan, dtype: torch.dtype, *, device: torch.device = _CPU
) -> StateCache | None:
    """Allocates the recurrent states; None if the model has none or the plan no slots for them. Sequence slot s has
    state slots 2 s and 2 s + 1: a step reads one and writes the other, so that a step that raised can be run again.
    Behind them are those of snapshots."""
    shape = spec.language.delta
    if shape is None or not plan.num_state_slots:
        return None
    size = (2 * plan.num_state_slots + plan.num_snapshots, spec.language.num_state_layers)
    conv = (*size, shape.num_taps - 1, shape.num_channels)
    recurrent = (*size, shape.num_value_heads, shape.key_dim, shape.value_dim)
    return StateCache(_allocate(conv, dtype, device), _allocate(recurrent, torch.float32, device))


def _paged(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, share: Share | None) -> PagedCache:
    """A cache of this shape, in memory of `share` if given and the cache is not empty, else private."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if share is None or num_bytes == 0:
        return PagedCache(_allocate(shape, dtype, device))
    memory = share(num_bytes)
    return PagedCache(memory.tensor()[:num_bytes].view(dtype).view(shape), memory)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor. On a CPU it is aligned to 64 bytes, and takes no memory before it is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page; calloc, behind numpy, hands out pages that are zero already.
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[first : first + num_bytes]).view(dtype).view(shape)
