"""What other instances let this one read, mapped into this process: their pools as caches, and their control words.

Knows layouts; does not know offers, nor when a peer comes or goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.cpu.shared_memory import PeerWords
from hydra_engine.backend.device import Device, PeerMemory
from hydra_engine.core.pools import Exports, PoolExport, PoolKind
from hydra_engine.errors import TransferError
from hydra_engine.worker.memory.cache_store import layout_of


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
        """Unmaps everything, since nobody else keeps the tensors. A second call does nothing."""
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
