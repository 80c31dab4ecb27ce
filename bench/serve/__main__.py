"""Serving under arrivals: SLO attainment and goodput, latency breakdown, tail, ablation and budgets.

Starts our server on MODEL (or takes servers that run already, ours or any OpenAI-compatible one), sends it seeded
synthetic requests shaped like TextCaps, POPE, MME, TextVQA and VizWiz in an open loop, and says who met the limits:
`python -m bench.serve --model DIR --workload textcaps --rates 1,2,4 --ttft-slo 1s --tpot-slo 40ms`. The last line of
the output is one JSON document with every request of every load.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from types import ModuleType
from typing import Any

from bench.common import card, emit, write_document
from bench.serve import ablation, breakdown, budget, curve, tail
from bench.serve.harness import Harness, say
from bench.serve.options import Settings, settings_from
from hydra_planner.slo import Limits
from hydra_terminal.load.target import ServerFailed

_MODES: dict[str, ModuleType] = {
    "curve": curve,
    "breakdown": breakdown,
    "tail": tail,
    "ablation": ablation,
    "budget": budget,
}


def main() -> int:
    settings = settings_from(None, __doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers that were started end too
    if settings.pictures is not None:
        from bench.serve import drawing  # before the run: a missing matplotlib should not cost one
    if settings.redraw is not None:
        document = json.loads(settings.redraw.read_text(encoding="utf-8"))
    else:
        try:
            document = measure(settings)
        except (ServerFailed, ValueError) as error:
            say(f"bench.serve: {error}")
            return 1
    if settings.pictures is not None:
        for path in drawing.draw(document, settings.pictures):
            say(f"picture: {path}")
    if settings.output is not None:
        write_document(settings.output, document)
    emit(document)
    return 0


def measure(settings: Settings) -> dict[str, Any]:
    """Raises ServerFailed where a server does not start or answers nothing. What ends a measurement takes no load with
    it that a mode has kept: the document is written without the others."""
    results: dict[str, Any] = {}

    def keep(result: dict[str, Any]) -> None:
        results[harness.mode] = result
        if settings.output is not None:
            document = _document(settings, harness.runs, harness.limits, results)
            write_document(settings.output, document | {"complete": False})

    with Harness(settings, keep) as harness:
        for mode in settings.modes:
            harness.mode = mode
            results[mode] = _MODES[mode].run(harness)
            _MODES[mode].report(results[mode])
        limits = harness.limits
    if settings.trace is not None:
        _write_trace(settings, harness)
    return _document(settings, harness.runs, limits, results)


def _write_trace(settings: Settings, harness: Harness) -> None:
    from bench.serve import trace

    assert settings.trace is not None
    title = f"bench serve {harness.traced_from}: {os.path.basename(settings.model.rstrip('/'))}"
    picture = trace.write(harness.traced, settings.trace, title)
    say(f"trace: {settings.trace}, {picture}" if picture else "no server sent a timeline, so there is no trace")


def _document(
    settings: Settings, runs: list[dict[str, Any]], limits: Limits, results: dict[str, Any]
) -> dict[str, Any]:
    workload = settings.workload
    return {
        "bench": "serve",
        "model": os.path.basename(settings.model.rstrip("/")),
        "servers": [server.document() for server in settings.servers],
        "limits": {
            "ttft_ms": limits.ttft_s * 1e3,
            "tpot_ms": limits.tpot_limit_s * 1e3,
            "source": limits.source,
            "to_server": settings.limits_to_server,
        },
        "load": {
            **asdict(workload),
            "workload": "mixed" if len(workload.shapes) > 1 else workload.shapes[0],
            "arrivals": str(settings.arrivals),
            "requests": settings.requests,
            "load_seconds": settings.load_s,
            "alone": settings.alone,
            "rounds": settings.rounds,
        },
        "tail": {
            "streams": settings.streams,
            "stream_tokens": settings.stream_tokens,
            "burst": settings.burst,
            "burst_every_s": settings.burst_every_s,
        },
        "budget": {"concurrency": settings.concurrency, "seconds": settings.seconds},
        "results": results,
        "runs": runs,
        "card": card(),
    }


if __name__ == "__main__":
    sys.exit(main())
