"""Encode, prefill and decode of every native family on its random miniature, in bf16; those with recurrent states are
left out.

The miniatures are too small to say how fast a real model is; they show that each family's stages run, what a picture of
640 x 480 becomes, and what a step costs beyond arithmetic. `python -m bench.families`; the last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.common import card, emit, interleaved
from bench.micro.steps import Row
from bench.micro.subject import Subject
from hydra_engine.backend.select import create_backend
from hydra_engine.models.specs.registry import FAMILIES, load_spec
from tools.miniatures import make_tiny

PICTURE = (640, 480)
PROMPT, CONTEXT, ROWS = 128, 256, 8


def measure(family: str, directory: Path, threads: int, repeats: int) -> dict[str, Any]:
    backend = create_backend("cpu", torch.bfloat16, threads=threads)
    subject = Subject(family, directory, backend)
    assert subject.spec.vision is not None, "a model with a vision tower"
    plan = subject.spec.vision.plan_image(*PICTURE)
    runs: dict[str, Callable[[], object]] = {
        "encode": subject.encode(1, PICTURE, subject.image_cache(plan.num_tokens)),
        "prefill": subject.language([Row(0, PROMPT)], subject.kv_cache(1, PROMPT)),
        "decode": subject.language([Row(CONTEXT - 1)] * ROWS, subject.kv_cache(ROWS, CONTEXT)),
    }
    times = interleaved(runs, repeats)
    return {
        "family": family,
        "patches": plan.num_patches,
        "tokens": plan.num_tokens,
        "spans": len(plan.items),
        **{f"{stage}_ms": value.median * 1e3 for stage, value in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else arguments.repeats
    print("family          patches  tokens  spans   encode 1   prefill 128   decode 8 rows of 256   (ms)")
    figures = []
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        for family in (name for name, row in FAMILIES.items() if row.vision):
            directory = Path(folder) / family
            make_tiny(family, directory, seed=1, dtype="bfloat16")
            if load_spec(directory).language.has_states:
                print(f"{family:14} has recurrent states", flush=True)
                continue
            row = measure(family, directory, arguments.threads, repeats)
            figures.append(row)
            print(
                f"{family:14} {row['patches']:8} {row['tokens']:7} {row['spans']:6} {row['encode_ms']:10.2f} "
                f"{row['prefill_ms']:13.2f} {row['decode_ms']:24.2f}",
                flush=True,
            )
    emit({"bench": "families", "threads": arguments.threads, "figures": figures, "card": card()})


if __name__ == "__main__":
    main()
