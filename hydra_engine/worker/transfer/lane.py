"""A pull job -> blocks of a peer in our caches -> a pull result.

Runs in the transfer lane's thread. The peer's blocks are read without its knowledge: it may take them back at any time,
and says so in a control word before it does. So a copy counts only if the word, read after it, is still the one that
the offer named. Does not know requests or offers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from hydra_engine.backend.base import Ops, PagedCache
from hydra_engine.backend.device import Device
from hydra_engine.clock import Clock
from hydra_engine.core.plans import PullJob, PullResult
from hydra_engine.core.pools import PoolKind
from hydra_engine.errors import ErrorInfo, TransferError
from hydra_engine.worker.boundary import attempt_step
from hydra_engine.worker.faults import AFTER_COPY, MID_COPY, FaultPoints
from hydra_engine.worker.transfer.peers import Peer, checksums_of


class TransferLane:
    def __init__(
        self,
        ops: Ops,
        device: Device,
        caches: Mapping[PoolKind, PagedCache],
        clock: Clock,
        faults: FaultPoints,
    ) -> None:
        self._ops = ops
        self._device = device
        self._caches = caches
        self._clock = clock
        self._faults = faults

    def run(self, job: PullJob, peer: Peer | None) -> PullResult:
        """`peer` None: the job's peer is not open. Raises nothing but BackendError, where the device failed; the result
        of a job that did has a `problem`."""
        started_s = self._clock.now()
        outcome = attempt_step(self._device, f"pull from instance {job.peer}", partial(self._pull, job, peer))
        if isinstance(outcome, ErrorInfo):
            outcome = False, 0, _problem(job, outcome)
        valid, num_bytes, problem = outcome
        return PullResult(job.step_id, started_s, self._clock.now(), valid, num_bytes, problem)

    def _pull(self, job: PullJob, peer: Peer | None) -> tuple[bool, int, str | None]:
        """(the word was still there, bytes, problem)."""
        kind = PoolKind(job.pool)
        if peer is None:
            raise TransferError(f"instance {job.peer} is not connected")
        if kind not in peer.pools:
            raise TransferError(f"instance {job.peer} lets nobody read its {kind} blocks")
        source, target = peer.pools[kind], self._caches[kind]
        blocks = np.stack((job.source_blocks, job.target_blocks), axis=1)
        self._copy(source, target, torch.from_numpy(blocks.astype(np.int64)))
        self._device.finish()
        if self._faults.hit_copy(AFTER_COPY):
            _flip_a_byte(target, job.target_blocks.tolist())
        # Everything has been read: what the word says now was true of every byte.
        valid = peer.words.load(job.slot) == job.word
        problem = None
        if valid and job.checksums and checksums_of(target, job.target_blocks.tolist()) != job.checksums:
            problem = f"{kind} blocks of instance {job.peer} are not what it offered: their checksums differ"
        return valid, len(blocks) * target.block_bytes, problem

    def _copy(self, source: PagedCache, target: PagedCache, pairs: torch.Tensor) -> None:
        if not self._faults.is_armed(MID_COPY):
            self._ops.copy_blocks(source, target, pairs)
            return
        half = (len(pairs) + 1) // 2
        self._ops.copy_blocks(source, target, pairs[:half])
        self._device.finish()
        if self._faults.hit_copy(MID_COPY):
            _flip_a_byte(target, pairs[:half, 1].tolist())
        self._ops.copy_blocks(source, target, pairs[half:])


def _problem(job: PullJob, error: ErrorInfo) -> str:
    if error.kind == TransferError.__name__:
        return error.message
    return f"blocks of instance {job.peer} could not be copied; the log says why"


def _flip_a_byte(cache: PagedCache, blocks: Sequence[int]) -> None:
    if blocks:
        cache.data[blocks[-1]].flatten().view(torch.uint8)[0] ^= 0xFF
