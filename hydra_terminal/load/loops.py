"""Runs one load against one server: open loop (fixed times) or closed loop (a fixed number always under way).

The client is this process alone; the server is another one. Bodies are made and encoded before the run and answers
parsed after it. How late requests were sent and how much of a core the client took are part of what comes back.
Does not know limits or how servers are started.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hydra_planner.records import Record, quantile
from hydra_terminal.load.client import Answer, Client
from hydra_terminal.load.events import Stream, parse
from hydra_terminal.load.target import Target
from hydra_terminal.load.workload import Spec, bodies

_LEAD_S = 0.05  # between making the tasks and the first request
_PAGE_EVERY_S = 0.5
_PRIORITY = -10


@dataclass(frozen=True, slots=True)
class Run:
    """`pages`: texts of /metrics with the seconds since the start at which they came, where they were asked for."""

    records: tuple[Record, ...]
    wall_s: float
    client_cpu: float  # cores that the client took, 0 to 1
    client_first: bool  # the client had a higher priority than the server
    pages: tuple[tuple[float, str], ...] = ()

    def document(self) -> dict[str, Any]:
        late = [max(record.late_s, 0.0) for record in self.records]
        return {
            "wall_s": round(self.wall_s, 3),
            "client_cpu": round(self.client_cpu, 3),
            "client_first": self.client_first,
            "sent_late_ms": {
                "median": round((quantile(late, 0.5) or 0) * 1e3, 2),
                "p99": round((quantile(late, 0.99) or 0) * 1e3, 2),
                "max": round(max(late, default=0.0) * 1e3, 2),
            },
            "errors": sum(record.error is not None for record in self.records),
            "records": [record.document() for record in self.records],
        }


def open_loop(
    target: Target, specs: Sequence[Spec], times_s: Sequence[float], drain_s: float = 60.0, *, exact: bool = True
) -> Run:
    """Sends `specs[i]` at `times_s[i]`, whatever the server does. What has not ended `drain_s` after the last arrival
    is cancelled and counts as an error, and so does an answer that is shorter than asked if `exact`."""
    prepared = bodies(specs, target.model, target.dialect)
    return _measured(lambda: _open_loop(target, specs, prepared, times_s, drain_s), exact)


def closed_loop(
    target: Target,
    specs: Sequence[Spec],
    concurrency: int,
    seconds: float = float("inf"),
    with_pages: bool = False,
    *,
    exact: bool = True,
) -> Run:
    """Keeps `concurrency` requests under way until `specs` run out or `seconds` are over; those under way then are
    cancelled and left out. A request is due when it is sent. `exact` as in `open_loop`."""
    prepared = bodies(specs, target.model, target.dialect)
    return _measured(lambda: _closed_loop(target, specs, prepared, concurrency, seconds, with_pages), exact)


def _measured(run: Any, exact: bool) -> Run:
    with _undisturbed() as raised:
        cpu_s, began_s = time.process_time(), time.monotonic()
        origin_s, entries, pages = asyncio.run(run())
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - began_s
    records = tuple(
        _record(index, spec, planned_s, answer, origin_s, exact) for index, spec, planned_s, answer in entries
    )
    texts = tuple((stamp - origin_s, text) for stamp, text in pages)
    return Run(records, wall_s, cpu_s / wall_s, raised, texts)


@contextlib.contextmanager
def _undisturbed() -> Iterator[bool]:
    """Stops garbage collection inside and, where the system allows it, raises this process's priority, because a
    busy server on few cores would otherwise delay its own measurement. Yields True if the priority was raised."""
    gc.collect()
    gc.disable()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
        raised = True
    except PermissionError:
        raised = False
    try:
        yield raised
    finally:
        if raised:
            os.setpriority(os.PRIO_PROCESS, 0, before)
        gc.enable()


async def _open_loop(
    target: Target, specs: Sequence[Spec], prepared: Sequence[bytes], times_s: Sequence[float], drain_s: float
) -> tuple[float, list[tuple[int, Spec, float, Answer]], list[tuple[float, str]]]:
    origin_s = time.monotonic() + _LEAD_S
    entries = [(i, spec, float(times_s[i]), Answer(sent_s=origin_s)) for i, spec in enumerate(specs)]

    async def one(index: int, planned_s: float, answer: Answer) -> None:
        await asyncio.sleep(origin_s + planned_s - time.monotonic())
        await client.send(prepared[index], answer)

    async with Client(target) as client:
        tasks = [asyncio.create_task(one(index, planned_s, answer)) for index, _, planned_s, answer in entries]
        await _until(tasks, origin_s + max(times_s) + drain_s)
    return origin_s, entries, []


async def _closed_loop(
    target: Target,
    specs: Sequence[Spec],
    prepared: Sequence[bytes],
    concurrency: int,
    seconds: float,
    with_pages: bool,
) -> tuple[float, list[tuple[int, Spec, float, Answer]], list[tuple[float, str]]]:
    origin_s = time.monotonic()
    entries: list[tuple[int, Spec, float, Answer]] = []
    pages: list[tuple[float, str]] = []
    waiting = iter(range(len(specs)))

    async def worker() -> None:
        for index in waiting:
            answer = Answer(sent_s=time.monotonic())
            await client.send(prepared[index], answer)
            entries.append((index, specs[index], answer.sent_s - origin_s, answer))

    async def watch() -> None:
        while (text := await client.page()) is not None:
            pages.append((time.monotonic(), text))
            await asyncio.sleep(_PAGE_EVERY_S)

    async with Client(target) as client:
        watcher = asyncio.create_task(watch()) if with_pages else None
        await _until([asyncio.create_task(worker()) for _ in range(concurrency)], origin_s + seconds)
        if watcher is not None:
            await _until([watcher], 0.0)
            if (text := await client.page()) is not None:
                pages.append((time.monotonic(), text))
    return origin_s, entries, pages


async def _until(tasks: Sequence[asyncio.Task[None]], deadline_s: float) -> None:
    """Waits for all; cancels what runs at the deadline. Raises what a task raised."""
    left_s = None if deadline_s == float("inf") else max(deadline_s - time.monotonic(), 0.0)
    _, pending = await asyncio.wait(tasks, timeout=left_s)
    for task in pending:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


def _record(index: int, spec: Spec, planned_s: float, answer: Answer, origin_s: float, exact: bool) -> Record:
    try:
        stream = parse(answer.chunks)
        problem = _problem(stream, spec, exact)
    except ValueError as error:
        stream, problem = Stream((), ()), f"the stream cannot be read: {error}"[:300]
    usage = stream.usage or {}
    details = usage.get("prompt_tokens_details") or {}
    never_sent = answer.end_s == 0.0
    return Record(
        index=index,
        kind=spec.kind,
        planned_s=planned_s,
        sent_s=planned_s if never_sent else answer.sent_s - origin_s,
        end_s=planned_s if never_sent else answer.end_s - origin_s,
        wanted_tokens=spec.max_tokens,
        stamps=tuple(stamp - origin_s for stamp in stream.stamps),
        counts=stream.counts,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        error="never sent" if never_sent else answer.error or problem,
        metrics=stream.metrics,
    )


def _problem(stream: Stream, spec: Spec, exact: bool) -> str | None:
    if stream.error or not stream.ended:
        return stream.error or "the stream did not end with [DONE]"
    tokens = (stream.usage or {}).get("completion_tokens", spec.max_tokens)
    fits = tokens == spec.max_tokens or (not exact and 0 < tokens < spec.max_tokens)
    return None if fits else f"{tokens} tokens instead of {spec.max_tokens}"
