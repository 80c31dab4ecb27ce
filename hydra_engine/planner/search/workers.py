"""Simulations side by side on the cores of this machine: children that are forked with everything they need and answer
with points as JSON through a pipe.

A simulation has one thread and reads nothing from outside, so a child ends as soon as it has answered.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence

import msgspec

from hydra_engine.errors import HydraError
from hydra_engine.planner.search.measure import Point
from hydra_engine.planner.simulator.deployment import SimulationError

Job = Callable[[], Point]


class _Answer(msgspec.Struct, frozen=True):
    """The points of a child's jobs in their order, or why there are none."""

    points: list[Point] = []
    error: str = ""


def run_all(jobs: Sequence[Job], num_workers: int) -> list[Point]:
    """In the order of `jobs`. Raises SimulationError where a simulation fails."""
    num_workers = min(num_workers, len(jobs))
    if num_workers <= 1:
        return [job() for job in jobs]
    children = [_fork(jobs[first::num_workers]) for first in range(num_workers)]
    points: list[Point | None] = [None] * len(jobs)
    problem = ""
    for first, (pid, descriptor) in enumerate(children):
        with os.fdopen(descriptor, "rb") as pipe:
            content = pipe.read()
        os.waitpid(pid, 0)
        answer = msgspec.json.decode(content, type=_Answer) if content else _Answer(error="a simulation ended early")
        problem = problem or answer.error
        for place, point in zip(range(first, len(jobs), num_workers), answer.points, strict=False):
            points[place] = point
    found = [point for point in points if point is not None]
    if problem or len(found) != len(jobs):
        raise SimulationError(problem or "a simulation gave no answer")
    return found


def _fork(jobs: Sequence[Job]) -> tuple[int, int]:
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
            answer = _Answer([job() for job in jobs])
        except (HydraError, RuntimeError) as error:
            answer = _Answer(error=str(error) or type(error).__name__)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(msgspec.json.encode(answer))
        status = 0
    os._exit(status)
