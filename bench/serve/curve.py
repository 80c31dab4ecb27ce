"""Mode `curve`: SLO attainment over request rates for every server, and its goodput (HydraInfer, Figure 10).

Where no rates are given, the first server's goodput is searched for and rates around it are taken, the same for all.
With `--alone` each server answers requests one after another first: what one takes with nothing beside it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.serve.harness import Harness, say, summary
from hydra_planner.records import Record
from hydra_planner.slo import SHARE, goodput, search
from hydra_terminal.load.target import Target

_AROUND = (0.4, 0.7, 0.9, 1.1, 1.4, 2.0)
_AROUND_QUICK = (0.5, 0.9, 1.2, 2.0)

Pooled = dict[float, list[Record]]  # requests of one server by rate


def run(harness: Harness) -> dict[str, Any]:
    settings = harness.settings
    rates = settings.rates or _find_rates(harness)
    pooled: dict[str, Pooled] = {server.name: {} for server in settings.servers}
    alone: dict[str, dict[str, Any]] = {}
    alone_content = harness.next_content() if settings.alone else 0
    contents = {(rate, n): harness.next_content() for rate in rates for n in range(settings.rounds)}
    for server, round_number in harness.turns():
        target, by_rate = harness.serving(server), pooled[server.name]
        if settings.alone and round_number == 0:
            records = harness.alone(target, settings.alone, alone_content).records
            alone[server.name] = summary(records, harness.limits)
            harness.keep({"servers": _results(harness, pooled, alone)})
        for rate in rates:
            done = harness.load(target, rate, contents[rate, round_number], round=round_number)
            by_rate.setdefault(rate, []).extend(done.records)
            harness.keep({"servers": _results(harness, pooled, alone)})
        if settings.rates and round_number == settings.rounds - 1:
            _narrow(harness, target, by_rate)
    results = _results(harness, pooled, alone)
    harness.goodput = results[settings.servers[0].name]["goodput"]["rate"]
    return {"servers": results}


def _results(
    harness: Harness, pooled: dict[str, Pooled], alone: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Results of the servers that have answered anything so far."""
    results = {}
    for name, by_rate in pooled.items():
        if by_rate or name in alone:
            results[name] = _result(harness, by_rate) | ({"alone": alone[name]} if name in alone else {})
    return results


def first_goodput(harness: Harness) -> float:
    """The first server's, searched for if no mode has found it yet."""
    if harness.goodput is None:
        start = harness.idle_rate
        target = harness.serving(harness.settings.servers[0])
        harness.goodput = goodput(find_goodput(harness, target, start)).rate
    return harness.goodput


def find_goodput(harness: Harness, target: Target, start: float) -> list[tuple[float, float]]:
    """Points of a search for the target's goodput, beginning at `start` requests per second."""

    def measure(rate: float) -> float:
        return harness.limits.attainment(harness.load(target, rate, harness.next_content()).records)

    return search(measure, start, harness.settings.bisect)


def _find_rates(harness: Harness) -> tuple[float, ...]:
    around = _AROUND_QUICK if harness.settings.quick else _AROUND
    goodput = first_goodput(harness)
    return tuple(round(goodput * share, 4) for share in around)


def _narrow(harness: Harness, target: Target, by_rate: Pooled) -> None:
    """Halves the interval in which attainment falls below 90 %, as often as was asked."""
    for _ in range(harness.settings.bisect):
        points = sorted((rate, harness.limits.attainment(records)) for rate, records in by_rate.items())
        bad = next((rate for rate, attained in points if attained < SHARE), None)
        good = [rate for rate, _ in points if bad is not None and rate < bad]
        if bad is None or not good:
            return
        rate = round((good[-1] * bad) ** 0.5, 4)
        by_rate[rate] = list(harness.load(target, rate, harness.next_content()).records)


def _result(harness: Harness, by_rate: Pooled) -> dict[str, Any]:
    points = [{"rate": rate, **summary(records, harness.limits)} for rate, records in sorted(by_rate.items())]
    found = [(point["rate"], point["attainment"]) for point in points]
    return {"points": points} | ({"goodput": asdict(goodput(found))} if found else {})


def report(result: dict[str, Any]) -> None:
    heads = f"{'rate':>8} {'attained':>8} {'TTFT':>6} {'TPOT':>6} {'TTFT p90 ms':>12} {'gap p99 ms':>11} tok/s"
    say(f"\n{'server':20} {heads}")
    for name, server in result["servers"].items():
        for p in server["points"]:
            ttft, gap = p["ttft_ms"]["p90"] or float("nan"), p["gap_ms"]["p99"] or float("nan")
            say(
                f"{name:20} {p['rate']:8.3g} {p['attainment']:8.0%} {p['ttft_met']:6.0%} {p['tpot_met']:6.0%} "
                f"{ttft:12.1f} {gap:11.2f} {p['tokens_per_s']:.1f}"
            )
    for name, server in result["servers"].items():
        if "alone" in server:
            ttft, gap = server["alone"]["ttft_ms"], server["alone"]["gap_ms"]
            times = f"TTFT p50 {ttft['p50']} ms, gap p50 {gap['p50']} ms, p99 {gap['p99']} ms"
            say(f"{name}, one request at a time: {times}")
        goodput = server["goodput"]
        say(f"goodput of {name}: {goodput['rate']:.3g} requests/s ({goodput['bound'].replace('_', ' ')})")
