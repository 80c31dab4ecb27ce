"""`python -m tools.miniatures DIR`: writes one random checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.miniatures import TINY, make_tiny
from tools.miniatures.llava import BENCH_SIZES, BF16, FORMS, make_bench_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint with random weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--bench", nargs="?", const="0.5b", choices=BENCH_SIZES, help="of so many parameters instead of a miniature"
    )
    parser.add_argument("--format", default=BF16, choices=FORMS, help="of the decoder's matrices, with --bench")
    parser.add_argument("--family", default="llava", choices=tuple(TINY))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.bench is not None:
        make_bench_checkpoint(arguments.directory, seed=arguments.seed, size=arguments.bench, form=arguments.format)
    else:
        make_tiny(arguments.family, arguments.directory, seed=arguments.seed)


main()
