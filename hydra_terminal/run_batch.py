"""`hydra-engine run-batch INPUT -o OUTPUT`: answers a file of requests, with a progress bar.

`server/openai/batch.py` parses and answers the lines. The exit code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hydra_engine import log
from hydra_engine.cli.options import GivenOnce, add_engine_options
from hydra_engine.cli.sources import read_settings
from hydra_engine.config import EngineConfig, ServerConfig
from hydra_engine.core.outputs import Result
from hydra_engine.errors import ConfigError, ResourceError
from hydra_engine.preprocess.model_files import find_model_files

_SERVER_OPTIONS = frozenset({"served_model_name", "tool_parser", "reasoning_parser", "max_body_bytes"})
_STANDARD = "-"
_EXAMPLE = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": .., "messages": ..}}'


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s FILE -o FILE [options]"
    requests = "requests, one JSON object a line; - is standard input"
    parser.add_argument("input", nargs="?", metavar="FILE", help=requests, action=GivenOnce)
    parser.add_argument("-i", "--input-file", dest="input", metavar="FILE", help="the same", action=GivenOnce)
    parser.add_argument(
        "-o",
        "--output",
        "--output-file",
        metavar="FILE",
        required=True,
        help="answers in order of completion; - is standard output",
    )
    parser.add_argument("--model", metavar="MODEL", help="model directory, GGUF file, hub id, or `demo` (the default)")
    parser.add_argument(
        "--max-concurrent",
        metavar="N",
        type=int,
        help="most requests in flight (default: twice --max-num-seqs for each instance)",
    )
    add_engine_options(parser, also=_SERVER_OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    if arguments.input is None:
        raise ConfigError("run-batch needs a file of requests: run-batch FILE -o FILE")
    settings = read_settings(arguments)
    config, server = find_model_files(settings.engine()), settings.server()
    log.configure(config.log_level, log_format=config.log_format)
    given = arguments.max_concurrent
    concurrency = _default_concurrency(config) if given is None else given
    if not 1 <= concurrency <= config.scheduler.max_queue:
        raise ConfigError(f"--max-concurrent must be from 1 to {config.scheduler.max_queue} (--max-queue)")
    with ExitStack() as files:
        source = _opened(arguments.input, "rb", files)
        if arguments.output != _STANDARD and _is_same(arguments.input, arguments.output):
            raise ConfigError("the file of answers must not be the file of requests")
        num_lines = _count(source)
        target = _opened(arguments.output, "wb", files)
        return asyncio.run(_answer_all(config, server, source, target, concurrency, num_lines))


def _default_concurrency(config: EngineConfig) -> int:
    """Number of requests in flight by default: twice what the instances serve at once, which keeps lanes and
    preprocessing busy, but at most half of `max_queue`."""
    topology = config.parsed_topology
    named = zip(topology.names, topology.instances, strict=True)
    at_once = sum(config.for_instance(name, spec.role).scheduler.max_running_requests for name, spec in named)
    return max(1, min(2 * at_once, config.scheduler.max_queue // 2))


async def _answer_all(
    config: EngineConfig,
    server: ServerConfig,
    source: BinaryIO,
    target: BinaryIO,
    concurrency: int,
    num_lines: int | None,
) -> int:
    # Imported here: `--help` needs none of them.
    from tqdm import tqdm

    from hydra_engine.engine import Engine
    from hydra_engine.server.app import build_app
    from hydra_engine.server.http.access_control import KeyRing
    from hydra_engine.server.openai.batch import serving

    engine = Engine.create_unstarted(config)
    await engine.astart()
    tokens, began_s = 0, time.monotonic()

    def add_tokens(result: Result) -> None:
        nonlocal tokens
        tokens += result.usage.completion_tokens

    def rate() -> float:
        return tokens / max(time.monotonic() - began_s, 1e-9)

    def write(line: bytes) -> None:
        try:
            target.write(line + b"\n")
            target.flush()
        except OSError as error:
            raise ResourceError(f"the answers cannot be written: {_why(error)}") from error
        failed = f", {batch.num_failed} failed" if batch.num_failed else ""
        bar.set_postfix_str(f"{rate():.0f} tok/s{failed}", refresh=False)
        bar.update(1)

    engine.add_observer(add_tokens)
    try:
        app = build_app(engine, server, keys=KeyRing.empty())
        async with serving(app, server.max_body_bytes) as batch:
            # None: a bar only on a terminal
            with tqdm(total=num_lines, unit="req", mininterval=0.2, disable=None) as bar:
                await batch.run(_lines(source, batch.max_line_bytes), write, concurrency)
        first = f"; the first one, {batch.first_failure}" if batch.num_failed else ""
        sys.stderr.write(
            f"{batch.num_done} requests in {time.monotonic() - began_s:.1f} s, {batch.num_failed} of them failed, "
            f"{tokens} tokens out ({rate():.0f} a second){first}\n"
        )
        return 1 if batch.num_failed else 0
    finally:
        await engine.aclose()


async def _lines(source: BinaryIO, max_bytes: int) -> AsyncIterator[tuple[int, bytes]]:
    """Yields (number, line) of the lines that are not empty; a line that is too long is cut."""
    number = 0
    while line := await asyncio.to_thread(source.readline, max_bytes + 2):
        number += 1
        rest = line
        while len(rest) == max_bytes + 2 and not rest.endswith(b"\n"):
            rest = await asyncio.to_thread(source.readline, max_bytes + 2)
        if line.strip():
            yield number, line.rstrip(b"\r\n")


def _count(source: BinaryIO) -> int | None:
    """The number of lines that are not empty; None if the file can be read only once. Raises ConfigError if there are
    lines and none of them is a JSON object."""
    if not source.seekable():
        return None
    count, first, requests = 0, 0, False
    for number, line in enumerate(source, start=1):
        if line.strip():
            count, first, requests = count + 1, first or number, requests or _is_object(line)
    if count and not requests:
        raise ConfigError(
            f"the file of requests has no line that is a JSON object, see line {first}; a line is for example "
            f"{_EXAMPLE}"
        )
    source.seek(0)
    return count


def _is_object(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


# ---- files


def _opened(name: str, mode: str, files: ExitStack) -> BinaryIO:
    if name == _STANDARD:
        return sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
    try:
        file: Any = open(name, mode)  # noqa: SIM115 - the stack closes it
    except OSError as error:
        what = "requests" if mode == "rb" else "answers"
        raise ConfigError(f"the file of {what} {name} cannot be opened: {_why(error)}") from None
    files.enter_context(file)
    opened: BinaryIO = file
    return opened


def _is_same(one: str, other: str) -> bool:
    return Path(other).exists() and one != _STANDARD and os.path.samefile(one, other)


def _why(error: OSError) -> str:
    return (error.strerror or "no reason given").lower()
