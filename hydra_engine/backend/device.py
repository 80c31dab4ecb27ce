"""The device interface beside the ops: memory, lanes, copies, marks, graphs, partitions.

Part of the device interface of base.py. Does not know the meaning of tensors, ops or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.core.pools import PoolExport

Send = Callable[[Sequence[npt.NDArray[np.generic]]], tuple[Tensor, ...]]  # `Device.send`
Cut = Callable[[], None]  # ends the present piece of a capture


class SharedMemory(Protocol):
    """Memory of this process that other processes of the machine can map and read: a pool."""

    @property
    def transport(self) -> str:
        """Kind of mapping, as in `core.pools.PoolExport`: "memfd" or "cuda-ipc"."""
        ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def descriptor(self) -> int:
        """File descriptor to send to a peer; `close` closes it, and reading it then raises ValueError. Always -1 if a
        peer needs `handle` alone."""
        ...

    @property
    def handle(self) -> bytes:
        """Bytes to send to a peer, which maps the memory by them; empty if it needs `descriptor` alone."""
        ...

    def tensor(self) -> Tensor:
        """The memory as uint8 [num_bytes], not copied. Not after `close`."""
        ...

    def close(self) -> None:
        """Closes `descriptor`. Tensors, and mappings of peers, stay valid; the memory is freed with the last of them,
        that of a GPU when the process ends if `handle` was read.

        No copy to or from memory of `stage` may be in flight. Idempotent.
        """
        ...


class PeerMemory(Protocol):
    """Memory of another process, mapped into this one."""

    def tensor(self) -> Tensor:
        """The memory as uint8 [num_bytes], not copied. It must never be written. Not after `close`."""
        ...

    def close(self) -> None:
        """Unmaps the memory. Call it once no launched work reads it; tensors over it are invalid afterwards.
        Idempotent."""
        ...


class Fetch(Protocol):
    """Copies to host memory that a lane has launched, made by `Device.fetch`."""

    def result(self) -> tuple[npt.NDArray[np.generic], ...]:
        """Waits for the copies and returns them. Thread-safe, may be called again. Raises BackendError if the device
        failed, or if an earlier kernel met a slot or row out of range."""
        ...


class Mark(Protocol):
    """A point in a lane's stream, after everything that was launched before it (a CUDA event).

    Thread-safe. Methods raise BackendError if the device failed.
    """

    def is_done(self) -> bool:
        """True if the device has finished the work before the mark. Does not wait."""
        ...

    def wait(self) -> None:
        """Blocks the calling thread until `is_done`."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds from `earlier`, a mark of the same lane, to this one on the device's clock; both must be done. Meant
        for neighbouring marks: the resolution gets worse over hours."""
        ...


class Graph(Protocol):
    """Captured launches that can be replayed, on the memory that they were captured with."""

    num_bytes: int  # device memory that the capture took; 0 for all pieces of a launch but the first

    def replay(self) -> None:
        """Launches the graph on the calling lane; it reads and writes the memory that it was captured with."""
        ...


class Partitions(Protocol):
    """Divisions of a GPU's SMs between language and vision lane, by number; each needs graphs of its own.

    Partition 0 is the whole device for both lanes, any other gives some SMs to the language lane and the others to the
    vision lane.
    """

    count: int  # of partitions, 0 included; 1: the device is not divided

    def set_partition(self, partition: int) -> None:
        """Sets the partition that jobs run on while both lanes have work; a number above the last means the last. The
        present job of the language lane calls this, and its further launches move too.

        A job may run on another partition: no lane gets SMs that a job of the other lane still uses, unless one of the
        two jobs has the whole device.
        """
        ...

    def current(self) -> int:
        """The partition that launches of the calling lane use now; 0 outside of the two lanes."""
        ...

    def use(self, partition: int) -> AbstractContextManager[None]:
        """Runs the calling lane's launches inside the context on this partition.

        Raises ValueError for a number that does not exist, and outside of the two lanes for any but 0.
        """
        ...


class Lane(Protocol):
    """A queue of jobs that run in order: a thread (CPU), or a stream with its launching thread (CUDA)."""

    name: str

    def submit(self, job: Callable[[], None]) -> None:
        """Appends a job, which runs in torch's inference mode after all earlier ones, and on the device after what the
        calling thread has launched. Returns at once.

        Jobs handle their own errors: an exception that leaves a job is logged and ends the lane. Raises RuntimeError
        then, and after `close`.
        """
        ...

    def close(self) -> None:
        """Waits for all submitted jobs and for what they have launched, and stops the thread. Idempotent."""
        ...


class Device(Protocol):
    """A device as the engine uses it: lanes run steps, peers map pools, copies and graphs belong to a lane.

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
        """Starts a lane; the caller closes it. name: "language" and "vision" have the priorities and partitions of
        their models, any other has neither."""
        ...

    def reader(self, name: str) -> Lane:
        """Starts a thread that waits for what lanes have launched (`Fetch.result`, `Mark.wait`) and launches nothing
        itself; the caller closes it."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes of the device's memory, (free, total)."""
        ...

    def trim(self) -> None:
        """Returns unused memory of the host's and the device's allocators to the system: while weights are loaded, and
        after a step that ran out of memory."""
        ...

    def share(self, num_bytes: int) -> SharedMemory:
        """Allocates zeroed memory of this device that peers can map, at least `num_bytes`, which is 1 or more. The
        caller closes it. Raises ResourceError if the system refuses. A CPU's pages are allocated when first written, so
        a lack of them shows later."""
        ...

    def stage(self, num_bytes: int) -> SharedMemory:
        """Allocates zeroed host memory for copies to and from this device; peers on any device can map it.

        Pages are allocated when its tensor is made or used. The caller closes it. Raises ResourceError if the system
        has none.
        """
        ...

    def open_staging(self, export: PoolExport, descriptor: int) -> PeerMemory:
        """Maps memory that a peer allocated with `stage`. Parameters and errors as of `open_peer`."""
        ...

    def open_peer(self, export: PoolExport, descriptor: int) -> PeerMemory:
        """Maps memory that a peer allocated with `share`; the caller closes it.

        descriptor: the one that came with `export`, -1 if none did; the caller closes it. Raises TransferError, with
        the reason, unless the memory is what `export` says.
        """
        ...

    def finish(self) -> None:
        """Waits until all that the calling lane has launched is done; at once on a CPU, whose ops return when they are
        done. Raises BackendError if the device failed."""
        ...

    # ---- work that ends after the call that launched it

    @property
    def asynchronous(self) -> bool:
        """True if ops return before their work is done. Then tokens are sampled on the device, and a step is launched
        before the result of the step before it is read."""
        ...

    def send(self, arrays: Sequence[npt.NDArray[np.generic]]) -> tuple[Tensor, ...]:
        """Copies host arrays to the device for the calling lane's next launches: a tensor of each array's shape and
        dtype.

        Up to 64 MiB travel in one copy. The arrays must not be changed afterwards: a CPU device returns their memory.
        """
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        """Starts to copy tensors, of dtypes that numpy has, to the host, after all that the calling lane has launched;
        its next launch may overwrite them."""
        ...

    def mark(self) -> Mark:
        """Returns a mark after all that the calling lane has launched until now."""
        ...

    def keep_free(self, num_bytes: int) -> None:
        """Sets how many bytes of device memory captures must leave to all other work, 0 at first: one that cannot
        raises torch.OutOfMemoryError."""
        ...

    def capture(self, launch: Callable[[], None]) -> Graph:
        """Captures `launch` as a graph on the calling lane's present partition, and so runs it: on a GPU to warm up, to
        capture, and as the graph.

        Graphs of a lane share one memory pool: read the results of one before the next is replayed. `launch` must not
        wait, copy from the host, or allocate memory that outlives it. Raises BackendError if it cannot be captured, and
        torch.OutOfMemoryError.
        """
        ...

    def capture_pieces(self, launch: Callable[[Cut], None]) -> tuple[Graph, ...]:
        """Captures `launch` as several graphs, cut where it calls its argument.

        It must cut at the same places in every run, each time after a launch. The graphs must be replayed in order,
        with no other graph of the lane between them. A device that captures nothing ignores the cuts and returns one.
        Otherwise as `capture`.
        """
        ...

    def peak_bytes(self, job: Callable[[], None]) -> int | None:
        """Runs `job`, waits for it, and returns the bytes of device memory at the peak beyond those allocated before;
        None if that is not measured (CPU). Other lanes' allocations meanwhile count too. On a GPU first waits for all
        lanes and empties torch's cache."""
        ...
