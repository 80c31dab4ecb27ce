"""The CUDA backend on an emulated device: the engine's own files, with torch.cuda, kernels and the extension replaced.

`emulated_cuda` puts everything in place for a test and takes it back. Nothing of hydra_engine is written again here but
pools that other processes map, which take the host's shared memory.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_engine.backend import devices, select
from hydra_engine.backend.cpu import device as cpu_host
from hydra_engine.backend.cpu.device import CpuDevice
from hydra_engine.backend.cpu.shared_memory import TRANSPORT as HOST_TRANSPORT
from hydra_engine.backend.cuda import attention as cuda_attention
from hydra_engine.backend.cuda import attention_timing
from hydra_engine.backend.cuda import cache as cuda_cache
from hydra_engine.backend.cuda import copies as cuda_copies
from hydra_engine.backend.cuda import device as cuda_host
from hydra_engine.backend.cuda import graphs as cuda_graphs
from hydra_engine.backend.cuda import lanes as cuda_lanes
from hydra_engine.backend.cuda import ops as cuda
from hydra_engine.backend.cuda import shared_memory as cuda_memory
from hydra_engine.backend.cuda import sm_split as cuda_split
from hydra_engine.backend.device import PeerMemory, SharedMemory
from hydra_engine.core.pools import PoolExport
from hydra_engine.errors import TransferError
from hydra_engine.models.loading import random_weights
from hydra_engine.worker import worker
from hydra_engine.worker.language import lane as language
from hydra_engine.worker.vision import gate
from tests.emulated import graphs, streams
from tests.emulated.captures import Pool
from tests.emulated.clock import Clock
from tests.emulated.graphs import Capturing
from tests.emulated.kernels import Extension, Launches, functions_of, kernel
from tests.emulated.streams import Streams
from tests.emulated.tensors import DEVICE, OnDevice, Present, new, pinned

WITH_TORCH = (
    *(attention_timing, cuda_attention, cuda_cache, cuda_copies, cuda_graphs, cuda_host, cuda_lanes),
    *(cuda_split, select),
)
# What is measured at start is small here, and measured once.
MEASURED = {"CACHE_BYTES": 1 << 16, "NUM_ROWS": 2, "CHUNK": 16, "TOWER_ROWS": 64, "LAUNCHES": 1, "REPLAYS": 1}
WITH_EXTENSION = (cuda_cache, cuda_copies, cuda_split, cuda_memory)
WITH_THREADS = (cpu_host, cuda_split, gate, language)
MULTIPROCESSORS = 8


class TorchCuda:
    """Stands in for torch.cuda."""

    def __init__(self, present: Streams) -> None:
        self._streams = present
        clock = present.clock
        self.multiprocessors = MULTIPROCESSORS if clock is None else clock.machine.multiprocessors

    # ---- streams

    def Stream(self, device: Any = None, priority: int = 0) -> streams.Stream:
        return self._streams.make(priority=priority)

    def ExternalStream(self, handle: int, device: Any = None) -> streams.Stream:
        return self._streams.by_handle[handle]

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> streams.Event:
        return streams.Event(self._streams, enable_timing=enable_timing)

    def current_stream(self, device: Any = None) -> streams.Stream:
        _check_device(device)
        return self._streams.current

    def default_stream(self, device: Any = None) -> streams.Stream:
        _check_device(device)
        return self._streams.default

    def set_stream(self, stream: streams.Stream) -> None:
        self._streams.use(stream)

    def stream(self, stream: streams.Stream) -> AbstractContextManager[None]:
        return self._streams.using(stream)

    def set_device(self, device: Any) -> None:
        self._streams.has_device()

    def device(self, device: Any) -> AbstractContextManager[None]:
        return self._streams.having_device()

    def get_device_name(self, device: Any) -> str:
        return "emulated"

    def get_device_properties(self, device: Any) -> SimpleNamespace:
        return SimpleNamespace(
            name="emulated",
            uuid="0",
            multi_processor_count=self.multiprocessors,
            L2_cache_size=1 << 14,
            total_memory=Present.total_bytes,
            major=9,
            minor=0,
        )

    def get_device_capability(self, device: Any) -> tuple[int, int]:
        return 9, 0

    def synchronize(self, device: Any = None) -> None:
        for stream in [*self._streams.by_handle.values()]:
            stream.synchronize()

    # ---- memory

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return Present.total_bytes - Present.reserved_bytes, Present.total_bytes

    def memory_allocated(self, device: Any = None) -> int:
        return Present.used_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        return Present.peak_bytes

    def memory_reserved(self, device: Any = None) -> int:
        return Present.reserved_bytes

    def max_memory_reserved(self, device: Any = None) -> int:
        return Present.peak_reserved_bytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        Present.peak_bytes, Present.peak_reserved_bytes = Present.used_bytes, Present.reserved_bytes

    def empty_cache(self) -> None:
        if not self._streams.captures.pools:
            Present.reserved_bytes = Present.used_bytes

    # ---- graphs

    def CUDAGraph(self) -> graphs.CUDAGraph:
        return graphs.CUDAGraph(self._streams)

    def graph_pool_handle(self) -> Pool:
        return Pool()

    def graph(
        self,
        graph: graphs.CUDAGraph,
        *,
        pool: Pool | None = None,
        stream: streams.Stream,
        capture_error_mode: str,
    ) -> Capturing:
        assert capture_error_mode == "thread_local", "other lanes may launch meanwhile"
        return Capturing(self._streams, graph, stream, pool)


def _check_device(device: Any) -> None:
    """Raises torch's error for a device that is not CUDA."""
    if isinstance(device, torch.device) and device != DEVICE:
        raise ValueError(f"Expected a cuda device, but got: {device}")


class TorchC:
    """Stands in for torch._C."""

    def __init__(self, present: Streams) -> None:
        self._streams = present

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams.captures, name)

    def _cuda_getCurrentRawStream(self, device: int) -> int:
        return self._streams.current.cuda_stream


class Torch:
    """Stands in for torch in files that name CUDA."""

    def __init__(self, present: Streams) -> None:
        self.cuda = TorchCuda(present)
        self._C = TorchC(present)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, kind: str, index: int | None = None) -> torch.device:
        return DEVICE if kind.startswith("cuda") else torch.device(kind)

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = torch.empty(*args, **kwargs)
        return pinned(made) if pin_memory else made

    def Generator(self, device: torch.device | None = None) -> torch.Generator:
        """Weights come out as on the host."""
        return torch.Generator()


class SharedDevicePool:
    """`SharedMemory` of backend/device.py, in the host's, which only emulated devices map."""

    transport = cuda_memory.TRANSPORT

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._tensor = new(memory.tensor(), lasting=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def tensor(self) -> Tensor:
        return self._tensor


_OPEN_PEER = cuda_host.CudaDevice.open_peer
NO_PEER_ACCESS = "EMULATED_NO_PEER_ACCESS"  # where this is in the environment no device maps another's memory


def share(self: cuda_host.CudaDevice, num_bytes: int) -> Any:
    return SharedDevicePool(CpuDevice(1).share(num_bytes))


def open_peer(self: cuda_host.CudaDevice, export: PoolExport, descriptor: int) -> PeerMemory:
    if export.transport != cuda_memory.TRANSPORT:
        return _OPEN_PEER(self, export, descriptor)
    if os.environ.get(NO_PEER_ACCESS):
        raise TransferError("a peer's memory cannot be mapped: CUDA error 217 (cudaErrorPeerAccessUnsupported)")
    export = replace(export, transport=HOST_TRANSPORT)
    pool: Any = SharedDevicePool(CpuDevice(1).open_peer(export, descriptor))  # type: ignore[arg-type]
    return pool


def _tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    """torch.tensor, which keeps the dispatcher out while it copies, also to where a context of torch.device says. A
    number in a list may be a tensor of the device, which is waited for."""
    if isinstance(data, (list, tuple)):
        data = [one.tolist() if isinstance(one, OnDevice) else one for one in data]
    with torch._C.DisableTorchFunction():
        made = _REAL_TENSOR(data, **kwargs)
    return made.to(torch.empty(0).device if device is None else device)


_REAL_TENSOR = torch.tensor
# Torch lists what makes tensors once, at the first use of a context of torch.device: before one of them is replaced.
# Without the real one in that list, models that transformers loads later in this process have no rotary positions.
with torch.device("cpu"):
    torch.empty(0)


@contextmanager
def emulated_cuda(*, total_bytes: int = 1 << 32, clock: Clock | None = None) -> Iterator[Streams]:
    """`Device` and `Ops` that are made inside are those of an emulated device, also by `Engine(.., device="cuda")`.
    With a clock, the threads and waits of lanes are in its time, and whoever makes and ends them must take part."""
    present = Present.begin(total_bytes, clock)
    fake: Any = Torch(present)
    extension = Extension(present, fake.cuda.multiprocessors)
    with pytest.MonkeyPatch.context() as patch:
        if clock is not None:
            for module in WITH_THREADS:
                patch.setattr(module, "threading", clock.time.threading)
            patch.setattr(cpu_host, "queue", clock.time.queue)
            patch.setattr(worker, "SimpleQueue", clock.time.queue.SimpleQueue)
            patch.setattr(cuda_graphs, "_CAPTURING", clock.time.threading.Lock())
        for module in WITH_TORCH:
            patch.setattr(module, "torch", fake, raising=False)
        patch.setattr(random_weights, "torch", fake)
        for name, small in MEASURED.items():
            patch.setattr(attention_timing, name, small)
        patch.setattr(torch, "tensor", _tensor)
        for module in WITH_EXTENSION:
            patch.setattr(module, "_C", extension)
        patch.setattr(cuda_split.Track.__init__, "__defaults__", (fake.cuda.set_stream,))
        for module in backend_modules():
            for place, name, function in [*functions_of(module)]:
                called = kernel(function)
                patch.setattr(place, name, staticmethod(called) if isinstance(place, type) else called)
        for name in [name for name in sys.modules if name.startswith("hydra_kernels.")]:
            for attribute in [name for name in vars(importlib.import_module(name)) if name.endswith("_kernel")]:
                patch.setattr(importlib.import_module(name), attribute, Launches(attribute))
        patch.setattr(cuda_host.CudaDevice, "share", share)
        patch.setattr(cuda_host.CudaDevice, "open_peer", open_peer)
        patch.setattr(devices, "resolve", _resolve)
        patch.setattr(devices, "names", lambda: (devices.CPU, "cuda:0"))
        yield present


def backend_modules() -> list[ModuleType]:
    """Loaded modules of the CUDA backend."""
    return [module for name, module in [*sys.modules.items()] if name.startswith(f"{cuda.__package__}.")]


def _resolve(device: str) -> devices.ChosenDevice:
    if device.startswith("cuda"):
        return devices.ChosenDevice("cuda:0", 0, 4, "emulated", (9, 0))
    return devices.ChosenDevice(devices.CPU, None, 0, "as asked")
