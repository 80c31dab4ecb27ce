"""Times moving blocks between two instances: a pull through the transfer lane, against a plain copy.

Two real processes. The source owns pools and control words in shared memory; the target, this one, maps them and pulls.
Per job, in turns within one run: the pull (blocks anywhere to blocks anywhere, then the word), memcpy block by block
within this process, and memcpy of as many bytes in one piece; the ceiling is the faster of the two. `+ way` is what it
takes besides to give the job to the lane and to learn that it is done. All pages have been touched before. Then the
round trip of an Offer and its Ack over a Unix socket, in the frames of the engine.

KV blocks default to those of a 7B decoder in bf16: 16 tokens, 28 layers, K and V of 4 heads of 128. Feature blocks are
64 rows of 3584. `python -m bench.migrate [--quick] [--json FILE]`; the last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import ctypes
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from statistics import median, quantiles
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from bench.common import ROOT, card, emit, write_document
from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.select import create_backend
from hydra_engine.clock import MonotonicClock
from hydra_engine.cluster.channel import FrameReader, encode_frames
from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.pools import PoolKind
from hydra_engine.transfer.messages import TRANSFER_VERSION, Ack, Hello, Offer
from hydra_engine.transfer.plans import PullJob, PullResult
from hydra_engine.worker.transfer import Exchange

DTYPE = torch.bfloat16
KV_BLOCK_KIB = 16 * 28 * 2 * 4 * 128 * 2 >> 10
FEATURE_BLOCK = (1, 1, 64, 1, 3584)
SLOT, WORD = 5, 0x1234
SMALL_JOBS = (1, 8, 64)  # blocks; and the whole pool
KINDS = (PoolKind.KV, PoolKind.FEATURES)

_LIBC = ctypes.CDLL(None)
_LIBC.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Took(NamedTuple):
    """Seconds of one job: as its caller waits for it, and without the way to another thread and back."""

    whole: float
    job: float


class Blocks:
    """A pool of `num_blocks` blocks, filled."""

    def __init__(self, shape: Sequence[int], num_blocks: int, backend: Backend, *, share: bool, fill: float) -> None:
        num_bytes = num_blocks * torch.Size(shape).numel() * DTYPE.itemsize
        memory = backend.device.share(num_bytes) if share else None
        on = backend.device.torch_device
        raw = torch.empty(num_bytes, dtype=torch.uint8, device=on) if memory is None else memory.tensor()[:num_bytes]
        self.cache = PagedCache(raw.view(DTYPE).view(num_blocks, *shape), memory)
        self.cache.data.fill_(fill)
        self.cache.data[:, 0, 0, 0, 0, 0] = torch.arange(num_blocks, device=on).to(DTYPE)
        backend.device.finish()


def pools(options: argparse.Namespace, backend: Backend, *, share: bool, fill: float) -> dict[PoolKind, PagedCache]:
    kv_shape = (1, 2, 16, 1, options.block_kib * 1024 // (32 * DTYPE.itemsize))
    shapes = {PoolKind.KV: kv_shape, PoolKind.FEATURES: FEATURE_BLOCK}
    return {k: Blocks(shapes[k], options.blocks, backend, share=share, fill=fill).cache for k in KINDS}


def make_backend(device: str, threads: int) -> Backend:
    return create_backend(device, DTYPE, backend="native" if device == "cpu" else "auto", threads=threads)


# ---- the source


def serve(channel: socket.socket, options: argparse.Namespace) -> None:
    backend = make_backend(options.device, 1)
    caches = pools(options, backend, share=True, fill=1.0)
    results: list[PullResult] = []
    exchange = Exchange(backend, caches, MonotonicClock(), results.append)
    exchange.set_word(SLOT, WORD)
    exports, descriptors = exchange.exports()
    frame = encode_frames([Hello(TRANSFER_VERSION, "source", 1, exports)])
    socket.send_fds(channel, [frame], list(descriptors))
    reader, decoder = FrameReader(), msgspec.msgpack.Decoder(Offer)
    while data := channel.recv(1 << 16):
        for body in reader.read_frames(data):
            offer = decoder.decode(body)
            channel.sendall(encode_frames([Ack(offer.incarnation, offer.sequence)]))


# ---- the target


class Target:
    """The process that pulls: its pools, the source's, and threads for the plain copies that a pull is compared
    with."""

    def __init__(self, options: argparse.Namespace, channel: socket.socket) -> None:
        self.threads: int = options.threads
        self.backend = make_backend(options.device, options.threads)
        self.caches = pools(options, self.backend, share=False, fill=0.0)
        self.local = pools(options, self.backend, share=False, fill=2.0)  # what a plain copy reads
        self._results: SimpleQueue[PullResult] = SimpleQueue()
        self.exchange = Exchange(self.backend, self.caches, MonotonicClock(), self._results.put)
        self.helpers = ThreadPoolExecutor(options.threads)
        data, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 8, socket.MSG_CMSG_CLOEXEC)
        (body,) = FrameReader().read_frames(data)
        hello = msgspec.msgpack.decode(body, type=Hello)
        self.exchange.open_peer("source", hello.exports, descriptors)
        self._steps = 0

    def pull(self, kind: PoolKind, pairs: np.ndarray[Any, Any]) -> Took:
        self._steps += 1
        sources, targets = pairs.astype(np.int32).T.copy()
        job = PullJob(StepId(self._steps), "source", kind, sources, targets, SLOT, WORD)
        began = time.perf_counter()
        self.exchange.submit_pull(job)
        result = self._results.get()
        seconds = time.perf_counter() - began
        if not result.valid or result.problem:
            raise SystemExit(f"a pull failed: {result}")
        return Took(seconds, result.ended_s - result.started_s)

    def copy_blocks(self, kind: PoolKind, pairs: np.ndarray[Any, Any]) -> Took:
        source, target = self.local[kind], self.caches[kind]
        size, here, there = target.block_bytes, target.data.data_ptr(), source.data.data_ptr()

        def some(part: np.ndarray[Any, Any]) -> None:
            for block, to in part.tolist():
                _LIBC.memcpy(here + to * size, there + block * size, size)

        return self._timed(some, np.array_split(pairs, min(self.threads, len(pairs))))

    def copy_at_once(self, kind: PoolKind, pairs: np.ndarray[Any, Any]) -> Took:
        """Copies as many bytes in one piece, from and to the blocks of the first pair, or earlier ones where the
        pool ends."""
        source, target = self.local[kind], self.caches[kind]
        size, count = target.block_bytes, len(pairs)
        begins = np.minimum(pairs[0], target.num_blocks - count) * size
        there, here = source.data.data_ptr() + int(begins[0]), target.data.data_ptr() + int(begins[1])
        cuts = np.linspace(0, count * size, self.threads + 1, dtype=np.int64).tolist()

        def some(part: tuple[int, int]) -> None:
            _LIBC.memcpy(here + part[0], there + part[0], part[1] - part[0])

        return self._timed(some, list(pairwise(cuts)))

    def _timed(self, run: Callable[[Any], None], parts: Sequence[Any]) -> Took:
        """The first part here, the others in threads that wait for work already."""
        began = time.perf_counter()
        others = [self.helpers.submit(run, part) for part in parts[1:]]
        run(parts[0])
        for other in others:
            other.result()
        seconds = time.perf_counter() - began
        return Took(seconds, seconds)


def check(target: Target, kind: PoolKind, num_blocks: int) -> None:
    """Raises SystemExit unless every block arrives. Touches every page that is measured afterwards."""
    order = np.random.default_rng(0).permutation(num_blocks)
    target.pull(kind, np.stack((np.arange(num_blocks), order), axis=1))
    data = target.caches[kind].data
    firsts = data[:, 0, 0, 0, 0, 0].float().cpu().numpy()
    expected = torch.arange(num_blocks).to(DTYPE).float().numpy()
    if not (firsts[order] == expected).all() or not bool((data[..., 1:] == 1.0).all()):
        raise SystemExit(f"{kind} blocks did not arrive as they were")


def measure(target: Target, kind: PoolKind, num_blocks: int, count: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(count)
    candidates = {"pull": target.pull, "memcpy_blocks": target.copy_blocks, "memcpy_at_once": target.copy_at_once}
    took: dict[str, list[Took]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, run in candidates.items():
            pairs = np.stack((rng.permutation(num_blocks)[:count], rng.permutation(num_blocks)[:count]), axis=1)
            result = run(kind, pairs)
            if turn:  # the first one warms up
                took[name].append(result)
    num_bytes = count * target.caches[kind].block_bytes
    best_copies = [min(a.job, b.job) for a, b in zip(took["memcpy_blocks"], took["memcpy_at_once"], strict=True)]
    rates = {name: num_bytes / median(t.job for t in values) / 1e9 for name, values in took.items()}
    rates["pull_and_back"] = num_bytes / median(t.whole for t in took["pull"]) / 1e9
    ceiling = max(rates["memcpy_blocks"], rates["memcpy_at_once"])
    return {
        "pool": str(kind),
        "blocks": count,
        "bytes": num_bytes,
        "job_us": median(t.job for t in took["pull"]) * 1e6,
        "whole_us": median(t.whole for t in took["pull"]) * 1e6,
        "gbytes_per_s": rates,
        "ratio": rates["pull"] / ceiling,
        "ratio_whole": rates["pull_and_back"] / ceiling,
        "ratio_within_rounds": median(c / t.job for c, t in zip(best_copies, took["pull"], strict=True)),
    }


def round_trips(channel: socket.socket, count: int) -> list[float]:
    """An Offer of 64 blocks there, its Ack back; microseconds, without the first tenth."""
    offer = Offer(1, 1, RequestId(7), None, SLOT, WORD, tuple(range(64)))
    reader, decoder, times = FrameReader(), msgspec.msgpack.Decoder(Ack), []
    for _ in range(count):
        began = time.perf_counter()
        channel.sendall(encode_frames([offer]))
        bodies: list[bytes] = []
        while not bodies:
            bodies = reader.read_frames(channel.recv(1 << 16))
        decoder.decode(bodies[0])
        times.append((time.perf_counter() - began) * 1e6)
    return times[count // 10 :]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(values, n=100)
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]}


HEADER = (
    f"{'pool':9} {'blocks':>6} {'MiB':>7} {'us':>8} {'+ way':>7} {'GB/s':>6} {'blocks':>7} {'at once':>8} "
    f"{'ratio':>6} {'+ way':>6}"
)


def show(row: dict[str, Any]) -> None:
    rates, way_us = row["gbytes_per_s"], row["whole_us"] - row["job_us"]
    print(
        f"{row['pool']:9} {row['blocks']:6} {row['bytes'] / 2**20:7.1f} {row['job_us']:8.0f} {way_us:7.0f} "
        f"{rates['pull']:6.1f} {rates['memcpy_blocks']:7.1f} {rates['memcpy_at_once']:8.1f} {row['ratio']:6.2f} "
        f"{row['ratio_whole']:6.2f}",
        flush=True,
    )


@contextmanager
def connected(options: argparse.Namespace) -> Iterator[tuple[Target, socket.socket]]:
    """A source in a process of its own and the target in this one; both end with the block."""
    ours, theirs = socket.socketpair()
    sizes = ["--blocks", str(options.blocks), "--block-kib", str(options.block_kib), "--device", options.device]
    command = [sys.executable, "-m", "bench.migrate", *sizes, "--serve", str(theirs.fileno())]
    with subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()]), ours:
        theirs.close()
        target = Target(options, ours)
        try:
            yield target, ours
        finally:
            target.exchange.close()


def run(options: argparse.Namespace) -> dict[str, Any]:
    with connected(options) as (target, channel):
        print(f"{options.threads} thread(s); the pull, then GB/s of memcpy, medians; ratio to the faster memcpy")
        print(HEADER)
        rows = []
        for kind in KINDS:
            check(target, kind, options.blocks)
            for count in sorted({*(n for n in SMALL_JOBS if n < options.blocks), options.blocks}):
                rows.append(measure(target, kind, options.blocks, count, options.rounds))
                show(rows[-1])
        control = percentiles(round_trips(channel, options.round_trips))
        print(
            f"round trip of an offer: {control['p50']:.0f} us, p95 {control['p95']:.0f} us, p99 {control['p99']:.0f} us"
        )
    return {
        "bench": "migrate",
        "threads": options.threads,
        "block_kib": options.block_kib,
        "rounds": options.rounds,
        "results": rows,
        "round_trip_us": control,
        "card": card(),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=256, help="of each pool")
    parser.add_argument("--block-kib", type=int, default=KV_BLOCK_KIB, help="size of a KV block")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="of the transfer lane and of the plain copies")
    parser.add_argument("--round-trips", type=int, default=3000)
    parser.add_argument("--quick", action="store_true", help="small pools, a few seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the document there too")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(device="cpu")
    parser.add_argument("--device", help=argparse.SUPPRESS)  # of bench.micro.migrate: plain copies are a processor's
    options = parser.parse_args(argv)
    if options.quick:
        options.blocks, options.rounds, options.round_trips = 64, 7, 500
    return options


def main() -> None:
    options = parse()
    if options.serve is not None:
        serve(socket.socket(fileno=options.serve), options)
        return
    document = run(options)
    if options.json is not None:
        write_document(options.json, document)
    emit(document)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
