"""Attention of prompts and of vision towers alone, by every kernel that an engine may choose: TFLOP/s of each.

Candidates are those of the measurement at start, with its shapes' makers and its comparison with ours; each is a graph
of eight launches. Ours is the plain Triton kernel, the others are its peers, so `over_peers` below 1 is what a choice
gains. Prompts are one, as most steps of an engine have, and as many as make 16k tokens (`--prompts`). The floor is the
FLOP (half of them where attention is causal) at the rate of the same run's best matrix product. GPUs only: a processor
has one kernel, in `bench.ops.attention`. `hydra-engine bench attn_prefill [--full]`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.micro.encode import numbers
from bench.micro.floors import Work
from bench.micro.harness import Report, Run, agree, captured, on_gpu, parse, scaled, timed
from bench.micro.subject import run_ops
from hydra_engine.backend.base import Backend, PackedPlan, Segments
from hydra_engine.backend.cuda.attention_choice import PROMPTS, TRITON, Heads, Tower

LAUNCHES = 8
TOKENS = 16384  # of all prompts of a case together, where there are several
QUICK_LENGTHS, FULL_LENGTHS = (2048,), (512, 1024, 2048, 16384)
BLOCKS = (16, 64)  # tokens; descriptors read the larger ones
SHAPES = {"MHA": (32, 32, 128), "GQA": (28, 4, 128)}  # query heads, KV heads, dim


class Layers(NamedTuple):
    """A tower, and how many of its layers attend within pictures and within windows."""

    tower: Tower
    pictures: int
    windows: int


TOWERS = {
    "CLIP-L": Layers(Tower(16, 64, 577, 0), 23, 0),
    "Qwen2-VL": Layers(Tower(16, 80, 4096, 0), 32, 0),
    "Qwen2.5-VL": Layers(Tower(16, 80, 4096, 64), 4, 28),
}

Attend = Callable[[], Tensor]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", help="of prompts, with commas")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of all prompts of a case together")
    parser.add_argument("--prompts", help="at once, with commas; default: 1, and as many as make --tokens")


def measure(arguments: argparse.Namespace, report: Report, backend: Backend) -> None:
    if not on_gpu(report.device):
        report.skip("attention of prompts and towers", "bench.ops.attention measures a processor's kernel")
        return
    # Needs Triton.
    timing: Any = importlib.import_module("hydra_engine.backend.cuda.attention_timing")
    device = backend.device
    num_sms = torch.cuda.get_device_properties(report.device).multi_processor_count
    site = timing.Site(device.torch_device, num_sms, device.send)
    for what, work, candidates, layers in (
        *_prompts(arguments, report.quick, timing, site, backend.dtype),
        *_towers(timing, site, backend.dtype),
    ):
        with report.case(what):
            _measure(report, timing, what, work, list(candidates), layers)
    report.skip("FlashAttention-4 for prompts and towers", "not built")


def _prompts(
    arguments: argparse.Namespace, quick: bool, timing: Any, site: Any, dtype: torch.dtype
) -> Iterator[tuple[str, Work, Iterator[Any], int]]:
    for kind, shape in SHAPES.items():
        for length in numbers(arguments.lengths, quick, QUICK_LENGTHS, FULL_LENGTHS):
            many = max(1, arguments.tokens // length)
            counts = dict.fromkeys(numbers(arguments.prompts, quick, (1, many), (1, many)))
            for rows, block in product(counts, BLOCKS):
                heads = Heads(*shape, block)
                case = timing.Case(PROMPTS, rows, length, length)
                what = f"prompts {kind} {shape[0]}:{shape[1]}x{shape[2]} S={length} b={rows} blocks of {block}"
                flops = 2.0 * rows * length * (length + 1) * shape[0] * shape[2]
                yield what, Work("attention", flops), _of_prompts(timing, site, case, heads, dtype), 1


def _of_prompts(timing: Any, site: Any, case: Any, heads: Heads, dtype: torch.dtype) -> Iterator[Any]:
    blocks = case.rows * -(-case.num_context // heads.block_size)
    block_bytes = 2 * heads.block_size * heads.kv_heads * heads.head_dim * dtype.itemsize
    cache = timing.random_cache(heads, dtype, site.device, num_bytes=blocks * block_bytes)
    yield timing.Candidate(TRITON, lambda: timing.prepared(site.triton(), case, cache, heads))
    yield from timing.paged_candidates(site, case, cache, heads)


def _towers(timing: Any, site: Any, dtype: torch.dtype) -> Iterator[tuple[str, Work, Iterator[Any], int]]:
    by_triton = site.triton()
    for name, (tower, pictures, windows) in TOWERS.items():
        for use, rows, segments in timing.tower_cases(by_triton, tower, site.device):
            what = f"tower {name} {tower.heads}x{tower.head_dim} {use}, {rows} rows"
            flops = 4.0 * sum(length**2 for length in _lengths(segments)) * tower.heads * tower.head_dim
            candidates = _of_tower(timing, site, by_triton, tower, rows, segments, dtype)
            yield what, Work("attention", flops), candidates, windows if "windows" in use else pictures


def _of_tower(
    timing: Any, site: Any, by_triton: Any, tower: Tower, rows: int, segments: Segments, dtype: torch.dtype
) -> Iterator[Any]:
    q, k, v = timing.tower_rows(tower, rows, dtype, site.device)
    attend = partial(by_triton.attend_packed, q, k, v, segments, tower.head_dim**-0.5)
    yield timing.Candidate(TRITON, lambda: attend)
    yield from timing.packed_candidates(site, by_triton, tower, q, k, v, segments)


def _lengths(segments: Segments) -> list[int]:
    bounds: Sequence[int] = segments.cu_seqlens.tolist() if isinstance(segments, PackedPlan) else segments
    return [end - begin for begin, end in pairwise(bounds)]


def _measure(report: Report, timing: Any, what: str, work: Work, candidates: list[Any], layers: int) -> None:
    """The first is ours. `layers`: of a model that attend so."""
    runs: dict[str, Run] = {}
    expected: Tensor | None = None
    for name, make in candidates:
        with report.optional(f"{what}, {name}"):
            try:
                attend = make()
            except timing.Refusal as reason:
                report.skip(f"{what}, {name}", str(reason))
                continue
            result = attend()
            expected = result if expected is None else expected
            agree(f"{what}, {name}", result, expected)
            runs[name] = captured(report.device, attend, LAUNCHES)
    seconds = scaled(timed(report.device, runs, report.effort), LAUNCHES)
    rates = {name: work.flops / taken.median / 1e12 for name, taken in seconds.items()}
    fastest = max(rates, key=rates.__getitem__)
    report.row(
        what,
        seconds.pop(TRITON),
        work=[work],
        peers=seconds,
        tflops=rates,
        fastest=fastest,
        encode_ms=layers * work.flops / rates[fastest] / 1e9 if layers > 1 else None,
    )


def main() -> None:
    arguments = parse(__doc__, options)
    run_ops("attn_prefill", arguments, lambda report, backend: measure(arguments, report, backend))


if __name__ == "__main__":
    main()
