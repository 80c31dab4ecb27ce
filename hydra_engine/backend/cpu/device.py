"""The CPU as a device: lanes are threads; memory is what machine and container allow.

Does not know which ops run on it (`select.py` combines the two), nor what a job does.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.cpu.shared_memory import TRANSPORT, SharedPool, map_pool
from hydra_engine.backend.device import Cut, Fetch, Graph, Lane, Mark, Partitions, PeerMemory, SharedMemory
from hydra_engine.core.options import NICENESS
from hydra_engine.core.pools import PoolExport
from hydra_engine.core.processes.heap import trim_heap
from hydra_engine.errors import TransferError

logger = logging.getLogger(__name__)

Job = Callable[[], None]


def set_torch_threads(threads: int) -> None:
    """Sets torch's thread count for the calling thread.

    When a thread first needs its count, torch applies the one that any thread set last. Reading the count here makes
    that happen first, so that another lane's count cannot replace this one later.
    """
    torch.get_num_threads()
    torch.set_num_threads(threads)


class ThreadLane:
    """A `Lane` of backend/device.py: one thread, which runs jobs in the order of submission.

    The thread runs in torch's inference mode (the mode belongs to a thread, so a job cannot rely on its submitter's)
    and sets its own thread counts when it starts. A job that raises is a bug: `error` is set, the traceback is logged,
    remaining jobs are dropped, and `submit` raises RuntimeError from then on, as after `close`.

    set_threads: called once, in the lane's thread, with `threads`. niceness: added to the nice value of the lane's
    thread, which threads that its ops start inherit.
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
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Runs jobs in the lane's thread until `close`, or until one raises."""
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


_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


class WholeDevice:
    """The `Partitions` of a device that is not divided: there is partition 0 alone."""

    count = 1

    def set_partition(self, partition: int) -> None:
        """Does nothing."""

    def current(self) -> int:
        return 0

    def use(self, partition: int) -> AbstractContextManager[None]:
        if partition != 0:
            raise ValueError(f"partition: expected 0, the device is not divided, got {partition}")
        return nullcontext()


def host_memory() -> tuple[int, int]:
    """Bytes (free, total) of the machine, or of the container if that has less. Free includes page cache that the
    kernel reclaims on demand."""
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    machine = {words[0]: int(words[1]) << 10 for words in lines if words[0] in ("MemAvailable:", "MemTotal:")}
    free, total = machine["MemAvailable:"], machine["MemTotal:"]
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is not None and used is not None:
        # The page cache counts as used, but the kernel reclaims it on demand.
        free = min(free, max(limit - used + _inactive_file_bytes(), 0))
        total = min(total, limit)
    return free, total


class CpuDevice:
    """`Device` of backend/device.py.

    threads: per lane. set_threads: sets the thread counts of the calling thread. lane_priority: a key of NICENESS,
    which has the lanes' nice values.
    """

    name = "cpu"
    torch_device = torch.device("cpu")
    partitions: Partitions = WholeDevice()
    asynchronous = False

    def __init__(
        self,
        threads: int,
        set_threads: Callable[[int], None] = set_torch_threads,
        lane_priority: str = "balanced",
    ) -> None:
        self.threads = threads
        self._set_threads = set_threads
        self._niceness = NICENESS[lane_priority]

    def lane(self, name: str) -> Lane:
        niceness = self._niceness.get(name, 0)
        return ThreadLane(name, self.threads, set_threads=self._set_threads, niceness=niceness)

    def reader(self, name: str) -> Lane:
        return ThreadLane(name, 1)

    def memory(self) -> tuple[int, int]:
        return host_memory()

    def trim(self) -> None:
        """Returns unused memory of the allocator to the system: glibc keeps freed blocks of some MiB, and packing
        weights frees one per tensor."""
        trim_heap()

    def share(self, num_bytes: int) -> SharedMemory:
        return SharedPool(num_bytes)

    def stage(self, num_bytes: int) -> SharedMemory:
        return SharedPool(num_bytes, peers_write=True)

    def open_staging(self, export: PoolExport, descriptor: int) -> PeerMemory:
        return map_pool(descriptor, export.num_bytes)

    def open_peer(self, export: PoolExport, descriptor: int) -> PeerMemory:
        if export.transport != TRANSPORT:
            raise TransferError(f"memory of transport {export.transport[:20]!r} cannot be mapped by a processor")
        return map_pool(descriptor, export.num_bytes)

    def finish(self) -> None:
        """Returns at once: ops return when they are done."""

    # ---- asynchronous work: there is none

    def send(self, arrays: Sequence[npt.NDArray[np.generic]]) -> tuple[Tensor, ...]:
        """Returns tensors over the arrays' own memory, not copies."""
        return tuple(torch.from_numpy(array) for array in arrays)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        return _Copies(tuple(tensor.numpy().copy() for tensor in tensors))

    def mark(self) -> Mark:
        """Returns a mark that is done."""
        return _Moment(time.monotonic())

    def keep_free(self, num_bytes: int) -> None:
        """Does nothing: graphs take no memory."""

    def capture(self, launch: Callable[[], None]) -> Graph:
        """Runs `launch` once. A replay of the result calls it again."""
        launch()
        return _Calls(launch)

    def capture_pieces(self, launch: Callable[[Cut], None]) -> tuple[Graph, ...]:
        """Returns one graph, as `capture`: cuts do nothing."""
        return (self.capture(partial(launch, _no_cut)),)

    def peak_bytes(self, job: Callable[[], None]) -> int | None:
        """Runs `job`. Returns None: host memory is not measured."""
        job()
        return None


@dataclass(frozen=True, slots=True)
class _Copies:
    """A `Fetch` whose copies are already made."""

    arrays: tuple[npt.NDArray[np.generic], ...]

    def result(self) -> tuple[npt.NDArray[np.generic], ...]:
        return self.arrays


def _no_cut() -> None:
    """Does nothing: the `Cut` of a launch that is captured as one graph."""


@dataclass(frozen=True, slots=True)
class _Moment:
    """A `Mark` that is done. at_s: monotonic time when it was made."""

    at_s: float

    def is_done(self) -> bool:
        return True

    def wait(self) -> None: ...

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Moment)
        return self.at_s - earlier.at_s


@dataclass(slots=True)
class _Calls:
    """A `Graph` whose replay calls the launch again."""

    replay: Callable[[], None]
    num_bytes: int = 0


def usable_cores() -> int:
    """Number of cores that this process may use, at least 1: the cores of its affinity, or its container's CPU quota,
    rounded, if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def _cgroup_number(file: str) -> int | None:
    """The number in a file of the container's cgroup; None without a container or a limit."""
    try:
        return int((_CGROUP / file).read_text())
    except (OSError, ValueError):  # no such container, or the word "max"
        return None


def _inactive_file_bytes() -> int:
    """Bytes of the container's page cache that the kernel reclaims first; 0 if unknown."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
