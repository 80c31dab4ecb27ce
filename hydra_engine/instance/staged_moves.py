"""Transfers through host memory, over the ports of an instance: pulls in pieces, and staging for peers. Both halves of
`transfer/staging.py`.

A part of the migration, for the instance's own thread. Only the transfer port decides which peers are read through host
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hydra_engine.core.pools import PoolKind
from hydra_engine.transfer.messages import Stage, Staged, Taken
from hydra_engine.transfer.staging import StagedPulls, Staging

if TYPE_CHECKING:
    from hydra_engine.instance.ports import PeerPort, TransferPort
    from hydra_engine.transfer.offers import Owner, Source
    from hydra_engine.transfer.plans import PullJob, PullResult, StagingResult


class StagedMoves:
    """The pulls and the staging of one instance, in whole copies or in pieces."""

    def __init__(self, source: Source, transfer: TransferPort, peers: PeerPort) -> None:
        self._source = source
        self._transfer = transfer
        self._peers = peers
        self._staging = Staging(transfer.staging_blocks)
        self._pulls = StagedPulls()
        self.num_bytes = 0  # bytes pulled in pieces

    def submit(self, job: PullJob, incarnation: int, now: float) -> None:
        """Starts a pull: one copy or, if the peer's memory cannot be mapped, one per piece. `on_pull` then returns the
        job's result with the last piece."""
        piece_blocks = self._transfer.piece_blocks(job.peer, job.pool)
        if piece_blocks and len(job.source_blocks):
            self._peers.send(job.peer, self._pulls.begin(job, incarnation, piece_blocks, now))
        else:
            self._transfer.submit_pull(job)

    def on_pull(self, result: PullResult) -> PullResult | None:
        """Takes the result of a copy; returns the result of the whole pull, or None while pieces are missing."""
        if not result.ticket:
            return result
        self.num_bytes += result.num_bytes
        peer, messages, ended = self._pulls.copied(result)
        self._peers.send(peer, messages)
        return ended

    def receive(self, peer: str, message: Stage | Staged | Taken) -> Owner | None:
        """Handles a staging message. Returns the owner of blocks that can never be staged, if any."""
        match message:
            case Stage():
                owner = self._source.owner_of(peer, message.incarnation, message.sequence)
                if owner is None:  # the offer has ended; the target knows or will be notified
                    return None
                pool = PoolKind.KV if owner[1] is None else PoolKind.FEATURES
                if not self._staging.request(peer, message, pool):
                    return owner
                self._start()
            case Staged():
                job = self._pulls.on_staged(peer, message)
                if job is not None:
                    self._transfer.submit_pull(job)
            case Taken():
                self._staging.on_taken(peer, message)
                self._start()
        return None

    def on_staging(self, result: StagingResult) -> Owner | None:
        """Takes the result of a staging copy. Returns the owner of blocks that could not be staged, if any."""
        done = self._staging.copied(result.number)
        self._start()
        if done is None:
            return None
        peer, staged = done
        if result.problem is not None:
            return self._source.owner_of(peer, staged.incarnation, staged.sequence)
        self._peers.send(peer, [staged])
        return None

    def free_ended(self, is_over: Callable[[PullJob], bool], now: float) -> list[PullResult]:
        """Frees staging blocks of ended offers. Returns the results of pulls whose offers have ended."""
        self._staging.free_ended(self._source.is_live)
        self._start()
        return list(self._pulls.end_expired(is_over, now))

    @property
    def num_staged(self) -> int:
        """Number of pieces of own offers that wait for staging, are copied, or are held for a target."""
        return self._staging.num_live

    def _start(self) -> None:
        """Submits the staging copies for which blocks are free."""
        for job in self._staging.start():
            self._transfer.submit_staging(job)
