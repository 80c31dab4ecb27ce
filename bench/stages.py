"""Times each stage alone: encode, prefill and decode of one model, next to what the same run's ceilings allow.

The micro-benchmarks of the three (`bench/micro`) in one document, with the sizes that docs/benchmarks-cpu.md shows and
without peers. `python -m bench.stages --model DIR --threads 1`; the last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from bench.micro import decode, encode, prefill
from bench.micro.harness import Report, parse
from bench.micro.subject import Subject, run_bench

Options = Callable[[argparse.ArgumentParser], None]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", default="1,4", help="pictures at once")
    parser.add_argument("--picture", default="640x480", help="width x height of a picture")
    parser.add_argument("--prompts", default="128,677", help="tokens of a prompt")
    parser.add_argument("--batches", default="1,4,8,16", help="decodes")
    parser.add_argument("--context", default="700", help="tokens that each decode sees")


def measure(arguments: argparse.Namespace, report: Report, subject: Subject) -> None:
    def with_sizes(options: Options, **sizes: str) -> argparse.Namespace:
        """The options of one of the three: its defaults, what was given here, and these sizes."""
        return argparse.Namespace(**vars(parse(None, options, ())) | vars(arguments) | {"no_peers": True} | sizes)

    encode.measure(with_sizes(encode.options, counts=arguments.images), report, subject)
    prefill.measure(with_sizes(prefill.options, rows="1", tokens=arguments.prompts), report, subject)
    decode.measure(with_sizes(decode.options, rows=arguments.batches, contexts=arguments.context), report, subject)


def main() -> None:
    arguments = parse(__doc__, options)
    run_bench("stages", arguments, lambda report, subject: measure(arguments, report, subject))


if __name__ == "__main__":
    main()
