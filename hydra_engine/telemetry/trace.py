"""The view of requests for people: those that run, and a ring of finished ones' spans, which can be written as Chrome
trace JSON for a standard viewer (ui.perfetto.dev).

A trace has one process per instance, with rows per lane for the steps and their requests, and one process for the
requests, with a row for each and further rows for its images and transfers. Late tokens carry their blame. Prompts and
answers never appear in it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hydra_engine.core.outputs import StageSpan, Usage
from hydra_engine.telemetry.timeline import MOVES, PHASE_OF

_RING = 2_000
_REQUESTS = "requests"


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A running request and its current stage. `stage` is one of

        preprocess  its pictures are fetched and decoded, its prompt is made
        queue       nothing of it runs: it waits for room, or for its turn
        encode      its pictures are encoded
        prefill     its prompt is computed
        transfer    features or KV move to the instance that continues it
        decode      tokens are generated
        lost        its instance was lost; it restarts once another can serve it

    `instance` is where that happens, "" before an instance has it. `done` of `of` are complete: pictures (or videos)
    with features, while some have none; in prefill, computed tokens of the prompt (and of the answer so far, if that is
    computed again); None if unknown. Instances report them four times a second. Times are in seconds on the monotonic
    clock.
    """

    id: str
    arrival_s: float
    first_token_s: float | None
    num_tokens: int
    stage: str
    instance: str
    done: int | None = None
    of: int | None = None


class EndedRequest(NamedTuple):
    """A request that has ended. `spans` are in seconds relative to `arrival_s`, which is on the monotonic clock.
    `usage` is None if it failed before it had any. `client`: its owner."""

    id: str
    arrival_s: float
    spans: Sequence[StageSpan]
    usage: Usage | None = None
    client: str = ""


@dataclass(frozen=True, slots=True)
class Activity:
    """A page of the activity view. `number` counts the requests that have ended so far; pass it on to get later ones.
    `finished` are the latest of them, the oldest first."""

    number: int
    finished: Sequence[EndedRequest]
    running: Sequence[LiveRequest]


class TraceRing:
    """The timelines of the last `capacity` requests; spans are relative to `arrival_s` on the monotonic clock."""

    def __init__(self, capacity: int = _RING) -> None:
        self._requests: deque[EndedRequest] = deque(maxlen=capacity)
        self._num_added = 0

    def add(
        self,
        request_id: str,
        arrival_s: float,
        spans: Sequence[StageSpan],
        usage: Usage | None = None,
        client: str = "",
    ) -> None:
        self._requests.append(EndedRequest(request_id, arrival_s, spans, usage, client))
        self._num_added += 1

    def added_since(self, number: int, limit: int, client: str | None = None) -> tuple[int, list[EndedRequest]]:
        """Returns the number of requests added in all, and up to `limit` of those added after the first `number`: the
        latest that are still kept, the oldest first; of one client, or of all if `client` is None. A `number` above the
        count is from before a restart and counts as 0."""
        new = self._num_added - number if number <= self._num_added else self._num_added
        behind = itertools.islice(reversed(self._requests), min(new, len(self._requests)))
        wanted = (request for request in behind if client in (None, request.client))
        return self._num_added, list(itertools.islice(wanted, limit))[::-1]

    def events(self, since_s: float = -math.inf) -> list[dict[str, Any]]:
        """Returns the requests as complete events ("ph": "X"; times in microseconds since the arrival of the oldest)
        and the names of their rows ("ph": "M"), without spans that ended before `since_s`. Events of one row never
        overlap, as viewers demand. Thread-safe."""
        requests = [
            (request_id, arrival, kept)
            for request_id, arrival, spans, *_ in tuple(self._requests)
            if (kept := [span for span in spans if arrival + span.end_s >= since_s])
        ]
        if not requests:
            return []
        origin = min(arrival for _, arrival, _ in requests)
        rows = _Rows()
        events: list[dict[str, Any]] = []
        for request_id, arrival, spans in requests:
            for span in sorted(spans, key=lambda span: span.start_s):
                event = _event(span, arrival - origin, {"request": request_id, **_arguments(span)})
                row = f"{request_id} transfer" if PHASE_OF.get(span.stage) in MOVES else request_id
                row = f"{request_id} images" if span.lane == "vision" else row
                events.append(event | rows.assign_row(_REQUESTS, row, event["ts"], event["ts"] + event["dur"]))
        for step in _steps(requests):
            arguments = {"requests": step.requests, "batch": step.span.batch, "tokens": step.tokens}
            event = _event(step.span, step.arrival_s - origin, arguments)
            start = event["ts"]
            events.append(event | rows.assign_row(step.span.instance, step.row, start, start + event["dur"]))
        return rows.names() + events

    def write(self, path: str | Path) -> None:
        document = {"traceEvents": self.events(), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(document), encoding="utf-8")


def _event(span: StageSpan, moved_s: float, arguments: dict[str, Any]) -> dict[str, Any]:
    start_us, end_us = _microseconds(span, moved_s)
    times = {"ts": start_us, "dur": end_us - start_us}
    return {"name": span.stage, "cat": span.lane, "ph": "X", **times, "args": arguments}


def _microseconds(span: StageSpan, moved_s: float) -> tuple[int, int]:
    """Start and end, rounded separately, so that adjacent spans stay adjacent."""
    return round((moved_s + span.start_s) * 1e6), round((moved_s + span.end_s) * 1e6)


def _arguments(span: StageSpan) -> dict[str, Any]:
    values: dict[str, Any] = {"batch": span.batch, "tokens": span.tokens, "cause": span.cause}
    if span.blame:
        values["blame"] = [
            {"kind": blame.kind, "ms": round(blame.seconds * 1e3, 3), "request": blame.request, "amount": blame.amount}
            for blame in span.blame
        ]
    return values


@dataclass(slots=True)
class _Step:
    """Spans of several requests over the same time on the same lane: one step, or a run of decode steps."""

    span: StageSpan
    arrival_s: float
    requests: list[str] = field(default_factory=list)
    tokens: int = 0

    @property
    def row(self) -> str:
        """The row of the lane; decodes have one of their own, since a run of them overlaps other requests' chunks in
        its steps."""
        return f"{self.span.lane} decode" if self.span.stage == "decode" else self.span.lane


def _steps(requests: Sequence[tuple[str, float, Sequence[StageSpan]]]) -> Iterator[_Step]:
    """Yields the steps in order of start."""
    steps: dict[tuple[object, ...], _Step] = {}
    for request_id, arrival_s, spans in requests:
        for span in spans:
            if span.batch:
                key = span.instance, span.lane, span.stage, *_microseconds(span, arrival_s)
                step = steps.setdefault(key, _Step(span, arrival_s))
                step.requests.append(request_id)
                step.tokens += span.tokens
    yield from sorted(steps.values(), key=lambda step: step.arrival_s + step.span.start_s)


class _Rows:
    """Numbers of processes and rows, as viewers want them, and their names."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._rows: dict[tuple[str, str], int] = {}
        self._busy_until: dict[tuple[str, str], float] = {}

    def assign_row(self, process: str, row: str, start: float, end: float) -> dict[str, int]:
        """Returns the pid and tid of the first of `row`, `row 2`, .. that is free at that time. Call it in order of
        start."""
        name, number = row, 1
        while self._busy_until.get((process, name), -math.inf) > start:
            number += 1
            name = f"{row} {number}"
        self._busy_until[process, name] = end
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        return {"pid": pid, "tid": self._rows.setdefault((process, name), len(self._rows) + 1)}

    def names(self) -> list[dict[str, Any]]:
        named: list[dict[str, Any]] = []
        for process, pid in self._processes.items():
            named.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
        for (process, row), tid in self._rows.items():
            shared = {"ph": "M", "pid": self._processes[process], "tid": tid}
            named.append({**shared, "name": "thread_name", "args": {"name": row}})
            named.append({**shared, "name": "thread_sort_index", "args": {"sort_index": tid}})
        return named
