"""What a device offers beside its ops: memory, lanes, and work that ends after the call that launched it.

Part of the one door to hardware (`base.py`). Does not know tensors' meaning, ops or steps.
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

Send = Callable[[Sequence[npt.NDArray[np.generic]]], tuple[Tensor, ...]]  # as `Device.send`
Cut = Callable[[], None]  # ends a piece of what is captured


class SharedMemory(Protocol):
    """Memory of this process that other processes of the node can map to read it."""

    @property
    def transport(self) -> str:
        """How it is mapped, as in `core.pools.PoolExport`."""
        ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def descriptor(self) -> int:
        """What travels to a peer, and stays ours; -1 where `handle` says everything. Not after `close`."""
        ...

    @property
    def handle(self) -> bytes: ...

    def tensor(self) -> Tensor:
        """[num_bytes] uint8."""
        ...

    def close(self) -> None:
        """No peer maps it from now on; a second call does nothing. Tensors, and what peers have mapped, stay good."""
        ...


class PeerMemory(Protocol):
    """Memory of another process, mapped into this one."""

    def tensor(self) -> Tensor:
        """[num_bytes] uint8, which must never be written. Not after `close`."""
        ...

    def close(self) -> None:
        """Once nothing that was launched reads it; a second call does nothing. No tensor of it may be read again."""
        ...


class Fetch(Protocol):
    """Copies to host memory that were started."""

    def result(self) -> tuple[npt.NDArray[np.generic], ...]:
        """Waits for them. From any thread; may be asked again. Raises BackendError where the device failed."""
        ...


class Mark(Protocol):
    """A point behind all that a lane had launched when it was made. From any thread. Raises BackendError where the
    device failed."""

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...

    def seconds_since(self, earlier: Mark) -> float:
        """Of the device's time, from an earlier mark of the same lane to this one; both are done. Precise between
        neighbours: devices count in few digits, which hours use up."""
        ...


class Graph(Protocol):
    """Launches that were captured and can be made again at once, on the memory that they were captured with."""

    num_bytes: int  # of device memory that capturing took

    def replay(self) -> None: ...


class Partitions(Protocol):
    """Parts of a device on which the language lane may run, numbered from 0, all of it, each with graphs."""

    count: int  # 1: the device is never divided

    def choose(self, partition: int) -> None:
        """Where the job of the language lane that calls this runs, and those of both lanes that begin from now on,
        while both have work."""
        ...

    def current(self) -> int:
        """Where the calling lane's present job runs."""
        ...

    def at(self, partition: int) -> AbstractContextManager[None]:
        """Runs what the calling lane launches inside there."""
        ...


class WholeDevice:
    """`Partitions` of a device that is never divided."""

    count = 1

    def choose(self, partition: int) -> None:
        """Does nothing."""

    def current(self) -> int:
        return 0

    def at(self, partition: int) -> AbstractContextManager[None]:
        if partition != 0:
            raise ValueError(f"partition: expected 0, the device is not divided, got {partition}")
        return nullcontext()


class Lane(Protocol):
    """Where the steps of one model run in order: a thread (CPU) or a stream with its launching thread (CUDA)."""

    name: str

    def submit(self, job: Callable[[], None]) -> None:
        """Runs `job` after all earlier ones, in torch's inference mode. A job handles its own errors; one that raises
        kills the lane loudly."""
        ...

    def close(self) -> None:
        """Waits for what was submitted and stops the thread."""
        ...


class Device(Protocol):
    name: str  # "cpu", "cuda:0"
    torch_device: torch.device

    @property
    def partitions(self) -> Partitions: ...

    def lane(self, name: str) -> Lane: ...

    def reader(self, name: str) -> Lane:
        """A thread that waits for what lanes have launched (`Fetch.result`, `Mark.wait`), and launches nothing."""
        ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of this device's memory."""
        ...

    def trim(self) -> None:
        """Gives freed memory back to the system, of the host and of the device: while weights are loaded, and after
        a step that found none."""
        ...

    def share(self, num_bytes: int) -> SharedMemory:
        """Memory full of zeros, of at least one byte. Raises ResourceError where there is none."""
        ...

    def stage(self, num_bytes: int) -> SharedMemory:
        """Host memory full of zeros, for copies between it and this device, which peers on any device can map. It takes
        nothing until its tensor is used. Raises ResourceError where there is none."""
        ...

    def open_staging(self, export: PoolExport, descriptor: int) -> PeerMemory:
        """Maps what a peer's `stage` has made, as `open_peer` does."""
        ...

    def open_peer(self, export: PoolExport, descriptor: int) -> PeerMemory:
        """Maps what a peer's `share` has made. `descriptor` is the one that came with it, -1 if none did; it is still
        the caller's. Raises TransferError, with the reason, unless the memory is what `export` says."""
        ...

    def finish(self) -> None:
        """Waits until all that the calling lane has launched is done; not at all where a call ends with its work."""
        ...

    # ---- work that ends after the call that launched it

    @property
    def asynchronous(self) -> bool:
        """Whether there is such work. Then tokens are sampled on the device, and a step is launched before the one
        before it was read."""
        ...

    def send(self, arrays: Sequence[npt.NDArray[np.generic]]) -> tuple[Tensor, ...]:
        """Each array as a tensor of its shape and dtype on the device, for what the calling lane launches next; with
        one copy for all of them where there is one to make. The arrays must not be changed afterwards."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        """Starts to copy them behind all that the calling lane has launched. They may be reused at once by what the
        lane launches next."""
        ...

    def mark(self) -> Mark:
        """Behind what the calling lane has launched."""
        ...

    def capture(self, launch: Callable[[], None]) -> Graph:
        """Runs `launch` once to warm it up and once to capture it, on the calling lane's present partition. Graphs
        share one pool of memory: their results must be read before the next replay. `launch` must not wait, copy from
        the host or allocate what outlives it."""
        ...

    def capture_pieces(self, launch: Callable[[Cut], None]) -> tuple[Graph, ...]:
        """As `capture`, in graphs that end where `launch` calls what it is given, always at the same places and behind
        a launch. They are replayed in their order and without another graph of the lane between them. One graph where
        nothing is captured."""
        ...

    def peak_bytes(self, job: Callable[[], None]) -> int | None:
        """Runs `job` and waits for it; how much memory of the device it took at most beside what was taken before.
        None where that cannot be told."""
        ...
