"""Attention against torch's scaled_dot_product_attention and, for decodes, against a plain read of the same bytes.

Decodes rotate through the layers of a cache larger than the processor's caches; the bound is the read bandwidth or, of
many query heads per KV head, the multiply-adds: `ceiling` is the share of read that torch's rate of float32 products
allows. Torch has to gather the blocks before it can compute. Prompts and vision towers are bound by arithmetic. Every
result is checked before it is timed. `--decodes` ends with a table of shares of the plain read.

With several threads set OMP_WAIT_POLICY=PASSIVE, as the engine does for its instances: torch's idle threads otherwise
spin for a while after each of its turns, on the core that the next candidate needs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.common import Times, card, emit, interleaved
from hydra_engine import _C
from hydra_engine.backend.base import SCALE_BYTES, AttentionPlan, PagedCache
from hydra_engine.backend.cpu.ops import NativeOps

BLOCK_SIZE = 16
COLD_BYTES = 96 << 20
# Of a cache; int8 holds rows of bfloat16.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
# (requests, context, query heads, KV heads, head dim)
DECODES = [
    (1, 640, 16, 16, 64),
    (8, 640, 16, 16, 64),
    (1, 16384, 16, 16, 64),
    (16, 2048, 14, 2, 64),
    (8, 2048, 32, 8, 128),
    (1, 16384, 12, 2, 128),
]
# Two requests, a growing number of query heads per KV head.
CONTEXTS = [(2, context, *heads, 64) for heads in ((16, 16), (4, 2), (8, 2), (14, 2)) for context in (1024, 4096, 8192)]
PRODUCT = 384  # rows and columns of the float32 matrices that show the rate of multiply-adds
QUICK_DECODES = [(1, 640, 16, 16, 64), (8, 640, 16, 16, 64)]
# (prompt tokens, query heads, KV heads, head dim)
PREFILLS = [(64, 16, 16, 64), (600, 16, 16, 64), (600, 14, 2, 64), (600, 16, 4, 128), (2048, 16, 16, 64)]
QUICK_PREFILLS = [(600, 16, 16, 64)]
# (segments, rows of each, heads, head dim)
TOWERS = [(1, 577, 16, 64), (4, 577, 16, 64), (1, 729, 16, 72), (2, 1024, 16, 80), (64, 64, 16, 80)]
QUICK_TOWERS = [(1, 577, 16, 64)]


class Paged:
    """Random requests over a cache with shuffled blocks, several layers of it."""

    def __init__(self, requests: int, queries: int, context: int, heads: tuple[int, int, int], dtype: torch.dtype):
        self.num_heads, num_kv_heads, dim = heads
        blocks = -(-context // BLOCK_SIZE)
        quantized = dtype == torch.int8
        head_bytes = dim * dtype.itemsize + (SCALE_BYTES if quantized else 0)
        layer_bytes = requests * blocks * BLOCK_SIZE * 2 * num_kv_heads * head_bytes
        self.layers = max(1, min(64, COLD_BYTES // layer_bytes)) if queries == 1 else 1
        self.bytes_read = requests * context * 2 * num_kv_heads * head_bytes
        shape = (requests * blocks, self.layers, 2, BLOCK_SIZE, num_kv_heads, dim)
        # Memory as the engine's caches have it, of large pages where the system gives them to numpy.
        raw = torch.from_numpy(np.zeros(math.prod(shape[:-1]) * head_bytes, dtype=np.uint8))
        if quantized:
            self.cache = PagedCache.quantized(raw, shape, torch.bfloat16)
            self.cache.data.random_(-127, 128)
            assert self.cache.scales is not None
            self.cache.scales.fill_(1 / 64)
        else:
            self.cache = PagedCache(raw.view(dtype).view(shape).copy_(torch.randn(shape)))
        self.tables = torch.randperm(requests * blocks, dtype=torch.int32).view(requests, blocks)
        self.q = torch.randn(requests * queries, self.num_heads, dim).to(self.cache.row_dtype)
        self.context, self.queries, self.scale = context, queries, dim**-0.5

    def plan(self, ops: NativeOps) -> AttentionPlan:
        cu_q = torch.arange(0, len(self.q) + 1, self.queries, dtype=torch.int32)
        return ops.plan_attention(cu_q, torch.full((len(self.tables),), self.context, dtype=torch.int32), self.tables)

    def gathered(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [B, Hkv, context, D], as torch wants them."""
        rows = self.cache.data[self.tables.long(), layer]
        if self.cache.scales is not None:
            scales = self.cache.scales[self.tables.long(), layer].transpose(-1, -2)
            rows = (rows * scales[..., None]).to(self.cache.row_dtype)
        rows = rows.movedim(2, 0).flatten(2, 3)[:, :, : self.context]
        return rows[0].transpose(1, 2), rows[1].transpose(1, 2)

    def sdpa(self, keys: Tensor, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.q.dtype
        q = self.q.to(dtype).unflatten(0, (len(self.tables), self.queries)).transpose(1, 2)
        causal = self.queries > 1
        out = F.scaled_dot_product_attention(
            q, keys.to(dtype), values.to(dtype), is_causal=causal, scale=self.scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)


def check(what: str, result: Tensor, plain: Tensor, exact: Tensor) -> None:
    """The error may be at most twice torch's own (and a float32 rounding)."""
    error, allowed = (result - exact).abs().max(), 2 * (plain - exact).abs().max() + 2e-6
    if error > allowed:
        raise SystemExit(f"wrong result of {what}: {error:.3g} > {allowed:.3g}")


def clock() -> Callable[[], float]:
    return time.perf_counter if _C.num_threads() > 1 else time.thread_time


def in_turn(run: Callable[[int], object], count: int) -> Callable[[], object]:
    turn = itertools.cycle(range(count))
    return lambda: run(next(turn))


def report(name: str, times: dict[str, Times], gflop: float) -> dict[str, Any]:
    native = times["native"]
    row: dict[str, Any] = {"case": name, "us": native.median * 1e6, "us_best": native.best * 1e6}
    row["gflops"] = gflop / native.best
    for other in times.keys() - {"native"}:
        row[f"{other}_ratio"] = times[other].median / native.median
        row[f"{other}_ratio_best"] = times[other].best / native.best
    return row


def measure_decode(
    ops: NativeOps, case: tuple[int, ...], dtype: torch.dtype, repeats: int, torch_too: bool = True
) -> dict[str, Any]:
    requests, context, num_heads, num_kv_heads, dim = case
    step = Paged(requests, 1, context, (num_heads, num_kv_heads, dim), dtype)
    plan = step.plan(ops)
    layers = range(step.layers if torch_too else 1)
    contiguous = [tuple(x.contiguous() for x in step.gathered(layer)) for layer in layers]
    result = ops.attention_paged(step.q, step.cache, 0, plan, step.scale)
    check(f"decode {case}", result, step.sdpa(*contiguous[0]), step.sdpa(*contiguous[0], dtype=torch.float64))
    # The plain read has large pages as the cache has them; of small ones it is a third slower.
    words = torch.from_numpy(np.ones(step.bytes_read * step.layers // 4, dtype=np.float32))
    square = torch.ones(PRODUCT, PRODUCT)
    candidates = {
        "native": in_turn(lambda i: ops.attention_paged(step.q, step.cache, i, plan, step.scale), step.layers),
        "read": in_turn(lambda i: words.view(step.layers, -1)[i].sum(), step.layers),
        "products": lambda: square @ square,
    }
    if torch_too:
        candidates["sdpa"] = in_turn(lambda i: step.sdpa(*contiguous[i]), step.layers)
        candidates["gather_sdpa"] = in_turn(lambda i: step.sdpa(*step.gathered(i)), step.layers)
    times = interleaved(candidates, repeats, clock=clock())
    name = f"decode {requests} x {context}, {num_heads}:{num_kv_heads} heads of {dim}"
    gflop = 4e-9 * requests * context * num_heads * dim
    row = report(name, times, gflop)
    floor = gflop / 2e-9 / PRODUCT**3 * times["products"].median
    row["context"], row["group"] = context, num_heads // num_kv_heads
    row["ceiling"] = min(1.0, times["read"].median / floor)
    row["gbytes_per_s"] = step.bytes_read / times["native"].best / 1e9
    row["read_gbytes_per_s"] = step.bytes_read / times["read"].best / 1e9
    return row


def measure_prefill(ops: NativeOps, case: tuple[int, ...], dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    tokens, num_heads, num_kv_heads, dim = case
    step = Paged(1, tokens, tokens, (num_heads, num_kv_heads, dim), dtype)
    plan = step.plan(ops)
    keys, values = (x.contiguous() for x in step.gathered(0))
    result = ops.attention_paged(step.q, step.cache, 0, plan, step.scale)
    check(f"prefill {case}", result, step.sdpa(keys, values), step.sdpa(keys, values, dtype=torch.float64))
    times = interleaved(
        {
            "native": lambda: ops.attention_paged(step.q, step.cache, 0, plan, step.scale),
            "sdpa": lambda: step.sdpa(keys, values),
        },
        repeats,
        clock=clock(),
    )
    return report(
        f"prefill {tokens}, {num_heads}:{num_kv_heads} heads of {dim}", times, 2e-9 * tokens**2 * num_heads * dim
    )


def measure_tower(ops: NativeOps, case: tuple[int, ...], dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    segments, rows, num_heads, dim = case
    fused = torch.randn(segments * rows, 3 * num_heads, dim).to(dtype)
    q, k, v = fused.split(num_heads, dim=1)
    bounds = list(range(0, segments * rows + 1, rows))
    scale = dim**-0.5

    def sdpa(dtype: torch.dtype) -> Tensor:
        parts = (x.to(dtype).unflatten(0, (segments, rows)).transpose(1, 2) for x in (q, k, v))
        query, key, value = parts
        return F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2).flatten(0, 1)

    result = ops.attention_packed(q, k, v, bounds, scale)
    check(f"tower {case}", result, sdpa(dtype), sdpa(torch.float64))
    times = interleaved(
        {"native": lambda: ops.attention_packed(q, k, v, bounds, scale), "sdpa": lambda: sdpa(dtype)},
        repeats,
        clock=clock(),
    )
    return report(
        f"tower {segments} x {rows}, {num_heads} heads of {dim}", times, 4e-9 * segments * rows**2 * num_heads * dim
    )


def show(row: dict[str, Any]) -> None:
    def ratio(name: str) -> str:
        if f"{name}_ratio" not in row:
            return f"{'-':>13}"
        return f"{row[f'{name}_ratio_best']:5.2f} [{row[f'{name}_ratio']:5.2f}]"

    gbytes = f"{row['gbytes_per_s']:6.1f}" if "gbytes_per_s" in row else f"{'-':>6}"
    print(
        f"{row['case']:42} {row['us_best']:9.1f} {row['gflops']:8.0f} {gbytes}"
        f"  {ratio('sdpa')}  {ratio('gather_sdpa')}  {ratio('read')}"
        + (f"  {row['ceiling']:7.2f}" if "ceiling" in row else ""),
        flush=True,
    )


def show_shares(results: list[dict[str, Any]]) -> None:
    """Shares of the plain read: a line for a type and number of query heads per KV head, a column for a context."""
    contexts = sorted({row["context"] for row in results})
    print(f"\nshare of a plain read, medians\n{'':24}" + "".join(f"{context:>8}" for context in contexts) + "  ceiling")
    for (dtype, group), of_group in itertools.groupby(results, key=lambda row: (row["dtype"], row["group"])):
        rows = sorted(of_group, key=lambda row: int(row["context"]))
        shares = "".join(f"{row['read_ratio']:8.2f}" for row in rows)
        ceiling = statistics.median(row["ceiling"] for row in rows)
        print(f"{dtype}, {group} per KV head".ljust(24) + f"{shares}{ceiling:9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="four cases, a few seconds")
    parser.add_argument("--decodes", action="store_true", help="only decodes of one to seven query heads per KV head")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, of --decodes all; int8: --decodes only")
    parser.add_argument("--isa", help="force a lower instruction-set level")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    _C.set_num_threads(arguments.threads)
    if arguments.isa:
        _C.force_isa(arguments.isa)
    if arguments.dtype == "int8" and not arguments.decodes:
        parser.error("--dtype int8 is of caches: add --decodes")
    quick, ops = arguments.quick, NativeOps()
    dtypes = [arguments.dtype] if arguments.dtype else list(DTYPES) if arguments.decodes else ["bfloat16"]
    repeats = 7 if quick else 11
    print(
        f"{', '.join(dtypes)}, {arguments.threads} thread(s), {_C.isa()}; ratios: other / native, best of many [median]"
    )
    titles = (
        f"{'us':>9} {'GFLOP/s':>8} {'GB/s':>6}  {'to sdpa':>13}  {'gather + sdpa':>13}  {'plain read':>13}  ceiling"
    )
    print(f"{'':42} {titles}")
    results: list[dict[str, Any]] = []
    groups: list[tuple[Callable[..., dict[str, Any]], list[tuple[int, ...]]]] = [
        (partial(measure_decode, torch_too=False), CONTEXTS)
    ]
    if not arguments.decodes:
        groups = [
            (measure_decode, QUICK_DECODES if quick else DECODES),
            (measure_prefill, QUICK_PREFILLS if quick else PREFILLS),
            (measure_tower, QUICK_TOWERS if quick else TOWERS),
        ]
    for dtype in dtypes:
        for measure, cases in groups:
            for case in cases:
                results.append({"dtype": dtype} | measure(ops, case, DTYPES[dtype], repeats))
                show(results[-1])
    if arguments.decodes:
        show_shares(results)
    emit(
        {
            "bench": "ops.attention",
            "threads": arguments.threads,
            "results": results,
            "card": card(),
        }
    )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
