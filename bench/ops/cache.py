"""Paged-cache operations, and rotation on its own, against torch's indexing and against a plain copy of the same bytes.

Every operation moves `2 * bytes` (each is read and written), and so does the copy it is held against. Large cases walk
through memory beyond the processor's caches; small ones show what a call costs. Results are checked before they are
timed.

With several threads set OMP_WAIT_POLICY=PASSIVE, as the engine does for its instances: torch's idle threads otherwise
spin for a while after each of its turns, on the core that the next candidate needs.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.common import card, emit, interleaved
from hydra_engine import _C
from hydra_engine.backend.base import HeadNorms, PagedCache
from hydra_engine.backend.cpu.ops import NativeOps
from hydra_engine.backend.reference.ops import ReferenceOps

BLOCK_SIZE = 16
DTYPE = torch.bfloat16
EPS = 1e-6
COLD_BYTES = 96 << 20
# (tokens, query heads, KV heads, head dim)
STEPS = [(1, 16, 16, 64), (16, 16, 16, 64), (16, 14, 2, 64), (600, 16, 16, 64), (600, 14, 2, 64), (600, 32, 8, 128)]
QUICK_STEPS = [(1, 16, 16, 64), (600, 16, 16, 64)]
# (rows, width) of image features
IMAGES = [(576, 1024), (576, 4096)]
QUICK_IMAGES = [(576, 1024)]
# (rows, heads, head dim) of the queries and keys of a vision tower
TOWERS = [(1024, 32, 80), (4096, 32, 80)]
QUICK_TOWERS = [(1024, 32, 80)]

Candidates = dict[str, Callable[[], object]]


class Target:
    """A cache with as many layers as make it cold, and one step's rows as views of a fused projection."""

    def __init__(self, tokens: int, num_heads: int, num_kv_heads: int, dim: int) -> None:
        self.tokens = tokens
        layer_bytes = 4 * tokens * num_kv_heads * dim * DTYPE.itemsize
        self.layers = max(1, min(32, COLD_BYTES // layer_bytes))
        blocks = 2 * -(-tokens // BLOCK_SIZE)
        self.cache = PagedCache(torch.zeros(blocks, self.layers, 2, BLOCK_SIZE, num_kv_heads, dim, dtype=DTYPE))
        self.slots = torch.randperm(blocks)[: -(-tokens // BLOCK_SIZE), None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
        self.slots = self.slots.flatten()[:tokens].contiguous()
        fused = torch.randn(self.layers, tokens, num_heads + 2 * num_kv_heads, dim).to(DTYPE)
        self.q, self.k, self.v = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
        self.cos, self.sin = torch.randn(2, tokens, dim // 2)
        self.kv_bytes = 2 * tokens * num_kv_heads * dim * DTYPE.itemsize
        self.q_bytes = tokens * num_heads * dim * DTYPE.itemsize
        self.source = torch.randn(self.layers, (self.kv_bytes + self.q_bytes) // 4)
        self.sink = self.source.clone()  # touched: a first write to a page costs more than the copy

    def in_turn(self, run: Callable[[int], object]) -> Callable[[], object]:
        turn = itertools.cycle(range(self.layers))
        return lambda: run(next(turn))

    def copy(self, num_bytes: int) -> Callable[[], object]:
        words = num_bytes // 4
        return self.in_turn(lambda i: self.sink[i, :words].copy_(self.source[i, :words]))


def torch_write(cache: PagedCache, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    cache.data[block, layer, 0, offset] = k
    cache.data[block, layer, 1, offset] = v


def torch_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates in the dtype of x, like a model in torch."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def require(ok: bool, what: str) -> None:
    if not ok:
        raise SystemExit(f"wrong result of {what}")


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def step_candidates(ops: NativeOps, case: tuple[int, ...]) -> list[tuple[str, int, Candidates]]:
    """(operation, bytes moved one way, candidates) of a step that writes keys and values."""
    t = Target(*case)
    other = PagedCache(torch.zeros_like(t.cache.data))
    plain = ReferenceOps()
    ops.write_cache(t.cache, 0, (t.k[0], t.v[0]), t.slots)
    plain.write_cache(other, 0, (t.k[0], t.v[0]), t.slots)
    require(torch.equal(t.cache.data, other.data), "write_cache")
    rotated = ops.rope_and_write(t.q[0], t.k[0], t.v[0], (t.cos, t.sin), t.cache, 0, t.slots)
    expected = plain.rope_and_write(t.q[0], t.k[0], t.v[0], (t.cos, t.sin), other, 0, t.slots)
    require(torch.allclose(rotated.float(), expected.float(), rtol=2**-7, atol=1e-2), "rope_and_write")
    require(torch.equal(ops.gather_cache(t.cache, 0, 1, t.slots), t.v[0]), "gather_cache")
    weight = torch.rand(case[3]).to(DTYPE)
    norms = HeadNorms(weight, weight, EPS)
    rotated = ops.rope_and_write(t.q[0], t.k[0], t.v[0], (t.cos, t.sin), t.cache, 0, t.slots, norms)
    expected = plain.rope_and_write(t.q[0], t.k[0], t.v[0], (t.cos, t.sin), other, 0, t.slots, norms)
    require(torch.allclose(rotated.float(), expected.float(), rtol=2**-7, atol=1e-2), "rope_and_write with norms")

    def torch_rope(i: int) -> Tensor:
        torch_write(t.cache, i, torch_rotate(t.k[i], t.cos, t.sin), t.v[i], t.slots)
        return torch_rotate(t.q[i], t.cos, t.sin)

    def torch_norm_rope(i: int) -> Tensor:
        torch_write(t.cache, i, torch_rotate(torch_norm(t.k[i], weight), t.cos, t.sin), t.v[i], t.slots)
        return torch_rotate(torch_norm(t.q[i], weight), t.cos, t.sin)

    def torch_gather(i: int) -> Tensor:
        return t.cache.data[t.slots // BLOCK_SIZE, i, 0, t.slots % BLOCK_SIZE]

    return [
        (
            "write_cache",
            t.kv_bytes,
            {
                "native": t.in_turn(lambda i: ops.write_cache(t.cache, i, (t.k[i], t.v[i]), t.slots)),
                "torch": t.in_turn(lambda i: torch_write(t.cache, i, t.k[i], t.v[i], t.slots)),
                "copy": t.copy(t.kv_bytes),
            },
        ),
        (
            "rope_and_write",
            t.kv_bytes + t.q_bytes,
            {
                "native": t.in_turn(
                    lambda i: ops.rope_and_write(t.q[i], t.k[i], t.v[i], (t.cos, t.sin), t.cache, i, t.slots)
                ),
                "torch": t.in_turn(torch_rope),
                "copy": t.copy(t.kv_bytes + t.q_bytes),
            },
        ),
        (
            "norms, rope_and_write",
            t.kv_bytes + t.q_bytes,
            {
                "native": t.in_turn(
                    lambda i: ops.rope_and_write(t.q[i], t.k[i], t.v[i], (t.cos, t.sin), t.cache, i, t.slots, norms)
                ),
                "torch": t.in_turn(torch_norm_rope),
                "copy": t.copy(t.kv_bytes + t.q_bytes),
            },
        ),
        (
            "gather_cache",
            t.kv_bytes // 2,
            {
                "native": t.in_turn(lambda i: ops.gather_cache(t.cache, i, 0, t.slots)),
                "torch": t.in_turn(torch_gather),
                "copy": t.copy(t.kv_bytes // 2),
            },
        ),
    ]


def tower_candidates(ops: NativeOps, rows: int, heads: int, dim: int) -> list[tuple[str, int, Candidates]]:
    x = torch.randn(rows, heads + heads // 2, dim).to(DTYPE)[:, :heads]
    cos, sin = torch.rand(2, rows, dim // 2)
    rotated, exact = ops.rotate(x, cos, sin), torch_rotate(x.double(), cos.double(), sin.double())
    require(torch.allclose(rotated.double(), exact, rtol=2**-7, atol=1e-2), "rotate")
    candidates: Candidates = {
        "native": lambda: ops.rotate(x, cos, sin),
        "torch": lambda: torch_rotate(x, cos, sin),
        "copy": x.contiguous,
    }
    return [("rotate", rotated.nbytes, candidates)]


def image_candidates(ops: NativeOps, rows: int, width: int) -> list[tuple[str, int, Candidates]]:
    num_bytes = rows * width * DTYPE.itemsize
    images = max(2, COLD_BYTES // (3 * num_bytes))
    cache = PagedCache(torch.zeros(images, 1, 1, rows, 1, width, dtype=DTYPE))
    other = PagedCache(torch.zeros_like(cache.data))
    features = torch.randn(images, rows, 1, width).to(DTYPE)
    hidden = torch.zeros(rows + 24, width, dtype=DTYPE)
    targets = torch.arange(rows) + 24
    slots = torch.arange(images)[:, None] * rows + torch.arange(rows)
    turn = itertools.cycle(range(images))
    for i in range(images):
        ops.write_cache(cache, 0, (features[i],), slots[i])
    require(torch.equal(cache.data[:, 0, 0], features), "write_cache of image features")
    ops.merge_image_tokens(hidden, targets, cache, slots[1])
    require(torch.equal(hidden[24:], features[1, :, 0]), "merge_image_tokens")
    pairs = torch.tensor([[i, images - 1 - i] for i in range(8) if 2 * i < images - 1])
    ops.copy_blocks(cache, other, pairs)
    require(torch.equal(other.data[pairs[:, 1]], cache.data[pairs[:, 0]]), "copy_blocks")
    sink = features.clone()

    def torch_write_image(i: int) -> None:
        cache.data[:, 0, 0].view(-1, 1, width)[slots[i]] = features[i]

    def torch_merge(i: int) -> None:
        hidden[targets] = cache.data.view(-1, width)[slots[i]]

    def torch_copy() -> None:
        other.data[pairs[:, 1]] = cache.data[pairs[:, 0]]

    return [
        (
            "write_cache, image",
            num_bytes,
            {
                "native": lambda: ops.write_cache(cache, 0, (features[i := next(turn)],), slots[i]),
                "torch": lambda: torch_write_image(next(turn)),
                "copy": lambda: sink[i := next(turn)].copy_(features[i]),
            },
        ),
        (
            "merge_image_tokens",
            num_bytes,
            {
                "native": lambda: ops.merge_image_tokens(hidden, targets, cache, slots[next(turn)]),
                "torch": lambda: torch_merge(next(turn)),
                "copy": lambda: hidden[24:].copy_(features[next(turn), :, 0]),
            },
        ),
        (
            "copy_blocks",
            len(pairs) * num_bytes,
            {
                "native": lambda: ops.copy_blocks(cache, other, pairs),
                "torch": torch_copy,
                "copy": lambda: other.data[: len(pairs)].copy_(cache.data[: len(pairs)]),
            },
        ),
    ]


def measure(case: str, operation: str, num_bytes: int, candidates: Candidates, repeats: int) -> dict[str, Any]:
    clock = time.perf_counter if _C.num_threads() > 1 else time.thread_time
    times = interleaved(candidates, repeats, clock=clock)
    native, other, copy = times["native"], times["torch"], times["copy"]
    return {
        "case": case,
        "op": operation,
        "bytes": num_bytes,
        "us": native.median * 1e6,
        "us_best": native.best * 1e6,
        "gbytes_per_s": 2 * num_bytes / native.best / 1e9,
        "copy_gbytes_per_s": 2 * num_bytes / copy.best / 1e9,
        "torch_ratio": other.median / native.median,
        "torch_ratio_best": other.best / native.best,
        "copy_ratio": copy.median / native.median,
        "copy_ratio_best": copy.best / native.best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="three cases, a few seconds")
    parser.add_argument("--isa", help="force a lower instruction-set level")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    _C.set_num_threads(arguments.threads)
    if arguments.isa:
        _C.force_isa(arguments.isa)
    ops, quick = NativeOps(), arguments.quick
    print(f"bf16, {arguments.threads} thread(s), {_C.isa()}; ratios: other / native, best of many [median]")
    print(f"{'':49} {'us':>9} {'GB/s':>6}  {'to torch':>15}  {'plain copy':>13}")
    results = []
    groups = [
        *((f"{t} tokens, {h}:{kv} heads of {d}", step_candidates(ops, (t, h, kv, d)))
          for t, h, kv, d in (QUICK_STEPS if quick else STEPS)),
        *((f"{rows} rows of {width}", image_candidates(ops, rows, width))
          for rows, width in (QUICK_IMAGES if quick else IMAGES)),
        *((f"{rows} rows, {heads} heads of {dim}", tower_candidates(ops, rows, heads, dim))
          for rows, heads, dim in (QUICK_TOWERS if quick else TOWERS)),
    ]  # fmt: skip
    for case, operations in groups:
        for operation, num_bytes, candidates in operations:
            row = measure(case, operation, num_bytes, candidates, 7 if quick else 15)
            results.append(row)
            print(
                f"{operation:21} {case:27} {row['us_best']:9.1f} {row['gbytes_per_s']:6.1f}"
                f"  {row['torch_ratio_best']:6.2f} [{row['torch_ratio']:6.2f}]"
                f"  {row['copy_ratio_best']:5.2f} [{row['copy_ratio']:5.2f}]",
                flush=True,
            )
    emit({"bench": "ops.cache", "threads": arguments.threads, "results": results, "card": card()})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
