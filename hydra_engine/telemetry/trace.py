"""What viewers are shown of requests: what runs now, and a ring of finished requests' spans, which can be written as
Chrome trace JSON for a standard viewer (ui.perfetto.dev).

A trace has one process per instance, with rows per lane for the steps and the requests in each, and one process for the
requests, with a row for each and one below it for its images. Late tokens carry their blame. Prompts and answers never
appear in it.
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
    """A request that runs, and what it waits for now. `stage` is one of

        preprocess  its pictures are fetched and decoded, its prompt is made
        queue       nothing of it is computed: it waits for room, or for its turn
        encode      its pictures are encoded
        prefill     its prompt is computed
        transfer    features or KV move to the instance that goes on with it
        decode      tokens come
        lost        its instance was lost; it begins again where one can serve it

    `instance` is where that happens, "" where no instance has it. `done` of `of` are behind it: while pictures (or
    videos) lack features, those that have them; in prefill, tokens of the prompt (and of the answer so far, if that has
    to be computed again) that are computed; None where that is not known; reported four times a second. Times
    on the monotonic clock.
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
    """`spans` are relative to `arrival_s`, which is on the monotonic clock. No usage: it failed before it had any.
    `client`: whose it was."""

    id: str
    arrival_s: float
    spans: Sequence[StageSpan]
    usage: Usage | None = None
    client: str = ""


@dataclass(frozen=True, slots=True)
class Activity:
    """`number` counts the requests that have ended so far; ask with it for those that end later. `finished` are the
    latest of them, oldest first."""

    number: int
    finished: Sequence[EndedRequest]
    running: Sequence[LiveRequest]


class TraceRing:
    """Keeps the last requests' timelines; `spans` are relative to `arrival_s` on the monotonic clock."""

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

    def since(self, number: int, limit: int, client: str | None = None) -> tuple[int, list[EndedRequest]]:
        """How many requests have been added in all, and those behind the first `number` of them, oldest first, at most
        the `limit` latest that are still here, of all clients or of one. A number from before a restart asks for
        all."""
        new = self._num_added - number if number <= self._num_added else self._num_added
        behind = itertools.islice(reversed(self._requests), min(new, len(self._requests)))
        wanted = (request for request in behind if client in (None, request.client))
        return self._num_added, list(itertools.islice(wanted, limit))[::-1]

    def events(self, since_s: float = -math.inf) -> list[dict[str, Any]]:
        """Complete events ("ph": "X", microseconds since the oldest of these requests came) and the names of their rows
        ("ph": "M"), without those that ended before `since_s`. Events of one row never overlap, as viewers demand.
        From any thread."""
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
                events.append(event | rows.place(_REQUESTS, row, event["ts"], event["ts"] + event["dur"]))
        for step in _steps(requests):
            arguments = {"requests": step.requests, "batch": step.span.batch, "tokens": step.tokens}
            event = _event(step.span, step.arrival_s - origin, arguments)
            start = event["ts"]
            events.append(event | rows.place(step.span.instance, step.row, start, start + event["dur"]))
        return rows.names() + events

    def write(self, path: str | Path) -> None:
        document = {"traceEvents": self.events(), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(document), encoding="utf-8")


def _event(span: StageSpan, moved_s: float, arguments: dict[str, Any]) -> dict[str, Any]:
    start_us, end_us = _microseconds(span, moved_s)
    times = {"ts": start_us, "dur": end_us - start_us}
    return {"name": span.stage, "cat": span.lane, "ph": "X", **times, "args": arguments}


def _microseconds(span: StageSpan, moved_s: float) -> tuple[int, int]:
    """Both ends as whole numbers, so that neighbours that touch still do."""
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
    """Spans of several requests over the same time on the same lane: one step, or for decodes a run of steps."""

    span: StageSpan
    arrival_s: float
    requests: list[str] = field(default_factory=list)
    tokens: int = 0

    @property
    def row(self) -> str:
        """A run of decodes lies across the chunks of other requests that were in its steps."""
        return f"{self.span.lane} decode" if self.span.stage == "decode" else self.span.lane


def _steps(requests: Sequence[tuple[str, float, Sequence[StageSpan]]]) -> Iterator[_Step]:
    """Steps in order of start."""
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
    """Numbers for processes and their rows, which viewers want, and the names that go with them."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._rows: dict[tuple[str, str], int] = {}
        self._busy_until: dict[tuple[str, str], float] = {}

    def place(self, process: str, row: str, start: float, end: float) -> dict[str, int]:
        """In the first of `row`, `row 2`, .. where nothing lies at that time; to be called in order."""
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
