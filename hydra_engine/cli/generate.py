"""`hydra-engine generate`: one question through an embedded engine, streamed to the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra_engine import log
from hydra_engine.cli.options import add_engine_options, add_sampling_options, sampling_from
from hydra_engine.cli.sources import read_settings
from hydra_engine.cli.summary import timeline_lines
from hydra_engine.config import MediaConfig
from hydra_engine.errors import ConfigError, InvalidRequest
from hydra_engine.preprocess.model_files import check_tower, find_model_files
from hydra_engine.preprocess.text.template_files import check_template

_SKIP = frozenset({"seed"})  # here the flag is the request's seed
_STANDARD = "-"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the question; - or none: standard input")
    parser.add_argument("--model", metavar="MODEL", help="model directory, GGUF file, hub id, or `demo` (the default)")
    picture = "picture, - for standard input; can be repeated"
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help=picture)
    parser.add_argument("--video", action="append", default=[], metavar="FILE", help="video; can be repeated")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    schema = "JSON Schema of the answer: a file, or the schema itself"
    parser.add_argument("--json-schema", metavar="FILE", help=schema)
    parser.add_argument(
        "--timeline", action="store_true", help="print the time of each stage and the causes of late tokens"
    )
    add_sampling_options(parser)
    add_engine_options(parser, _SKIP)


def run(arguments: argparse.Namespace) -> int:
    config = read_settings(arguments, _SKIP).engine(local_files=True)
    log.configure(config.log_level, log_format=config.log_format)
    options: dict[str, Any] = sampling_from(arguments)
    if arguments.json_schema is not None:
        options["response_format"] = _response_format(arguments.json_schema)
    prompt, pictures = _read_input(arguments.prompt, arguments.image, config.media)
    check_media(pictures, arguments.video, config.media)
    config = find_model_files(config)
    if pictures or arguments.video:
        check_tower(config)
    check_template(config.model_path, config.chat_template)
    from hydra_engine.engine import Engine  # slow to import

    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    messages = [*system, {"role": "user", "content": prompt}]
    with Engine.from_config(config) as engine:
        for piece in engine.stream(messages, pictures or None, arguments.video or None, **options):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            if (result := piece.result) is not None:
                sys.stdout.write("\n")
                if arguments.timeline:
                    metrics = result.metrics
                    lines = timeline_lines(result.timeline, metrics.slo, clock_error_s=metrics.clock_error_s)
                    sys.stdout.write("\n".join(lines) + "\n")
    return 0


# ---- checks before a model is loaded


def check_media(pictures: Sequence[str | bytes], videos: Sequence[str], limits: MediaConfig) -> None:
    """Checks what can be checked of pictures and videos without a model. Raises InvalidRequest for the first invalid
    one."""
    for kind, files in (("image", pictures), ("video", videos)):
        for number, file in enumerate(files, 1):
            try:
                _check_file(file, kind, limits)
            except InvalidRequest as error:
                if len(files) > 1:
                    raise error.with_message(f"{kind} {number}: {error.message}") from error
                raise


def _check_file(file: str | bytes, kind: str, limits: MediaConfig) -> None:
    from hydra_engine.preprocess.media import images, opening, sources  # slow to import

    source = sources.classify(file, limits, kind)
    with sources.with_path_in_errors(source):
        if not isinstance(source, sources.RemoteFile):
            data = sources.read_local(source, limits)
            images.inspected(data, limits) if kind == "image" else opening.inspected_video(data, limits)


def _read_input(prompt: str | None, pictures: list[str], limits: MediaConfig) -> tuple[str, list[str | bytes]]:
    """Returns the question and the pictures, of which one may come from standard input. Raises ConfigError."""
    wanted = pictures.count(_STANDARD)
    if wanted > 1 or (wanted and prompt in (None, _STANDARD)):
        raise ConfigError("standard input is one thing only: the question, or one picture (--image -)")
    if prompt is None and sys.stdin.isatty():
        raise ConfigError("there is no question: hydra-engine generate PROMPT, or - to read it from standard input")
    if prompt in (None, _STANDARD):
        try:
            prompt = sys.stdin.buffer.read().decode().strip()
        except UnicodeDecodeError as error:
            raise ConfigError("the question on standard input is not UTF-8 text") from error
        if not prompt:
            raise ConfigError("the question on standard input is empty")
    return prompt, [
        sys.stdin.buffer.read(limits.max_image_bytes + 1) if picture == _STANDARD else picture for picture in pictures
    ]


def _response_format(given: str) -> dict[str, Any]:
    """The `response_format` for a schema, or for the file that holds one. Raises ConfigError."""
    from hydra_engine.core.grammar import Grammar
    from hydra_engine.guidance.guide import GrammarError, check

    try:
        text = given if given.lstrip().startswith("{") else Path(given).read_text(encoding="utf-8")
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise ConfigError('--json-schema must be an object, such as {"type": "object"}')
        check(Grammar("json_schema", text))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--json-schema: cannot read {given[:200]}: {reason.lower()}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"--json-schema is not valid JSON: {where}: {error.msg}") from error
    except (GrammarError, InvalidRequest, RecursionError) as error:
        raise ConfigError(f"--json-schema cannot be followed: {error}") from error
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
