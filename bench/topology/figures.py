"""Statistics of many requests, real or simulated, from their timelines.

Latencies that are compared between the two count from when a scheduler had the request: what comes before is not what
topologies differ in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra_engine.core.outputs import Result, StageSpan
from hydra_engine.telemetry.timeline import PHASES, intake_s, phases
from hydra_planner.records import quantile

_PULLS = frozenset({"pull_features", "pull_kv"})
_MOVES = _PULLS | {"offered"}
_RUNS = frozenset({"encode", "prefill", "decode"})


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of a request. Seconds since a scheduler had it; `phases` since it arrived."""

    ttft_s: float
    tpot_s: float | None
    latency_s: float
    num_tokens: int
    phases: dict[str, float]
    pulled_s: float  # copying, whether or not it delayed anything
    exposed_s: float


def sample_of(result: Result) -> Sample:
    metrics, timeline = result.metrics, result.timeline
    assert metrics.ttft_s is not None, "a request without a token"
    before_s = intake_s(timeline)
    return Sample(
        ttft_s=metrics.ttft_s - before_s,
        tpot_s=metrics.tpot_s,
        latency_s=metrics.e2e_s - before_s,
        num_tokens=len(result.token_ids),
        phases=phases(timeline, metrics.e2e_s, ttft_s=metrics.ttft_s),
        pulled_s=sum(span.end_s - span.start_s for span in timeline if span.stage in _PULLS),
        exposed_s=exposed_s(timeline),
    )


def exposed_s(timeline: Sequence[StageSpan]) -> float:
    """Seconds in which something of the request was on offer or being copied and no stage of it ran.

    An upper bound of what moving costs: if the target was busy with others, that wait is in it. The migration phases of
    `observe.phases` are a lower one, for any queue goes before them there.
    """
    edges: list[tuple[float, int, int]] = []
    for span in timeline:
        kind = 0 if span.stage in _MOVES else 1 if span.stage in _RUNS else None
        if kind is not None:
            edges += [(span.start_s, 1, kind), (span.end_s, -1, kind)]
    total_s, since_s, active = 0.0, 0.0, [0, 0]
    for at_s, change, kind in sorted(edges):
        if active[0] and not active[1]:
            total_s += at_s - since_s
        since_s = at_s
        active[kind] += change
    return total_s


def load_figures(samples: Sequence[Sample], wall_s: float) -> dict[str, float]:
    """Medians over the requests of one load, milliseconds; tokens per second."""
    tpots = [sample.tpot_s for sample in samples if sample.tpot_s is not None]
    return {
        "ttft_ms": round(1e3 * (quantile([sample.ttft_s for sample in samples], 0.5) or 0.0), 3),
        "tpot_ms": round(1e3 * (quantile(tpots, 0.5) or 0.0), 3),
        "latency_ms": round(1e3 * sum(sample.latency_s for sample in samples) / len(samples), 3),
        "tokens_per_s": round(sum(sample.num_tokens for sample in samples) / wall_s, 2),
    }


def breakdown(samples: Sequence[Sample]) -> dict[str, Any]:
    """Mean milliseconds of each phase, and what moving between instances had to do with the latency: see `exposed_s`;
    `pulled_ms` is time of copying, most of it hidden."""
    count = len(samples)
    latency_s = sum(sum(sample.phases.values()) for sample in samples)
    return {
        "phases_ms": {name: round(1e3 * sum(sample.phases[name] for sample in samples) / count, 3) for name in PHASES},
        "latency_ms": round(1e3 * latency_s / count, 3),
        "exposed_share": round(sum(sample.exposed_s for sample in samples) / latency_s, 5),
        "pulled_ms": round(1e3 * sum(sample.pulled_s for sample in samples) / count, 3),
    }
