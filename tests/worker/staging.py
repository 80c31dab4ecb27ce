"""Two exchanges in one process that play all that two instances do to move blocks through host memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.clock import MonotonicClock
from hydra_engine.core.ids import StepId
from hydra_engine.core.pools import PoolKind
from hydra_engine.transfer.plans import PullJob, PullResult, StagingJob, StagingResult
from tests.faults.points import FaultPoints
from tests.faults.worker import FaultyExchange

SHAPE = (2, 2, 4, 1, 8)  # of a block
NUM_BLOCKS = 40
BLOCK_BYTES = 512
SLOT, WORD = 3, 17


def cache_of(backend: Backend, *, share: bool, fill: float | None = None) -> PagedCache:
    """`fill` None: every block holds its number and more."""
    numbers = torch.arange(NUM_BLOCKS * BLOCK_BYTES // 4, dtype=torch.float32)
    values = numbers if fill is None else torch.full_like(numbers, fill)
    memory = backend.device.share(NUM_BLOCKS * BLOCK_BYTES) if share else None
    raw = memory.tensor() if memory is not None else torch.zeros(NUM_BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
    raw = raw[: NUM_BLOCKS * BLOCK_BYTES].to(backend.device.torch_device)
    cache = PagedCache(raw.view(torch.float32).view(NUM_BLOCKS, *SHAPE), memory)
    cache.data.copy_(values.view(NUM_BLOCKS, *SHAPE))
    return cache


class Side:
    def __init__(self, backend: Backend, *, source: bool, **options: Any) -> None:
        self.backend = backend
        self.cache = cache_of(backend, share=source, fill=None if source else float("nan"))
        self.faults = FaultPoints()
        self.results: SimpleQueue[PullResult | StagingResult] = SimpleQueue()
        pools = {PoolKind.KV: self.cache}
        self.exchange = FaultyExchange(
            backend, pools, MonotonicClock(), self.results.put, faults=self.faults, **options
        )


@contextmanager
def sides(source: Backend, target: Backend, **options: Any) -> Iterator[tuple[Side, Side]]:
    """The target has opened the source. `staging_bytes` is the source's."""
    through_host = options.get("through_host", False)
    one, other = Side(source, source=True, **options), Side(target, source=False, through_host=through_host)
    exports, descriptors = one.exchange.exports()
    try:
        other.exchange.open_peer("source", exports, [os.dup(descriptor) for descriptor in descriptors])
        one.exchange.set_word(SLOT, WORD)
        yield one, other
    finally:
        other.exchange.close()
        one.exchange.close()


def stage(source: Side, blocks: tuple[int, ...], staging_blocks: tuple[int, ...]) -> StagingResult:
    source.exchange.submit_staging(StagingJob(5, PoolKind.KV, blocks, staging_blocks))
    found = source.results.get(timeout=20)
    assert isinstance(found, StagingResult) and found.number == 5
    return found


def pull(target: Side, blocks: tuple[int, ...], to: tuple[int, ...], **rest: Any) -> PullResult:
    """`blocks` of what the target has mapped: the source's cache, or its staging pool."""
    pairs = np.array(blocks, np.int32), np.array(to, np.int32)
    job = PullJob(StepId(9), "source", PoolKind.KV, *pairs, SLOT, WORD, ticket=4)
    target.exchange.submit_pull(replace(job, **rest))
    found = target.results.get(timeout=20)
    assert isinstance(found, PullResult) and found.step_id == 9 and found.ticket == 4
    return found


def moves_blocks(source: Side, target: Side) -> None:
    """Moves blocks through a staging pool of 8 blocks and checks them."""
    assert source.exchange.staging_blocks == {PoolKind.KV: 8}
    assert target.exchange.piece_blocks("source", PoolKind.KV) == 1
    blocks, staged, to = (3, 4, 5, 30, 12), (6, 7, 0, 2, 1), (39, 0, 1, 2, 20)
    for turn in range(2):
        assert stage(source, tuple(block + turn for block in blocks), staged).problem is None
        checksums = source.exchange.checksums(PoolKind.KV, [block + turn for block in blocks])
        result = pull(target, staged, to, checksums=checksums)
        assert result.valid and result.problem is None and result.num_bytes == 5 * BLOCK_BYTES
        found, expected = target.cache.data.cpu(), source.cache.data.cpu()
        for block, place in zip(blocks, to, strict=True):
            assert torch.equal(found[place], expected[block + turn])
    assert int(found.isfinite().flatten(1).all(1).sum()) == 5, "nothing else was written"
