"""Throughput of the engine: TTFT, TPOT and tokens per second at several numbers of concurrent requests.

Every request brings a picture of its own; all start at once, in the embedded engine; greedy, end-of-sequence ignored.
`python -m bench.throughput --model DIR --concurrency 1,4,8,16 --tokens 64 --threads 1`; with `--option
load_format=random --option quantization=int4` a model of which there are no weights, in 4 bits. Latency under arrivals
over HTTP is `bench.serve`. The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import resource
import sys
import time
from typing import Any

from bench.common import card, emit
from bench.workload import QUESTION, Point, pictures, point
from hydra_engine import Engine, SamplingParams


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--concurrency", default="1,4,8,16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=1, help="the median by tokens per second is reported")
    parser.add_argument("--no-deterministic", action="store_true")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="any engine option")
    parser.add_argument(
        "--picture-size",
        default="336",
        metavar="PIXELS,..",
        help="sides of the pictures, one after another; 0: text alone",
    )
    parser.add_argument("--quick", action="store_true", help="few tokens, small concurrency")
    return parser.parse_args()


def measure(engine: Engine, concurrency: int, tokens: int, size: int, seed: int) -> Point:
    images = pictures(concurrency, size, seed) if size else [None] * concurrency
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    handles = [engine.submit(QUESTION, image, sampling=sampling) for image in images]
    results = [handle.result() for handle in handles]
    wall = time.perf_counter() - began
    ttfts = [r.metrics.ttft_s for r in results if r.metrics.ttft_s is not None]
    tpots = [r.metrics.tpot_s for r in results if r.metrics.tpot_s is not None]
    assert all(len(r.token_ids) == tokens for r in results)
    return point(concurrency, wall, ttfts, tpots, sum(len(r.token_ids) for r in results))


def main() -> None:
    arguments = parse()
    levels = [int(n) for n in arguments.concurrency.split(",")]
    tokens = arguments.tokens
    if arguments.quick:
        levels, tokens = [n for n in levels if n <= 4], min(tokens, 32)
    sizes = [int(n) for n in arguments.picture_size.split(",")]
    options: dict[str, Any] = dict(option.split("=", 1) for option in arguments.option)
    began = time.perf_counter()
    with Engine(
        arguments.model,
        threads=arguments.threads,
        deterministic=not arguments.no_deterministic,
        backend=arguments.backend,
        prefix_caching=False,  # the same requests come twice, and the peers do without as well
        **options,
    ) as engine:
        ready_s = time.perf_counter() - began
        summary = engine.summary
        measure(engine, min(2, max(levels)), min(tokens, 8), max(sizes), seed=99)
        points = []
        for size, level in itertools.product(sizes, levels):
            tries = [measure(engine, level, tokens, size, seed=100 * level + r) for r in range(arguments.repeats)]
            chosen = sorted(tries, key=lambda p: p.tokens_per_s)[len(tries) // 2]
            points.append({"picture_size": size, **dataclasses.asdict(chosen)})
            print(
                f"{size:4} pixels  {chosen.concurrency:3} concurrent  {chosen.tokens_per_s:8.2f} tok/s  "
                f"TPOT {chosen.tpot_median_ms:8.2f} ms  "
                f"TTFT median {chosen.ttft_median_s:7.3f} s, last {chosen.ttft_max_s:7.3f} s",
                file=sys.stderr,
            )
    emit(
        {
            "bench": "throughput",
            "system": "hydra-engine",
            "model": os.path.basename(arguments.model.rstrip("/")),
            "ready_s": round(ready_s, 2),
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "weights_mib": summary.weights_bytes >> 20,
            "cache_mib": (summary.kv_cache_bytes + summary.image_cache_bytes) >> 20,
            "deterministic": summary.deterministic,
            "ops": summary.backend,
            "threads": summary.threads,
            "options": options,
            "points": points,
            "card": card(),
        }
    )


if __name__ == "__main__":
    main()
