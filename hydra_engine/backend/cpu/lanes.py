"""A lane on the CPU: one thread that runs jobs in the order of their submission.

The thread runs in torch's inference mode (the mode belongs to a thread, so a job cannot rely on its submitter's) and
sets its own thread counts when it starts. Does not know what a job does. A job that raises is a bug: it is logged with
its traceback, later jobs are refused, and `submit` raises from then on.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

Job = Callable[[], None]


def set_torch_threads(threads: int) -> None:
    """Sets torch's thread count for the calling thread.

    torch applies the count last set by any thread when a thread first needs it; asking once gets that over with, so
    that another lane's count cannot replace ours later.
    """
    torch.get_num_threads()
    torch.set_num_threads(threads)


class ThreadLane:
    """`Lane` of backend/device.py. `set_threads` is called once, in the lane's thread, with `threads`.

    `niceness` is how far the lane's threads step back when lanes compete for cores; threads that the ops start from
    this one inherit it.
    """

    def __init__(
        self, name: str, threads: int, *, set_threads: Callable[[int], None] = set_torch_threads, niceness: int = 0
    ) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._threads = threads
        self._set_threads = set_threads
        self._niceness = niceness
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()  # orders submit and close: no job can land behind the end mark
        self._thread = threading.Thread(target=self._run, name=f"lane-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._lock:
            if self.error is not None:
                raise RuntimeError(f"lane {self.name} died: {self.error!r}") from self.error
            if self._closed:
                raise RuntimeError(f"lane {self.name} is closed")
            self._jobs.put(job)

    def close(self) -> None:
        """Waits for what was submitted and stops the thread; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._niceness:  # on Linux a thread has a priority of its own
                thread = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self._niceness)
            self._set_threads(self._threads)
            with torch.inference_mode():
                while (job := self._jobs.get()) is not None:
                    job()
                    del job  # a finished job must not keep its tensors until the next one comes
        except BaseException as error:  # the thread's boundary: kept for every later submit
            self.error = error
            logger.critical("lane %s died; the instance cannot continue", self.name, exc_info=True)
