"""Mode `ablation`: goodput with everything on, then without one thing at a time (HydraInfer, Figure 14).

Limits, workload and arrivals are the same for all; each round serves all configurations in turns, and everything on
once more at its end: how far that is from 1 says what the machine's noise alone makes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bench.serve.curve import find_goodput
from bench.serve.harness import Harness, say
from bench.serve.servers import ours
from hydra_planner.slo import Goodput, goodput

EVERYTHING = "everything on"
AGAIN = "everything on, again"
ALL_ON = "--look-ahead"  # the only switch that is off by default
SWITCHES: Mapping[str, str] = {"look-ahead": "--no-look-ahead", "reuse": "--no-prefix-caching"}  # flags
BASELINES: Mapping[str, str] = {"stage schedule": "request-level", "lanes": "one-lane", "slicing": "unsliced"}


def run(harness: Harness) -> dict[str, Any]:
    """Raises ValueError for a switch that does not exist."""
    settings = harness.settings
    chosen = settings.switches or (*BASELINES, *SWITCHES)
    if unknown := [name for name in chosen if name not in (*BASELINES, *SWITCHES)]:
        raise ValueError(f"no switch is called {unknown[0]!r}; there are {', '.join((*BASELINES, *SWITCHES))}")
    configurations = (EVERYTHING, *chosen, AGAIN)
    found: dict[str, list[Goodput]] = {name: [] for name in configurations}
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in configurations}
    start = harness.goodput or harness.idle_rate
    for _ in range(settings.rounds):
        for name in configurations:
            flags = f"{settings.server_flags} {ALL_ON} {SWITCHES.get(name, '')}"
            server = ours(label(name), settings.model, flags, baseline=BASELINES.get(name, ""))
            measured = find_goodput(harness, harness.serving(server), start)
            points[name] += measured
            found[name].append(goodput(measured))
            if name == EVERYTHING:
                start = found[name][-1].rate
    medians = {name: statistics.median(each.rate for each in rounds) for name, rounds in found.items()}
    return {
        "switches": {
            name: {
                "flags": SWITCHES.get(name, ""),
                "baseline": BASELINES.get(name, ""),
                "goodput": medians[name],
                "rounds": [asdict(each) for each in found[name]],
                "ratio": round(medians[EVERYTHING] / medians[name], 3),
                "points": points[name],
            }
            for name in configurations
        }
    }


def label(name: str) -> str:
    return name if name in (EVERYTHING, AGAIN) else f"{name} off"


def report(result: dict[str, Any]) -> None:
    say(f"\n{'':22} {'goodput, requests/s':>20} {'on / off':>9}")
    for name, switch in result["switches"].items():
        say(f"{label(name):22} {switch['goodput']:20.3g} {switch['ratio']:9.2f}")
