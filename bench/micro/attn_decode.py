"""Paged attention of decodes alone, a layer at a time, with a KV head for each query head (MHA) and for several (GQA).

The floor is one read of the contexts at the read bandwidth of the same run. Layers take turns, so nothing is in a
cache. Peers: torch's SDPA over contiguous keys and values, and over ones gathered out of the blocks first, which is
what paging costs without a kernel of its own; and FlashInfer's, planned as for a captured step, where it is installed.
`--uneven`: also one request of eight times the context among others of half of it, where SDPA has no such form.
Results are compared with SDPA in float32 first. Shapes are those of the models and, with --shape, any. `hydra-engine
bench attn_decode [--full]`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.micro.encode import numbers
from bench.micro.floors import attention_work
from bench.micro.harness import Report, Run, agree, captured, cold_copies, in_turn, parse, scaled, timed
from bench.micro.machine import on_gpu
from bench.micro.steps import BLOCK
from bench.micro.subject import run_ops
from hydra_engine.backend.base import AttentionPlan, Backend, PagedCache
from hydra_engine.backend.cuda import flashinfer_kernels
from hydra_engine.backend.cuda.attention_choice import flashinfer_missing, flashinfer_problem

QUICK_ROWS, FULL_ROWS = (1, 16, 64), (1, 4, 16, 32, 64, 128)
SMALL_ROWS = (1, 8)  # of a processor
QUICK_CONTEXTS, FULL_CONTEXTS = (1024,), (256, 1024, 4096)
SHAPES = {"MHA": (32, 32, 128), "GQA": (28, 4, 128)}  # of the three models of 7 billion: query heads, KV heads, dim
SMALL_SHAPES = {"MHA": (8, 8, 64), "GQA": (14, 2, 64)}
_CACHE_BYTES = 48 << 30


class Case(NamedTuple):
    kind: str
    heads: tuple[int, int, int]
    rows: int
    context: int
    uneven: bool = False

    def __str__(self) -> str:
        heads, kv_heads, dim = self.heads
        contexts = self.contexts
        seen = f"{contexts[-1]} but one of {contexts[0]}" if self.uneven else str(self.context)
        return f"attention {self.kind} {heads}:{kv_heads}x{dim} B={self.rows} KV={seen}"

    @property
    def contexts(self) -> list[int]:
        if self.uneven:
            return [8 * self.context, *[max(1, self.context // 2)] * (self.rows - 1)]
        return [self.context] * self.rows

    @property
    def num_blocks(self) -> list[int]:
        """Blocks of each request."""
        return [-(-context // BLOCK) for context in self.contexts]

    def layer_bytes(self, width: int) -> int:
        return sum(self.num_blocks) * BLOCK * 2 * self.heads[1] * self.heads[2] * width


class Paged:
    """Requests over a cache of random numbers and as many layers as keep it cold."""

    def __init__(self, case: Case, backend: Backend) -> None:
        heads, kv_heads, dim = case.heads
        device = backend.device.torch_device
        self._ops, self._case, self.scale = backend.ops, case, dim**-0.5
        self.layers = cold_copies(device, case.layer_bytes(backend.dtype.itemsize), most=32)
        blocks = case.num_blocks
        shape = (sum(blocks), self.layers, 2, BLOCK, kv_heads, dim)
        self.cache = PagedCache(torch.empty(shape, dtype=backend.dtype, device=device).normal_())
        tables = torch.zeros((case.rows, max(blocks)), dtype=torch.int32)
        for row, own in enumerate(torch.randperm(sum(blocks), dtype=torch.int32).split(blocks)):
            tables[row, : len(own)] = own
        self.tables, self._places = tables.to(device), tables.long().to(device)
        self.context = torch.tensor(case.contexts, dtype=torch.int32).to(device)
        self.q = torch.randn((case.rows, heads, dim), device=device).to(backend.dtype)
        self.plan = self._planned(device)

    def _planned(self, device: torch.device) -> AttentionPlan:
        if on_gpu(device):
            return self._ops.plan_decode(self.context, self.tables)
        return self._ops.plan_attention(torch.arange(len(self.q) + 1, dtype=torch.int32), self.context, self.tables)

    def ours(self, layer: int) -> Tensor:
        return self._ops.attention_paged(self.q, self.cache, layer, self.plan, self.scale)

    def gathered(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, context, D] of requests of one length."""
        return self._gathered(layer, slice(None), self._case.context)

    def _gathered(self, layer: int, rows: slice, context: int) -> tuple[Tensor, Tensor]:
        found = self.cache.data[:, layer][self._places[rows]]  # [B, W, 2, S, H, D]
        both = found.permute(2, 0, 4, 1, 3, 5).flatten(3, 4)[:, :, :, :context]
        return both[0], both[1]

    def exact(self) -> Tensor:
        """Attention of the first layer in float32, request by request."""
        found = []
        for row, context in enumerate(self._case.contexts):
            rows = slice(row, row + 1)
            found.append(self.sdpa(*(x.float() for x in self._gathered(0, rows, context)), rows=rows))
        return torch.cat(found)

    def sdpa(self, keys: Tensor, values: Tensor, rows: slice = slice(None)) -> Tensor:
        q = self.q[rows].to(keys.dtype)[:, :, None]
        gqa = self._case.heads[0] != self._case.heads[1]
        return F.scaled_dot_product_attention(q, keys, values, scale=self.scale, enable_gqa=gqa)[:, :, 0]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", help="query heads, KV heads and head dim with commas, instead of the models'")
    parser.add_argument("--rows", help="requests, with commas")
    parser.add_argument("--contexts", help="tokens that each request sees, with commas")
    parser.add_argument("--uneven", action="store_true", help="also contexts that differ")


def cases(arguments: argparse.Namespace, quick: bool, *, gpu: bool) -> Iterator[Case]:
    shapes = SHAPES if gpu else SMALL_SHAPES
    if arguments.shape is not None:
        heads, kv_heads, dim = (int(word) for word in arguments.shape.split(","))
        shapes = {"MHA" if heads == kv_heads else "GQA": (heads, kv_heads, dim)}
    rows = (QUICK_ROWS, FULL_ROWS) if gpu else (SMALL_ROWS, SMALL_ROWS)
    for kind, shape in shapes.items():
        for context in numbers(arguments.contexts, quick, QUICK_CONTEXTS, FULL_CONTEXTS):
            for count in numbers(arguments.rows, quick, *rows):
                yield Case(kind, shape, count, context)
                if arguments.uneven and count > 1:
                    yield Case(kind, shape, count, context, uneven=True)


def measure(arguments: argparse.Namespace, report: Report, backend: Backend) -> None:
    for case in cases(arguments, report.quick, gpu=on_gpu(report.device)):
        if case.layer_bytes(backend.dtype.itemsize) > _CACHE_BYTES / 2:
            report.skip(str(case), "more KV than is sensible for one layer")
            continue
        with report.case(str(case)):
            _measure(report, backend, case)


def _measure(report: Report, backend: Backend, case: Case) -> None:
    paged = Paged(case, backend)
    agree(str(case), paged.ours(0), paged.exact())
    runs = {"ours": all_layers(report.device, paged, paged.ours)}
    peers: dict[str, Callable[[int], object]] = {}
    if not case.uneven:
        contiguous = [tuple(x.contiguous() for x in paged.gathered(layer)) for layer in range(paged.layers)]
        peers["sdpa"] = lambda layer: paged.sdpa(contiguous[layer][0], contiguous[layer][1])
        peers["gather + sdpa"] = lambda layer: paged.sdpa(*paged.gathered(layer))
    if on_gpu(report.device):
        with report.optional(f"{case}, flashinfer"):
            attend = by_flashinfer(backend, case, paged)
            if isinstance(attend, str):
                report.skip(f"{case}, flashinfer", attend)
            else:
                agree(f"{case}, flashinfer", attend(0), paged.ours(0))
                peers["flashinfer"] = attend
    for name, peer in peers.items():
        with report.optional(f"{case}, {name}"):
            runs[name] = all_layers(report.device, paged, peer)
    seconds = scaled(timed(report.device, runs, report.effort), paged.layers)
    ours = seconds.pop("ours")
    mean = sum(case.contexts) / case.rows
    work = attention_work(*case.heads, case.rows, mean, backend.dtype.itemsize)
    report.row(
        str(case),
        ours,
        work=[work],
        inputs={**case._asdict(), "block_size": BLOCK, "layers": paged.layers},
        peers=seconds,
        bytes_per_s=work.read_bytes / ours.median,
    )


def by_flashinfer(backend: Backend, case: Case, paged: Paged) -> Callable[[int], Tensor] | str:
    """FlashInfer's decode of one layer, with a plan as before a replay; or the reason why it cannot run here."""
    # Needs Triton.
    timing: Any = importlib.import_module("hydra_engine.backend.cuda.attention_timing")
    heads, kv_heads, dim = case.heads
    problem = flashinfer_problem(backend.dtype, dim, BLOCK) or flashinfer_missing()
    kernel = flashinfer_kernels.decode_kernel(heads, kv_heads, dim)
    if problem := problem or flashinfer_kernels.installed().reason_missing(kernel, backend.dtype, dim):
        return problem
    num_sms = torch.cuda.get_device_properties(backend.device.torch_device).multi_processor_count
    attention = timing.Site(backend.device.torch_device, num_sms, backend.device.send).flashinfer()
    plan = attention.plan_decode(paged.context, paged.tables)
    if plan.refresh is not None:
        plan.refresh(paged.context.cpu().numpy(), paged.tables.cpu().numpy())
    return lambda layer: attention.paged(paged.q, paged.cache, layer, plan, paged.scale)


def all_layers(device: torch.device, paged: Paged, run: Callable[[int], object]) -> Run:
    """A run through all layers, as one graph where the device has graphs."""
    return captured(device, in_turn(run, paged.layers), paged.layers)


def main() -> None:
    arguments = parse(__doc__, options)
    run_ops("attn_decode", arguments, lambda report, backend: measure(arguments, report, backend))


if __name__ == "__main__":
    main()
