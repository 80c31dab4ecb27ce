"""What runs at once on one device slows each other: steps of lanes as jobs that advance at shares of their speed.

A job has work, in seconds of having the device to itself. Beside other jobs it takes `1 + sum(beside - 1)` times as
long, one term for each of them, where `beside` is the factor that the profile has measured for a lane of that kind; and
never less than all jobs' threads over the cores. For one instance with two lanes on a device of its own that is the
cost surface's model exactly. For lanes of several instances on the same cores it is plain processor sharing: right as
far as a lane uses its threads all along and memory bandwidth is shared like cores.

The gate between the two lanes of an instance (`worker/vision/gate.py`) is here too, but for its granularity: vision
pauses at once when the seconds that a language step allows are used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hydra_engine.planner.simulator.agenda import Agenda

VISION, LANGUAGE, HOST = "vision", "language", "host"
_DONE_S = 1e-9  # of work: less than this is rounding


@dataclass(eq=False)
class Job:
    """`beside[kind]`: how many times as long it takes beside one job of that kind, 1 where it says nothing.
    `allowance_s`, of a language step: seconds of vision of the same instance that may run beside it."""

    instance: str
    kind: str
    left_s: float
    done: Callable[[Job], None]
    beside: Mapping[str, float] = field(default_factory=dict)
    allowance_s: float = math.inf
    threads: int = 1
    vision_s: float = 0.0  # that ran beside it
    started_s: float = 0.0


class Machine:
    """`cores` 0: a device where only the measured factors count. `busy_s`: seconds in which a job of that kind ran, by
    (instance, kind)."""

    def __init__(self, agenda: Agenda, cores: int = 0) -> None:
        self.busy_s: dict[tuple[str, str], float] = {}
        self._agenda = agenda
        self._cores = cores
        self._jobs: list[Job] = []
        self._settled_s = 0.0
        self._version = 0

    def run(self, job: Job) -> None:
        self._settle()
        job.started_s = self._agenda.now()
        self._jobs.append(job)
        self._schedule()

    def drop(self, instance: str) -> None:
        """The instance has died: its jobs are never done."""
        self._settle()
        self._jobs = [job for job in self._jobs if job.instance != instance]
        self._schedule()

    # ---- sharing

    def _running(self) -> list[Job]:
        """Those that are not held up at a gate."""
        if len(self._jobs) == 1:
            return self._jobs
        closed = {job.instance for job in self._jobs if job.kind == LANGUAGE and job.allowance_s - job.vision_s <= 0}
        return [job for job in self._jobs if job.kind != VISION or job.instance not in closed]

    def _factor(self, job: Job, running: list[Job]) -> float:
        if len(running) == 1:
            return 1.0
        beside = 1.0 + sum(job.beside.get(other.kind, 1.0) - 1.0 for other in running if other is not job)
        if not self._cores:
            return beside
        return max(beside, sum(other.threads for other in running) / self._cores)

    def _settle(self) -> None:
        """Brings all work up to this moment."""
        elapsed_s = self._agenda.now() - self._settled_s
        self._settled_s = self._agenda.now()
        if not elapsed_s:
            return
        running = self._running()
        encoding = {job.instance for job in running if job.kind == VISION}
        for job in running:
            job.left_s -= elapsed_s / self._factor(job, running)
            key = job.instance, job.kind
            self.busy_s[key] = self.busy_s.get(key, 0.0) + elapsed_s
            if job.kind == LANGUAGE and job.instance in encoding:
                job.vision_s += elapsed_s

    def _schedule(self) -> None:
        """The next moment at which the shares change."""
        self._version += 1
        running = self._running()
        encoding = {job.instance for job in running if job.kind == VISION}
        next_s = math.inf
        for job in running:
            next_s = min(next_s, job.left_s * self._factor(job, running))
            if job.kind == LANGUAGE and job.instance in encoding:
                next_s = min(next_s, job.allowance_s - job.vision_s)
        if next_s < math.inf:
            version = self._version
            self._agenda.after(max(next_s, 0.0), lambda: self._on_change(version))

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
