"""A peer: OpenVINO GenAI's continuous batching on a model converted beforehand (`--model` is the converted folder).

Needs an environment of its own; docs/benchmarks.md says how to make one and how to convert. Run by `bench/compare.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import time

import numpy as np
import openvino as ov
import openvino_genai as genai

from bench.workload import QUESTION, pictures, point


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", default="1,4,8")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    began = time.perf_counter()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_batched_tokens = 4096
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": "bf16"}  # threads: as many as the cores that it may use
    pipe = genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)
    ready_s = time.perf_counter() - began

    def config(tokens: int) -> genai.GenerationConfig:
        chosen = genai.GenerationConfig()
        chosen.max_new_tokens = tokens
        chosen.min_new_tokens = tokens
        chosen.ignore_eos = True
        chosen.do_sample = False
        return chosen

    def run(images: list, tokens: int) -> float:
        tensors = [[ov.Tensor(np.asarray(image, dtype=np.uint8)[None])] for image in images]
        start = time.perf_counter()
        pipe.generate([QUESTION] * len(images), images=tensors, generation_config=[config(tokens)] * len(images))
        return time.perf_counter() - start

    run(pictures(1, seed=99), 4)
    points = []
    for level in map(int, arguments.concurrency.split(",")):
        images = pictures(level, seed=100 * level)
        first_s, wall_s = run(images, 1), run(images, arguments.tokens)
        tpot_s = (wall_s - first_s) / (arguments.tokens - 1)
        points.append(point(level, wall_s, [first_s], [tpot_s], level * arguments.tokens))
    print(
        json.dumps(
            {
                "system": "openvino-genai",
                "ready_s": round(ready_s, 2),
                "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "points": [dataclasses.asdict(p) for p in points],
            }
        )
    )


if __name__ == "__main__":
    main()
