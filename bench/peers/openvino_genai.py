"""A peer: OpenVINO GenAI's continuous batching on a model converted beforehand (`--model` is the converted folder).

Needs an environment of its own; docs/benchmarks.md says how to make one and how to convert. Run by `bench/compare.py`.
"""

from __future__ import annotations

import time

import numpy as np
import openvino as ov
import openvino_genai as genai

from bench.workload import QUESTION, batch_points, peer_arguments, print_report


def main() -> None:
    arguments = peer_arguments().parse_args()
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

    print_report("openvino-genai", ready_s, batch_points(run, arguments.concurrency, arguments.tokens))


if __name__ == "__main__":
    main()
