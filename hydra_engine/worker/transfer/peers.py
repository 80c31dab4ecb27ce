"""The memory that instances let each other read: ours as it is announced, a peer's as it is mapped here.

Knows layouts; does not know offers, nor when a peer comes or goes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.cpu.shared_memory import ControlWords, PeerWords
from hydra_engine.backend.device import Device, PeerMemory
from hydra_engine.core.pools import Exports, PoolExport, PoolKind, PoolLayout
from hydra_engine.errors import TransferError


def layout_of(kind: PoolKind, cache: PagedCache) -> PoolLayout:
    data = cache.data
    dtype = str(data.dtype).removeprefix("torch.")
    return PoolLayout(kind, cache.num_blocks, tuple(data.shape[1:]), dtype, cache.block_bytes)


def checksums_of(cache: PagedCache, blocks: Sequence[int]) -> tuple[int, ...]:
    """CRC-32 of each block's bytes."""
    return tuple(zlib.crc32(cache.data[block].cpu().flatten().view(torch.uint8).numpy().data) for block in blocks)


def exports_of(caches: Mapping[PoolKind, PagedCache], words: ControlWords) -> tuple[Exports, tuple[int, ...]]:
    """Those of `caches` that peers can map, and the words; and the descriptors, by their place in what is exported."""
    pools, descriptors = [], [words.descriptor]
    for kind, cache in caches.items():
        memory = cache.memory
        if memory is None:
            continue
        place = -1
        if memory.descriptor >= 0:
            place = len(descriptors)
            descriptors.append(memory.descriptor)
        pools.append(PoolExport(layout_of(kind, cache), memory.transport, memory.num_bytes, place, memory.handle))
    return Exports(tuple(pools), words=0, num_words=words.num_words), tuple(descriptors)


class Peer:
    """What one peer lets us read, mapped."""

    def __init__(
        self, exports: Exports, descriptors: Sequence[int], caches: Mapping[PoolKind, PagedCache], device: Device
    ) -> None:
        """`caches` are ours: pools of other kinds are not opened. The descriptors are still the caller's. Raises
        TransferError unless everything is what `exports` says and our blocks are like the peer's."""
        self.pools: dict[PoolKind, PagedCache] = {}
        with ExitStack() as opened:
            self.words = PeerWords(_chosen(descriptors, exports.words), exports.num_words)
            opened.callback(self.words.close)
            for export in exports.pools:
                ours = caches.get(export.layout.kind)
                if ours is None:
                    continue
                _check(export, ours)
                descriptor = -1 if export.descriptor < 0 else _chosen(descriptors, export.descriptor)
                memory = device.open_peer(export, descriptor)
                opened.callback(memory.close)
                self.pools[export.layout.kind] = _cache_in(memory, export, ours)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Unmaps everything: no other reference to the tensors is left. A second call does nothing."""
        self.pools.clear()
        self._opened.close()


def _check(export: PoolExport, ours: PagedCache) -> None:
    theirs = export.layout
    expected = layout_of(theirs.kind, ours)
    if not theirs.agrees_with(expected):
        raise TransferError(
            f"{theirs.kind} blocks of the peer are {list(theirs.block_shape)} {theirs.dtype}, ours "
            f"{list(expected.block_shape)} {expected.dtype}; give both instances the same model, dtype and block sizes"
        )
    if not 0 < theirs.num_blocks * theirs.block_bytes <= export.num_bytes:
        raise TransferError(
            f"{theirs.num_blocks} {theirs.kind} blocks of {theirs.block_bytes} bytes do not lie in {export.num_bytes}"
        )


def _cache_in(memory: PeerMemory, export: PoolExport, ours: PagedCache) -> PagedCache:
    shape = export.layout.num_blocks, *export.layout.block_shape
    return PagedCache(memory.tensor()[: shape[0] * ours.block_bytes].view(ours.data.dtype).view(shape))


def _chosen(descriptors: Sequence[int], place: int) -> int:
    if not 0 <= place < len(descriptors):
        raise TransferError(f"a peer names descriptor {place} of the {len(descriptors)} that came with its memory")
    return descriptors[place]
