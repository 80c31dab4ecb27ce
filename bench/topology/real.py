"""`real`: small topologies of real processes on this machine, and what the simulator says of the same loads.

All processes are pinned to the same cores, so more instances are not faster: what shows is the price of taking stages
apart, and who disturbs whom. All deployments are up at once and take turns, round after round, with the same requests
at the same times; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from tqdm import tqdm

from bench.serve.harness import say
from bench.topology.figures import Sample, breakdown, load_figures, sample_of
from bench.topology.loads import Call, calls, rows
from hydra_engine import Engine
from hydra_engine.core.outputs import Result
from hydra_engine.errors import HydraError
from hydra_engine.telemetry.timeline import PHASES
from hydra_planner.simulator.deployment import Deployment
from hydra_planner.simulator.node import Site
from hydra_planner.simulator.requests import RequestMaker
from hydra_planner.workload.arrivals import Arrivals
from hydra_planner.workload.file import WorkloadRequest

TOPOLOGIES = "EPD,2EPD,EP+D,ED+P,E+PD,E+P+D"
COMPARED = ("ttft_ms", "tpot_ms", "latency_ms", "tokens_per_s")
_RATE = 1.5  # requests per second where none is given: little enough for a small model on two cores
_ANSWER_S = 120.0
_WARM_UP = 1 << 20  # content that no round has
_REPORT_S = 0.6  # until every instance has reported its counters again


def pin(cores: str) -> list[int]:
    """Pins this process, and all that it starts from here on, to `cores`, for example "0,1"; "" changes nothing.
    Returns the cores that it may use."""
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    return sorted(os.sched_getaffinity(0))


def run(options: argparse.Namespace, site: Site) -> dict[str, Any]:
    topologies, rate = options.topologies.split(","), options.rate or _RATE
    times_s: list[float] = Arrivals.parse(options.arrivals).times(rate, options.requests, options.load.seed).tolist()
    rounds = [rows(options.load, times_s, content) for content in range(options.rounds)]
    (device,) = site.devices.values()
    say(f"{device.costs.source}; {rate:.3g} requests/s, {options.rounds} round(s) of {options.requests}")
    say(f"all processes share cores {pin('')}: this is about overhead and interference, not about speed-up")
    measured = _measure(topologies, rounds, options, site)
    found = []
    for topology in tqdm(topologies, unit="simulation", disable=None):
        simulated = [predict(topology, site, load, content) for content, load in enumerate(rounds)]
        found.append({"topology": topology, **measured[topology], "simulated": _pooled(simulated)})
    add_errors(found)
    return {"rate": rate, "requests": options.requests, "rounds": options.rounds, "topologies": found}


# ---- measured


def _measure(
    topologies: Sequence[str],
    rounds: Sequence[Sequence[WorkloadRequest]],
    options: argparse.Namespace,
    site: Site,
) -> dict[str, dict[str, Any]]:
    loads: dict[str, list[tuple[list[Sample], float]]] = {topology: [] for topology in topologies}
    moved = dict.fromkeys(topologies, 0)
    errors = dict.fromkeys(topologies, 0)
    with contextlib.ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for topology in tqdm(topologies, unit="deployment", disable=None):
            config = replace(site.config, topology=topology)
            engines[topology] = stack.enter_context(Engine.from_config(config, processes=True, progress=False))
        warm_up = calls(rows(options.load, [0.0, 0.2], _WARM_UP), RequestMaker(site.spec, _WARM_UP))
        for topology in tqdm(topologies, unit="warm-up", disable=None):
            load_of(engines[topology], warm_up, [0.0, 0.2])
        with tqdm(total=len(rounds) * len(topologies), unit="load", disable=None) as bar:
            for content, load in enumerate(rounds):
                made, times_s = calls(load, RequestMaker(site.spec, content)), [row.at_s for row in load]
                for topology in topologies:
                    bar.set_postfix_str(topology)
                    before = pulled_bytes(engines[topology])
                    results, wall_s = load_of(engines[topology], made, times_s)
                    moved[topology] += pulled_bytes(engines[topology]) - before
                    errors[topology] += len(load) - len(results)
                    loads[topology].append(([sample_of(result) for result in results], wall_s))
                    bar.update()
    return {
        topology: {
            "measured": _pooled(loads[topology]),
            "moved_bytes": moved[topology],
            "moved_bytes_per_request": round(moved[topology] / sum(map(len, rounds))),
            "errors": errors[topology],
        }
        for topology in topologies
    }


def load_of(engine: Engine, load: Sequence[Call], times_s: Sequence[float]) -> tuple[list[Result], float]:
    """Results of those that succeeded, and seconds from the first arrival to the last end. An open loop."""
    began_s, handles = time.monotonic(), []
    for call, time_s in zip(load, times_s, strict=True):
        time.sleep(max(0.0, began_s + time_s - time.monotonic()))
        handles.append(engine.submit(call.prompt, call.images, sampling=call.sampling))
    results = []
    for handle in handles:
        try:
            results.append(handle.result(_ANSWER_S))
        except HydraError as error:
            say(f"a request failed: {error}")
    return results, time.monotonic() - began_s - times_s[0]


def pulled_bytes(engine: Engine) -> int:
    time.sleep(_REPORT_S)
    return sum(status.transfer.pulled_bytes for status in engine.statuses().values())


# ---- simulated


def predict(topology: str, site: Site, load: Sequence[WorkloadRequest], content: int = 0) -> tuple[list[Sample], float]:
    """The same load on one simulated machine whose cores all instances share."""
    deployment = Deployment(topology, site, content=content)
    for row in load:
        deployment.submit(row)
    records = deployment.run()
    samples = [sample_of(result) for _, result in sorted(deployment.results.items()) if result.error is None]
    return samples, max(record.end_s for record in records) - load[0].at_s


# ---- both


def _pooled(loads: Sequence[tuple[list[Sample], float]]) -> dict[str, Any]:
    """Medians over the rounds, the breakdown of all requests together."""
    kept = [(samples, wall_s) for samples, wall_s in loads if samples]
    if not kept:
        raise ValueError("no request succeeded")
    figures = [load_figures(samples, wall_s) for samples, wall_s in kept]
    middle = {name: round(median(one[name] for one in figures), 3) for name in COMPARED}
    return {**middle, "rounds": figures, "breakdown": breakdown([s for samples, _ in kept for s in samples])}


def add_errors(rows: Sequence[dict[str, Any]]) -> None:
    """`error`: predicted over measured, less 1. `relative_error`: the same of what is gained or lost against the first
    topology, so that it does not count whether the machine is as fast now as when it was profiled."""
    for row in rows:
        row["error"] = {name: _error(row["simulated"][name], row["measured"][name]) for name in COMPARED}
    first = rows[0]["error"]
    for row in rows:
        row["relative_error"] = {name: _error(1 + row["error"][name], 1 + first[name]) for name in COMPARED}


def _error(predicted: float, measured: float) -> float:
    return round(predicted / measured - 1, 4) if measured else 0.0


def report(result: dict[str, Any]) -> None:
    say(f"\nmedians of {result['rounds']} round(s) at {result['rate']:.3g} requests/s: measured, simulated, error")
    say("(in brackets against the first topology, whatever the machine's speed of the day)")
    titles = {"ttft_ms": "TTFT, ms", "tpot_ms": "TPOT, ms", "latency_ms": "latency, ms", "tokens_per_s": "tokens/s"}
    say(f"{'topology':9}" + "".join(f"{titles[name]:>33}" for name in COMPARED) + f"{'moved':>12} {'exposed':>8}")
    for row in result["topologies"]:
        cells = "".join(
            f"{row['measured'][name]:10.1f}{row['simulated'][name]:9.1f}{row['error'][name]:+7.0%}"
            f"{_bracketed(row['relative_error'][name]):>7}"
            for name in COMPARED
        )
        exposed = row["measured"]["breakdown"]["exposed_share"]
        say(f"{row['topology']:9}{cells}{row['moved_bytes_per_request'] / 1024:8.0f} KiB {exposed:8.2%}")
    say("\nmean milliseconds of each phase, measured / simulated")
    shown = [phase for phase in PHASES if any(_phase(row, "measured", phase) > 0.005 for row in result["topologies"])]
    say(f"{'':9}" + "".join(f"{phase:>17}" for phase in shown))
    for row in result["topologies"]:
        pairs = (f"{_phase(row, 'measured', p):.1f} / {_phase(row, 'simulated', p):.1f}" for p in shown)
        say(f"{row['topology']:9}" + "".join(f"{pair:>17}" for pair in pairs))


def _phase(row: dict[str, Any], side: str, phase: str) -> float:
    value: float = row[side]["breakdown"]["phases_ms"][phase]
    return value


def _bracketed(share: float) -> str:
    return f"({share:+.0%})"
