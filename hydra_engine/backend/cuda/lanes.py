"""Lanes on a CUDA device: a stream with the thread that launches on it.

A lane's stream does not wait for the default stream, on which the thread that builds an instance works. So a job begins
behind what its submitter had launched. Does not know what a job does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from hydra_engine.backend.cpu.lanes import Job, ThreadLane

logger = logging.getLogger(__name__)

# Whose blocks the device begins first, by `lane_priority`; -1 before 0. Blocks that run are not interrupted. Tokens
# wait for each other and pictures do not, so only where encodes are to finish early no lane goes first.
PRIORITIES: dict[str, dict[str, int]] = {
    "throughput": {},
    "balanced": {"language": -1},
    "latency": {"language": -1},
}
# Compute capability from which kernels begin early (dependent launch, hydra_kernels/_common.py).
BEGINS_EARLY = (9, 0)


def priorities(lane_priority: str, capability: tuple[int, int] | None) -> dict[str, int]:
    """Priorities of the lanes' streams on such a GPU, 0 if a lane is not named; `lane_priority`: a key of PRIORITIES.

    Where kernels begin early no lane goes first: programs of its next kernel would stand ready all the time and take
    every place that falls free, so that an encode beside steps of 8 requests was measured to take 15 times as long.
    What an encode adds to a step is bounded by the gate there."""
    return {} if capability is None or capability >= BEGINS_EARLY else PRIORITIES[lane_priority]


def priority_note(lane_priority: str, capability: tuple[int, int] | None) -> str | None:
    """For the start-up summary, where a lane was to go first and none does."""
    if capability is None or not PRIORITIES[lane_priority] or priorities(lane_priority, capability):
        return None
    return (
        f"lane priority {lane_priority}: both models have the same on this GPU, where encodes beside tokens that go "
        "first would hardly get on; a TPOT limit holds encodes up between their pieces"
    )


class CudaLane(ThreadLane):
    """`Lane` of backend/device.py."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        stream: torch.cuda.Stream,
        threads: int,
        set_threads: Callable[[int], None],
    ) -> None:
        self._device = device
        self._stream = stream
        self._set_host_threads = set_threads
        super().__init__(name, threads, set_threads=self._begin)

    def submit(self, job: Job) -> None:
        super().submit(self._behind_caller(job))

    def close(self) -> None:
        """Waits for what the jobs have launched too."""
        super().close()
        try:
            self._stream.synchronize()
        except RuntimeError:
            logger.exception("lane %s: the device failed before the lane was closed", self.name)

    def _begin(self, threads: int) -> None:
        """In the lane's thread: from here on it works on its device and stream."""
        self._set_host_threads(threads)
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._stream)

    def _behind_caller(self, job: Job) -> Job:
        caller = torch.cuda.current_stream(self._device)
        if caller == self._stream or caller.query():
            return job
        launched = torch.cuda.Event()
        launched.record(caller)

        def run() -> None:
            torch.cuda.current_stream(self._device).wait_event(launched)
            job()

        return run
