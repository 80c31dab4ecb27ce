"""`hydra-engine generate`: one question through an embedded engine, streamed to the terminal."""

from __future__ import annotations

import argparse
import sys

from hydra_engine import log
from hydra_engine.cli.options import add_engine_options, add_sampling_options, sampling_from
from hydra_engine.cli.sources import read_settings
from hydra_engine.cli.timeline import timeline_lines

_SKIP = frozenset({"seed"})  # here the flag is the request's seed


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the question")
    parser.add_argument("--model", metavar="MODEL", help="Hugging Face model directory, or `demo` (the default)")
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help="picture; may be repeated")
    parser.add_argument("--timeline", action="store_true", help="print what each stage took and what delayed tokens")
    add_sampling_options(parser, temperature=0.0)
    add_engine_options(parser, _SKIP)


def run(arguments: argparse.Namespace) -> int:
    from hydra_engine.engine import Engine

    config = read_settings(arguments, _SKIP).engine(local_files=True)
    log.configure(config.log_level, log_format=config.log_format)
    sampling = sampling_from(arguments)
    with Engine.from_config(config) as engine:
        for piece in engine.stream(arguments.prompt, arguments.image or None, sampling=sampling):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            if (result := piece.result) is not None:
                sys.stdout.write("\n")
                if arguments.timeline:
                    sys.stdout.write("\n".join(timeline_lines(result.timeline, result.metrics.slo)) + "\n")
    return 0
