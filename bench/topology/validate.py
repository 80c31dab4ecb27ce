"""`validate`: is the simulator right? Deployments of real processes on this machine against predictions of the same
requests at the same times: means and 90th percentiles of TTFT and TPOT, and requests within limits per second.

Deployments are up one after the other, round after round, with other contents of equal sizes in each, so that what the
machine does besides falls on all alike. What a step costs comes from the profile, what preprocessing, copies and
messages cost from requests of one idle deployment; no number is fitted to a topology or a load. Before each deployment
one matrix product is timed, so that a reader sees whether the machine was as fast as when the run began. The model has
to be larger than the machine's last cache: else step times may depend on what ran before (docs/planning.md).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from statistics import mean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tqdm import tqdm

from bench.serve.harness import say
from bench.topology.loads import calls, rows
from bench.topology.real import load_of, pin, pulled_bytes
from hydra_engine import Engine
from hydra_engine.core.outputs import Result, StageSpan
from hydra_planner.records import quantile
from hydra_planner.simulator.deployment import Deployment, simulate
from hydra_planner.simulator.node import Site
from hydra_planner.simulator.requests import RequestMaker
from hydra_planner.work import decode_seconds, prefill_seconds, vision_seconds, works
from hydra_planner.workload.arrivals import Arrivals
from hydra_planner.workload.file import WorkloadRequest

TOPOLOGIES = "EPD,2EPD,EP+D,ED+P,E+PD,E+P+D,2E+PD,EP+2D,E+2PD,EPD+PD"
LOADS = (0.3, 0.6, 0.9)  # seconds of lanes a second, on the mean
_WARM_UP = 1 << 20  # content that no round has
_IDLE = 12  # requests from which preprocessing is measured
_FACTORS = (1.5, 1.5)  # limits: so many times the middle TTFT and TPOT that an idle EPD has by the simulator
_SIDE, _SPEEDS, _SPEED_S = 512, 5, 0.2  # of the matrix product that tells the machine's speed
FIGURES = ("ttft_mean", "ttft_p90", "tpot_mean", "tpot_p90")
_ALLOWED = {"mean": 0.15, "p90": 0.25}
_MIN_RANK = 0.9


class Times(NamedTuple):
    """Latencies of a request in seconds; `tpot_s` is None for one token."""

    ttft_s: float
    tpot_s: float | None


def run(options: argparse.Namespace, site: Site) -> dict[str, Any]:
    topologies = options.topologies.split(",")
    (device,) = site.devices.values()
    say(f"{device.costs.source}; all processes share cores {pin('')}")
    if options.measured is not None:
        points, site = _kept(options, site)
    else:
        site = _calibrated(options, site)
        points = _measured_points(topologies, _rates(options, site), options, site)
    _predict(points, options, site)
    limits = _limits(options, site)
    for point in points:
        for side in ("measured", "predicted"):
            point[f"{side}_figures"] = _figures(point[side], limits, point["seconds"])
    return {"host": _host_document(site), "limits_ms": [1e3 * limit for limit in limits], "points": points,
            **verdict(points)}  # fmt: skip


def _load(options: argparse.Namespace, rate: float, count: int, content: int = 0) -> list[WorkloadRequest]:
    times_s = Arrivals.parse(options.arrivals).times(rate, count, options.load.seed).tolist()
    return rows(options.load, times_s, content)


def _rates(options: argparse.Namespace, site: Site) -> list[float]:
    """Rates at which the lanes have `LOADS` seconds of work a second, with decodes in batches of four."""
    (device,) = site.devices.values()
    surface, found = device.costs.surface, list(works(site.spec, _load(options, 1.0, options.requests)))
    each_s = mean(
        vision_seconds(surface, w) + prefill_seconds(surface, w) + decode_seconds(surface, w, 4) for w in found
    )
    return [float(f"{share / each_s:.3g}") for share in LOADS]


def _calibrated(options: argparse.Namespace, site: Site) -> Site:
    """Adds what a profile does not have: preprocessing, copies and messages, measured with requests that come one by
    one to an idle deployment which hands their KV on."""
    load, content = _load(options, 0.2, _IDLE, _WARM_UP + 1), _WARM_UP + 1
    spans: dict[bool, list[float]] = {True: [], False: []}
    pixels, timelines = [], []
    with _serving("EP+D", options, site) as engine:
        before = pulled_bytes(engine)
        for row, call in zip(load, calls(load, RequestMaker(site.spec, content)), strict=True):
            result = engine.submit(call.prompt, call.images, sampling=replace(call.sampling, max_tokens=2)).result(60.0)
            took_s = [s.end_s - s.start_s for s in result.timeline if s.stage in ("tokenize", "preprocess")]
            timelines.append(result.timeline)
            spans[bool(row.pictures)].append(sum(took_s))
            pixels += [one.width * one.height for one in row.pictures]
        copied = pulled_bytes(engine) - before
    text_s = median(spans[False]) if spans[False] else 0.0
    picture_s = max(median(spans[True]) - text_s, 0.0) if spans[True] else 0.0
    host = replace(site.host, request_s=text_s, pixel_s=picture_s / mean(pixels) if pixels else 0.0, message_s=0.0)
    site = _with_copies(replace(site, host=host), _copy_rate(timelines, copied, host.pull_s))
    deployment = Deployment("EP+D", site, content=content)
    for row in load:
        deployment.submit(msgspec.structs.replace(row, output_tokens=2))
    deployment.run()
    without = [result.timeline for result in deployment.results.values()]
    message_s = max(_wait_for_copy(timelines) - _wait_for_copy(without), 0.0)
    return replace(site, host=replace(site.host, message_s=message_s))


def _copy_rate(timelines: Sequence[Sequence[StageSpan]], copied: int, pull_s: float) -> float:
    """Bytes per second of the middle one of the larger half of all pulls."""
    pulls = sorted((s for timeline in timelines for s in timeline if s.stage == "pull_kv"), key=lambda s: s.tokens)
    per_token_s = median(max(s.end_s - s.start_s - pull_s, 0.0) / s.tokens for s in pulls[len(pulls) // 2 :])
    return copied / sum(s.tokens for s in pulls) / max(per_token_s, 1e-9)


def _wait_for_copy(timelines: Sequence[Sequence[StageSpan]]) -> float:
    """Median time from the end of a prefill to the start of the copy of its KV; one message lies between them."""
    waits = []
    for timeline in timelines:
        start_s = next(s.start_s for s in timeline if s.stage == "pull_kv")
        waits.append(start_s - max(s.end_s for s in timeline if s.stage == "prefill" and s.end_s <= start_s))
    return median(waits)


def _with_copies(site: Site, bytes_per_s: float) -> Site:
    devices = {name: replace(kind, copy_bytes_per_s=bytes_per_s) for name, kind in site.devices.items()}
    return replace(site, devices=devices)


def _kept(options: argparse.Namespace, site: Site) -> tuple[list[dict[str, Any]], Site]:
    """The measured side of a document of this benchmark; the load must be given as it was then."""
    result = json.loads(options.measured.read_text(encoding="utf-8"))["result"]
    points = [{**point, "measured": [Times(*times) for times in point["measured"]]} for point in result["points"]]
    host = {name: value for name, value in result["host"].items() if name != "copy_bytes_per_s"}
    return points, _with_copies(replace(site, host=replace(site.host, **host)), result["host"]["copy_bytes_per_s"])


def _measured_points(
    topologies: Sequence[str], rates: Sequence[float], options: argparse.Namespace, site: Site
) -> list[dict[str, Any]]:
    """Measures a point for each topology and rate, with the times of all requests of all rounds."""
    points: list[dict[str, Any]] = [
        {"topology": topology, "rate": rate, "place": place, "seconds": 0.0, "speeds": [], "measured": []}
        for topology in topologies
        for place, rate in enumerate(rates)
    ]
    began = _speed()
    with tqdm(total=len(points) * options.rounds, unit="load", disable=None) as bar:
        for number, topology in product(range(options.rounds), topologies):
            speed = _speed() / began
            with _serving(topology, options, site) as engine:
                for point in [point for point in points if point["topology"] == topology]:
                    bar.set_postfix_str(f"{topology} at {point['rate']:.3g}/s")
                    load, content = _round(options, point, number)
                    point["measured"] += _measured(engine, load, site, content)
                    point["seconds"] += load[-1].at_s - load[0].at_s
                    point["speeds"].append(round(speed, 3))
                    bar.update()
    return points


def _round(options: argparse.Namespace, point: dict[str, Any], number: int) -> tuple[list[WorkloadRequest], int]:
    """The load, and its content: one of its own at each rate too, for nothing may be in the caches that another load
    has left there."""
    content = number * len(LOADS) + point["place"]
    return _load(options, point["rate"], options.requests, content), content


def _predict(points: Sequence[dict[str, Any]], options: argparse.Namespace, site: Site) -> None:
    for point in tqdm(points, unit="simulation", disable=None):
        rounds = [_round(options, point, number) for number in range(options.rounds)]
        point["predicted"] = [
            times for load, content in rounds for times in _predicted(point["topology"], load, site, content)
        ]


def _speed() -> float:
    """Matrix products of one thread per second, the median of several short measurements."""
    import torch

    one, rates = torch.ones(_SIDE, _SIDE), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(_SPEEDS):
        began_s, count = time.perf_counter(), 0
        while time.perf_counter() - began_s < _SPEED_S:
            torch.mm(one, one)
            count += 1
        rates.append(count / (time.perf_counter() - began_s))
    torch.set_num_threads(threads)
    return median(rates)


@contextlib.contextmanager
def _serving(topology: str, options: argparse.Namespace, site: Site) -> Iterator[Engine]:
    """Warm."""
    config = replace(site.config, topology=topology)
    with Engine.from_config(config, processes=True, progress=False) as engine:
        _measured(engine, _load(options, 2.0, 3, _WARM_UP), site, _WARM_UP)
        yield engine


def _measured(engine: Engine, load: Sequence[WorkloadRequest], site: Site, content: int) -> list[Times]:
    results, _ = load_of(engine, calls(load, RequestMaker(site.spec, content)), [row.at_s for row in load])
    return [_times(result) for result in results]


def _times(result: Result) -> Times:
    assert result.metrics.ttft_s is not None, "a request without a token"
    return Times(result.metrics.ttft_s, result.metrics.tpot_s)


def _predicted(topology: str, load: Sequence[WorkloadRequest], site: Site, content: int) -> list[Times]:
    records = simulate(topology, site, load, content)
    return [Times(record.ttft_s, record.tpot_s) for record in records if record.ttft_s is not None]


def _limits(options: argparse.Namespace, site: Site) -> tuple[float, float]:
    idle = _predicted("EPD", _load(options, 0.1, options.requests), site, 0)
    ttft_s, tpot_s = median(t.ttft_s for t in idle), median(t.tpot_s for t in idle if t.tpot_s is not None)
    return _FACTORS[0] * ttft_s, _FACTORS[1] * tpot_s


# ---- figures


def _figures(times: Sequence[Times], limits: tuple[float, float], seconds: float) -> dict[str, float]:
    """Milliseconds, and requests within both limits per second of arrivals."""
    ttft = [1e3 * one.ttft_s for one in times]
    tpot = [1e3 * one.tpot_s for one in times if one.tpot_s is not None]
    within = sum(one.ttft_s <= limits[0] and (one.tpot_s or 0.0) <= limits[1] for one in times)
    return {
        "ttft_mean": round(mean(ttft), 3),
        "ttft_p90": round(quantile(ttft, 0.9) or 0.0, 3),
        "tpot_mean": round(mean(tpot), 3),
        "tpot_p90": round(quantile(tpot, 0.9) or 0.0, 3),
        "goodput": round(within / seconds, 4),
    }


def verdict(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors are predicted over measured, less 1. `rank`: Spearman's correlation of goodput over all points."""
    errors = {name: [_error(point, name) for point in points] for name in FIGURES}
    return {
        "errors": {name: {"mean_abs": round(mean(map(abs, values)), 4), "largest": round(max(map(abs, values)), 4),
                          "within": sum(abs(value) <= _allowed(name) for value in values), "of": len(values)}
                   for name, values in errors.items()},
        "rank": round(_rank_correlation(*(
            [point[f"{side}_figures"]["goodput"] for point in points] for side in ("measured", "predicted"))), 4),
    }  # fmt: skip


def _error(point: dict[str, Any], name: str) -> float:
    measured: float = point["measured_figures"][name]
    return float(point["predicted_figures"][name] / measured - 1) if measured else 0.0


def _allowed(name: str) -> float:
    return _ALLOWED[name.split("_")[1]]


def _rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    first, second = (_ranks(values) for values in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    """Equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [mean(place for place, other in enumerate(ordered) if other == value) for value in values]


def _host_document(site: Site) -> dict[str, float]:
    (device,) = site.devices.values()
    found = {name: getattr(site.host, name) for name in ("request_s", "pixel_s", "message_s", "pull_s")}
    return {**found, "copy_bytes_per_s": device.copy_bytes_per_s}


def report(result: dict[str, Any]) -> None:
    for line in _lines(result):
        say(line)


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield "\nmeasured, predicted, error; milliseconds"
    yield (
        f"{'':8}{'rate':>6}" + "".join(f"{name.replace('_', ' ').upper():>26}" for name in FIGURES) + f"{'goodput':>16}"
    )
    for point in result["points"]:
        measured, predicted = point["measured_figures"], point["predicted_figures"]
        cells = "".join(f"{measured[n]:10.1f}{predicted[n]:9.1f}{_error(point, n):+7.0%}" for n in FIGURES)
        yield f"{point['topology']:8}{point['rate']:6.3g}{cells}{measured['goodput']:9.2f}{predicted['goodput']:7.2f}"
    for name, found in result["errors"].items():
        yield (
            f"{name.replace('_', ' ')}: {found['mean_abs']:.1%} off on the mean, {found['largest']:.0%} at most; "
            f"within {_allowed(name):.0%} at {found['within']} of {found['of']} points"
        )
    yield f"rank correlation of goodput: {result['rank']:.3f} (asked for: {_MIN_RANK})"
