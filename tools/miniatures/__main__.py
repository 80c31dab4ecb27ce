"""`python -m tools.miniatures DIR`: writes one random checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from hydra_engine.config import SHAPES, EngineConfig
from tools.miniatures import TINY, make_tiny
from tools.miniatures.llava import BENCH_SIZES, BF16, FORMS, make_bench_checkpoint
from tools.miniatures.shape import make_shape_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint with random weights.")
    parser.add_argument("directory", type=Path)
    sizes, default = (*BENCH_SIZES, *SHAPES), "0.5b"
    parser.add_argument(
        "--bench", nargs="?", const=default, choices=sizes, help="LLaVA of so many parameters, or a shape, instead"
    )
    parser.add_argument("--format", default=BF16, choices=FORMS, help="of the decoder's matrices, with --bench")
    parser.add_argument("--family", default="llava", choices=tuple(TINY))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.bench in SHAPES:
        source = EngineConfig(model=arguments.bench).model_path
        make_shape_checkpoint(source, arguments.directory, seed=arguments.seed)
    elif arguments.bench is not None:
        make_bench_checkpoint(arguments.directory, seed=arguments.seed, size=arguments.bench, form=arguments.format)
    else:
        make_tiny(arguments.family, arguments.directory, seed=arguments.seed)


main()
