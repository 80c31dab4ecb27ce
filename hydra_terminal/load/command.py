"""`hydra-engine bench serve`: sends requests to a server with OpenAI's API and prints throughput and latencies.

The table is that of `vllm bench serve`. With --request-rate latencies count from when a request was due, so a server
that cannot keep up looks as slow as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from hydra_engine.cli.options import DEFAULT_URL
from hydra_engine.cli.parser import Parser
from hydra_engine.config import environment_api_keys
from hydra_engine.errors import ConfigError, RequestFailed, ResourceError
from hydra_planner.records import Record, quantile
from hydra_planner.workload.arrivals import Arrivals
from hydra_planner.workload.shapes import SHAPES
from hydra_terminal.load.loops import Run, closed_loop, open_loop
from hydra_terminal.load.target import ServerFailed, Target, identify
from hydra_terminal.load.workload import Spec, Workload, sentence

_WIDTH = 50
_WARM_UP_SEED = 1 << 30  # of the request before the load
_INPUT, _OUTPUT = 256, 128  # default lengths
_NOT_OF_THE_LOAD = frozenset({"api_key", "help", "model", "output", "url"})


def run(words: Sequence[str]) -> int:
    """Runs the load; 1 if a request failed. Raises HydraError."""
    arguments = _parser().parse_args(words)
    if arguments.output is not None and not arguments.output.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {arguments.output.parent}", param="output")
    specs = _specs(arguments, arguments.num_prompts, arguments.seed)
    warm_up = _specs(arguments, 1, arguments.seed + _WARM_UP_SEED)
    keys = environment_api_keys()
    key = arguments.api_key or (keys[0] if keys else None)
    try:
        target = identify("the server", arguments.url, {"Authorization": f"Bearer {key}"} if key else {})
    except ServerFailed as error:
        raise ResourceError(str(error)) from error
    target = Target(target.name, target.base_url, arguments.model or target.model, target.dialect, target.headers)
    if (problem := closed_loop(target, warm_up, 1, exact=False).records[0].error) is not None:
        raise RequestFailed(f"the first request failed, so no load was sent: {problem}")
    rate: float | None = arguments.request_rate
    if rate is None:
        done = closed_loop(target, specs, arguments.max_concurrency or len(specs), exact=False)
    else:
        times_s = Arrivals("gamma", cv=arguments.burstiness**-0.5).times(rate, len(specs), arguments.seed)
        done = open_loop(target, specs, times_s.tolist(), float("inf"), exact=False)
    sys.stdout.write("\n".join(report_lines(done, arguments.max_concurrency, rate)) + "\n")
    if arguments.output is not None:
        load = {name: value for name, value in vars(arguments).items() if name not in _NOT_OF_THE_LOAD}
        document = {"model": target.model, "load": load, **done.document()}
        try:
            arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output cannot be written: {error.strerror}", param="output") from error
    failed = [record.error for record in done.records if record.error is not None]
    if failed:
        sys.stderr.write(f"hydra-engine: {len(failed)} of {len(done.records)} failed; the first one: {failed[0]}\n")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="hydra-engine bench serve", description="Sends requests to a server with OpenAI's API.")
    add = parser.add_argument
    most: dict[str, Any] = {"type": _count, "metavar": "N"}
    add("--url", "--base-url", default=DEFAULT_URL, metavar="URL", help="the server (default: %(default)s)")
    add("--model", metavar="NAME", help="one of the server's models; default: its first")
    add("--api-key", metavar="KEY", help="the server's API key (default: HYDRA_API_KEY)")
    add("--num-prompts", default=100, help="requests (default: %(default)s)", **most)
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument("--max-concurrency", help="requests under way; default: all of them at once", **most)
    arrivals.add_argument("--request-rate", type=_positive, metavar="RATE", help="requests per second that arrive")
    add(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="X",
        help="of arrivals: 1 Poisson, below 1 burstier, above 1 more regular (default: 1)",
    )
    add("--workload", choices=("mixed", *SHAPES), metavar="NAME", help=f"mixed, {', '.join(SHAPES)}; instead of sizes")
    add("--input-len", "--random-input-len", help=f"words of a prompt, about a token each (default: {_INPUT})", **most)
    add("--output-len", "--random-output-len", help=f"tokens of an answer (default: {_OUTPUT})", **most)
    add("--images", help="pictures of a request; default: none", **most)
    add("--image-size", type=_size, metavar="WxH", help="their size (default: 1024x768)")
    add("--seed", type=int, default=0, help="another one: other words and pixels, which no cache has (default: 0)")
    add("--output", type=Path, metavar="FILE", help="also write the times of all requests to this file, as JSON")
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number above 0")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number above 0")
    return number


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    return _count(width), _count(height)


def _specs(arguments: argparse.Namespace, count: int, seed: int) -> list[Spec]:
    """`count` requests. `seed`: of words and pixels."""
    sizes = (arguments.input_len, arguments.output_len, arguments.images, arguments.image_size)
    if arguments.workload is not None:
        if sizes != (None,) * len(sizes):
            raise ConfigError("--workload has sizes of its own; leave out --input-len, --output-len and --images")
        workload = Workload.named(arguments.workload, None, 1.0, reuse=True, seed=arguments.seed)
        return workload.specs(count, seed)
    words, (width, height) = np.random.default_rng(seed), arguments.image_size or (1024, 768)
    return [
        Spec(
            "sized",
            tuple((width, height, int(words.integers(1 << 31))) for _ in range(arguments.images or 0)),
            sentence(words, arguments.input_len or _INPUT),
            arguments.output_len or _OUTPUT,
        )
        for _ in range(count)
    ]


def report_lines(run: Run, concurrency: int | None, rate: float | None) -> list[str]:
    """The table. `concurrency` and `rate`: as configured."""
    good = [record for record in run.records if record.ok]
    span_s = max((record.end_s for record in run.records), default=0.0) or run.wall_s
    prompt, out = sum(record.prompt_tokens for record in good), sum(record.num_tokens for record in good)
    short = sum(record.num_tokens < record.wanted_tokens for record in good)
    rows = [
        ("Successful requests:", str(len(good))),
        ("Failed requests:", str(len(run.records) - len(good))),
        *([("Answers shorter than asked:", str(short))] if short else []),
        *([("Maximum request concurrency:", str(concurrency))] if concurrency else []),
        *([("Request rate configured (RPS):", f"{rate:.2f}")] if rate else []),
        ("Benchmark duration (s):", f"{span_s:.2f}"),
        ("Total input tokens:", str(prompt)),
        ("Cached input tokens:", str(sum(record.cached_tokens for record in good))),
        ("Total generated tokens:", str(out)),
        ("Request throughput (req/s):", f"{len(good) / span_s:.2f}"),
        ("Output token throughput (tok/s):", f"{out / span_s:.2f}"),
        ("Total token throughput (tok/s):", f"{(prompt + out) / span_s:.2f}"),
    ]
    lines = [
        " Serving Benchmark Result ".center(_WIDTH, "="),
        *(f"{name:<40} {value:<9}".rstrip() for name, value in rows),
    ]
    return [*lines, *_latencies(good), "=" * _WIDTH]


def _latencies(records: Sequence[Record]) -> Iterator[str]:
    """Yields means and percentiles of each latency in milliseconds."""
    kinds = {
        ("TTFT", "Time to First Token"): [r.ttft_s for r in records if r.ttft_s is not None],
        ("TPOT", "Time per Output Token (excl. 1st token)"): [r.tpot_s for r in records if r.tpot_s is not None],
        ("ITL", "Inter-token Latency"): [gap for record in records for gap in record.gaps()],
        ("E2EL", "End-to-end Latency"): [record.latency_s for record in records],
    }
    for (short, title), values_s in kinds.items():
        if values_s:
            yield title.center(_WIDTH, "-")
            yield f"{f'Mean {short} (ms):':<40} {1e3 * mean(values_s):.2f}"
            for name, share in (("Median", 0.5), ("P90", 0.9), ("P99", 0.99)):
                yield f"{f'{name} {short} (ms):':<40} {1e3 * (quantile(values_s, share) or 0.0):.2f}"
