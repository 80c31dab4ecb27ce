"""Packed bf16 matrix products against torch.nn.functional.linear and against a plain read of the same bytes.

Few rows: weights rotate through copies larger than the caches of a core, as the layers of a model do, and the bound is
the read bandwidth. Many rows: the bound is arithmetic. Inputs are random, because processors with AMX run faster on
zeros. Every result is checked before it is timed.

--precisions: one weight in bf16, 8 and 4 bits instead, against a plain read of each one's own bytes and against bf16.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.common import Times, card, emit, interleaved
from hydra_engine import _C
from hydra_engine.backend.base import PackedLinear
from hydra_engine.backend.cpu.linear import NativeLinear, linear, pack_linear
from hydra_engine.backend.quantized import QuantizedWeight, quantized
from hydra_engine.models.loading.gguf_tensors import decode_in_torch
from hydra_engine.models.specs.gguf_file import TENSOR_TYPES
from tools.miniatures.gguf_text import random_blocks

FEW_ROWS = 16
CASES = [
    *itertools.product((1, 4, 8, 16), (1024, 4096), (1024, 4096)),
    *itertools.product((32, 128, 256, 577, 1024), (1024, 4096), (1024, 4096)),
    *[(rows, 384, 128) for rows in (1, 8, 64)],
]
QUICK_CASES = [(1, 4096, 1024), (8, 1024, 1024), (128, 1024, 1024), (577, 4096, 1024), (1, 384, 128)]


PRECISIONS: dict[str, Callable[[Tensor], Tensor | QuantizedWeight]] = {
    "bf16": lambda weight: weight.bfloat16(),
    "int8": lambda weight: quantized(weight, 8, weight.shape[1], torch.bfloat16),
    "int4, groups of 128": lambda weight: quantized(weight, 4, 128, torch.float16),
    "int4, groups of 32": lambda weight: quantized(weight, 4, 32, torch.float16),
    "GGUF Q4_K": lambda weight: random_weight("Q4_K", weight),
    "GGUF Q6_K": lambda weight: random_weight("Q6_K", weight),
}


def random_weight(kind: str, weight: Tensor) -> QuantizedWeight:
    """Random blocks in the shape of `weight`: nothing here quantises to this type."""
    blocks = torch.from_numpy(random_blocks(kind, *weight.shape)).flatten()
    return decode_in_torch(
        blocks, next(known for known in TENSOR_TYPES.values() if known.name == kind), weight.shape[0]
    )


def in_turn(run: Callable[[int], object], copies: int) -> Callable[[], object]:
    turn = itertools.cycle(range(copies))
    return lambda: run(next(turn))


def check(result: Tensor, plain: Tensor, x: Tensor, weight: Tensor) -> None:
    """The error may be at most twice torch's own."""
    exact = x.double() @ weight.double().T
    error, allowed = (result - exact).abs().max(), 2 * (plain - exact).abs().max()
    if error > allowed:
        raise SystemExit(f"wrong result for {tuple(x.shape)} x {tuple(weight.shape)}: {error:.3g} > {allowed:.3g}")


def measure(rows: int, num_out: int, num_in: int, repeats: int, cold_bytes: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    num_bytes = 2 * num_out * num_in
    copies = max(1, min(256, cold_bytes // num_bytes)) if rows <= FEW_ROWS else 1
    x = torch.randn(rows, num_in, generator=generator).bfloat16()
    weights = [torch.randn(num_out, num_in, generator=generator).bfloat16() for _ in range(copies)]
    packed: list[NativeLinear] = [NativeLinear(weight) for weight in weights]
    check(linear(x, packed[0]), F.linear(x, weights[0]), x, weights[0])
    words = [weight.view(torch.float32) for weight in weights]
    times: dict[str, Times] = interleaved(
        {
            "native": in_turn(lambda i: linear(x, packed[i]), copies),
            "torch": in_turn(lambda i: F.linear(x, weights[i]), copies),
            "read": in_turn(lambda i: words[i].sum(), copies),
        },
        repeats,
        clock=time.perf_counter if _C.num_threads() > 1 else time.thread_time,
    )
    native, other, read = times["native"], times["torch"], times["read"]
    return {
        "m": rows,
        "n": num_out,
        "k": num_in,
        "us": native.median * 1e6,
        "us_best": native.best * 1e6,
        "gflops": 2e-9 * rows * num_out * num_in / native.best,
        "gbytes_per_s": num_bytes / native.best / 1e9,
        "torch_us": other.median * 1e6,
        "torch_us_best": other.best * 1e6,
        "torch_ratio": other.median / native.median,
        "torch_ratio_best": other.best / native.best,
        "read_gbytes_per_s": num_bytes / read.best / 1e9,
        "read_ratio": read.best / native.best,
    }


def precision_runs(
    x: Tensor, copies: dict[str, list[PackedLinear]], reads: dict[str, list[Tensor]]
) -> dict[str, Callable[[], object]]:
    runs: dict[str, Callable[[], object]] = {}
    for name, packed in copies.items():
        runs[name] = in_turn(lambda i, packed=packed: linear(x, packed[i]), len(packed))  # type: ignore[misc]
        words = reads[name]
        runs[f"read {name}"] = in_turn(lambda i, words=words: words[i].sum(), len(words))  # type: ignore[misc]
    return runs


def measure_precisions(num_out: int, num_in: int, cold_bytes: int) -> list[dict[str, Any]]:
    """Times all precisions in turns, so that their ratios hold on a noisy machine."""
    weight = torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(0)) / num_in**0.5
    copies: dict[str, list[PackedLinear]] = {}
    for name, convert in PRECISIONS.items():
        source = convert(weight)
        copies[name] = [pack_linear(source)]
        copies[name] += [pack_linear(source) for _ in range(cold_bytes // copies[name][0].nbytes)]
    reads = {name: [torch.ones(one.nbytes // 4) for one in packed] for name, packed in copies.items()}
    clock = time.perf_counter if _C.num_threads() > 1 else time.thread_time
    results = []
    print(f"{num_out} x {num_in}, {_C.num_threads()} thread(s), {_C.isa()}; medians; a read: a plain one of its bytes")
    for rows in (1, 4, 8, 16, 64, 512):
        x = torch.randn(rows, num_in).bfloat16()
        times = interleaved(precision_runs(x, copies, reads), 15 if rows <= FEW_ROWS else 3, clock=clock)
        for name in copies:
            seconds = times[name].median
            ratios = times[f"read {name}"].median / seconds, times["bf16"].median / seconds
            results.append(
                {"rows": rows, "weight": name, "ms": seconds * 1e3, "to_read": ratios[0], "to_bf16": ratios[1]}
            )
            print(f"{rows:4} {name:20} {seconds * 1e3:8.3f} ms  to a read {ratios[0]:5.2f}  to bf16 {ratios[1]:5.2f}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="five cases, a few seconds")
    parser.add_argument("--precisions", action="store_true", help="6144 x 2048 in bf16, 8 and 4 bits")
    parser.add_argument("--isa", help="force a lower instruction-set level")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    _C.set_num_threads(arguments.threads)
    if arguments.isa:
        _C.force_isa(arguments.isa)
    if arguments.precisions:
        rates = measure_precisions(6144, 2048, 48 << 20)
        emit({"bench": "ops.linear precisions", "threads": arguments.threads, "results": rates, "card": card()})
        return
    print(f"bf16, {arguments.threads} thread(s), {_C.isa()}; ratios above 1: native is faster, best of many [median]")
    print(f"{'M':>5} {'N':>5} {'K':>5} {'us':>9} {'GFLOP/s':>8} {'GB/s':>6}  {'to torch':>13}  {'to a plain read':>15}")
    results = []
    for rows, num_out, num_in in QUICK_CASES if arguments.quick else CASES:
        repeats, cold_bytes = (9, 32 << 20) if arguments.quick else (15, 128 << 20)
        row = measure(rows, num_out, num_in, repeats, cold_bytes)
        results.append(row)
        print(
            f"{rows:5} {num_out:5} {num_in:5} {row['us_best']:9.1f} {row['gflops']:8.0f} {row['gbytes_per_s']:6.1f}"
            f"  {row['torch_ratio_best']:5.2f} [{row['torch_ratio']:5.2f}]  {row['read_ratio']:15.2f}",
            flush=True,
        )
    emit({"bench": "ops.linear", "threads": arguments.threads, "results": results, "card": card()})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
