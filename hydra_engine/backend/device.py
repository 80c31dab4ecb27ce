"""The device interface beside the ops: memory, lanes, copies, marks, graphs, partitions.

Part of the device interface of base.py. Does not know the meaning of tensors, ops or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.core.pools import PoolExport

Send = Callable[[Sequence[npt.NDArray[np.generic]]], tuple[Tensor, ...]]  # `Device.send`
Cut = Callable[[], None]  # ends the present piece of a capture


class SharedMemory(Protocol):
    """Memory of this process that other processes of the node can map and read."""

    @property
    def transport(self) -> str:
        """Kind of mapping, as in `core.pools.PoolExport`: "memfd" or "cuda-ipc"."""
        ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def descriptor(self) -> int:
        """File descriptor to send to a peer; it stays the pool's. -1 if `handle` is enough. Not after `close`."""
        ...

    @property
    def handle(self) -> bytes: ...

    def tensor(self) -> Tensor:
        """The memory as uint8 [num_bytes]."""
        ...

    def close(self) -> None:
        """Ends sharing: no peer can map it from now on. Tensors and mappings of peers stay valid. Idempotent."""
        ...


class PeerMemory(Protocol):
    """Memory of another process, mapped into this one."""

    def tensor(self) -> Tensor:
        """The memory as uint8 [num_bytes]. Must never be written; not after `close`."""
        ...

    def close(self) -> None:
        """Unmaps it. Call it once no launched work reads it; its tensors are invalid afterwards. Idempotent."""
        ...


class Fetch(Protocol):
    """Copies to host memory in flight."""

    def result(self) -> tuple[npt.NDArray[np.generic], ...]:
        """Waits for the copies and returns them. Thread-safe, may be called again. Raises BackendError if the device
        failed."""
        ...


class Mark(Protocol):
    """A point in a lane's stream, after everything that was launched before it (a CUDA event).

    Thread-safe. Methods raise BackendError if the device failed.
    """

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...

    def seconds_since(self, earlier: Mark) -> float:
        """Device seconds from `earlier`, a mark of the same lane, to this one; both must be done. Meant for
        neighbouring marks: the resolution gets worse over hours."""
        ...


class Graph(Protocol):
    """Captured launches that can be replayed, on the memory that they were captured with."""

    num_bytes: int  # device memory that the capture took

    def replay(self) -> None: ...


class Partitions(Protocol):
    """Sets of SMs for the language lane, numbered from 0, which is all of them; each has graphs of its own."""

    count: int  # 1: the device is not divided

    def set_partition(self, partition: int) -> None:
        """Sets the partition of the language lane's present job, which calls this, and of later jobs of both lanes
        while both have work."""
        ...

    def current(self) -> int:
        """The partition of the calling lane's present job."""
        ...

    def use(self, partition: int) -> AbstractContextManager[None]:
        """Runs the calling lane's launches inside the context on this partition."""
        ...


class WholeDevice:
    """The `Partitions` of a device that is not divided."""

    count = 1

    def set_partition(self, partition: int) -> None:
        """Does nothing."""

    def current(self) -> int:
        return 0

    def use(self, partition: int) -> AbstractContextManager[None]:
        if partition != 0:
            raise ValueError(f"partition: expected 0, the device is not divided, got {partition}")
        return nullcontext()


class Lane(Protocol):
    """A queue of jobs that run in order: a thread (CPU), or a stream with its launching thread (CUDA)."""

    name: str

    def submit(self, job: Callable[[], None]) -> None:
        """Runs `job` after all earlier ones, in torch's inference mode. Jobs handle their own errors: an exception that
        leaves a job ends the lane, is logged, and later calls raise."""
        ...

    def close(self) -> None:
        """Waits for all submitted jobs and stops the thread."""
        ...


class Device(Protocol):
    """A device as the engine uses it: lanes run steps, pools are shared with peers, copies and graphs belong to a lane.

        lane = device.lane("language")
        lane.submit(lambda: ops.linear(x, weight))
        lane.close()

    The "calling lane" of a method is the lane whose job makes the call.
    """

    name: str  # "cpu", "cuda:0"
    torch_device: torch.device

    @property
    def partitions(self) -> Partitions: ...

    def lane(self, name: str) -> Lane:
        """Starts a lane; the caller closes it."""
        ...

    def reader(self, name: str) -> Lane:
        """Starts a thread that waits for what lanes have launched (`Fetch.result`, `Mark.wait`) and launches nothing
        itself."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes of the device's memory, (free, total)."""
        ...

    def trim(self) -> None:
        """Returns freed host and device memory to the system: while weights are loaded, and after a step that ran out
        of memory."""
        ...

    def share(self, num_bytes: int) -> SharedMemory:
        """Allocates zeroed memory that peers can map, 1 byte or more. Raises ResourceError if there is none."""
        ...

    def stage(self, num_bytes: int) -> SharedMemory:
        """Allocates zeroed host memory for copies between it and this device; peers on any device can map it.

        Pages are taken when its tensor is used. Raises ResourceError if there is none.
        """
        ...

    def open_staging(self, export: PoolExport, descriptor: int) -> PeerMemory:
        """Maps the `stage` memory of a peer, as `open_peer` does."""
        ...

    def open_peer(self, export: PoolExport, descriptor: int) -> PeerMemory:
        """Maps the `share` memory of a peer.

        descriptor: the one that came with `export`, -1 if none did; it stays the caller's. Raises TransferError, with
        the reason, unless the memory is what `export` says.
        """
        ...

    def finish(self) -> None:
        """Waits until all that the calling lane has launched is done. Returns at once if ops compute before they
        return."""
        ...

    # ---- work that ends after the call that launched it

    @property
    def asynchronous(self) -> bool:
        """True if launched work ends after the call. Then tokens are sampled on the device, and a step is launched
        before the result of the step before it is read."""
        ...

    def send(self, arrays: Sequence[npt.NDArray[np.generic]]) -> tuple[Tensor, ...]:
        """Copies host arrays to the device for the calling lane's next launches: a tensor of each array's shape and
        dtype.

        All arrays travel in one copy. They must not be changed afterwards: a CPU device returns their own memory.
        """
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        """Starts to copy tensors to the host, after all that the calling lane has launched. The lane may overwrite them
        with its next launch."""
        ...

    def mark(self) -> Mark:
        """Marks the present end of the calling lane's launches."""
        ...

    def capture(self, launch: Callable[[], None]) -> Graph:
        """Captures `launch` as a graph on the calling lane's present partition. Runs it twice: to warm up, then to
        capture.

        Graphs of a lane share one memory pool: read their results before the next replay. `launch` must not wait, copy
        from the host, or allocate memory that outlives it.
        """
        ...

    def capture_pieces(self, launch: Callable[[Cut], None]) -> tuple[Graph, ...]:
        """Captures `launch` as several graphs, cut where it calls its argument.

        It must cut at the same places in every run, each time after a launch. The graphs must be replayed in order,
        with no other graph of the lane between them. One graph if the device captures nothing.
        """
        ...

    def peak_bytes(self, job: Callable[[], None]) -> int | None:
        """Runs `job`, waits for it, and returns the peak of additional device memory in bytes. None if that is not
        measured."""
        ...
