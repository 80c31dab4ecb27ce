"""A processor that behaves like a device which works behind the call: what is fetched comes when the test lets it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.cpu.device import CpuDevice
from hydra_engine.backend.device import Fetch, Graph
from hydra_engine.errors import BackendError

Arrays = Sequence[npt.NDArray[np.generic]]


@dataclass
class LateFetch:
    copies: Fetch
    device: LateDevice

    def result(self) -> tuple[npt.NDArray[np.generic], ...]:
        self.device.waiting.set()
        assert self.device.working.wait(20), "nobody lets the device work"
        if self.device.broken:
            raise BackendError("the device has failed")
        return self.copies.result()


@dataclass
class CountedCalls:
    launch: Callable[[], None]
    device: LateDevice
    num_bytes: int = 1000

    def replay(self) -> None:
        self.device.replays.append(self.device.partitions.here)
        self.launch()


class LatePartitions:
    def __init__(self, count: int) -> None:
        self.count = count
        self.here = 0

    def set_partition(self, partition: int) -> None:
        """The test says where."""

    def current(self) -> int:
        return self.here

    def use(self, partition: int) -> AbstractContextManager[None]:
        assert 0 <= partition < self.count
        return nullcontext()


class LateDevice(CpuDevice):
    """A device with memory of its own: tensors that are sent are copies. Graphs are calls, counted by partition."""

    def __init__(self, num_partitions: int = 1) -> None:
        super().__init__(1)
        self.working = threading.Event()  # unset: results are not there yet
        self.working.set()
        self.waiting = threading.Event()  # somebody waits for a result, or did
        self.broken = False
        self.partitions: LatePartitions = LatePartitions(num_partitions)
        self.sent: list[int] = []  # arrays of each send
        self.replays: list[int] = []  # the partition of each
        self.trims = 0

    @property
    def asynchronous(self) -> bool:
        return True

    def send(self, arrays: Arrays) -> tuple[Tensor, ...]:
        self.sent.append(len(arrays))
        return tuple(torch.from_numpy(array.copy()) for array in arrays)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        return LateFetch(super().fetch(tensors), self)

    def capture(self, launch: Callable[[], None]) -> Graph:
        launch()
        return CountedCalls(launch, self)

    def finish(self) -> None:
        if self.broken:
            raise BackendError("the device has failed")

    def trim(self) -> None:
        self.trims += 1
