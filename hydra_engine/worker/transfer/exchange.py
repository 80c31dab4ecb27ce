"""The peers of a worker: what they may map of its memory, which of them are open, and the transfer lane.

Threads: the instance thread calls the methods and owns the table of peers. A job takes its peer to the lane with it,
and it is the lane that closes a peer, behind the jobs that read it. Does not know offers, nor how a peer is reached.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.cpu.shared_memory import ControlWords
from hydra_engine.clock import Clock
from hydra_engine.core.plans import PullJob, PullResult
from hydra_engine.core.pools import Exports, PoolKind
from hydra_engine.worker.faults import FaultPoints
from hydra_engine.worker.memory.cache_store import checksums_of, exports_of
from hydra_engine.worker.transfer.lane import TransferLane
from hydra_engine.worker.transfer.peers import Peer

NUM_CONTROL_WORDS = 4096  # one for each offer that is live at once


class Exchange:
    """`caches` are those that the instance has, in memory that peers can map or not. `run`: how a pull is run in the
    lane; it may raise BackendError, where the device failed."""

    def __init__(
        self,
        backend: Backend,
        caches: Mapping[PoolKind, PagedCache],
        clock: Clock,
        faults: FaultPoints,
        run: Callable[[Callable[[], None]], None] = lambda job: job(),
    ) -> None:
        self._run = run
        self._device = backend.device
        self._caches = caches
        self._words = ControlWords(NUM_CONTROL_WORDS)
        self._peers: dict[str, Peer] = {}
        self._runner = TransferLane(backend.ops, backend.device, caches, clock, faults)
        self._lane = backend.device.lane("transfer")

    def exports(self) -> tuple[Exports, tuple[int, ...]]:
        return exports_of(self._caches, self._words)

    def set_word(self, slot: int, word: int) -> None:
        self._words.store(slot, word)

    def checksums(self, pool: str, blocks: Sequence[int]) -> tuple[int, ...]:
        return checksums_of(self._caches[PoolKind(pool)], blocks)

    def open(self, name: str, exports: Exports, descriptors: Sequence[int]) -> None:
        """Closes the descriptors, whatever comes of it. Raises TransferError."""
        try:
            assert name not in self._peers, "a peer opened twice"
            self._peers[name] = Peer(exports, descriptors, self._caches, self._device)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self, name: str) -> None:
        """An unknown name is ignored; a name can be opened again at once."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._lane.submit(peer.close)

    def submit(self, job: PullJob, deliver: Callable[[PullResult], None]) -> None:
        """`deliver` is called in the lane."""
        peer, runner = self._peers.get(job.peer), self._runner
        self._lane.submit(lambda: self._run(lambda: deliver(runner.run(job, peer))))

    def end(self) -> None:
        """Waits for the jobs and lets go of everything; peers keep what they have mapped of ours. A second call does
        nothing."""
        self._lane.close()
        while self._peers:
            self._peers.popitem()[1].close()
        for cache in self._caches.values():
            if cache.memory is not None:
                cache.memory.close()
        self._words.close()
