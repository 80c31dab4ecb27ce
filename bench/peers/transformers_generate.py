"""A peer: transformers' own generate, all requests as one batch (it has no other way), bf16, sdpa.

Run by `bench/compare.py` with the project's environment. TTFT is the time of a one-token generate of the same batch.
"""

from __future__ import annotations

import time

import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from bench.workload import QUESTION, batch_points, peer_arguments, print_report


def main() -> None:
    arguments = peer_arguments().parse_args()
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

    points = batch_points(run, arguments.concurrency, arguments.tokens)
    print_report("transformers generate", ready_s, points)


if __name__ == "__main__":
    main()
