"""A pull through pinned host memory, as two instances make it that cannot map each other's memory.

Source and target are two exchanges of this process over one device, each with its transfer lane; what their instances
do in between (`transfer/staging.py`, without sockets) is done here. The source writes a piece while the target reads
another, so the floor is as many bytes at the rate of the slower direction of a plain copy of the same run.
"""

from __future__ import annotations

import os
import time
from queue import SimpleQueue

import numpy as np
import torch

from bench.micro.harness import Report, Seconds, require
from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.clock import MonotonicClock
from hydra_engine.core.ids import StepId
from hydra_engine.core.pools import PoolKind
from hydra_engine.transfer.messages import Stage
from hydra_engine.transfer.plans import PullJob, PullResult, StagingResult
from hydra_engine.transfer.staging import StagedPulls, Staging
from hydra_engine.worker.transfer import NUM_PIECES, Exchange

_SLOT, _WORD = 5, 0x1234
_SMALL_BYTES = 32 << 20
_KIND = PoolKind.KV


class Pair:
    """A source and a target of `count` blocks of `shape`, from `exchange` to `exchange`."""

    def __init__(self, backend: Backend, shape: tuple[int, ...], count: int, dtype: torch.dtype) -> None:
        device = backend.device.torch_device
        num_bytes = count * torch.Size(shape).numel() * dtype.itemsize
        memory = backend.device.share(num_bytes)
        self.source = PagedCache(memory.tensor()[:num_bytes].view(dtype).view(count, *shape), memory)
        self.target = PagedCache(torch.full((count, *shape), float("nan"), dtype=dtype, device=device))
        self.source.data.normal_()
        backend.device.finish()
        self._results: SimpleQueue[PullResult | StagingResult] = SimpleQueue()
        rest = MonotonicClock(), self._results.put
        self._from = Exchange(backend, {_KIND: self.source}, *rest, through_host=True)
        self._to = Exchange(backend, {_KIND: self.target}, *rest, through_host=True)
        exports, descriptors = self._from.exports()
        self._to.open_peer("source", exports, [os.dup(descriptor) for descriptor in descriptors])
        self._from.set_word(_SLOT, _WORD)
        self._staging, self._pulls, self._steps = Staging(self._from.staging_blocks), StagedPulls(), 0

    def pull(self, blocks: np.ndarray, places: np.ndarray) -> None:
        """Blocks anywhere to blocks anywhere; returns when all of them are there."""
        self._steps += 1
        pairs = blocks.astype(np.int32), places.astype(np.int32)
        job = PullJob(StepId(self._steps), "source", _KIND, *pairs, _SLOT, _WORD, sequence=1)
        for stage in self._pulls.begin(job, 1, self._to.piece_blocks("source", _KIND), 0.0):
            self._staging.request("target", stage, _KIND)
        ended = None
        while ended is None:
            for staging in self._staging.start():
                self._from.submit_staging(staging)
            result = self._results.get()
            if isinstance(result, StagingResult):
                done = self._staging.end_copy(result.number)
                require(result.problem is None and done is not None, "a piece that is staged")
                assert done is not None
                piece = self._pulls.on_staged("source", done[1])
                assert piece is not None
                self._to.submit_pull(piece)
                continue
            _, messages, ended = self._pulls.end_copy(result)
            for message in messages:
                if isinstance(message, Stage):
                    self._staging.request("target", message, _KIND)
                else:
                    self._staging.on_taken("target", message)
        require(ended.valid and ended.problem is None, "a pull through host memory")

    def close(self) -> None:
        self._to.close()
        self._from.close()


def plain_copies(backend: Backend, num_bytes: int, rounds: int) -> dict[str, Seconds]:
    """Times copies of as many bytes in one piece to pinned host memory, and from it."""
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=backend.device.torch_device)
    pool = backend.device.stage(num_bytes)
    here = pool.tensor()
    took: dict[str, list[float]] = {"to the host": [], "from the host": []}
    for _ in range(rounds + 1):
        for name, (target, source) in {"to the host": (here, there), "from the host": (there, here)}.items():
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            backend.device.finish()
            took[name].append(time.perf_counter() - began)
    pool.close()
    return {name: Seconds.of(values[1:]) for name, values in took.items()}  # the first one warms up


def through_host(report: Report, backend: Backend, name: str, shape: tuple[int, ...], blocks: int) -> None:
    rounds = 3 if report.quick else 15
    num_bytes = blocks * torch.Size(shape).numel() * torch.bfloat16.itemsize
    count = blocks * (2 if num_bytes > _SMALL_BYTES else NUM_PIECES)  # what fits into a piece is one
    pair = Pair(backend, shape, count, torch.bfloat16)
    order = np.random.default_rng(0)
    took = []
    try:
        for _ in range(rounds + 1):
            pairs = [order.permutation(count)[:blocks] for _ in range(2)]
            began = time.perf_counter()
            pair.pull(*pairs)
            took.append(time.perf_counter() - began)
        places = [torch.from_numpy(part).to(backend.device.torch_device) for part in pairs]
        arrived, sent = pair.target.data[places[1]], pair.source.data[places[0]]
        require(torch.equal(arrived.view(torch.int16), sent.view(torch.int16)), f"{name}: what arrived")
    finally:
        pair.close()
    plain = plain_copies(backend, num_bytes, rounds)
    report.row(
        f"through host memory {name}, {blocks} blocks",
        Seconds.of(took[1:]),  # the first one pins
        floor_s=max(value.median for value in plain.values()),
        formula="the slower of two copies of as many bytes in one piece, to pinned host memory and from it",
        inputs={"blocks": blocks, "block_bytes": num_bytes // blocks},
        peers=plain,
    )
