"""The staging pools: host memory into which an instance copies blocks for peers that cannot map its caches.

There is one pool of a few blocks per kind of cache; a peer asks for blocks in pieces. Runs in the transfer lane, except
`exports` and `num_blocks`. Does not know the readers, or when a block is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from hydra_engine.backend.base import Ops, PagedCache
from hydra_engine.backend.cpu.shared_memory import TRANSPORT
from hydra_engine.backend.device import Device, PeerMemory, SharedMemory
from hydra_engine.core.pools import PoolExport, PoolKind, PoolLayout
from hydra_engine.transfer.plans import StagingJob

STAGING_BYTES = 256 << 20  # of one pool, at most, unless one block is larger
NUM_PIECES = 8  # that a pool has room for


def layout_of(kind: PoolKind, cache: PagedCache) -> PoolLayout:
    data = cache.data
    dtype = str(data.dtype).removeprefix("torch.")
    return PoolLayout(kind, cache.num_blocks, tuple(data.shape[1:]), dtype, cache.block_bytes)


def cache_in(memory: SharedMemory | PeerMemory, num_blocks: int, like: PagedCache) -> PagedCache:
    """A cache view of `num_blocks` blocks in the format of `like`, at the beginning of `memory`."""
    shape = num_blocks, *like.data.shape[1:]
    raw = memory.tensor()[: num_blocks * like.block_bytes]
    if like.scales is not None:
        return PagedCache.quantized(raw, shape, like.row_dtype)
    return PagedCache(raw.view(like.data.dtype).view(shape))


def piece_of(num_blocks: int) -> int:
    """Blocks per piece in a pool of `num_blocks`."""
    return max(1, num_blocks // NUM_PIECES)


class StagingPools:
    """The staging pools of the caches in memory that not all peers can map; `always`: of every cache that peers read.
    `max_bytes`: limit of one pool."""

    def __init__(
        self, caches: Mapping[PoolKind, PagedCache], device: Device, *, always: bool, max_bytes: int = STAGING_BYTES
    ) -> None:
        self.num_blocks: dict[PoolKind, int] = {}
        self._sources = caches
        self._memory: dict[PoolKind, SharedMemory] = {}
        self._caches: dict[PoolKind, PagedCache] = {}  # made when they are used first: until then they take nothing
        for kind, cache in caches.items():
            if cache.memory is not None and (always or cache.memory.transport != TRANSPORT):
                self.num_blocks[kind] = max(1, min(max_bytes // cache.block_bytes, cache.num_blocks))
                self._memory[kind] = device.stage(self.num_blocks[kind] * cache.block_bytes)

    def exports(self, first: int) -> tuple[tuple[PoolExport, ...], tuple[int, ...]]:
        """Returns (exports of the pools, their descriptors). Descriptor indices begin at `first`."""
        pools = [
            PoolExport(
                replace(layout_of(kind, self._sources[kind]), num_blocks=self.num_blocks[kind]),
                memory.transport,
                memory.num_bytes,
                index,
            )
            for index, (kind, memory) in enumerate(self._memory.items(), first)
        ]
        return tuple(pools), tuple(memory.descriptor for memory in self._memory.values())

    def fill(self, job: StagingJob, ops: Ops, device: Device) -> None:
        """Copies the job's blocks and waits for the copy. Raises the device's errors."""
        kind = PoolKind(job.pool)
        if kind not in self._caches:
            self._caches[kind] = cache_in(self._memory[kind], self.num_blocks[kind], self._sources[kind])
        pairs = np.stack((job.blocks, job.staging_blocks), axis=1).astype(np.int64)
        ops.copy_blocks(self._sources[kind], self._caches[kind], torch.from_numpy(pairs))
        device.finish()

    def close(self) -> None:
        """Releases the memory; no copy may be in flight. Peers keep their mappings."""
        self._caches.clear()
        for memory in self._memory.values():
            memory.close()
