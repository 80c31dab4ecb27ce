"""`hydra-engine plan MODEL --workload FILE --devices 8`: finds the topology that keeps the limits at the highest rate,
with the reasons.

Simulates deployments of the real scheduler, router and migration in virtual time, on step times that were measured
(this machine's, or `--profile FILE`) or derived from a device's data (`--devices 8xH200`). Starts nothing, except with
`--launch`: then the server, with the best topology.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hydra_engine import log
from hydra_engine.cli.options import add_all_options, add_model_argument
from hydra_engine.cli.sources import read_settings
from hydra_engine.config import EngineConfig, ServerConfig
from hydra_engine.config.options import MEDIA_LIMITS, all_options
from hydra_engine.errors import ConfigError
from hydra_engine.preprocess.model_files import find_model_files
from hydra_planner.commands.output import check_output

if TYPE_CHECKING:  # `--help` needs none
    from hydra_planner.search.candidates import Candidate
    from hydra_planner.search.halving import Effort
    from hydra_planner.search.measure import Question
    from hydra_planner.search.plan import Plan

_TTFT_S, _TPOT_S = 1.0, 0.05  # default limits, but of offline plans, which have none
_REQUESTS = 400  # of a workload given by name
_DECIDED = frozenset({"topology", "ttft_slo", "tpot_slo", "decode_workers"})  # by the plan's own flags


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--workload",
        metavar="FILE",
        help="requests to plan for: a file that `serve --record-workload FILE` has written, or the name of a load, for "
        "example textcaps",
    )
    group.add_argument(
        "--devices",
        metavar="DEVICES",
        default="1",
        help="how many devices like those of this machine, or of which kind: 8, 8xH200, 2xA100+2xRTX4090 (default: 1)",
    )
    group.add_argument(
        "--profile", type=Path, metavar="FILE", help="step times that `hydra-engine profile --output FILE` has written"
    )
    group.add_argument(
        "--mps",
        action="store_true",
        help="NVIDIA's MPS runs on the devices, so that instances that share one compute at the same moment (default: "
        "they take turns)",
    )
    group.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="DEVICE=DOLLARS",
        help="dollars for an hour of one device, for example A100=1.29 or, of every device, 1.29; repeat it for other "
        "kinds (default: list prices, where one is known)",
    )
    group.add_argument("--topologies", metavar="LIST", help="only these, with spaces between them")
    group.add_argument(
        "--objective",
        choices=("goodput", "cost", "offline"),
        default="goodput",
        help="goodput: the highest rate within the limits; cost: the cheapest of the devices that keep them at --rate; "
        "offline: all requests at once, done as early as possible (default: goodput)",
    )
    group.add_argument("--rate", type=float, metavar="RATE", help="requests per second, for --objective cost")
    group.add_argument("--seeds", type=int, default=3, metavar="N", help="parts of the workload to repeat with")
    group.add_argument(
        "--explain", action="store_true", help="also print the bytes, links and prices that the choice rests on"
    )
    group.add_argument("--output", type=Path, metavar="FILE", help="also write the plan to this file, as JSON")
    group.add_argument("--pictures", type=Path, metavar="FOLDER", help="write pictures there (needs matplotlib)")
    group.add_argument("--launch", action="store_true", help="start the server with the topology that has won")
    add_all_options(parser)


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments)
    config = find_model_files(settings.engine())
    log.configure(config.log_level, log_format=config.log_format)
    _check(arguments)
    from hydra_planner.commands.devices import check_here
    from hydra_planner.report import explain_lines, plan_lines
    from hydra_planner.search.plan import make_plan

    question, effort = _question(arguments, config), _effort(arguments)
    if arguments.launch:
        check_here(question.kinds, mps=arguments.mps)
    began_s = time.monotonic()
    plan = make_plan(question, effort, _progress(), arguments.objective, arguments.rate, _only(arguments, question))
    seconds = time.monotonic() - began_s
    lines = plan_lines(plan, question, [config.model, *_given_flags(arguments, plan)], seconds)
    if arguments.explain:
        lines += ["", *explain_lines(plan, question)]
    sys.stdout.write("\n".join(lines) + "\n")
    _write(arguments, plan, f"{config.model_name} on {arguments.devices} devices, {arguments.workload}")
    return _launch(plan, question, settings.server()) if arguments.launch else 0


def _given_flags(arguments: argparse.Namespace, plan: Plan) -> Iterator[str]:
    """Yields the user's flags that `serve` needs too, quoted for a shell. Those that the plan decides are left out;
    secrets are not repeated."""
    decided = _DECIDED | {setting.field for setting in plan.best.settings}
    for option in all_options():
        value = getattr(arguments, option.field, None)
        if value is None or option.positional or option.field in decided:
            continue
        if option.kind is bool:
            yield f"--{'' if value else 'no-'}{option.name}"
        else:
            for text in ["..."] if option.secret else value if isinstance(value, list) else [value]:
                yield f"{option.flag} {shlex.quote(text)}"
    for name in ("config", MEDIA_LIMITS):
        if (text := getattr(arguments, name.replace("-", "_"))) is not None:
            yield f"--{name} {shlex.quote(text)}"


def _check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for errors that show before any file is read."""
    if not arguments.workload:
        raise ConfigError(
            "say what to plan for: --workload FILE, which `hydra-engine serve --record-workload FILE` writes, or a "
            "load's name such as --workload textcaps",
            param="workload",
        )
    rate = arguments.rate
    if arguments.objective == "cost" and not (rate and 0 < rate < math.inf):
        raise ConfigError("--objective cost needs --rate, in requests per second", param="rate")
    if arguments.objective != "cost" and rate is not None:
        raise ConfigError("--rate is for --objective cost; without it a plan looks for the highest rate", param="rate")
    if not 1 <= arguments.seeds <= 20:
        raise ConfigError("--seeds must be between 1 and 20", param="seeds")
    if arguments.topologies is not None and not arguments.topologies.split():
        raise ConfigError("--topologies names none; leave it out to try all", param="topologies")
    if arguments.output is not None:
        check_output(arguments.output)
    if arguments.pictures is not None:
        _drawing()
        try:
            arguments.pictures.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--pictures {arguments.pictures}: {error.strerror}", param="pictures") from error


def _drawing() -> Any:
    """Imports the module of pictures. Raises ConfigError without matplotlib, before a plan is made."""
    try:
        from hydra_planner import pictures
    except ImportError as error:
        raise ConfigError(
            "--pictures needs matplotlib; install it with `pip install matplotlib`", param="pictures"
        ) from error
    return pictures


def _question(arguments: argparse.Namespace, config: EngineConfig) -> Question:
    from hydra_engine.models.specs.registry import load_spec
    from hydra_planner.commands.devices import devices_of, with_mps, with_prices
    from hydra_planner.search.measure import Question
    from hydra_planner.search.plan import with_decoders
    from hydra_planner.slo import Limits
    from hydra_planner.workload.generators import LOADS, read_or_make

    text = arguments.workload
    if text in LOADS and arguments.objective != "offline":
        text = f"{text}@1"  # Poisson arrivals, stretched to each rate
    rows = read_or_make(text, _REQUESTS, 0)
    spec = load_spec(config.model_path, config.spec_options)
    given = config.scheduler
    offline = arguments.objective == "offline"
    ttft_s, tpot_s = (math.inf, math.inf) if offline else (_TTFT_S, _TPOT_S)
    limits = Limits(given.ttft_slo or ttft_s, given.tpot_slo or tpot_s)
    kinds, host = devices_of(arguments.devices, arguments.profile, config, spec)
    kinds = with_prices(with_mps(kinds) if arguments.mps else kinds, arguments.price)
    question = Question(spec, config, kinds, host, rows, limits)
    return with_decoders(question if offline else question.limited())


def _effort(arguments: argparse.Namespace) -> Effort:
    from hydra_planner.search.halving import Effort

    return Effort(seeds=arguments.seeds, workers=len(os.sched_getaffinity(0)))


def _only(arguments: argparse.Namespace, question: Question) -> list[Candidate]:
    if not arguments.topologies:
        return []
    from hydra_engine.core.instances import Topology, check_serves
    from hydra_planner.search.candidates import Candidate
    from hydra_planner.simulator.deployment import assign_devices

    found = []
    for text in arguments.topologies.split():
        topology = Topology.parse(text)
        check_serves(topology, question.spec.vision is not None)
        found.append(Candidate(topology.with_devices(assign_devices(topology, question.kinds)), text))
    return found


def _progress() -> Callable[[str, int], None]:
    """Returns a callback that logs a line for each part of the search."""

    def report(what: str, _: int) -> None:
        log.log_always(what)

    return report


def _write(arguments: argparse.Namespace, plan: Plan, title: str) -> None:
    if arguments.output is not None:
        try:
            arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")
        except OSError as error:
            raise ConfigError(f"the plan cannot be written: {error.strerror}", param="output") from error
    if arguments.pictures is not None:
        for path in _drawing().draw(plan, arguments.pictures, title):
            log.log_always(f"picture: {path}")


def _launch(plan: Plan, question: Question, server: ServerConfig) -> int:
    """Starts the server with the best topology. Raises ConfigError if this machine does not have the devices."""
    from hydra_engine.cli.serve import start

    config = replace(question.config, topology=plan.best.topology)
    for setting in plan.best.settings:
        config = setting.apply(config)
    return start(config, server)
