"""Routing alone: microseconds of a decision by the number of instances, with estimates that are kept since the last one
(`bench.routing`), and with all of them made anew, as between two decisions every instance has computed a step; and
which functions take the time."""

from __future__ import annotations

import cProfile
import pstats
import time
from statistics import median
from typing import Any

from bench.routing import measure, request, table, topologies
from hydra_engine.frontend.routing.router import Router

_DECISIONS = 200
_SHOWN = 8  # functions


def run(sizes: list[int]) -> dict[str, Any]:
    rows = []
    for size in sizes:
        for name, roles in topologies(size).items():
            kept = {what: 1e6 * median(took) for what, took in measure(roles, _DECISIONS).items() if took}
            rows.append({"instances": size, "topology": name, "kept_us": kept, "anew_us": 1e6 * _anew(roles)})
    profile = cProfile.Profile(time.thread_time)
    _anew(topologies(max(sizes))[f"{max(sizes)}EPD"], profile)
    return {"rows": rows, "profile": _shares(profile)}


def _anew(roles: list[str], profile: cProfile.Profile | None = None) -> float:
    """Median seconds of a choice of the prefilling instance, between which all loads change."""
    instances = table(roles, 0)
    router, seconds = Router(instances), []
    for number in range(_DECISIONS):
        for load in instances.values():
            load.decode_tokens += load.decodes
        asked = request(number)
        began_s = time.thread_time()
        if profile is None:
            router.route(asked)
        else:
            profile.runcall(router.route, asked)
        seconds.append(time.thread_time() - began_s)
    return median(seconds)


def _shares(profile: cProfile.Profile) -> list[dict[str, Any]]:
    """Functions with the most own time, and their shares."""
    stats: Any = pstats.Stats(profile)
    own = sorted(((tottime, name) for (_, _, name), (_, _, tottime, _, _) in stats.stats.items()), reverse=True)
    total = sum(tottime for tottime, _ in own)
    return [{"function": name, "share": tottime / total} for tottime, name in own[:_SHOWN]]
