"""`hydra-engine generate`: one question through an embedded engine, streamed to the terminal."""

from __future__ import annotations

import argparse
import sys

from hydra_engine import log
from hydra_engine.cli.options import add_engine_options, add_sampling_options, sampling_from
from hydra_engine.cli.sources import read_settings
from hydra_engine.cli.summary import timeline_lines
from hydra_engine.config import MediaConfig
from hydra_engine.errors import InvalidRequest
from hydra_engine.preprocess.model_files import check_tower, find_model_files
from hydra_engine.preprocess.text.template_files import check_template

_SKIP = frozenset({"seed"})  # here the flag is the request's seed


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the question")
    parser.add_argument("--model", metavar="MODEL", help="model directory, hub id, or `demo` (the default)")
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help="picture; can be repeated")
    parser.add_argument(
        "--timeline", action="store_true", help="print the time of each stage and the causes of late tokens"
    )
    add_sampling_options(parser)
    add_engine_options(parser, _SKIP)


def _check_pictures(pictures: list[str], limits: MediaConfig) -> None:
    """Checks the pictures before a model is loaded. Raises InvalidRequest for the first invalid one."""
    from hydra_engine.preprocess.media import images, sources  # slow to import

    for number, picture in enumerate(pictures, 1):
        try:
            source = sources.classify(picture, limits)
            with sources.with_path_in_errors(source):
                if not isinstance(source, sources.RemoteFile):
                    images.inspected(sources.read_local(source, limits), limits)
        except InvalidRequest as error:
            if len(pictures) > 1:
                raise error.with_message(f"image {number}: {error.message}") from error
            raise


def run(arguments: argparse.Namespace) -> int:
    config = read_settings(arguments, _SKIP).engine(local_files=True)
    log.configure(config.log_level, log_format=config.log_format)
    sampling = sampling_from(arguments)
    if arguments.image:
        _check_pictures(arguments.image, config.media)
    config = find_model_files(config)
    if arguments.image:
        check_tower(config)
    check_template(config.model_path, config.chat_template)
    from hydra_engine.engine import Engine  # slow to import

    with Engine.from_config(config) as engine:
        for piece in engine.stream(arguments.prompt, arguments.image or None, **sampling):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            if (result := piece.result) is not None:
                sys.stdout.write("\n")
                if arguments.timeline:
                    sys.stdout.write("\n".join(timeline_lines(result.timeline, result.metrics.slo)) + "\n")
    return 0
