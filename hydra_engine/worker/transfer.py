"""The memory that instances map of each other, and the lane that copies blocks between it and the local caches.

The instance thread calls the methods of `Exchange` and owns the table of peers; jobs run in the lane's thread. A job
goes to the lane with its peer, and the lane closes a peer after the jobs that read it. A peer's blocks are read without
its knowledge: it may free them at any time, and invalidates a control word before it does. So a copy is valid only if
the word, read after it, is still the one in the offer. An instance copies blocks into staging pools in host memory for
peers that cannot map its caches; there is one pool of a few blocks per kind of cache, and a peer asks for blocks in
pieces. Peers on other nodes are read over a network, each in a thread of its own, so that a slow one holds up no other
copy. Does not know requests or offers, how a peer is reached, or when a block is free.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from hydra_engine.backend.base import Backend, Ops, PagedCache
from hydra_engine.backend.cpu.shared_memory import TRANSPORT, ControlWords, PeerWords, map_pool
from hydra_engine.backend.device import Device, PeerMemory, SharedMemory
from hydra_engine.clock import Clock
from hydra_engine.core.pools import Exports, PoolExport, PoolKind, PoolLayout
from hydra_engine.errors import ErrorInfo, TransferError
from hydra_engine.transfer.network import BlockNetwork, RemoteBlocks, Rows
from hydra_engine.transfer.plans import PullJob, PullResult, StagingJob, StagingResult
from hydra_engine.worker.boundary import run_guarded_step

logger = logging.getLogger(__name__)

NUM_CONTROL_WORDS = 4096  # one for each offer that is live at once
STAGING_BYTES = 256 << 20  # of one pool, at most, unless one block is larger
NUM_PIECES = 8  # that fit into a staging pool at once
LANDING_BYTES = 8 << 20  # of pinned memory for each peer on another node, at a device; at least one block


def layout_of(kind: PoolKind, cache: PagedCache) -> PoolLayout:
    """The layout of a cache's blocks, with their number, as peers compare it."""
    data = cache.data
    dtype = str(data.dtype).removeprefix("torch.")
    return PoolLayout(kind, cache.num_blocks, tuple(data.shape[1:]), dtype, cache.block_bytes)


def cache_in(memory: SharedMemory | PeerMemory, num_blocks: int, like: PagedCache) -> PagedCache:
    """A cache of `num_blocks` blocks in the format of `like`, a view of the beginning of `memory`."""
    shape = num_blocks, *like.data.shape[1:]
    raw = memory.tensor()[: num_blocks * like.block_bytes]
    if like.scales is not None:
        return PagedCache.quantized(raw, shape, like.row_dtype)
    return PagedCache(raw.view(like.data.dtype).view(shape))


def rows_of(cache: PagedCache) -> Rows:
    """The bytes of all blocks of a cache in host memory, scales included."""
    data = cache.data
    raw = data.view(torch.uint8)
    shape, strides = (cache.num_blocks, cache.block_bytes), (cache.block_bytes, 1)
    rows: Rows = raw.as_strided(shape, strides, data.storage_offset() * data.itemsize).numpy()
    return rows


def piece_of(num_blocks: int) -> int:
    """Number of blocks that a peer may ask for at once, in a staging pool of `num_blocks`."""
    return max(1, num_blocks // NUM_PIECES)


class StagingPools:
    """Staging pools, in host memory, for caches whose memory some peers cannot map; if `always`, for every cache that
    peers read. `max_bytes` limits each pool, which holds at least one block."""

    def __init__(
        self, caches: Mapping[PoolKind, PagedCache], device: Device, *, always: bool, max_bytes: int = STAGING_BYTES
    ) -> None:
        self.num_blocks: dict[PoolKind, int] = {}
        self._sources = caches
        self._memory: dict[PoolKind, SharedMemory] = {}
        self._caches: dict[PoolKind, PagedCache] = {}  # made at first use: until then they take no memory
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

    def memory_of(self, kind: PoolKind) -> tuple[SharedMemory, int] | None:
        """Returns (memory, number of blocks) of a staging pool, None if there is none of this kind."""
        return (self._memory[kind], self.num_blocks[kind]) if kind in self._memory else None

    def fill(self, job: StagingJob, ops: Ops, device: Device) -> None:
        """Copies the job's blocks into the staging pool of their kind and waits for the copy. Raises the device's
        errors."""
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


def checksums_of(cache: PagedCache, blocks: Sequence[int]) -> tuple[int, ...]:
    """CRC-32 of each block's bytes."""
    return tuple(zlib.crc32(cache.block_view(block).cpu().numpy().data) for block in blocks)


def exports_of(
    caches: Mapping[PoolKind, PagedCache], words: ControlWords, staging: StagingPools, endpoint: str
) -> tuple[Exports, tuple[int, ...]]:
    """Returns (exports, descriptors): the caches that peers may map, the control words and the staging pools. Exports
    refer to descriptors by index; this instance keeps them. `endpoint`: where a network serves the pools, or ""."""
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
    exports = Exports(tuple(pools), words=0, num_words=words.num_words, staging=staged, endpoint=endpoint)
    return exports, (*descriptors, *more)


def served_pools(
    caches: Mapping[PoolKind, PagedCache], staging: StagingPools, *, writable: bool = False
) -> dict[PoolKind, Rows]:
    """Returns what peers on other nodes read: the staging pool of each kind that has one, else the cache itself, which
    then lies in host memory. Both are mapped once more, to be read only, unless they have to be `writable`."""
    pools: dict[PoolKind, Rows] = {}
    for kind, cache in caches.items():
        if cache.memory is not None:
            memory, num_blocks = staging.memory_of(kind) or (cache.memory, cache.num_blocks)
            mapped = memory if writable else map_pool(memory.descriptor, memory.num_bytes)
            raw = mapped.tensor()[: num_blocks * cache.block_bytes]
            pools[kind] = raw.numpy().reshape(num_blocks, cache.block_bytes)
    return pools


class Peer:
    """The mapped memory of one peer: its pools, and staging pools in place of those that cannot be mapped here."""

    def __init__(
        self,
        exports: Exports,
        descriptors: Sequence[int],
        caches: Mapping[PoolKind, PagedCache],
        device: Device,
        *,
        through_host: bool = False,
    ) -> None:
        """Maps the peer's pools of the kinds in `caches`, the local caches. The caller keeps the descriptors, and
        closes them. `through_host`: prefer staging pools. Raises TransferError if the memory does not match `exports`,
        the peer's blocks differ from the local ones, or a pool without a staging pool cannot be mapped."""
        self.pools: dict[PoolKind, PagedCache] = {}
        self.piece_blocks: dict[PoolKind, int] = {}  # by kind that is read from a staging pool
        self.not_mapped = ""  # why a pool could not be mapped; empty if none failed
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

    def copy(self, job: PullJob, kind: PoolKind, target: PagedCache, ops: Ops, device: Device) -> bool:
        """Copies the blocks of a job. Returns True if the control word of its offer still stood after the copy."""
        blocks = np.stack((job.source_blocks, job.target_blocks), axis=1)
        ops.copy_blocks(self.pools[kind], target, torch.from_numpy(blocks.astype(np.int64)))
        device.finish()
        # All bytes have been read: a word that is still valid now was valid for each of them.
        return self.words.load(job.slot) == job.word

    def _mapped(
        self, export: PoolExport, descriptors: Sequence[int], device: Device, *, needed: bool
    ) -> PeerMemory | None:
        """Maps a pool. If that fails and the pool is not `needed`, returns None and stores the reason in `not_mapped`.
        Raises TransferError otherwise, and if the peer names a descriptor that did not come."""
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


CopyInLane = Callable[[str, Callable[[], None]], None]
"""Runs a copy, which the first argument describes, in the transfer lane and waits for it. Raises TransferError."""


class RemotePeer:
    """The pools of one peer on another node. `reader`: the thread that reads them."""

    not_mapped = ""

    def __init__(
        self,
        name: str,
        exports: Exports,
        caches: Mapping[PoolKind, PagedCache],
        remote: RemoteBlocks,
        device: Device,
        copy_in_lane: CopyInLane,
    ) -> None:
        """Raises TransferError if the peer's blocks differ from the local ones. Owns `remote` from then on."""
        self.pools: set[PoolKind] = set()
        self.piece_blocks: dict[PoolKind, int] = {}
        staging = {export.layout.kind: export for export in exports.staging}
        for export in exports.pools:
            kind = export.layout.kind
            ours = caches.get(kind)
            if ours is not None:
                _check(export, ours)
                if (staged := staging.get(kind)) is not None:
                    _check(staged, ours)
                    self.piece_blocks[kind] = piece_of(staged.layout.num_blocks)
                self.pools.add(kind)
        self._name = name
        self._remote = remote
        self._device = device
        self._copy_in_lane = copy_in_lane
        self._landing: SharedMemory | None = None  # made at first use
        self._landing_bytes = max(LANDING_BYTES, *(caches[kind].block_bytes for kind in self.pools), 0)
        self.reader = device.reader(f"blocks of {name}")

    def copy(self, job: PullJob, kind: PoolKind, target: PagedCache, ops: Ops, device: Device) -> bool:
        """Does what `Peer.copy` does, in the thread of `reader`: into target blocks in host memory, else through pinned
        memory."""
        if target.data.device.type == "cpu":
            rows = rows_of(target)
            return self._remote.read(kind, job.source_blocks, rows, job.target_blocks, job.slot, job.word)
        memory = self._landing = self._landing or device.stage(self._landing_bytes)
        num_blocks = memory.num_bytes // target.block_bytes
        landing = cache_in(memory, num_blocks, target)
        for begin in range(0, max(len(job.source_blocks), 1), num_blocks):
            blocks, to = job.source_blocks[begin : begin + num_blocks], job.target_blocks[begin : begin + num_blocks]
            places = np.arange(len(blocks), dtype=np.int32)
            if not self._remote.read(kind, blocks, rows_of(landing), places, job.slot, job.word):
                return False
            pairs = torch.from_numpy(np.stack((places, to), axis=1).astype(np.int64))
            self._copy_in_lane(
                f"copy of blocks of instance {self._name}", partial(ops.copy_blocks, landing, target, pairs)
            )
        return True

    def abort(self) -> None:
        """Ends the connection: jobs of `reader` end soon, with a problem."""
        self._remote.close()

    def close(self) -> None:
        """Ends the thread after its jobs. Idempotent."""
        self.abort()
        self.reader.close()
        if self._landing is not None:
            self._landing.close()


def _check(export: PoolExport, ours: PagedCache) -> None:
    """Raises TransferError if the peer's blocks differ from those of `ours`, or there are none, or more than the
    exported memory holds."""
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
    """The descriptor at `index`. Raises TransferError if there is none."""
    if not 0 <= index < len(descriptors):
        raise TransferError(f"a peer names descriptor {index} of the {len(descriptors)} that came with its memory")
    return descriptors[index]


class TransferLane:
    """Copies blocks of peers into the local caches, and local ones into staging pools. For the thread of the transfer
    lane."""

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
        """Copies blocks into a staging pool and waits for them. Raises only BackendError, if the device failed; another
        failure is the result's `problem`."""
        fill = partial(staging.fill, job, self._ops, self._device)
        outcome = run_guarded_step(self._device, f"copies of {job.pool} blocks for a peer", fill)
        problem = "they could not be copied; the log says why" if isinstance(outcome, ErrorInfo) else None
        return StagingResult(job.number, problem)

    def run(self, job: PullJob, peer: Peer | RemotePeer | None) -> PullResult:
        """Copies a peer's blocks into the local cache. The result is `valid` if the offer still stood after the copy.
        `peer` None: the job's peer is not open. Raises only BackendError, if the device failed; another failure is the
        result's `problem`."""
        started_s = self._clock.now()
        outcome = run_guarded_step(self._device, f"pull from instance {job.peer}", partial(self._pull, job, peer))
        if isinstance(outcome, ErrorInfo):
            outcome = False, 0, _problem(job, outcome)
        valid, num_bytes, problem = outcome
        return PullResult(job.step_id, started_s, self._clock.now(), valid, num_bytes, problem, job.ticket)

    def _pull(self, job: PullJob, peer: Peer | RemotePeer | None) -> tuple[bool, int, str | None]:
        """Copies the blocks. Returns (True if the offer's control word is still valid, bytes copied, problem or None):
        the problem that checksums differ. Raises TransferError if the peer is not open or lacks a pool of that kind."""
        kind = PoolKind(job.pool)
        if peer is None:
            raise TransferError(f"instance {job.peer} is not connected")
        if kind not in peer.pools:
            raise TransferError(f"instance {job.peer} lets nobody read its {kind} blocks")
        target = self._caches[kind]
        valid = peer.copy(job, kind, target, self._ops, self._device)
        problem = None
        if valid and job.checksums and checksums_of(target, job.target_blocks.tolist()) != job.checksums:
            problem = f"{kind} blocks of instance {job.peer} are not what it offered: their checksums differ"
        return valid, len(job.source_blocks) * target.block_bytes, problem


def _problem(job: PullJob, error: ErrorInfo) -> str:
    """The text of a failed pull: the error's own if it is a TransferError, else one that refers to the log."""
    if error.kind == TransferError.__name__:
        return error.message
    return f"blocks of instance {job.peer} could not be copied; the log says why"


class Exchange:
    """The `TransferPort` over one backend. `caches`: the instance's caches, mappable by peers or not. `deliver` and
    `run` are called in the lane; `run` runs a copy, which may raise BackendError if the device failed. `through_host`:
    stage blocks in host memory even if peers could map them. `staging_bytes`: limit of one staging pool. `network`: for
    peers on other nodes, closed with the exchange; None: there are none."""

    def __init__(
        self,
        backend: Backend,
        caches: Mapping[PoolKind, PagedCache | None],
        clock: Clock,
        deliver: Callable[[PullResult | StagingResult], None],
        run: Callable[[Callable[[], None]], None] = lambda job: job(),
        *,
        through_host: bool = False,
        staging_bytes: int = STAGING_BYTES,
        network: BlockNetwork | None = None,
    ) -> None:
        self._run = run
        self._deliver = deliver
        self._device = backend.device
        self._caches = {kind: cache for kind, cache in caches.items() if cache is not None and cache.num_blocks}
        self._words = ControlWords(NUM_CONTROL_WORDS)
        self._through_host = through_host
        self._staging = StagingPools(self._caches, backend.device, always=through_host, max_bytes=staging_bytes)
        self._network = network
        self._endpoint = ""
        if network is not None:
            words = PeerWords(self._words.descriptor, NUM_CONTROL_WORDS)
            pools = served_pools(self._caches, self._staging, writable=network.registers_pools)
            self._endpoint = network.serve(pools, words.load, NUM_CONTROL_WORDS)
        self._peers: dict[str, Peer | RemotePeer] = {}
        self._ending: set[RemotePeer] = set()  # closed, but their threads may still run
        self._runner = TransferLane(backend.ops, backend.device, self._caches, clock)
        self._lane = backend.device.lane("transfer")

    def exports(self) -> tuple[Exports, tuple[int, ...]]:
        """Returns (exports, descriptors): the memory that peers may map. The descriptors stay this instance's."""
        return exports_of(self._caches, self._words, self._staging, self._endpoint)

    def set_word(self, slot: int, word: int) -> None:
        """Writes a control word, which peers read after they have copied the blocks of its offer."""
        self._words.store(slot, word)

    def checksums(self, pool: str, blocks: Sequence[int]) -> tuple[int, ...]:
        """CRC-32 of each of these local blocks. For debugging only: computed at once, in the calling thread."""
        return checksums_of(self._caches[PoolKind(pool)], blocks)

    def open_peer(self, name: str, exports: Exports, descriptors: Sequence[int]) -> None:
        """Maps the peer's memory or, if no descriptors came, prepares to read it over the network. Closes the
        descriptors in any case. Asserts that the peer is not open. Raises TransferError if the memory cannot be mapped
        or its blocks differ from the local ones."""
        peer: Peer | RemotePeer
        try:
            assert name not in self._peers, "a peer opened twice"
            if exports.endpoint and not descriptors:
                peer = self._remote_peer(name, exports)
            else:
                peer = Peer(exports, descriptors, self._caches, self._device, through_host=self._through_host)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._peers[name] = peer
        if peer.not_mapped:
            logger.warning("blocks of instance %s come through host memory: %s", name, peer.not_mapped)

    def _remote_peer(self, name: str, exports: Exports) -> RemotePeer:
        if self._network is None:
            raise TransferError(f"instance {name} is on another node, and this instance was started without a network")
        remote = self._network.open(name, exports.endpoint)
        return RemotePeer(name, exports, self._caches, remote, self._device, self._copy_in_lane)

    def _copy_in_lane(self, what: str, copy: Callable[[], None]) -> None:
        def copy_all() -> None:
            copy()
            self._device.finish()

        def job() -> None:
            try:
                self._run(lambda: outcomes.append(run_guarded_step(self._device, what, copy_all)))
            finally:
                ended.set()

        outcomes: list[ErrorInfo | None] = []
        ended = threading.Event()
        self._lane.submit(job)
        ended.wait()
        if outcomes != [None]:
            raise TransferError(f"{what} failed; the log says why")

    def close_peer(self, name: str) -> None:
        """Unmaps the peer's memory after the jobs that were submitted for it; those that read over the network end at
        once. Ignores an unknown name; a name can be opened again at once."""
        peer = self._peers.pop(name, None)
        if isinstance(peer, RemotePeer):
            peer.abort()
            self._ending.add(peer)
            # Its jobs may wait for the lane, which must not wait for them: it closes the peer behind the last one.
            peer.reader.submit(partial(self._lane.submit, partial(self._forget, peer)))
        elif peer is not None:
            self._lane.submit(peer.close)

    def _forget(self, peer: RemotePeer) -> None:
        peer.close()
        self._ending.discard(peer)

    def piece_blocks(self, peer: str, pool: str) -> int:
        """Maximum number of blocks to ask for at once; 0 if the peer's pool (a PoolKind) is mapped, or not open."""
        opened = self._peers.get(peer)
        return 0 if opened is None else opened.piece_blocks.get(PoolKind(pool), 0)

    @property
    def staging_blocks(self) -> Mapping[PoolKind, int]:
        """Number of blocks of each staging pool."""
        return self._staging.num_blocks

    def submit_staging(self, job: StagingJob) -> None:
        """Queues a copy of local blocks into a staging pool; `deliver` gets its result."""
        self._lane.submit(lambda: self._run(lambda: self._deliver(self._runner.stage(job, self._staging))))

    def submit_pull(self, job: PullJob) -> None:
        """Queues a copy of a peer's blocks into a local cache; `deliver` gets its result, with a `problem` if the copy
        failed or the peer is not open."""
        peer = self._peers.get(job.peer)
        pull = partial(self._runner.run, job, peer)
        lane = peer.reader if isinstance(peer, RemotePeer) else self._lane
        lane.submit(lambda: self._run(lambda: self._deliver(pull())))

    def close(self) -> None:
        """Waits for the jobs, ends the network and releases all memory; peers keep their mappings of it. A second call
        does nothing."""
        remote_peers = [peer for peer in (*self._peers.values(), *self._ending) if isinstance(peer, RemotePeer)]
        for peer in remote_peers:
            peer.abort()
        for peer in remote_peers:
            peer.reader.close()  # before the lane, which its jobs use
        self._lane.close()
        if self._network is not None:
            self._network.close()
        while self._peers:
            self._peers.popitem()[1].close()
        for cache in self._caches.values():
            if cache.memory is not None:
                cache.memory.close()
        self._staging.close()
        self._words.close()
