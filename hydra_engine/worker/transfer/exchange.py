"""The peers of a worker: the memory that they may map, the peers that are open, and the transfer lane.

Threads: the instance thread calls the methods and owns the table of peers. A job takes its peer to the lane, and the
lane closes a peer after the jobs that read it. Does not know offers, or how a peer is reached.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.cpu.shared_memory import ControlWords
from hydra_engine.clock import Clock
from hydra_engine.core.pools import Exports, PoolKind
from hydra_engine.transfer.plans import PullJob, PullResult, StagingJob, StagingResult
from hydra_engine.worker.transfer.lane import Peer, TransferLane, checksums_of, exports_of
from hydra_engine.worker.transfer.staging import STAGING_BYTES, StagingPools

logger = logging.getLogger(__name__)

NUM_CONTROL_WORDS = 4096  # one for each offer that is live at once


class Exchange:
    """The `TransferPort` over one backend. `caches`: the instance's caches, mappable by peers or not. `deliver`
    and `run` are called in the lane; `run` runs a copy and may raise BackendError if the device failed.
    `through_host`: stage blocks in host memory even if peers could map them. `staging_bytes`: limit of one staging
    pool."""

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
    ) -> None:
        self._run = run
        self._deliver = deliver
        self._device = backend.device
        self._caches = {kind: cache for kind, cache in caches.items() if cache is not None and cache.num_blocks}
        self._words = ControlWords(NUM_CONTROL_WORDS)
        self._through_host = through_host
        self._staging = StagingPools(self._caches, backend.device, always=through_host, max_bytes=staging_bytes)
        self._peers: dict[str, Peer] = {}
        self._runner = TransferLane(backend.ops, backend.device, self._caches, clock)
        self._lane = backend.device.lane("transfer")

    def exports(self) -> tuple[Exports, tuple[int, ...]]:
        return exports_of(self._caches, self._words, self._staging)

    def set_word(self, slot: int, word: int) -> None:
        self._words.store(slot, word)

    def checksums(self, pool: str, blocks: Sequence[int]) -> tuple[int, ...]:
        return checksums_of(self._caches[PoolKind(pool)], blocks)

    def open_peer(self, name: str, exports: Exports, descriptors: Sequence[int]) -> None:
        """Maps the peer's memory. Closes the descriptors in any case. Raises TransferError if the memory cannot be
        mapped or its blocks differ from the local ones."""
        try:
            assert name not in self._peers, "a peer opened twice"
            peer = Peer(exports, descriptors, self._caches, self._device, through_host=self._through_host)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._peers[name] = peer
        if peer.not_mapped:
            logger.warning("blocks of instance %s come through host memory: %s", name, peer.not_mapped)

    def close_peer(self, name: str) -> None:
        """Closes the peer after its jobs. An unknown name is ignored; a name can be opened again at once."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._lane.submit(peer.close)

    def piece_blocks(self, peer: str, pool: str) -> int:
        opened = self._peers.get(peer)
        return 0 if opened is None else opened.piece_blocks.get(PoolKind(pool), 0)

    @property
    def staging_blocks(self) -> Mapping[PoolKind, int]:
        return self._staging.num_blocks

    def submit_staging(self, job: StagingJob) -> None:
        self._lane.submit(lambda: self._run(lambda: self._deliver(self._runner.stage(job, self._staging))))

    def submit_pull(self, job: PullJob) -> None:
        pull = partial(self._runner.run, job, self._peers.get(job.peer))
        self._lane.submit(lambda: self._run(lambda: self._deliver(pull())))

    def close(self) -> None:
        """Waits for the jobs and releases all memory; peers keep their mappings of it. A second call does nothing."""
        self._lane.close()
        while self._peers:
            self._peers.popitem()[1].close()
        for cache in self._caches.values():
            if cache.memory is not None:
                cache.memory.close()
        self._staging.close()
        self._words.close()
