"""Numbers that experiments take from the requests of a load themselves."""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.telemetry.timeline import PHASES, phases
from hydra_planner.records import Record, quantile
from hydra_planner.simulator.deployment import Deployment

GAPS = ("gap p50 ms", "p99 ms", "longest ms", "TTFT p90 ms")


def take_gaps(_deployment: Deployment, records: Sequence[Record]) -> dict[str, float]:
    gaps = [1e3 * gap for record in records for gap in record.gaps()]
    ttft = quantile([record.ttft_s for record in records if record.ttft_s is not None], 0.9) or 0.0
    found = (quantile(gaps, 0.5) or 0.0, quantile(gaps, 0.99) or 0.0, max(gaps), 1e3 * ttft)
    return dict(zip(GAPS, found, strict=True))


def take_phases(deployment: Deployment, records: Sequence[Record]) -> dict[str, float]:
    """Mean milliseconds of each phase, and the 95th percentile of pulls."""
    spent: dict[str, list[float]] = {phase: [] for phase in PHASES}
    pulls: dict[str, list[float]] = {"pull_features": [], "pull_kv": []}
    for record in records:
        result = deployment.results[record.index + 1]
        for phase, seconds in phases(result.timeline, result.metrics.e2e_s, ttft_s=result.metrics.ttft_s).items():
            spent[phase].append(seconds)
        for span in result.timeline:
            if span.stage in pulls:
                pulls[span.stage].append(1e3 * (span.end_s - span.start_s))
    found = {phase: 1e3 * sum(seconds) / len(seconds) for phase, seconds in spent.items()}
    return found | {name: quantile(taken, 0.95) or 0.0 for name, taken in pulls.items()}
