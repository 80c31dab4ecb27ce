"""Cost of a migration: a request's blocks copied within a device, pulled from another process, or
handed over as they are.

`copy`: all blocks of one request from one pool to another of the same device in one call of the engine's op, next to
torch's indexing and to one copy per block; the floor is as many bytes at the rate of a plain copy of the same run.
`pull`: the same through the transfer lane out of a pool that another process owns (`bench.migrate`): in host memory,
and on a GPU over CUDA IPC, where the floor is again that of a plain copy on the device.
`through host memory`: a pull where the source's memory cannot be mapped (`staged.py`).
`map`: a request that goes on where its blocks are moves none of them: an offer and its ack between two processes.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench import migrate
from bench.micro.ceilings import measure
from bench.micro.floors import Work
from bench.micro.harness import Report, Run, Seconds, cold_copies, in_turn, parse, require, timed
from bench.micro.machine import on_gpu
from bench.micro.staged import through_host
from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.select import create_backend
from hydra_engine.core.pools import PoolKind

DTYPE = torch.bfloat16
_BLOCK, _IMAGE_BLOCK = 16, 64
_MAX_BYTES = 1 << 28  # of one request on a processor; larger ones are cut down


class Moved(NamedTuple):
    """The blocks of one request: one picture and 100 tokens of text. `shape` is a block's."""

    name: str
    shape: tuple[int, ...]
    blocks: int

    @property
    def block_bytes(self) -> int:
        return torch.Size(self.shape).numel() * DTYPE.itemsize

    def cut(self, max_bytes: int) -> Moved:
        return self._replace(blocks=max(1, min(self.blocks, max_bytes // self.block_bytes)))


REQUESTS = (
    Moved("llava-1.5-7b KV", (32, 2, _BLOCK, 32, 128), -(-676 // _BLOCK)),
    Moved("qwen2.5-vl-7b KV", (28, 2, _BLOCK, 4, 128), -(-1124 // _BLOCK)),
    Moved("llava-1.5-7b image", (1, 1, _IMAGE_BLOCK, 1, 4096), 576 // _IMAGE_BLOCK),
    Moved("qwen2.5-vl-7b image", (1, 1, _IMAGE_BLOCK, 1, 3584), 1024 // _IMAGE_BLOCK),
)


class Pools:
    """Two pools with room for several requests, so that what is copied next is in no cache; the source's blocks are
    random, and every pair of places is another one."""

    def __init__(self, backend: Backend, moved: Moved) -> None:
        device = backend.device.torch_device
        self._ops, self.moved = backend.ops, moved
        self.turns = cold_copies(device, 2 * moved.blocks * moved.block_bytes, 16)
        count = (self.turns + 1) * moved.blocks
        generator = torch.Generator(device).manual_seed(0)
        self.source, self.target = (
            PagedCache(torch.empty((count, *moved.shape), dtype=DTYPE, device=device)) for _ in range(2)
        )
        for block in self.source.data:
            block.normal_(generator=generator)
        order = np.random.default_rng(0)
        pairs = np.stack((order.permutation(count), order.permutation(count)), axis=1)[: self.turns * moved.blocks]
        self.pairs = [torch.from_numpy(part) for part in np.split(pairs, self.turns)]
        self._on_device = [part.to(device) for part in self.pairs]

    def copy(self, turn: int) -> None:
        self._ops.copy_blocks(self.source, self.target, self.pairs[turn])

    def indexing(self, turn: int) -> None:
        pairs = self._on_device[turn]
        self.target.data[pairs[:, 1]] = self.source.data[pairs[:, 0]]

    def per_block(self, turn: int) -> None:
        source, target = self.source.data, self.target.data
        for begin, end in self.pairs[turn].tolist():
            target[end].copy_(source[begin], non_blocking=True)

    def runs(self) -> dict[str, Run]:
        """The runs, each checked once on a target full of NaN."""
        ways = {"ours": self.copy, "indexing": self.indexing, "per block": self.per_block}
        for name, way in ways.items():
            self.target.data.fill_(float("nan"))
            way(0)
            pairs = self._on_device[0]
            arrived = torch.equal(_bits(self.target.data[pairs[:, 1]]), _bits(self.source.data[pairs[:, 0]]))
            require(arrived, f"{self.moved.name}, {name}")
        return {name: in_turn(way, self.turns) for name, way in ways.items()}


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def copies(report: Report, backend: Backend) -> None:
    for request in REQUESTS:
        moved = request if on_gpu(report.device) else request.cut(_MAX_BYTES // (8 if report.quick else 1))
        pools = Pools(backend, moved)
        runs = pools.runs()
        seconds = timed(report.device, runs, report.effort)
        num_bytes = moved.blocks * moved.block_bytes
        report.row(
            f"copy {moved.name}, {moved.blocks} blocks",
            seconds["ours"],
            work=[Work("copy", moved_bytes=2.0 * num_bytes)],
            inputs={"blocks": moved.blocks, "block_bytes": moved.block_bytes},
            peers={name: value for name, value in seconds.items() if name != "ours"},
        )


def between_processes(report: Report, threads: int) -> None:
    """Host memory on every machine."""
    options = migrate.parse(["--threads", str(threads), *(["--quick"] if report.quick else [])])
    with migrate.connected(options) as (target, channel):
        trips = Seconds.of([value / 1e6 for value in migrate.round_trips(channel, options.round_trips)])
        inputs: dict[str, Any] = {"bytes": 0, "round_trips": options.round_trips}
        report.row("map: an offer and its ack", trips, inputs=inputs, p95_us=trips.p95 * 1e6)
        for kind in (PoolKind.KV, PoolKind.FEATURES):
            migrate.check(target, kind, options.blocks)
            pulls(report, target, kind, options)


def pulls(report: Report, target: migrate.Target, kind: PoolKind, options: argparse.Namespace) -> None:
    """The floor is the faster of two ways to copy as many bytes within one process."""
    order = np.random.default_rng(options.blocks)
    ways = {"pull": target.pull, "per block": target.copy_blocks, "at once": target.copy_at_once}
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds + 1):
        for name, way in ways.items():
            pairs = np.stack([order.permutation(options.blocks) for _ in range(2)], axis=1)
            took[name].append(way(kind, pairs).job)
    seconds = {name: Seconds.of(values[1:]) for name, values in took.items()}  # the first one warms up
    pull = seconds.pop("pull")
    report.row(
        f"pull {kind}, {options.blocks} blocks of another process, host memory",
        pull,
        floor_s=min(value.median for value in seconds.values()),
        formula="the faster of two copies of as many bytes within one process",
        inputs={"blocks": options.blocks, "block_bytes": target.caches[kind].block_bytes, "threads": options.threads},
        peers=seconds,
    )


def over_ipc(report: Report) -> None:
    """Two processes on the device of the report. The word is read behind each copy, so its way to the host counts."""
    options = migrate.parse(["--device", str(report.device), *(["--quick"] if report.quick else [])])
    with migrate.connected(options) as (target, _):
        for kind in (PoolKind.KV, PoolKind.FEATURES):
            migrate.check(target, kind, options.blocks)
            order, took = np.random.default_rng(options.blocks), []
            for _ in range(options.rounds + 1):
                pairs = np.stack([order.permutation(options.blocks) for _ in range(2)], axis=1)
                took.append(target.pull(kind, pairs).job)
            block_bytes = target.caches[kind].block_bytes
            report.row(
                f"pull {kind}, {options.blocks} blocks of another process, CUDA IPC",
                Seconds.of(took[1:]),  # the first one warms up
                work=[Work("copy", moved_bytes=2.0 * options.blocks * block_bytes)],
                inputs={"blocks": options.blocks, "block_bytes": block_bytes},
            )


def main() -> None:
    arguments = parse(__doc__)
    device = torch.device(arguments.device)
    with torch.inference_mode():
        backend = create_backend(arguments.device, DTYPE, deterministic=False, threads=arguments.threads or 1)
        ceilings = measure(device, DTYPE, quick=arguments.quick, known=arguments.ceilings)
        with Report("migrate", arguments, ceilings) as report:
            copies(report, backend)
            for request in REQUESTS:
                moved = request if device.type == "cuda" else request.cut(_MAX_BYTES // (8 if report.quick else 1))
                through_host(report, backend, *moved)
            between_processes(report, arguments.threads or 1)
            if device.type == "cuda":
                with report.optional("pulls over CUDA IPC"):
                    over_ipc(report)


if __name__ == "__main__":
    main()
