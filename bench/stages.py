"""Times each stage alone: encode, prefill and decode of one model, next to what the same run's ceilings allow.

The micro-benchmarks of the three (`bench/micro`) in one document, with the sizes that docs/benchmarks-cpu.md shows and
without peers. `python -m bench.stages --model DIR --threads 1`; the last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse

from bench.micro import decode, encode, prefill
from bench.micro.harness import Report, parse
from bench.micro.subject import Subject, run_bench


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", default="1,4", help="pictures at once")
    parser.add_argument("--picture", default="640x480", help="width x height of a picture")
    parser.add_argument("--prompts", default="128,677", help="tokens of a prompt")
    parser.add_argument("--batches", default="1,4,8,16", help="decodes")
    parser.add_argument("--context", default="700", help="tokens that each decode sees")


def measure(arguments: argparse.Namespace, report: Report, subject: Subject) -> None:
    def asked(**sizes: str) -> argparse.Namespace:
        return argparse.Namespace(**vars(arguments) | {"no_peers": True, "compile": False} | sizes)

    encode.measure(asked(counts=arguments.images), report, subject)
    prefill.measure(asked(rows="1", tokens=arguments.prompts), report, subject)
    decode.measure(asked(rows=arguments.batches, contexts=arguments.context), report, subject)


def main() -> None:
    arguments = parse(__doc__, options)
    run_bench("stages", arguments, lambda report, subject: measure(arguments, report, subject))


if __name__ == "__main__":
    main()
