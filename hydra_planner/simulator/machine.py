"""Concurrent steps on one device slow each other: jobs of lanes that advance at shares of their speed.

A job has work, in seconds of having the device to itself. Beside other jobs it takes `1 + sum(slowdown - 1)` times as
long, one term for each of them, where `slowdown` is the factor that was measured for the two; on a processor only those
that find a core beside it count, and cores that are not enough are shared. For one instance with two lanes on a device
of its own that is the cost surface's model exactly. For lanes of several instances on the same cores it is processor
sharing by nice values, as Linux does it: right as far as a lane uses its threads all along. On a GPU without MPS
instances, each a process, take turns: each has its share of the time, with only its own lanes in it.

The gate between the two lanes of an instance (`worker/vision/gate.py`) is here too, but for its granularity: vision
pauses at once when the seconds that a language step allows are used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hydra_planner.simulator.agenda import Agenda

VISION, LANGUAGE, HOST = "vision", "language", "host"
_DONE_S = 1e-9  # of work: less than this is rounding


@dataclass(eq=False)
class Job:
    """`slowdown(job, other)`: time beside another job over the time alone. `prompts`, of a language step: share of its
    seconds that chunks take. `allowance_s`: seconds of vision of the same instance that may run beside it."""

    instance: str
    kind: str
    left_s: float
    done: Callable[[Job], None]
    slowdown: Callable[[Job, Job], float] = lambda *_: 1.0
    prompts: float = 0.0
    allowance_s: float = math.inf
    threads: int = 1
    niceness: int = 0
    vision_s: float = 0.0  # that ran beside it
    started_s: float = 0.0
    alone_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.alone_s = self.left_s


# A step of niceness is worth a quarter of the weight (sched(7)).
_NICE = 1.25


def shares(jobs: Sequence[Job], cores: int) -> list[float]:
    """Cores that each job gets: divided by weight, none gets more than it has threads."""
    left, given = float(cores), [0.0] * len(jobs)
    open_ones = list(range(len(jobs)))
    weights = [job.threads * _NICE**-job.niceness for job in jobs]
    while open_ones:
        total = sum(weights[place] for place in open_ones)
        full = [place for place in open_ones if left * weights[place] >= total * jobs[place].threads]
        if not full:
            for place in open_ones:
                given[place] = left * weights[place] / total / jobs[place].threads
            break
        for place in full:
            given[place] = 1.0
            left -= jobs[place].threads
        open_ones = [place for place in open_ones if place not in full]
    return given


class Machine:
    """`cores` 0: a device where only the measured factors count. `time_sliced`: its instances take turns. `busy_s`:
    seconds in which a job of that kind ran, by (instance, kind)."""

    def __init__(self, agenda: Agenda, cores: int = 0, *, time_sliced: bool = False) -> None:
        self.busy_s: dict[tuple[str, str], float] = {}
        self._agenda = agenda
        self._cores = cores
        self._time_sliced = time_sliced
        self._jobs: list[Job] = []
        self._settled_s = 0.0
        self._version = 0
        self._running: list[tuple[Job, float, bool]] = []  # (job, factor, beside an encode of its own), since then

    def run(self, job: Job) -> None:
        self._settle()
        job.started_s = self._agenda.now_s
        self._jobs.append(job)
        self._schedule()

    def drop(self, instance: str) -> None:
        """The instance has died: its jobs are never done."""
        self._settle()
        self._jobs = [job for job in self._jobs if job.instance != instance]
        self._schedule()

    # ---- sharing

    def _open(self) -> list[Job]:
        """The jobs that do not wait at a gate."""
        if len(self._jobs) == 1:
            return self._jobs
        closed = {job.instance for job in self._jobs if job.kind == LANGUAGE and job.allowance_s - job.vision_s <= 0}
        return [job for job in self._jobs if job.kind != VISION or job.instance not in closed]

    def _factors(self, running: list[Job]) -> list[float]:
        """Slowdown of each job at present."""
        if len(running) == 1:
            return [1.0]
        added = [
            sum(job.slowdown(job, other) - 1.0 for other in running if other is not job and self._meet(job, other))
            for job in running
        ]
        if not self._cores:
            turns = len({job.instance for job in running}) if self._time_sliced else 1
            return [turns * (1.0 + more) for more in added]
        # Others slow a job by more than the cores that they take only as far as they run at the same moment.
        every = sum(job.threads for job in running)
        beside = [
            1.0 + more * min(1.0, max(self._cores - job.threads, 0) / max(every - job.threads, 1))
            for job, more in zip(running, added, strict=True)
        ]
        return [factor / share for factor, share in zip(beside, shares(running, self._cores), strict=True)]

    def _meet(self, one: Job, other: Job) -> bool:
        """True if both can compute at the same moment."""
        return not self._time_sliced or one.instance == other.instance

    def _settle(self) -> None:
        """Brings all work up to this moment."""
        elapsed_s = self._agenda.now_s - self._settled_s
        self._settled_s = self._agenda.now_s
        if not elapsed_s:
            return
        for job, factor, encodes in self._running:
            job.left_s -= elapsed_s / factor
            key = job.instance, job.kind
            self.busy_s[key] = self.busy_s.get(key, 0.0) + elapsed_s
            if encodes:
                job.vision_s += elapsed_s

    def _schedule(self) -> None:
        """Shares the device out until the next moment at which that changes."""
        self._version += 1
        running = self._open()
        encoding = {job.instance for job in running if job.kind == VISION}
        self._running = [
            (job, factor, job.kind == LANGUAGE and job.instance in encoding)
            for job, factor in zip(running, self._factors(running), strict=True)
        ]
        next_s = math.inf
        for job, factor, encodes in self._running:
            next_s = min(next_s, job.left_s * factor)
            if encodes:
                next_s = min(next_s, job.allowance_s - job.vision_s)
        if next_s < math.inf:
            version = self._version
            self._agenda.schedule_after(max(next_s, 0.0), lambda: self._on_change(version))

    def _on_change(self, version: int) -> None:
        if version != self._version:
            return
        self._settle()
        for job in self._jobs:
            if job.allowance_s - job.vision_s < _DONE_S:
                job.vision_s = job.allowance_s
        ended = [job for job in self._jobs if job.left_s < _DONE_S]
        self._jobs = [job for job in self._jobs if job.left_s >= _DONE_S]
        self._schedule()
        for job in ended:
            job.done(job)
