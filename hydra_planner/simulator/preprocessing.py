"""Preprocessing in the frontend process: template, tokens, decoding and resizing of pictures.

A pool of threads, as in `core/fairness.py`, on the cores of the host. A picture that was decoded lately is
not decoded again (`--pixel-cache-mib`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hydra_engine.config import MediaConfig
from hydra_planner.simulator.costs import Host
from hydra_planner.simulator.machine import HOST, Job, Machine
from hydra_planner.workload.file import WorkloadRequest

FRONTEND = "frontend"


def preprocess_s(host: Host, pixels: int) -> float:
    """Seconds of preprocessing of a request on one core."""
    return host.request_s + host.pixel_s * pixels


def pixels_of(row: WorkloadRequest) -> int:
    """Pixels to decode for the request, if none of its media were decoded lately."""
    pictures = sum(picture.width * picture.height for picture in row.pictures)
    return pictures + sum(video.width * video.height * video.frames for video in row.videos)


class Preprocessing:
    def __init__(self, machine: Machine, host: Host, config: MediaConfig) -> None:
        self._machine = machine
        self._host = host
        self.num_workers = self._free = config.decode_workers
        self._keeps_pixels = config.pixel_cache_mib > 0
        self._decoded: set[int] = set()
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()

    def submit(self, row: WorkloadRequest, done: Callable[[], None]) -> None:
        """Queues the preprocessing of a request; `done` is called when the request is ready to be routed."""
        self._waiting.append((self._work_s(row), done))
        self._next()

    def _next(self) -> None:
        while self._free and self._waiting:
            work_s, done = self._waiting.popleft()
            self._free -= 1

            def end_job(_: Job, done: Callable[[], None] = done) -> None:
                self._free += 1
                self._next()
                done()

            self._machine.run(Job(FRONTEND, HOST, work_s, end_job))

    def _work_s(self, row: WorkloadRequest) -> float:
        pixels = 0
        for picture in row.pictures:
            if not (self._keeps_pixels and picture.number in self._decoded):
                pixels += picture.width * picture.height
                self._decoded.add(picture.number)
        pixels += sum(video.width * video.height * video.frames for video in row.videos)
        return preprocess_s(self._host, pixels)
