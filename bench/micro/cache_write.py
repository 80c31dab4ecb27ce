"""Times the cache writes of a step: keys and values after their rotation in one operation, and features of pictures.

The floor is one read and one write of the bytes at the copy bandwidth of the same run; few tokens are bound by the
launch instead, which is the document's `graph_gap_s`. The peer is the same in unfused torch: rotations, then two writes
by index. Results are compared first. Layers take turns, so nothing is in a cache. `hydra-engine bench cache_write`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bench.micro.encode import numbers
from bench.micro.floors import image_write_work, rope_write_work
from bench.micro.harness import Report, Run, agree, captured, cold_copies, in_turn, parse, require, scaled, timed
from bench.micro.machine import on_gpu
from bench.micro.steps import BLOCK
from bench.micro.subject import IMAGE_BLOCK, run_ops
from hydra_engine.backend.base import Backend, PagedCache

QUICK_TOKENS, FULL_TOKENS = (64, 1024), (1, 16, 64, 256, 1024, 2048, 8192)
SHAPES = {"MHA": (32, 32, 128), "GQA": (28, 4, 128)}
SMALL_SHAPES = {"MHA": (8, 8, 64), "GQA": (14, 2, 64)}
IMAGES = {"llava": (576, 4096), "qwen": (1024, 3584)}  # tokens and width of a picture's features
SMALL_IMAGES = {"small": (64, 256)}


class Case(NamedTuple):
    kind: str
    heads: tuple[int, int, int]
    tokens: int

    def __str__(self) -> str:
        heads, kv_heads, dim = self.heads
        return f"rope + write {self.kind} {heads}:{kv_heads}x{dim} N={self.tokens}"


class Writes:
    """Rows of a fused projection for each of several layers, and the slots that they go to."""

    def __init__(self, case: Case, backend: Backend) -> None:
        heads, kv_heads, dim = case.heads
        device, dtype = backend.device.torch_device, backend.dtype
        self._ops = backend.ops
        layer_bytes = case.tokens * (heads + 2 * kv_heads) * dim * dtype.itemsize
        self.layers = cold_copies(device, 2 * layer_bytes, most=64)
        blocks = 2 * -(-case.tokens // BLOCK)
        self.cache = PagedCache(torch.zeros((blocks, self.layers, 2, BLOCK, kv_heads, dim), dtype=dtype, device=device))
        order = torch.randperm(blocks)[: -(-case.tokens // BLOCK), None] * BLOCK + torch.arange(BLOCK)
        self.slots = order.flatten()[: case.tokens].contiguous().to(device)
        fused = torch.randn((self.layers, case.tokens, heads + 2 * kv_heads, dim), device=device).to(dtype)
        self._q, self._k, self._v = fused.split((heads, kv_heads, kv_heads), dim=2)
        angles = torch.rand((case.tokens, dim // 2), device=device) * 6
        self._cos, self._sin = angles.cos(), angles.sin()
        self._cos_wide, self._sin_wide = (x.to(dtype)[:, None] for x in (self._cos, self._sin))

    def ours(self, layer: int) -> Tensor:
        q, k, v = self._q[layer], self._k[layer], self._v[layer]
        return self._ops.rope_and_write(q, k, v, (self._cos, self._sin), self.cache, layer, self.slots)

    def unfused(self, layer: int) -> Tensor:
        block, offset = self.slots // BLOCK, self.slots % BLOCK
        self.cache.data[block, layer, 0, offset] = self._turned(self._k[layer])
        self.cache.data[block, layer, 1, offset] = self._v[layer]
        return self._turned(self._q[layer])

    def _turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = self._cos_wide, self._sin_wide
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def check(self, what: str) -> None:
        ours = self.ours(0).clone()
        written = self.cache.data[:, 0].clone()
        self.cache.data.zero_()
        agree(what, ours, self.unfused(0))
        agree(f"{what}, the cache", written, self.cache.data[:, 0])


class Images:
    """Features of several pictures, and an image cache that has room for all."""

    def __init__(self, tokens: int, size: int, backend: Backend) -> None:
        device, dtype = backend.device.torch_device, backend.dtype
        self._ops, self._size = backend.ops, size
        self.count = cold_copies(device, 2 * tokens * size * dtype.itemsize, most=64)
        blocks = self.count * -(-tokens // IMAGE_BLOCK)
        self.cache = PagedCache(torch.zeros((blocks, 1, 1, IMAGE_BLOCK, 1, size), dtype=dtype, device=device))
        order = torch.randperm(blocks)[:, None] * IMAGE_BLOCK + torch.arange(IMAGE_BLOCK)
        self.slots = order.view(self.count, -1)[:, :tokens].contiguous().to(device)
        self._features = torch.randn((self.count, tokens, 1, size), device=device).to(dtype)

    def ours(self, picture: int) -> None:
        self._ops.write_cache(self.cache, 0, (self._features[picture],), self.slots[picture])

    def unfused(self, picture: int) -> None:
        self.cache.data.view(-1, self._size)[self.slots[picture]] = self._features[picture, :, 0]

    def check(self, what: str) -> None:
        self.ours(0)
        written = self.cache.data.clone()
        self.cache.data.zero_()
        self.unfused(0)
        require(torch.equal(written, self.cache.data), what)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", help="query heads, KV heads and head dim with commas, instead of the models'")
    parser.add_argument("--tokens", help="rows that are written, with commas")


def both(report: Report, what: str, made: Writes | Images, count: int) -> dict[str, Run]:
    def all_of(run: Callable[[int], object]) -> Run:
        return captured(report.device, in_turn(run, count), count)

    runs = {"ours": all_of(made.ours)}
    with report.optional(f"{what}, torch"):
        runs["torch"] = all_of(made.unfused)
    return runs


def measure(arguments: argparse.Namespace, report: Report, backend: Backend) -> None:
    gpu = on_gpu(report.device)
    shapes = SHAPES if gpu else SMALL_SHAPES
    if arguments.shape is not None:
        heads, kv_heads, dim = (int(word) for word in arguments.shape.split(","))
        shapes = {"MHA" if heads == kv_heads else "GQA": (heads, kv_heads, dim)}
    for kind, shape in shapes.items():
        for tokens in numbers(arguments.tokens, report.quick, QUICK_TOKENS, FULL_TOKENS):
            case = Case(kind, shape, tokens)
            with report.case(str(case)):
                _measure_writes(report, backend, case)
    for name, (tokens, size) in (IMAGES if gpu else SMALL_IMAGES).items():
        what = f"image write {name} {tokens}x{size}"
        with report.case(what):
            _measure_images(report, backend, what, tokens, size)


def _measure_writes(report: Report, backend: Backend, case: Case) -> None:
    writes = Writes(case, backend)
    writes.check(str(case))
    runs = both(report, str(case), writes, writes.layers)
    seconds = scaled(timed(report.device, runs, report.effort), writes.layers)
    work = [rope_write_work(*case.heads, case.tokens, backend.dtype.itemsize)]
    inputs = {**case._asdict(), "layers": writes.layers}
    report.row(str(case), seconds.pop("ours"), work=work, inputs=inputs, peers=seconds)


def _measure_images(report: Report, backend: Backend, what: str, tokens: int, size: int) -> None:
    images = Images(tokens, size, backend)
    images.check(what)
    seconds = scaled(timed(report.device, both(report, what, images, images.count), report.effort), images.count)
    work = [image_write_work(size, tokens, backend.dtype.itemsize)]
    report.row(what, seconds.pop("ours"), work=work, inputs={"tokens": tokens, "size": size}, peers=seconds)


def main() -> None:
    arguments = parse(__doc__, options)
    run_ops("cache_write", arguments, lambda report, backend: measure(arguments, report, backend))


if __name__ == "__main__":
    main()
