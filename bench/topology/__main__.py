"""Topologies measured with real processes on this machine, and one request seen moving.

`python -m bench.topology real --profile FILE`: six small topologies on the cores of this machine, in turns, with a
breakdown of latencies, and how far the simulator of `hydra_planner` is off with the step times of that profile,
which `hydra-engine profile --output FILE` has written here. `validate`: the same question for ten topologies at three
rates, answered in errors of means and 90th percentiles. `timeline`: a request with two pictures through E, P and D.
Tables go to standard error; standard output is one JSON document, so `> bench/results/topology-validate.json` keeps it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from bench.common import card, emit
from bench.serve.harness import say
from bench.topology import real, timeline, validate
from hydra_engine.config import EngineConfig, SchedulerConfig
from hydra_engine.core.units import GIB
from hydra_engine.errors import HydraError
from hydra_engine.models.specs.registry import load_spec
from hydra_planner.simulator.costs import UNKNOWN, Costs, DeviceKind, read_costs
from hydra_planner.simulator.node import Site
from hydra_planner.workload.shapes import SHAPES
from hydra_terminal.load.workload import TEXT_SHARE_HELP, Workload

_MODES: dict[str, Any] = {"real": real, "validate": validate, "timeline": timeline}
_REQUESTS = {"real": (8, 24), "validate": (8, 20), "timeline": (1, 1)}  # of a load: quick, full
_MEMORY_BYTES = 16 * GIB  # of the simulated machine


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.pictures is not None or options.redraw is not None:
        from bench.topology import drawing  # noqa: F401  before the run: a missing matplotlib should not cost one
    if options.redraw is not None:
        document = json.loads(options.redraw.read_text(encoding="utf-8"))
    else:
        try:
            document = _measure(options)
        except (HydraError, ValueError) as error:
            say(f"bench.topology: {error}")
            return 1
    if options.pictures is not None:
        for path in _draw(document, options.pictures):
            say(f"picture: {path}")
    emit(document)
    return 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    mode = _MODES[options.mode]
    quick, full = _REQUESTS[options.mode]
    options.requests = options.requests or (quick if options.quick else full)
    options.load = Workload.named(
        options.workload, options.text_share, options.scale, not options.no_reuse, options.seed
    )
    if options.mode != "timeline":
        options.topologies = options.topologies or _MODES[options.mode].TOPOLOGIES
        options.rounds = options.rounds or (1 if options.quick else 3)
        real.pin(options.cores)
    site = site_of(options)
    result = mode.run(options, site)
    mode.report(result)
    shapes = options.load.shapes
    return {
        "bench": "topology",
        "mode": options.mode,
        "model": os.path.basename(options.model.rstrip("/")),
        "load": {
            **asdict(options.load),
            "workload": "mixed" if len(shapes) > 1 else shapes[0],
            "arrivals": options.arrivals,
            "requests": options.requests,
        },
        "costs": {name: kind.costs.document() for name, kind in site.devices.items()},
        "result": result,
        "card": card(),
        **_measured_card(options),
    }


def _measured_card(options: argparse.Namespace) -> dict[str, Any]:
    """The machine and time of the measurements, where only the predictions are new."""
    if options.measured is None:
        return {}
    document = json.loads(options.measured.read_text(encoding="utf-8"))
    return {"measured_card": document.get("measured_card", document["card"])}


def site_of(options: argparse.Namespace) -> Site:
    kind = _kind(options)
    config = EngineConfig(
        model=options.model,
        threads=options.threads,
        dtype="auto" if kind.costs is UNKNOWN else kind.costs.dtype,  # what was profiled is what runs
        scheduler=SchedulerConfig(token_budget=options.token_budget),
    )
    spec = load_spec(config.model_path, config.spec_options)
    if spec.vision is None:
        raise ValueError("the model has no vision tower; topologies with E need one")
    return Site(spec, config, {"cpu": kind})


def _kind(options: argparse.Namespace) -> DeviceKind:
    if options.mode == "timeline":
        return DeviceKind("cpu", UNKNOWN)  # nothing is simulated
    if options.mode == "validate" and options.measured is not None:
        kept = json.loads(options.measured.read_text(encoding="utf-8"))["costs"]["cpu"]
        return DeviceKind("cpu", msgspec.convert(kept, Costs), _MEMORY_BYTES)
    if options.profile is None:
        raise ValueError(
            f"{options.mode} needs --profile FILE, which `hydra-engine profile MODEL --output FILE` writes"
        )
    costs = read_costs(options.profile)
    if options.gbytes_per_s is None:
        return DeviceKind("cpu", costs, _MEMORY_BYTES)
    return DeviceKind("cpu", costs, _MEMORY_BYTES, copy_bytes_per_s=options.gbytes_per_s * 1e9)


def _draw(document: dict[str, Any], folder: Path) -> list[Path]:
    if document["mode"] == "timeline":
        folder.mkdir(parents=True, exist_ok=True)
        return [timeline.picture(document["result"], folder / "topology-timeline.png")]
    from bench.topology import drawing

    return drawing.draw(document, folder)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=tuple(_MODES))
    parser.add_argument("--model", default="demo", help="Hugging Face directory (default: demo)")
    parser.add_argument("--quick", action="store_true", help="few rounds and requests")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="write PNGs there (needs matplotlib)")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="only draw the pictures of a document kept before")
    _add_load(parser.add_argument_group("load"))
    _add_costs(parser.add_argument_group("costs"))
    _add_modes(parser)
    return parser


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--workload", default="mixed", help=f"mixed, or of {', '.join(SHAPES)} (default: mixed)")
    group.add_argument("--text-share", type=float, help=TEXT_SHARE_HELP)
    group.add_argument("--scale", type=float, default=0.5, help="shrinks picture sides, prompts and outputs")
    group.add_argument("--no-reuse", action="store_true", help="no two questions share a picture")
    group.add_argument("--arrivals", default="poisson", help="poisson, gamma:CV or onoff:ON,OFF seconds")
    group.add_argument("--requests", type=int, help="requests of each load")
    group.add_argument("--rate", type=float, help="requests per second")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--token-budget", type=int, default=SchedulerConfig().max_step_tokens)


def _add_costs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--profile", type=Path, metavar="FILE", help="written by `hydra-engine profile --output FILE`")
    group.add_argument("--threads", type=int, help="threads of a lane (default: all cores)")
    group.add_argument("--gbytes-per-s", type=float, help="of a pull between two instances")


def _add_modes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("real and validate")
    group.add_argument("--topologies", help=f"default: {real.TOPOLOGIES}; validate: {validate.TOPOLOGIES}")
    group.add_argument("--rounds", type=int)
    group.add_argument("--measured", type=Path, metavar="FILE", help="validate: only predict, for what a document has")
    group.add_argument("--cores", default="", help="pin everything to these, for example 0,1 (default: all)")
    group = parser.add_argument_group("timeline")
    group.add_argument("--topology", default="E+P+D")
    group.add_argument("--words", type=int, default=64, help="of the prompt, behind its two pictures")
    group.add_argument("--tokens", type=int, default=16, help="of the answer")


if __name__ == "__main__":
    sys.exit(main())
