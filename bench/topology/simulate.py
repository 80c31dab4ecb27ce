"""`simulate`: TTFT, TPOT, throughput and goodput against the ratio of roles, as HydraInfer's Figure 11, on devices that
are not here.

Every topology gets the same seeded load at every rate. Where no limits are given they are multiples of what the
simulated deployment of EPD takes when it is idle, and the instances are told them, so budgets are at work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from tqdm import tqdm

from bench.serve.arrivals import Arrivals
from bench.serve.harness import say
from bench.serve.records import Record, quantile
from bench.serve.slo import Limits, goodput
from bench.serve.workload import Workload
from bench.topology.asks import Ask, asks, request_of
from bench.topology.cluster import Cluster
from bench.topology.figures import point
from bench.topology.node import Site
from bench.topology.ratios import EPD, ratios
from hydra_engine.core.cost import LanguageLoad, VisionLoad

_TTFT_FACTOR, _TPOT_FACTOR = 5.0, 3.0
_IDLE_REQUESTS = 8
_LOADS = (0.4, 0.6, 0.8, 1.0, 1.2)  # of the capacity that is estimated
_QUICK_LOADS = (0.4, 0.8)
_TYPICAL_BATCH = 8  # of decodes, in the estimate


def run(options: argparse.Namespace, site: Site) -> dict[str, Any]:
    workload: Workload = options.load
    families = _families(options)
    load = asks(workload, options.requests, site.spec)
    capacity = options.devices / mean_work_s(load, site)
    loads = _QUICK_LOADS if options.quick else _LOADS
    rates = options.rates or [float(f"{share * capacity:.3g}") for share in loads]
    limits = _limits(options, site, load)
    say(
        f"{site.costs.source}; a request has {1e3 * options.devices / capacity:.0f} ms of work on the mean, so "
        f"{options.devices} devices have done about {capacity:.3g} a second; TTFT <= {limits.ttft_s * 1e3:.0f} ms, "
        f"TPOT <= {limits.tpot_s * 1e3:.3g} ms ({limits.source})"
    )
    limited = site if options.no_limits else _with_limits(site, limits)
    rows = _measure(families, rates, load, limits, limited, options)
    for row in rows:
        points = [(point["rate"], point["attainment"]) for point in row["points"]]
        row["goodput"] = asdict(goodput(points))
    return {
        "devices": options.devices,
        "rates": rates,
        "shown_rate": _shown_rate(options, rates),
        "capacity": round(capacity, 4),
        "limits": {"ttft_ms": limits.ttft_s * 1e3, "tpot_ms": limits.tpot_s * 1e3, "source": limits.source},
        "limits_to_engine": not options.no_limits,
        "topologies": rows,
    }


def simulate(topology: str, site: Site, load: Sequence[Ask], times_s: Sequence[float]) -> list[Record]:
    """One load, each device a machine of its own."""
    cluster = Cluster(topology, site)
    for ask, time_s in zip(load, times_s, strict=True):
        cluster.submit(ask, float(time_s))
    return cluster.run()


def mean_work_s(load: Sequence[Ask], site: Site) -> float:
    """Seconds of both lanes for a request, with nothing beside it and decodes in batches."""
    surface, total_s = site.costs.surface, 0.0
    for number, ask in enumerate(load, start=1):
        request, _ = request_of(ask, site.spec, number, 0.0)
        patches = [image.num_patches for image in request.images]
        if patches:
            total_s += surface.vision_s(VisionLoad(sum(patches), float(sum(count * count for count in patches))))
        tokens = request.num_prompt
        total_s += surface.language_s(LanguageLoad(0, 0, tokens, tokens * (tokens + 1) / 2, 1))
        decodes = LanguageLoad(_TYPICAL_BATCH, _TYPICAL_BATCH * tokens)
        total_s += (ask.max_tokens - 1) * surface.language_s(decodes) / _TYPICAL_BATCH
    return total_s / len(load)


def _families(options: argparse.Namespace) -> dict[str, list[str]]:
    by_family = ratios(options.devices, quick=options.quick)
    chosen = options.families.split(",") if options.families else list(by_family)
    if unknown := [family for family in chosen if family not in by_family]:
        raise ValueError(f"no family is called {unknown[0]!r}; there are {', '.join(by_family)}")
    return {family: by_family[family] for family in by_family if family in chosen}


def _limits(options: argparse.Namespace, site: Site, load: Sequence[Ask]) -> Limits:
    """As given, or multiples of what one request at a time takes."""
    if options.ttft_slo is not None and options.tpot_slo is not None:
        return Limits(options.ttft_slo, options.tpot_slo)
    some = load[:_IDLE_REQUESTS]
    apart_s = 100 * mean_work_s(some, site)
    records = simulate(f"{options.devices}EPD", site, some, [index * apart_s for index in range(len(some))])
    ttft_s = quantile([record.ttft_s for record in records if record.ttft_s is not None], 0.5)
    gap_s = quantile([gap for record in records for gap in record.gaps()], 0.5)
    if ttft_s is None or gap_s is None:
        raise ValueError("the workload has no two tokens between which time could pass")
    return Limits(
        options.ttft_slo or _TTFT_FACTOR * ttft_s,
        options.tpot_slo or _TPOT_FACTOR * gap_s,
        source=f"{_TTFT_FACTOR:g} TTFTs and {_TPOT_FACTOR:g} gaps of an idle {EPD}",
    )


def _with_limits(site: Site, limits: Limits) -> Site:
    scheduler = replace(site.config.scheduler, ttft_slo=limits.ttft_s, tpot_slo=limits.tpot_s)
    return replace(site, config=replace(site.config, scheduler=scheduler))


def _measure(
    families: dict[str, list[str]],
    rates: Sequence[float],
    load: Sequence[Ask],
    limits: Limits,
    site: Site,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    arrivals, seed = Arrivals.parse(options.arrivals), options.load.seed
    rows = []
    with tqdm(total=len(rates) * sum(map(len, families.values())), unit="load", disable=None) as bar:
        for family, topologies in families.items():
            for topology in topologies:
                points = []
                for rate in rates:
                    bar.set_postfix_str(f"{topology} at {rate:g}/s")
                    times_s = arrivals.times(rate, len(load), seed).tolist()
                    points.append({"rate": rate, **point(simulate(topology, site, load, times_s), limits)})
                    bar.update()
                rows.append({"topology": topology, "family": family, "points": points})
    return rows


def _shown_rate(options: argparse.Namespace, rates: Sequence[float]) -> float:
    """At which latencies are drawn over ratios: as asked, or the middle one."""
    if options.rate is None:
        return sorted(rates)[len(rates) // 2]
    return min(rates, key=lambda rate: abs(rate - options.rate))


HEADER = (
    f"{'topology':10} {'rate':>6}  {'TTFT ms p50':>11} {'p90':>7} {'p99':>7}  {'TPOT ms p50':>11} {'p90':>7} {'p99':>7}"
    f"  {'tokens/s':>8} {'within':>6} {'errors':>6}"
)


def report(result: dict[str, Any]) -> None:
    say(HEADER)
    for row in result["topologies"]:
        for load in row["points"]:
            ttft, tpot = (
                [f"{load[name][share] or 0.0:.1f}" for share in ("p50", "p90", "p99")]
                for name in ("ttft_ms", "tpot_ms")
            )
            say(
                f"{row['topology']:10} {load['rate']:6.3g}  {ttft[0]:>11} {ttft[1]:>7} {ttft[2]:>7}  {tpot[0]:>11} "
                f"{tpot[1]:>7} {tpot[2]:>7}  {load['tokens_per_s']:8.1f} {load['attainment']:6.0%} {load['errors']:6}"
            )
    say("\ngoodput at 90 % within both limits, requests/s")
    signs = {"exact": "", "at_least": ">= ", "at_most": "< "}
    for row in sorted(result["topologies"], key=goodput_of, reverse=True):
        goodput = row["goodput"]
        say(f"  {row['topology']:10} {signs[goodput['bound']]}{goodput['rate']:.3g}")


def goodput_of(row: dict[str, Any]) -> tuple[float, float]:
    """For sorting: `at_most` is below that rate, and equal goodputs go by how many requests were within limits."""
    goodput = row["goodput"]
    rate = 0.0 if goodput["bound"] == "at_most" else goodput["rate"]
    return rate, sum(point["attainment"] for point in row["points"])
