"""Mixtures of experts against a plain read of the chosen experts' bytes, and against `linear` of the same bytes.

Sizes are those of a layer of Qwen3-30B-A3B with fewer experts. With one row, calls take turns over disjoint choices, so
that weights come from memory as in a model, and the bound is the read bandwidth. With many rows the bound is
arithmetic; `linear` then multiplies as many rows as all experts together, with one weight.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.common import card, emit, interleaved
from bench.ops.linear import PRECISIONS, in_turn
from hydra_engine import _C
from hydra_engine.backend.base import PackedExperts, PackedLinear, Routes
from hydra_engine.backend.cpu.ops import NativeOps

WIDTH, INNER, EXPERTS, CHOSEN = 2048, 768, 32, 8
FORMS = ("bf16", "int8", "int4, groups of 128", "GGUF Q4_K")
OPS = NativeOps()


def packed_weights(form: str) -> tuple[PackedExperts, list[tuple[PackedLinear, PackedLinear]]]:
    """Experts, and plain weights with the bytes of CHOSEN experts, as often as there are disjoint choices."""
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (
        PRECISIONS[form](torch.randn(shape, generator=generator) / shape[1] ** 0.5)
        for shape in ((2 * INNER, WIDTH), (WIDTH, INNER))
    )
    experts = OPS.pack_experts([gate_up] * EXPERTS, [down] * EXPERTS)
    wide = [PRECISIONS[form](torch.randn(CHOSEN * rows, k)) for rows, k in ((2 * INNER, WIDTH), (WIDTH, INNER))]
    return experts, [(OPS.pack_linear(wide[0]), OPS.pack_linear(wide[1])) for _ in range(EXPERTS // CHOSEN)]


def one_row(form: str) -> dict[str, Callable[[], object]]:
    experts, plain = packed_weights(form)
    x, inner = torch.randn(1, WIDTH).bfloat16(), torch.randn(1, INNER).bfloat16()
    numbers = torch.randperm(EXPERTS).to(torch.int32).view(-1, 1, CHOSEN)
    routes = [Routes(chosen.contiguous(), torch.full((1, CHOSEN), 1 / CHOSEN)) for chosen in numbers]
    words = [torch.ones(experts.nbytes // len(routes) // 4) for _ in routes]
    return {
        "experts": in_turn(lambda i: OPS.experts(x, routes[i], experts, "silu"), len(routes)),
        "linear": in_turn(lambda i: (OPS.linear(x, plain[i][0]), OPS.linear(inner, plain[i][1])), len(routes)),
        "read": in_turn(lambda i: words[i].sum(), len(routes)),
        "route": in_turn(lambda _: OPS.route(torch.zeros(1, 128), CHOSEN, renormalise=True), 1),
    }


def many_rows(form: str, rows: int) -> dict[str, Callable[[], object]]:
    experts, _ = packed_weights(form)
    x, logits = torch.randn(rows, WIDTH).bfloat16(), torch.randn(rows, EXPERTS)
    routes = OPS.route(logits, CHOSEN, renormalise=True)
    weights = [torch.randn(shape) / 32 for shape in ((2 * INNER, WIDTH), (WIDTH, INNER))]
    gate_up, down = (OPS.pack_linear(PRECISIONS[form](weight)) for weight in weights)
    every = x.repeat(CHOSEN, 1)
    inner = OPS.linear_act_and_mul(every, (gate_up,), "silu")

    def products() -> Tensor:
        OPS.linear_act_and_mul(every, (gate_up,), "silu")
        return OPS.linear(inner, down)

    return {"experts": lambda: OPS.experts(x, routes, experts, "silu"), "linear": products}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=512, help="of the second case")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    _C.set_num_threads(arguments.threads)
    clock = time.perf_counter if arguments.threads > 1 else time.thread_time
    results: list[dict[str, Any]] = []
    for form in FORMS:
        for rows in (1, arguments.rows):
            runs = one_row(form) if rows == 1 else many_rows(form, rows)
            repeats = arguments.repeats if rows == 1 else max(arguments.repeats // 5, 3)
            times = interleaved(runs, repeats, clock=clock)
            row = {"form": form, "rows": rows} | {f"{name}_us": one.median * 1e6 for name, one in times.items()}
            row |= {f"to_{name}": one.median / times["experts"].median for name, one in times.items()}
            results.append(row)
            ratios = "  ".join(f"{name} {row[f'to_{name}']:.2f}" for name in times if name not in ("experts", "route"))
            print(f"{form:20} {rows:4} rows {row['experts_us']:10.0f} us  of {ratios}", flush=True)
    print(f"route of 128 experts, one row: {results[0]['route_us']:.1f} us")
    emit({"bench": "ops.experts", "threads": arguments.threads, "results": results, "card": card()})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
