"""A peer: vLLM's CPU build, embedded, prefix and image caches off (the pictures differ anyway).

Needs an environment of its own; docs/benchmarks.md says how to make one. Run by `bench/compare.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid

from bench.workload import QUESTION, peer_arguments, pictures, point, print_report


async def run(engine, prompt: str, images: list, tokens: int) -> tuple[float, list[float], list[float]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    async def one(image: object) -> tuple[float, float]:
        began, first = time.perf_counter(), 0.0
        request = {"prompt": prompt, "multi_modal_data": {"image": image}}
        async for _ in engine.generate(request, sampling, request_id=uuid.uuid4().hex):
            first = first or time.perf_counter() - began
        return first, time.perf_counter() - began

    began = time.perf_counter()
    done = await asyncio.gather(*(one(image) for image in images))
    wall = time.perf_counter() - began
    return wall, [f for f, _ in done], [(e - f) / max(tokens - 1, 1) for f, e in done]


async def measure(arguments: argparse.Namespace) -> None:
    from transformers import AutoTokenizer
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    began = time.perf_counter()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=arguments.model,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=32,
            enable_prefix_caching=False,
            enforce_eager=arguments.eager,
            mm_processor_cache_gb=0,
        )
    )
    await run(engine, prompt, pictures(1, seed=99), 4)
    ready_s = time.perf_counter() - began
    points = []
    for level in map(int, arguments.concurrency.split(",")):
        wall, ttfts, tpots = await run(engine, prompt, pictures(level, seed=100 * level), arguments.tokens)
        points.append(point(level, wall, ttfts, tpots, level * arguments.tokens))
    engine.shutdown()
    print_report("vllm-cpu" + (" (eager)" if arguments.eager else ""), ready_s, points)


if __name__ == "__main__":
    parser = peer_arguments()
    parser.add_argument("--eager", action="store_true")
    asyncio.run(measure(parser.parse_args()))
