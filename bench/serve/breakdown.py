"""Mode `breakdown`: where a request's time goes, by the eight phases of HydraInfer's Figure 13. Our servers only.

Every request asks for its stage timeline. Two remainders are shown beside the phases, because the phases cover a
server's own latency by construction: what no span explains (`other`), and what the client saw beyond the server's
latency (sending, the socket, reading).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bench.serve.curve import first_goodput
from bench.serve.harness import Harness, say
from hydra_engine.core.outputs import StageSpan
from hydra_engine.telemetry.timeline import phases
from hydra_planner.records import Record, quantile

UNEXPLAINED = "other"


def run(harness: Harness) -> dict[str, Any]:
    settings = harness.settings
    rate = settings.rate or first_goodput(harness) / 2
    pooled: dict[str, list[Record]] = {server.name: [] for server in settings.servers}
    contents = [harness.next_content() for _ in range(settings.rounds)]
    for server, round_number in harness.turns():
        done = harness.load(harness.serving(server), rate, contents[round_number])
        pooled[server.name] += done.records
    servers = {name: _result(records) for name, records in pooled.items() if any(r.metrics for r in records)}
    return {"rate": rate, "servers": servers}


def timeline(record: Record) -> tuple[StageSpan, ...]:
    """The server's spans of a request, seconds since it arrived there; empty if it sent none."""
    return msgspec.convert((record.metrics or {}).get("timeline") or (), tuple[StageSpan, ...])


def _result(records: Sequence[Record]) -> dict[str, Any]:
    answered = [record for record in records if record.ok and record.metrics]
    own = [record.metrics for record in answered if record.metrics]
    shares = [phases(timeline(r), m["e2e_s"], ttft_s=m["ttft_s"]) for r, m in zip(answered, own, strict=True)]
    latencies = [metrics["e2e_s"] for metrics in own]
    residuals = [1 - _explained(found) / e2e_s for found, e2e_s in zip(shares, latencies, strict=True)]
    outside = [record.latency_s - e2e_s for record, e2e_s in zip(answered, latencies, strict=True)]
    return {
        "requests": len(answered),
        "phases": {
            name: {
                "mean_ms": round(1e3 * sum(found[name] for found in shares) / len(shares), 3),
                "p95_ms": round(1e3 * (quantile([found[name] for found in shares], 0.95) or 0.0), 3),
            }
            for name in (shares[0] if shares else ())
        },
        "latency_ms": _mean_and_p95(latencies),
        "unexplained": {"mean": round(sum(residuals) / len(residuals), 5), "max": round(max(residuals), 5)},
        "outside_ms": _mean_and_p95(outside),
        "client_latency_ms": _mean_and_p95([record.latency_s for record in answered]),
    }


def _explained(found: dict[str, float]) -> float:
    return sum(found.values()) - found[UNEXPLAINED]


def _mean_and_p95(values_s: Sequence[float]) -> dict[str, float]:
    return {
        "mean": round(1e3 * sum(values_s) / len(values_s), 3),
        "p95": round(1e3 * (quantile(values_s, 0.95) or 0.0), 3),
    }


def report(result: dict[str, Any]) -> None:
    for name, server in result["servers"].items():
        say(f"\n{name} at {result['rate']:.3g} requests/s, {server['requests']} requests: mean and p95, ms")
        latency = server["latency_ms"]["mean"]
        for phase, figures in server["phases"].items():
            mean, p95 = figures["mean_ms"], figures["p95_ms"]
            say(f"  {phase:16} {mean:10.2f} {p95:10.2f}  {mean / latency:6.1%}")
        say(f"  {'latency':16} {latency:10.2f} {server['latency_ms']['p95']:10.2f}")
        say(
            f"  the phases leave {server['unexplained']['mean']:.2%} of the latency unexplained on average, "
            f"{server['unexplained']['max']:.2%} at most; the client saw {server['outside_ms']['mean']:.2f} ms more"
        )
