"""The call that answers the questions that decide the next steps: `make gpu-check ARGS=--decide`, planned for an H200.

Each part has a question, with the figures between which its answer lies and what follows from it. They are written
before the run and stand in summary.md beside what was measured (`answers.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from bench.gpu_check.commands import (
    CEILINGS,
    LLAVA,
    QWEN,
    TWIN,
    Setup,
    Tests,
    build,
    ceilings,
    files_by_kind,
    run_bench,
    run_serve,
    run_tests,
    run_together,
)
from bench.micro.parts import Part

# Of tests/gpu, by words of their names: kernels, graphs and lanes that no device has run yet.
CHANGED = (
    "cache_ops or graph or captured or mixed or encodes or split or gate or int8 or experts or states or flashinfer"
)
PRIORITIES = "equal,language"
SERVE_RATES = "8,32,48"  # of requests a second; about 31 and 43 are what is reckoned to be the most


class Question(NamedTuple):
    """The question of a part and the meaning of each answer."""

    asks: str
    means: str


QUESTIONS = {
    "ring": Question(
        "what 48 multiprocessors read with 192 KB in flight on each",
        "2.6 TB/s or more: a lane of encodes and prompts beside decodes is worth building; less than 2.0: it is not",
    ),
    CEILINGS: Question(
        "what parts of the device read and compute, contiguous and spread",
        "spread parts read 5 % more than contiguous ones of that size: give tokens every second group",
    ),
    "layer": Question(
        "whether the gaps between the kernels of a layer cost what its parts do not add up to",
        "a layer takes 8 us more than its kernels alone: seams; less: the kernels themselves",
    ),
    LLAVA: Question(
        "how far one row of decodes differs within one process, and what differing contexts and the served table cost",
        "a spread above 5 % at B=1: no conclusion below it; one long context doubles a step: splits by row",
    ),
    QWEN: Question(
        "what padded inner widths made of the encode, and the products of 8 rows of the decode",
        "12.0 to 12.3 ms an encode as reckoned (18.7 before); B=8 above 0.7 of its floor (0.34 before)",
    ),
    TWIN: Question("where an encode of Qwen2-VL spends its time", "attention above 40 % of it: other kernels first"),
    "attn_decode": Question(
        "whether FlashInfer's decodes are faster, and what one long context among short ones costs either",
        "one long context halves the share of the floor: splits by row; FlashInfer 3 % faster: `auto` takes it",
    ),
    "attn_prefill": Question(
        "whether other attention kernels are faster for prompts and towers",
        "300 TFLOP/s at 1,024 tokens and one prompt, 520 in a tower with heads of 80: take that kernel; else ours stay",
    ),
    "products": Question(
        "what an activation behind a product costs as a launch of its own",
        "a fused kernel has to be within 3 % of the product alone to gain",
    ),
    "prefill": Question(
        "what a prompt of 676 and 1,024 tokens takes launch by launch and as a graph, and at the burst clock",
        "16.5 ms or less as a graph at 676: launches were the loss; else look at the profile's gaps",
    ),
    "colocate": Question(
        "what encodes and prompts beside endless decodes gain, on streams and on parts",
        "1.2 or more at B=64 on 64 of 132: parts for throughput; else only for tails",
    ),
    "serve": Question(
        "the first token of a request alone, and requests a second with and without keys and values of int8",
        "TTFT of 20 to 27 ms (44 before); 43 requests/s with int8 for 31 without, a few more with these prompts of 610 "
        "tokens for 676: the recipe for throughput",
    ),
}


def decisive(setup: Setup) -> list[Part]:
    """The parts, the most decisive first; 456 seconds are planned."""
    ops, engine, device, _ = files_by_kind()
    files = [*ops, *engine, *device]
    rows = ("--rows", "1,8,24,64,128")
    return [
        build(setup, 35.0),
        run_tests(setup, Tests("tests-changed", files, "cuda and not alone", 14, 25.0, 90.0, CHANGED)),
        run_tests(setup, Tests("tests-changed-alone", files, "cuda and alone", 1, 15.0, 60.0, CHANGED)),
        run_bench(setup, "ring", None, 4.0, 30.0, min_s=4.0),
        ceilings(setup, 12.0),
        run_bench(setup, "layer", None, 30.0, 90.0, flags=("--rows", "1,8,16,64")),
        *run_together(
            setup,
            LLAVA,
            ("decode", "profile"),
            LLAVA,
            50.0,
            120.0,
            flags=("--quick", *rows, "--uneven", "--served-width", "--repeat", "3"),
        ),
        *run_together(setup, QWEN, ("encode", "prefill", "decode", "profile"), QWEN, 30.0, 120.0),
        *run_together(setup, TWIN, ("encode", "profile"), TWIN, 15.0, 60.0),
        run_bench(setup, "attn_decode", None, 8.0, 40.0, flags=("--rows", "16,64", "--uneven"), min_s=8.0),
        run_bench(setup, "attn_prefill", None, 12.0, 60.0, flags=("--lengths", "676,1024,2048", "--prompts", "1")),
        run_bench(setup, "products", None, 15.0, 45.0),
        run_bench(
            setup,
            "prefill",
            LLAVA,
            15.0,
            60.0,
            flags=("--tokens", "676,1024", "--graph", "--idle", "0.5", "--no-peers"),
        ),
        run_bench(
            setup,
            "colocate",
            LLAVA,
            70.0,
            180.0,
            flags=(
                *("--beside-only", "--seconds", "1.5", "--rows", "8,64,128", "--counts", "4", "--prompt", "1024"),
                *("--priority", PRIORITIES, "--splits", "32,48,64"),
            ),
        ),
        run_serve(setup, LLAVA, SERVE_RATES, 120.0, 240.0, configs={"int8": "--kv-cache-dtype int8"}),
    ]
