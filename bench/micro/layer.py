"""A decoder layer of a decode step, kernel by kernel: each fused one beside the ops that it replaces, then all one
after another, as ops, and launched so that a kernel begins before the one ahead has ended or without that.

The floor is one read of weights and contexts at the read bandwidth of the same run, or the arithmetic where that takes
longer. `parts_s` of a whole layer is what its kernels take alone, each behind its own copies: what the layer takes more
lies between them. Layers take turns, so nothing is in a cache. Results are compared first. Shapes are those of the
models and, with --shape, any. `hydra-engine bench layer [--full]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from bench.micro.encode import numbers
from bench.micro.floors import Work, attention_work
from bench.micro.harness import Report, Run, agree, captured, cold_copies, in_turn, parse, scaled, timed
from bench.micro.machine import on_gpu
from bench.micro.steps import BLOCK
from bench.micro.subject import run_ops
from hydra_engine.backend.base import Backend, DeferredNorm, PackedLinear, PagedCache
from hydra_engine.backend.reference.ops import ComposedOps

QUICK_ROWS, FULL_ROWS = (1, 8, 16, 64), (1, 2, 4, 8, 16, 32, 64)
SMALL_ROWS = (1, 8)  # of a processor
CONTEXT = 1024
SMALL_CONTEXT = 64
EPS = 1e-5


class Shape(NamedTuple):
    """Query heads, KV heads, head dim, inner width; the hidden size is that of all query heads."""

    heads: int
    kv_heads: int
    dim: int
    inner: int

    @property
    def hidden(self) -> int:
        return self.heads * self.dim

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.dim, self.hidden),
            "o": (self.hidden, self.hidden),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }


SHAPES = {"LLaVA-1.5-7B": Shape(32, 32, 128, 11008), "Qwen2.5-VL-7B": Shape(28, 4, 128, 18944)}
SMALL_SHAPES = {"small": Shape(8, 2, 64, 1024)}


class Layers:
    """Layers, as many as keep weights and contexts cold."""

    def __init__(self, shape: Shape, rows: int, context: int, backend: Backend) -> None:
        device, dtype, ops = backend.device.torch_device, backend.dtype, backend.ops
        self.ops, self._scale = ops, shape.dim**-0.5
        self.count = cold_copies(device, min(n * k for n, k in shape.matrices.values()) * dtype.itemsize, most=8)

        def random(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device).normal_()

        self._weights: list[dict[str, PackedLinear]] = [
            {name: ops.pack_linear(random(n, k) * k**-0.5) for name, (n, k) in shape.matrices.items()}
            for _ in range(self.count)
        ]
        blocks = -(-context // BLOCK)
        size = (rows * blocks, self.count, 2, BLOCK, shape.kv_heads, shape.dim)
        self.cache = PagedCache(random(*size))
        tables = torch.randperm(rows * blocks, dtype=torch.int32).view(rows, blocks)
        contexts = torch.full((rows,), context, dtype=torch.int32)
        self.slots = (tables[:, -1].long() * BLOCK + (context - 1) % BLOCK).to(device)
        if on_gpu(device):
            self._plan = ops.plan_decode(contexts.to(device), tables.to(device))
        else:
            self._plan = ops.plan_attention(torch.arange(rows + 1, dtype=torch.int32), contexts, tables)
        angles = torch.rand((rows, shape.dim // 2), device=device) * 6
        self._rotary = angles.cos(), angles.sin()
        self._norm, self.x, self.inner = random(shape.hidden), random(rows, shape.hidden), random(rows, shape.inner)
        self.q, self.residual = random(rows, shape.heads, shape.dim), random(rows, shape.hidden)

    def project(self, layer: int, x: Tensor | DeferredNorm | None = None, *, composed: bool = False) -> Tensor:
        given = (
            DeferredNorm(self.x, self._norm, EPS) if x is None else x,
            (self._weights[layer]["qkv"],),
            self._rotary,
            self.cache,
            layer,
            self.slots,
        )
        if composed:
            return ComposedOps.linear_rope_and_write(self.ops, *given)
        return self.ops.linear_rope_and_write(*given)

    def gate(self, layer: int, x: Tensor | DeferredNorm | None = None, *, composed: bool = False) -> Tensor:
        given = (DeferredNorm(self.x, self._norm, EPS) if x is None else x, (self._weights[layer]["gate_up"],), "silu")
        if composed:
            return ComposedOps.linear_act_and_mul(self.ops, *given)  # type: ignore[arg-type]
        return self.ops.linear_act_and_mul(*given)  # type: ignore[arg-type]

    def attention(self, layer: int, q: Tensor | None = None) -> Tensor:
        return self.ops.attention_paged(self.q if q is None else q, self.cache, layer, self._plan, self._scale)

    def norm(self) -> Tensor:
        return self.ops.add_rms_norm(self.x, self.residual, self._norm, EPS)[0]

    def add(
        self, name: str, layer: int, x: Tensor, residual: Tensor | None = None, *, composed: bool = False
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        """The product and the norm behind it, where it is not left to the next product."""
        weight = self._weights[layer][name]
        given = x, weight, self.residual if residual is None else residual, self._norm, EPS
        if composed:
            return ComposedOps.linear_add_rms_norm(self.ops, *given)
        return self.ops.linear_add_rms_norm(*given)

    def whole(self, layer: int, *, composed: bool = False) -> Tensor:
        q = self.project(layer, composed=composed)
        hidden, residual = self.add("o", layer, self.attention(layer, q).flatten(1), composed=composed)
        return self.add("down", layer, self.gate(layer, hidden, composed=composed), residual, composed=composed)[1]


@contextmanager
def without_dependent_launch() -> Iterator[None]:
    """Kernels begin when the one ahead of them has ended, as on devices before Hopper. Launches that are kept say
    which, so none is kept over an end of this."""
    from hydra_kernels._launch import clear_launch_caches

    with patch("hydra_kernels._common.capability_of", lambda _: 80):
        clear_launch_caches()
        try:
            yield
        finally:
            clear_launch_caches()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", help="query heads, KV heads, head dim and inner width, instead of the models'")
    parser.add_argument("--rows", help="requests, with commas")


def measure(arguments: argparse.Namespace, report: Report, backend: Backend) -> None:
    gpu = on_gpu(report.device)
    shapes = SHAPES if gpu else SMALL_SHAPES
    if arguments.shape is not None:
        shapes = {"any": Shape(*(int(word) for word in arguments.shape.split(",")))}
    for name, shape in shapes.items():
        for rows in numbers(arguments.rows, report.quick, *((QUICK_ROWS, FULL_ROWS) if gpu else (SMALL_ROWS,) * 2)):
            with report.case(f"layer {name} B={rows}"):
                _measure(report, backend, name, shape, rows, CONTEXT if gpu else SMALL_CONTEXT)
    if gpu:
        report.skip("weights fetched ahead of the wait for the kernel before", "not built")


def _measure(report: Report, backend: Backend, name: str, shape: Shape, rows: int, context: int) -> None:
    layers = Layers(shape, rows, context, backend)
    for part in (layers.project, layers.gate):
        agree(f"{name} B={rows}", part(0), part(0, composed=True))
    width = backend.dtype.itemsize
    of = {part: Work(part, 2.0 * rows * n * k, float(n * k * width)) for part, (n, k) in shape.matrices.items()}
    read = attention_work(shape.heads, shape.kv_heads, shape.dim, rows, context, width)
    kernels: dict[str, tuple[list[Work], dict[str, Callable[[int], object]]]] = {
        "add + norm": ([], {"ours": lambda _: layers.norm()}),
        "norm + qkv + rope + write": (
            [of["qkv"]],
            {"ours": layers.project, "ops": lambda layer: layers.project(layer, composed=True)},
        ),
        "attention": ([read], {"ours": layers.attention}),
        "o + add": (
            [of["o"]],
            {
                "ours": lambda layer: layers.add("o", layer, layers.q.flatten(1)),
                "ops": lambda layer: layers.add("o", layer, layers.q.flatten(1), composed=True),
            },
        ),
        "norm + gate_up + act": (
            [of["gate_up"]],
            {"ours": layers.gate, "ops": lambda layer: layers.gate(layer, composed=True)},
        ),
        "down + add": (
            [of["down"]],
            {
                "ours": lambda layer: layers.add("down", layer, layers.inner),
                "ops": lambda layer: layers.add("down", layer, layers.inner, composed=True),
            },
        ),
        "layer": (
            [*of.values(), read],
            {"ours": layers.whole, "ops": lambda layer: layers.whole(layer, composed=True)},
        ),
    }
    alone: dict[str, float] = {}
    for what, (work, candidates) in kernels.items():
        runs = {each: _captured(report, layers, run) for each, run in candidates.items()}
        if what == "layer" and on_gpu(report.device):
            with without_dependent_launch():
                runs["begun when the last has ended"] = _captured(report, layers, layers.whole)
        seconds = scaled(timed(report.device, runs, report.effort), layers.count)
        ours = seconds.pop("ours")
        inputs = {**shape._asdict(), "rows": rows, "context": context, "layers": layers.count}
        alone[what] = ours.median
        more = {"parts_s": _together(layers, alone)} if what == "layer" else {}
        report.row(f"{name} B={rows} {what}", ours, work=work, inputs=inputs, peers=seconds, **more)


def _together(layers: Layers, alone: Mapping[str, float]) -> float:
    """Seconds of all parts. Where norms are nodes, the one between O and gate/up is in two of them."""
    norm, *parts, _ = alone.values()
    return sum(parts) - (0.0 if isinstance(layers.add("o", 0, layers.q.flatten(1))[0], DeferredNorm) else norm)


def _captured(report: Report, layers: Layers, run: Callable[[int], object]) -> Run:
    """Captures one pass through all layers as a graph, if there are graphs."""
    return captured(report.device, in_turn(run, layers.count), layers.count)


def main() -> None:
    arguments = parse(__doc__, options)
    run_ops("layer", arguments, lambda report, backend: measure(arguments, report, backend))


if __name__ == "__main__":
    main()
