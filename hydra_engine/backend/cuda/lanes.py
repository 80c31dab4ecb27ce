"""Lanes on a CUDA device: a stream with the thread that launches on it.

A lane's stream does not wait for the default stream, which the thread that builds an instance uses. So a job first
waits for what its submitter has launched. Does not know what a job does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from hydra_engine.backend.cpu.device import Job, ThreadLane

logger = logging.getLogger(__name__)

# Stream priorities by `lane_priority`: blocks of -1 start before blocks of 0; running blocks are not preempted. Tokens
# wait for each other and pictures do not, so the language lane goes first, except when encodes are to finish early.
PRIORITIES: dict[str, dict[str, int]] = {
    "throughput": {},
    "balanced": {"language": -1},
    "latency": {"language": -1},
}
# Compute capability with programmatic dependent launch (hydra_kernels/_common.py).
BEGINS_EARLY = (9, 0)


def priorities(lane_priority: str, capability: tuple[int, int] | None) -> dict[str, int]:
    """Stream priorities of the lanes on a GPU of this capability, 0 for a lane that is not named. lane_priority: a key
    of PRIORITIES. capability: None if there is no GPU.

    Empty without a GPU, and from BEGINS_EARLY on: with programmatic dependent launch, programs of the lane's next
    kernel would always be ready and take every free place, so that an encode beside steps of 8 requests took 15 times
    as long (measured). There worker/vision/gate.py bounds what an encode adds to a step.
    """
    return {} if capability is None or capability >= BEGINS_EARLY else PRIORITIES[lane_priority]


def priority_note(lane_priority: str, capability: tuple[int, int] | None) -> str | None:
    """A note for the start-up summary if this GPU does not get the stream priorities of `lane_priority`, else None."""
    if capability is None or not PRIORITIES[lane_priority] or priorities(lane_priority, capability):
        return None
    return (
        f"lane priority {lane_priority}: both models have the same on this GPU, where encodes beside tokens that go "
        "first would hardly get on; a TPOT limit holds encodes up between their pieces"
    )


class CudaLane(ThreadLane):
    """`Lane` of backend/device.py: one thread, whose jobs launch on `stream`. set_threads: called once in that thread,
    with `threads`."""

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
        """Queues `job`. What it launches begins after all that the calling thread has launched. Raises RuntimeError if
        the lane is closed or a job of it has raised."""
        super().submit(self._after_caller(job))

    def close(self) -> None:
        """Waits for submitted jobs and for what they have launched, and stops the thread. Logs an error of the device.
        Idempotent."""
        super().close()
        try:
            self._stream.synchronize()
        except RuntimeError:
            logger.exception("lane %s: the device failed before the lane was closed", self.name)

    def _begin(self, threads: int) -> None:
        """Prepares the lane's thread: sets its CPU threads, device and stream."""
        self._set_host_threads(threads)
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._stream)

    def _after_caller(self, job: Job) -> Job:
        """Returns `job`, made to wait on the device for what the calling thread has launched."""
        caller = torch.cuda.current_stream(self._device)
        if caller == self._stream or caller.query():
            return job
        launched = torch.cuda.Event()
        launched.record(caller)

        def run() -> None:
            torch.cuda.current_stream(self._device).wait_event(launched)
            job()

        return run
