"""Simulations side by side on the cores of this machine: children that are forked with everything they need and answer
with points as JSON through a pipe.

A simulation has one thread and reads nothing from outside, so a child ends as soon as it has answered.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from hydra_engine.errors import HydraError
from hydra_planner.search.measure import Point
from hydra_planner.simulator.deployment import SimulationError

Job = Callable[[], Point]


class _Answer(msgspec.Struct, frozen=True):
    """A child's point, or why there is none."""

    point: Point | None = None
    error: str = "a simulation ended early"


def run_all(jobs: Sequence[Job], num_workers: int) -> list[Point]:
    """Runs the jobs in child processes; returns their points in order. Raises SimulationError if a simulation fails."""
    if min(num_workers, len(jobs)) <= 1:
        return [job() for job in jobs]
    points: list[Point | None] = [None] * len(jobs)
    running: dict[int, tuple[int, int]] = {}  # by descriptor: (place, pid)
    waiting, problem = deque(range(len(jobs))), ""
    while running or (waiting and not problem):
        while waiting and not problem and len(running) < num_workers:
            place = waiting.popleft()
            pid, descriptor = _fork(jobs[place])
            running[descriptor] = place, pid
        for descriptor in select.select([*running], [], [])[0]:
            place, pid = running.pop(descriptor)
            with os.fdopen(descriptor, "rb") as pipe:
                content = pipe.read()
            os.waitpid(pid, 0)
            answer = msgspec.json.decode(content, type=_Answer) if content else _Answer()
            points[place] = answer.point
            problem = problem or ("" if answer.point is not None else answer.error)
    if problem:
        raise SimulationError(problem)
    return [point for point in points if point is not None]


def _fork(job: Job) -> tuple[int, int]:
    """(pid, descriptor of the pipe's end to read)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.close(reading)
        try:
            answer = _Answer(job(), "")
        except (HydraError, RuntimeError) as error:
            answer = _Answer(None, str(error) or type(error).__name__)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(msgspec.json.encode(answer))
        status = 0
    os._exit(status)
