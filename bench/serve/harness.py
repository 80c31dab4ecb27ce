"""The harness of all modes: serves, warms up, finds limits, runs loads in turns, keeps records. Does not know the
modes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from types import TracebackType
from typing import Any, Self

from bench.serve.options import Settings
from bench.serve.servers import Server, running
from hydra_planner.records import Record, quantile
from hydra_planner.slo import Limits
from hydra_terminal.load.loops import Run, closed_loop, open_loop
from hydra_terminal.load.target import ServerFailed, Target
from hydra_terminal.load.workload import Spec

# Limits where none are given: so many times what the idle server takes, and never below what a client can stamp.
_TTFT_FACTOR, _TPOT_FACTOR = 5.0, 3.0
_MIN_TTFT_S, _MIN_TPOT_S = 0.05, 0.005
_IDLE_REQUESTS = 6
_WARM_UP_REQUESTS = 3
_WARM_UP_CONTENT = 1 << 20  # from here on content numbers that no load has


class Harness:
    """`runs` collects a document of every load; `traced` the records of the latest one that has stage timelines; `keep`
    takes what a mode's result would be if it ended now.

    `with` ends the server that runs last: one stays up until another command is asked for, because starting one takes
    longer than a load on a small model, and no load finds anything of another in its caches.
    """

    def __init__(self, settings: Settings, keep: Callable[[dict[str, Any]], None]) -> None:
        self.settings = settings
        self.keep = keep
        self.runs: list[dict[str, Any]] = []
        self.traced: Sequence[Record] = ()
        self.traced_from = ""
        self.mode = ""
        self.goodput: float | None = None  # of the first server, once it is measured
        self._limits = settings.limits
        self._running = contextlib.ExitStack()
        self._current: tuple[tuple[str, ...], Target] | None = None
        self._content = 0
        self._warm_ups = 0
        self._idle_latency_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._running.close()

    # ---- servers

    def serving(self, server: Server, with_limits: bool = True) -> Target:
        """A warm server; the one before ends, unless it is the same. Ours gets the limits, unless that was turned
        off. Raises ServerFailed."""
        extra: tuple[str, ...] = ()
        if server.takes_limits and with_limits and self.settings.limits_to_server:
            limits = self.limits
            extra = ("--ttft-slo", f"{limits.ttft_s:.6f}", "--tpot-slo", f"{limits.tpot_limit_s:.6f}")
        wanted = (*server.command, *extra, server.base_url)
        if self._current is not None and self._current[0] == wanted:
            return replace(self._current[1], name=server.name)
        self._current = None
        self._running.close()
        target = self._running.enter_context(running(server, extra))
        warm_up = closed_loop(target, self.settings.workload.specs(_WARM_UP_REQUESTS, self._next_warm_up()), 1)
        if all(record.error is not None for record in warm_up.records):
            raise ServerFailed(f"{server.name} fails every request: {warm_up.records[0].error}")
        self._current = (wanted, target)
        return target

    def turns(self) -> Iterator[tuple[Server, int]]:
        """Yields every server once a round, with the round's number."""
        for round_number in range(self.settings.rounds):
            for server in self.settings.servers:
                yield server, round_number

    # ---- limits

    @property
    def limits(self) -> Limits:
        """Limits as given, else multiples of what the first server takes for one request at a time."""
        if self._limits is None:
            self._measure_idle()
        assert self._limits is not None
        return self._limits

    @property
    def idle_rate(self) -> float:
        """Requests per second of one client that waits for each answer: a rate at which searches may begin."""
        if self._idle_latency_s is None:
            self._measure_idle()
        assert self._idle_latency_s is not None
        return 1 / self._idle_latency_s

    def _measure_idle(self) -> None:
        target = self.serving(self.settings.servers[0], with_limits=False)
        records = closed_loop(target, self.settings.workload.specs(_IDLE_REQUESTS, self._next_warm_up()), 1).records
        for record in records:
            if record.error is not None:
                raise ServerFailed(f"{target.name} fails on an idle machine: {record.error}")
        self._idle_latency_s = quantile([record.latency_s for record in records], 0.5)
        ttft_s = quantile([record.ttft_s for record in records if record.ttft_s is not None], 0.5)
        gap_s = quantile([gap for record in records for gap in record.gaps()], 0.5)
        if ttft_s is None or gap_s is None:
            raise ServerFailed(f"{target.name} streams nothing that could be measured")
        if self._limits is None:
            self._limits = Limits(
                max(ttft_s * _TTFT_FACTOR, _MIN_TTFT_S),
                max(gap_s * _TPOT_FACTOR, _MIN_TPOT_S),
                source=f"{_TTFT_FACTOR:g} idle TTFTs and {_TPOT_FACTOR:g} idle gaps of {target.name}",
            )
        say(f"idle: TTFT {ttft_s * 1e3:.1f} ms, gap {gap_s * 1e3:.2f} ms; limits: {describe(self._limits)}")

    # ---- loads

    def next_content(self) -> int:
        """A number for the pixels and words of a load, so that nothing of it is in a cache."""
        self._content += 1
        return self._content

    def _next_warm_up(self) -> int:
        self._warm_ups += 1
        return _WARM_UP_CONTENT + self._warm_ups

    def load(self, target: Target, rate: float, content: int, **facts: Any) -> Run:
        """The workload at `rate`, as it arrives."""
        settings = self.settings
        count = settings.requests if settings.load_s is None else max(1, round(rate * settings.load_s))
        specs = settings.workload.specs(count, content)
        times_s = settings.arrivals.times(rate, count, settings.workload.seed)
        run = open_loop(target, specs, [float(time_s) for time_s in times_s], settings.drain_s)
        attained = self.limits.attainment(run.records)
        self.note(target, run, rate=rate, attainment=attained, **facts)
        say(f"{self.mode} {target.name}: {rate:.3g} requests/s, attainment {attained:.0%}{_remarks(run)}")
        return run

    def alone(self, target: Target, count: int, content: int) -> Run:
        """Runs `count` requests, each sent when the one before has ended."""
        run = closed_loop(target, self.settings.workload.specs(count, content), 1)
        self.note(target, run, concurrency=1)
        return run

    def run_specs(self, target: Target, specs: Sequence[Spec], times_s: Sequence[float], **facts: Any) -> Run:
        run = open_loop(target, specs, times_s, self.settings.drain_s)
        self.note(target, run, **facts)
        return run

    def note(self, target: Target, run: Run, **facts: Any) -> None:
        """Keeps what a load gave for the document and the trace."""
        self.runs.append({"mode": self.mode, "server": target.name, **facts, **run.document()})
        if any(record.metrics for record in run.records):
            self.traced, self.traced_from = run.records, f"{self.mode} {target.name}"


def summary(records: Sequence[Record], limits: Limits) -> dict[str, Any]:
    """Figures of the requests of one point: shares, milliseconds, tokens per second."""
    gaps = [gap for record in records for gap in record.gaps()]
    ttfts = [record.ttft_s for record in records if record.ttft_s is not None]
    verdicts = [record.slo["met"] for record in records if record.slo is not None]
    span_s = max(record.end_s for record in records) - min(record.planned_s for record in records)
    return {
        "requests": len(records),
        "attainment": limits.attainment(records),
        "ttft_met": sum(map(limits.ttft_met, records)) / len(records),
        "tpot_met": sum(limits.tpot_met(record) and record.ok for record in records) / len(records),
        "met_says_server": sum(map(bool, verdicts)) / len(verdicts) if verdicts else None,
        "ttft_ms": _quantiles(ttfts),
        "gap_ms": _quantiles(gaps),
        "requests_per_s": round(sum(record.ok for record in records) / span_s, 3),
        "steady_requests_per_s": steady_rate(records),
        "tokens_per_s": round(sum(record.num_tokens for record in records) / span_s, 2),
        "cached_share": round(
            sum(record.cached_tokens for record in records) / max(sum(r.prompt_tokens for r in records), 1), 4
        ),
        "errors": sum(not record.ok for record in records),
    }


def steady_rate(records: Sequence[Record]) -> float | None:
    """Requests a second, counted by tokens from when the first request of at least the mean length has ended until the
    last one arrives: a short load's beginning and end, when few requests run, are left out. None without such a time.
    """
    mean_tokens = sum(record.wanted_tokens for record in records) / len(records)
    ended_s = (record.end_s for record in records if record.ok and record.wanted_tokens >= mean_tokens)
    begin_s, end_s = min(ended_s, default=inf), max(record.planned_s for record in records)
    if begin_s >= end_s:
        return None
    events = (event for record in records for event in zip(record.stamps, record.counts, strict=True))
    num_tokens = sum(count for stamp_s, count in events if begin_s < stamp_s <= end_s)
    return round(num_tokens / mean_tokens / (end_s - begin_s), 3)


def describe(limits: Limits) -> str:
    return f"TTFT {limits.ttft_s * 1e3:.0f} ms, TPOT {limits.tpot_limit_s * 1e3:.3g} ms ({limits.source})"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _quantiles(values: Sequence[float]) -> dict[str, float | None]:
    quantiles = {name: quantile(values, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return {name: None if value is None else round(value * 1e3, 3) for name, value in quantiles.items()}


def _remarks(run: Run) -> str:
    document = run.document()
    remarks = ""
    if document["errors"]:
        first = next(record.error for record in run.records if record.error)
        remarks += f", {document['errors']} failed (first: {first})"
    if document["sent_late_ms"]["p99"] > 20:
        remarks += f", sent late by up to {document['sent_late_ms']['max']:.0f} ms"
    return remarks
