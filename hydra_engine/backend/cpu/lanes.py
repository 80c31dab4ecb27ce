"""A lane on the CPU: a thread that runs jobs in the order of submission.

The thread runs in torch's inference mode (the mode belongs to a thread, so a job cannot rely on its submitter's) and
sets its own thread counts when it starts. A job that raises is a bug: the traceback is logged, remaining jobs are
dropped, and `submit` raises from then on. Does not know what a job does.
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

    torch applies the count that any thread set last when a thread first needs it. Asking for it once forces that now,
    so that another lane's count cannot replace ours later.
    """
    torch.get_num_threads()
    torch.set_num_threads(threads)


class ThreadLane:
    """A `Lane` of backend/device.py: one thread.

    set_threads: called once, in the lane's thread, with `threads`. niceness: added to the nice value of the lane's
    thread; threads that its ops start inherit it.
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
        self._lock = threading.Lock()  # orders submit and close: no job can follow the end mark
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
        """Waits for submitted jobs and stops the thread. Idempotent."""
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
        except BaseException as error:  # the thread's boundary: every later submit raises it
            self.error = error
            logger.critical("lane %s died; the instance cannot continue", self.name, exc_info=True)
