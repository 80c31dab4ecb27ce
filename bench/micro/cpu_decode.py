"""Decode steps on a processor: a miniature and a decoder of half a billion parameters in bf16, from one request to 32.

Next to a plain torch step over the same weights and contexts (`bench/micro/peers.py`), and to what the read bandwidth
and the matrix products of the same run allow. Both steps are checked against each other first. Weights are random and
never on disk; ours is planned and run as the engine does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.micro.ceilings import measure, show
from bench.micro.floors import decode_work
from bench.micro.harness import Effort, Report, agree, parse, timed
from bench.micro.peers import HfPeer
from bench.micro.steps import Row, Step
from bench.micro.subject import Subject
from hydra_engine.backend.select import create_backend
from tools.miniatures import TINY
from tools.miniatures.base import save_processor

DTYPE = torch.bfloat16
# Of a decoder as Qwen2-0.5B has one: a step reads 0.49 billion numbers, of which the head is 0.14.
HALF_BILLION: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
}
TINY_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
}
MODELS = {"tiny": TINY_SIZES, "0.5b": HALF_BILLION}
_TOLERANCE = 0.15  # of the largest logit: two orders of rounding to bf16, which 24 layers of random weights spread


def write_config(directory: Path, sizes: dict[str, Any]) -> None:
    """A directory with everything but weights: a decoder of these sizes behind the smallest tower."""
    family = TINY["llava"]
    config = family.build_config({"head_dim": None, **sizes}, {}, {})
    config.architectures, config.dtype = ["LlavaForConditionalGeneration"], "bfloat16"
    config.save_pretrained(directory)
    save_processor(directory, config, family)


@contextmanager
def loaded(name: str, threads: int) -> Iterator[Subject]:
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), MODELS[name])
        yield Subject(name, Path(folder), create_backend("cpu", DTYPE, threads=threads))


def sizes_of(quick: bool) -> tuple[tuple[int, ...], int]:
    """(requests of a step, tokens that each sees)."""
    return ((1, 4), 256) if quick else ((1, 2, 4, 8, 16, 32), 1024)


def report_model(report: Report, subject: Subject, threads: int) -> None:
    batches, context = sizes_of(report.quick)
    language = subject.spec.language
    cache, peer = subject.kv_cache(max(batches), context), HfPeer(subject)
    for rows in batches:
        step = Step(subject, [Row(context - 1)] * rows, cache)
        plain = peer.static_decode(step)
        agree(f"{subject.name}, B={rows}", step(), plain(), tolerance=_TOLERANCE)
        effort = Effort(5, 0.01, 1.0) if report.quick else report.effort
        seconds = timed(report.device, {"ours": step, "torch": plain}, effort)
        report.row(
            f"{subject.name} B={rows} KV={context}",
            seconds["ours"],
            work=decode_work(language, rows, context, DTYPE.itemsize),
            inputs={"rows": rows, "context": context, "threads": threads},
            peers={"torch": seconds["torch"]},
            tokens_per_s=rows / seconds["ours"].median,
        )


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--sizes", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")

    arguments = parse(__doc__, add)
    arguments.device = "cpu"
    threads = arguments.threads or 1
    torch.set_num_threads(threads)
    names = arguments.sizes.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        raise SystemExit(f"--sizes: there is no {unknown[0]!r}; there are {', '.join(MODELS)}")
    with torch.inference_mode():
        ceilings = measure(torch.device("cpu"), DTYPE, quick=arguments.quick)
        print(show(ceilings))
        with Report("cpu_decode", arguments, ceilings) as report:
            for name in names:
                with loaded(name, threads) as subject:
                    report_model(report, subject, threads)


if __name__ == "__main__":
    main()
