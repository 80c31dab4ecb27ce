"""Compares lane priorities where both lanes compete for cores: throughput of pictures, and a text stream beside a
burst.

For each `lane_priority`: requests with a picture each, all at once; then the gaps between the tokens of one text stream
while a burst of pictures is encoded and prefilled. `python -m bench.lanes --model DIR --threads 1`. The last line of
the output is one JSON document.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from bench.common import card, emit
from bench.workload import QUESTION, pictures
from hydra_engine import Engine, SamplingParams

PRIORITIES = ("throughput", "balanced", "latency")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=8)
    return parser.parse_args()


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def all_at_once(engine: Engine, count: int) -> dict[str, float]:
    began = time.perf_counter()
    handles = [engine.submit(QUESTION, image, sampling=greedy(64)) for image in pictures(count, seed=count)]
    results = [handle.result() for handle in handles]
    wall_s = time.perf_counter() - began
    tpots = [r.metrics.tpot_s for r in results if r.metrics.tpot_s is not None]
    return {"tokens_per_s": 64 * count / wall_s, "tpot_median_ms": statistics.median(tpots) * 1e3}


def stream_beside_a_burst(engine: Engine, count: int) -> dict[str, float]:
    alone = engine.generate("Tell me a story.", sampling=greedy(64))
    stream = iter(engine.submit("Tell me a story.", sampling=greedy(400)))
    for _ in range(20):
        next(stream)
    burst = [engine.submit(QUESTION, image, sampling=greedy(1)) for image in pictures(count, seed=5)]
    gaps, last = [], time.perf_counter()
    for _ in stream:
        now = time.perf_counter()
        if all(handle.done for handle in burst):
            break
        gaps.append(now - last)
        last = now
    burst_s = max(handle.result().metrics.e2e_s for handle in burst)
    return {
        "gap_alone_ms": alone.metrics.tpot_s * 1e3,
        "gap_median_ms": statistics.median(gaps) * 1e3,
        "gap_longest_ms": max(gaps) * 1e3,
        "burst_s": burst_s,
    }


def main() -> None:
    arguments = parse()
    figures: dict[str, Any] = {}
    for priority in PRIORITIES:
        with Engine(arguments.model, threads=arguments.threads, lane_priority=priority, prefix_caching=False) as engine:
            engine.generate(QUESTION, pictures(1, seed=99)[0], sampling=greedy(4))
            figure = all_at_once(engine, arguments.requests) | stream_beside_a_burst(engine, arguments.requests)
        figures[priority] = {name: round(value, 2) for name, value in figure.items()}
        print(priority, figures[priority], flush=True)
    model = os.path.basename(arguments.model.rstrip("/"))
    emit({"bench": "lanes", "model": model, "threads": arguments.threads, "figures": figures, "card": card()})


if __name__ == "__main__":
    main()
