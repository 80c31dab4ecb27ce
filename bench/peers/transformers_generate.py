"""A peer: transformers' own generate, all requests as one batch (it has no other way), bf16, sdpa.

Run by `bench/compare.py` with the project's environment. TTFT is the time of a one-token generate of the same batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import time

import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from bench.workload import QUESTION, pictures, point


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", default="1,4,8")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    began = time.perf_counter()
    processor = AutoProcessor.from_pretrained(arguments.model)
    model = LlavaForConditionalGeneration.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()
    ready_s = time.perf_counter() - began
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)

    def run(images: list, tokens: int) -> float:
        start = time.perf_counter()
        inputs = processor(images=images, text=[text] * len(images), return_tensors="pt", padding=True)
        inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
        with torch.inference_mode():
            model.generate(**inputs, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, eos_token_id=None)
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
                "system": "transformers generate",
                "ready_s": round(ready_s, 2),
                "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "points": [dataclasses.asdict(p) for p in points],
            }
        )
    )


if __name__ == "__main__":
    main()
