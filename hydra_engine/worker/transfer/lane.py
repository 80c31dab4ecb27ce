"""A pull job -> blocks of a peer in the local caches -> a pull result; and the memory that instances map of each other.

Jobs run in the transfer lane's thread. The peer's blocks are read without its knowledge: it may take them back at any
time, and invalidates a control word before it does. So a copy is valid only if the word, read after it, is still the
one in the offer. Does not know requests or offers, or when peers connect and disconnect.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from hydra_engine.backend.base import Ops, PagedCache
from hydra_engine.backend.cpu.shared_memory import ControlWords, PeerWords
from hydra_engine.backend.device import Device, PeerMemory
from hydra_engine.clock import Clock
from hydra_engine.core.pools import Exports, PoolExport, PoolKind
from hydra_engine.errors import ErrorInfo, TransferError
from hydra_engine.transfer.plans import PullJob, PullResult, StagingJob, StagingResult
from hydra_engine.worker.boundary import run_guarded_step
from hydra_engine.worker.transfer.staging import StagingPools, cache_in, layout_of, piece_of


def checksums_of(cache: PagedCache, blocks: Sequence[int]) -> tuple[int, ...]:
    """CRC-32 of each block's bytes."""
    return tuple(zlib.crc32(cache.block_view(block).cpu().numpy().data) for block in blocks)


def exports_of(
    caches: Mapping[PoolKind, PagedCache], words: ControlWords, staging: StagingPools
) -> tuple[Exports, tuple[int, ...]]:
    """Returns (exports, descriptors): the caches that peers can map, the control words and the staging pools. Exports
    refer to descriptors by index."""
    pools, descriptors = [], [words.descriptor]
    for kind, cache in caches.items():
        memory = cache.memory
        if memory is None:
            continue
        index = -1
        if memory.descriptor >= 0:
            index = len(descriptors)
            descriptors.append(memory.descriptor)
        pools.append(PoolExport(layout_of(kind, cache), memory.transport, memory.num_bytes, index, memory.handle))
    staged, more = staging.exports(len(descriptors))
    return Exports(tuple(pools), words=0, num_words=words.num_words, staging=staged), (*descriptors, *more)


class Peer:
    """The mapped memory of one peer: its pools, or its staging pools if a pool cannot be mapped here."""

    def __init__(
        self,
        exports: Exports,
        descriptors: Sequence[int],
        caches: Mapping[PoolKind, PagedCache],
        device: Device,
        *,
        through_host: bool = False,
    ) -> None:
        """Maps the peer's pools of the kinds in `caches`, the local caches. The caller keeps the descriptors.
        `through_host`: prefer staging pools. Raises TransferError if the memory does not match `exports` or the peer's
        blocks differ from the local ones."""
        self.pools: dict[PoolKind, PagedCache] = {}
        self.piece_blocks: dict[PoolKind, int] = {}  # of those that are staging pools
        self.not_mapped = ""  # why there are such, if that was not asked for
        staging = {export.layout.kind: export for export in exports.staging}
        with ExitStack() as opened:
            self.words = PeerWords(_chosen(descriptors, exports.words), exports.num_words)
            opened.callback(self.words.close)
            for export in exports.pools:
                ours = caches.get(export.layout.kind)
                if ours is None:
                    continue
                staged = staging.get(export.layout.kind)
                _check(export, ours)
                memory = None
                if staged is None or not through_host:
                    memory = self._mapped(export, descriptors, device, needed=staged is None)
                if memory is None and staged is not None:
                    export = staged
                    _check(export, ours)
                    memory = device.open_staging(export, _chosen(descriptors, export.descriptor))
                    self.piece_blocks[export.layout.kind] = piece_of(export.layout.num_blocks)
                assert memory is not None
                opened.callback(memory.close)
                self.pools[export.layout.kind] = cache_in(memory, export.layout.num_blocks, ours)
            self._opened = opened.pop_all()

    def _mapped(
        self, export: PoolExport, descriptors: Sequence[int], device: Device, *, needed: bool
    ) -> PeerMemory | None:
        descriptor = -1 if export.descriptor < 0 else _chosen(descriptors, export.descriptor)
        try:
            return device.open_peer(export, descriptor)
        except TransferError as error:
            if needed:
                raise
            self.not_mapped = error.message
            return None

    def close(self) -> None:
        """Unmaps everything; no other reference to the tensors may be left. A second call does nothing."""
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


def _chosen(descriptors: Sequence[int], index: int) -> int:
    if not 0 <= index < len(descriptors):
        raise TransferError(f"a peer names descriptor {index} of the {len(descriptors)} that came with its memory")
    return descriptors[index]


class TransferLane:
    def __init__(
        self,
        ops: Ops,
        device: Device,
        caches: Mapping[PoolKind, PagedCache],
        clock: Clock,
    ) -> None:
        self._ops = ops
        self._device = device
        self._caches = caches
        self._clock = clock

    def stage(self, job: StagingJob, staging: StagingPools) -> StagingResult:
        """Copies blocks into a staging pool. Raises only BackendError, if the device failed; another failure is the
        result's `problem`."""
        fill = partial(staging.fill, job, self._ops, self._device)
        outcome = run_guarded_step(self._device, f"copies of {job.pool} blocks for a peer", fill)
        problem = "they could not be copied; the log says why" if isinstance(outcome, ErrorInfo) else None
        return StagingResult(job.number, problem)

    def run(self, job: PullJob, peer: Peer | None) -> PullResult:
        """Copies a peer's blocks. `peer` None: the job's peer is not open. Raises only BackendError, if the device
        failed; another failure is the result's `problem`."""
        started_s = self._clock.now()
        outcome = run_guarded_step(self._device, f"pull from instance {job.peer}", partial(self._pull, job, peer))
        if isinstance(outcome, ErrorInfo):
            outcome = False, 0, _problem(job, outcome)
        valid, num_bytes, problem = outcome
        return PullResult(job.step_id, started_s, self._clock.now(), valid, num_bytes, problem, job.ticket)

    def _pull(self, job: PullJob, peer: Peer | None) -> tuple[bool, int, str | None]:
        """Copies and validates. Returns (control word still valid, bytes, problem)."""
        kind = PoolKind(job.pool)
        if peer is None:
            raise TransferError(f"instance {job.peer} is not connected")
        if kind not in peer.pools:
            raise TransferError(f"instance {job.peer} lets nobody read its {kind} blocks")
        source, target = peer.pools[kind], self._caches[kind]
        blocks = np.stack((job.source_blocks, job.target_blocks), axis=1)
        self._ops.copy_blocks(source, target, torch.from_numpy(blocks.astype(np.int64)))
        self._device.finish()
        # All bytes have been read: a word that is still valid now was valid for each of them.
        valid = peer.words.load(job.slot) == job.word
        problem = None
        if valid and job.checksums and checksums_of(target, job.target_blocks.tolist()) != job.checksums:
            problem = f"{kind} blocks of instance {job.peer} are not what it offered: their checksums differ"
        return valid, len(blocks) * target.block_bytes, problem


def _problem(job: PullJob, error: ErrorInfo) -> str:
    if error.kind == TransferError.__name__:
        return error.message
    return f"blocks of instance {job.peer} could not be copied; the log says why"
