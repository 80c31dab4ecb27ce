"""Each stage alone on one thread or more: encode, prefill and decode, next to what the same run's floors allow.

Floors: matrix work at the bf16 rate that torch reaches here, weights and cache at the read bandwidth measured here.
`python -m bench.stages --model DIR --threads 1`. The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.common import card, emit, interleaved
from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.select import create_backend
from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.plans import BlockIds, ChunkRow, DecodeRows, Ints, LanguagePlan
from hydra_engine.core.roles import EPD
from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.registry import load_model
from hydra_engine.specs.base import DTYPE_BYTES, ModelSpec
from hydra_engine.specs.registry import load_spec
from hydra_engine.worker.batches import language_input
from hydra_engine.worker.positions import PromptPositions
from hydra_engine.worker.seats import Seats

BLOCK = 16
PICTURE = (640, 480)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--images", default="1,4")
    parser.add_argument("--prompts", default="128,677")
    parser.add_argument("--batches", default="1,4,8,16")
    parser.add_argument("--context", type=int, default=700)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


class Stages:
    """One loaded model with caches that hold `max_rows` requests of `max_tokens`, and `max_images` pictures."""

    def __init__(self, model_dir: Path, threads: int, max_rows: int, max_tokens: int, max_images: int) -> None:
        self.spec: ModelSpec = load_spec(model_dir)
        self.backend = create_backend("cpu", torch.bfloat16, threads=threads)
        self.model = load_model(model_dir, self.spec, self.backend, EPD)
        language, vision = self.spec.language, self.spec.vision
        assert vision is not None, "a model with a vision tower"
        self.vision = vision
        self.blocks = -(-max_tokens // BLOCK)
        heads, dim = language.num_kv_heads, language.head_dim
        self.kv = PagedCache(
            torch.zeros((max_rows * self.blocks, language.num_kv_layers, 2, BLOCK, heads, dim), dtype=torch.bfloat16)
        )
        num_blocks = -(-max_images * vision.plan_image(*PICTURE).num_tokens // 64)
        shape = (num_blocks, vision.num_planes, 1, 64, 1, vision.feature_size)
        self.images = PagedCache(torch.zeros(shape, dtype=torch.bfloat16))

    def encode(self, count: int) -> Callable[[], object]:
        items = [item for _ in range(count) for item in self.vision.plan_image(*PICTURE).items]
        shapes = [(item.num_pictures, item.height, item.width, 3) for item in items]
        pixels = tuple(torch.randint(0, 256, shape, dtype=torch.uint8) for shape in shapes)
        slots = torch.arange(sum(item.num_tokens for item in items))
        inputs = VisionInput(pixels, (PICTURE,) * len(items), tuple(item.grid for item in items), slots)
        return lambda: self.model.encode(inputs, self.images)

    def language(self, count: int, new: int, start: int) -> Callable[[], object]:
        """`count` requests compute `new` tokens each after `start` tokens; the input is planned each time."""
        rng = np.random.default_rng(0)
        order = rng.permutation(self.kv.num_blocks).astype(np.int32)
        tables = order[: count * self.blocks].reshape(count, self.blocks)
        token_ids = rng.integers(10, min(1000, self.spec.language.vocab_size), (count, new))
        decoding = new == 1
        numbers = np.arange(count if decoding else 0)
        decodes = DecodeRows(
            request_ids=numbers,
            seats=numbers,
            token_ids=token_ids[numbers, 0],
            starts=np.full_like(numbers, start),
            num_generated=np.zeros_like(numbers),
            block_tables=tables[numbers],
        )
        chunks = () if decoding else tuple(self._chunk(i, token_ids[i], start, tables[i]) for i in range(count))
        plan = LanguagePlan(StepId(0), decodes, chunks)
        seats = Seats(count)
        seats.owners[:] = np.arange(count)
        device = torch.device("cpu")
        places = np.arange(start + new, dtype=np.int64)
        text = PromptPositions(np.broadcast_to(places, (3, start + new)), 0)
        rope = None if self.spec.language.rope_sections is None else [text] * len(chunks)

        def run() -> object:
            inputs = language_input(
                plan, seats, self.backend.ops, block_size=BLOCK, image_block_size=64, device=device, rope=rope
            )
            return self.model.forward(inputs, self.kv, self.images)

        return run

    def _chunk(self, index: int, token_ids: Ints, start: int, table: BlockIds) -> ChunkRow:
        return ChunkRow(
            request_id=RequestId(index),
            seat=index,
            token_ids=tuple(token_ids.tolist()),
            start=start,
            block_ids=table,
            num_blocks=self.blocks,
            sample=True,
            num_generated=0,
        )


def ceilings(repeats: int) -> tuple[float, float]:
    """(bf16 FLOP/s of torch's best matrix product here, bytes/s of a streaming read), with this thread count."""
    x, w = torch.randn(1024, 1024, dtype=torch.bfloat16), torch.randn(4096, 1024, dtype=torch.bfloat16)
    data = torch.ones(1 << 28, dtype=torch.int8).view(torch.int64)
    times = interleaved({"matrix": lambda: torch.nn.functional.linear(x, w), "read": data.sum}, repeats)
    return 2 * 1024 * 1024 * 4096 / times["matrix"].best, data.numel() * 8 / times["read"].best


def main() -> None:
    arguments = parse()
    images = [int(n) for n in arguments.images.split(",")]
    prompts = [int(n) for n in arguments.prompts.split(",")]
    batches = [int(n) for n in arguments.batches.split(",")]
    with torch.inference_mode():
        stages = Stages(
            Path(arguments.model),
            arguments.threads,
            max(batches),
            max(*prompts, arguments.context) + BLOCK,
            max(images),
        )
        flops_per_s, bytes_per_s = ceilings(arguments.repeats)
        print(f"ceilings here: {flops_per_s / 1e9:.0f} GFLOP/s bf16, {bytes_per_s / 1e9:.1f} GB/s read")
        language, width = stages.spec.language, DTYPE_BYTES["bfloat16"]
        head_bytes = language.vocab_size * language.hidden_size * width
        layer_bytes = stages.spec.language.num_parameters() * width - head_bytes * (1 if language.tie_embeddings else 2)
        figures = []

        def report(stage: str, size: int, run: Callable[[], object], floor_s: float) -> None:
            times = interleaved({"run": run}, arguments.repeats)["run"]
            ratio = floor_s / times.median
            print(
                f"{stage:8} {size:5}  {times.median * 1e3:9.2f} ms (best {times.best * 1e3:9.2f})  "
                f"floor {floor_s * 1e3:9.2f} ms  {ratio:5.2f} of the floor's rate"
            )
            figures.append({"stage": stage, "size": size, "ms": times.median * 1e3, "floor_ms": floor_s * 1e3})

        for count in images:
            patches = stages.vision.plan_image(*PICTURE).num_patches
            report("encode", count, stages.encode(count), count * stages.vision.flops(patches) / flops_per_s)
        for tokens in prompts:
            flops = tokens * language.flops_per_token(tokens // 2) + 2 * language.vocab_size * language.hidden_size
            floor = max(flops / flops_per_s, (layer_bytes + head_bytes) / bytes_per_s)
            report("prefill", tokens, stages.language(1, tokens, 0), floor)
        for count in batches:
            kv_bytes = count * arguments.context * language.kv_bytes_per_token(width)
            flops = count * (
                language.flops_per_token(arguments.context) + 2 * language.vocab_size * language.hidden_size
            )
            floor = max((layer_bytes + head_bytes + kv_bytes) / bytes_per_s, flops / flops_per_s)
            report("decode", count, stages.language(count, 1, arguments.context - 1), floor)
    emit(
        {
            "bench": "stages",
            "model": os.path.basename(arguments.model.rstrip("/")),
            "threads": arguments.threads,
            "flops_per_s": flops_per_s,
            "bytes_per_s": bytes_per_s,
            "figures": figures,
            "card": card(),
        }
    )


if __name__ == "__main__":
    main()
