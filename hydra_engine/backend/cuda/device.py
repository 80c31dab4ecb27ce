"""A CUDA device as `Device` of backend/device.py: lanes, memory, copies, graphs, pools that peers map.

Does not touch the device before its first use, so that `doctor` can look at one. Does not know which ops run on it;
`select.py` combines the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.cpu.device import CpuDevice, ThreadLane, set_torch_threads
from hydra_engine.backend.cpu.shared_memory import TRANSPORT as HOST_TRANSPORT
from hydra_engine.backend.cpu.shared_memory import map_pool
from hydra_engine.backend.cuda.copies import CudaFetch, CudaMark, Sender, failure
from hydra_engine.backend.cuda.graphs import GraphPools
from hydra_engine.backend.cuda.lanes import CudaLane
from hydra_engine.backend.cuda.shared_memory import PEER_POOLS, TRANSPORT, DevicePool, PeerStaging, StagingPool
from hydra_engine.backend.cuda.sm_split import SplitDevice
from hydra_engine.backend.device import Cut, Fetch, Graph, Lane, Mark, Partitions, PeerMemory, SharedMemory, WholeDevice
from hydra_engine.core.pools import PoolExport
from hydra_engine.core.units import size
from hydra_engine.errors import ResourceError, TransferError


class CudaDevice:
    """`Device` of backend/device.py on a GPU.

    set_threads: sets the CPU threads of the calling thread. priorities: of lanes' streams, 0 for a lane that is not
    named. split: None if the device is not divided.
    """

    asynchronous = True

    def __init__(
        self,
        index: int,
        threads: int,
        set_threads: Callable[[int], None] = set_torch_threads,
        priorities: Mapping[str, int] | None = None,
        split: SplitDevice | None = None,
    ) -> None:
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self._index = index
        self._threads = threads
        self._set_threads = set_threads
        self._priorities = dict(priorities or {})
        self._host = CpuDevice(threads, set_threads)
        self._split = split
        self.partitions: Partitions = WholeDevice() if split is None else split
        self._graphs = GraphPools(self.torch_device)
        self._sender = Sender(self.torch_device)

    def lane(self, name: str) -> Lane:
        stream = torch.cuda.Stream(self.torch_device, priority=self._priorities.get(name, 0))
        if self._split is None:
            return CudaLane(name, self.torch_device, stream, self._threads, self._set_threads)
        return self._split.lane(name, stream, self._threads, self._set_threads)

    def reader(self, name: str) -> Lane:
        """Sets the thread's device first: otherwise waiting would create a context on GPU 0."""
        return ThreadLane(name, 1, set_threads=self._begin_reader)

    def _begin_reader(self, threads: int) -> None:
        set_torch_threads(threads)
        torch.cuda.set_device(self.torch_device)

    # ---- memory

    def memory(self) -> tuple[int, int]:
        """Bytes (free, total); memory that torch has reserved and does not use counts as free."""
        free, total = torch.cuda.mem_get_info(self._index)
        idle = torch.cuda.memory_reserved(self._index) - torch.cuda.memory_allocated(self._index)
        return free + idle, total

    def trim(self) -> None:
        """Empties torch's cache too: weights arrive in parts, and what parts leave behind is of no use to the
        caches."""
        self._host.trim()
        torch.cuda.empty_cache()

    def peak_bytes(self, job: Callable[[], None]) -> int | None:
        """Runs `job` and returns the peak, which includes what other lanes allocate meanwhile."""
        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._index)
        allocated, reserved = torch.cuda.memory_allocated(self._index), torch.cuda.memory_reserved(self._index)
        job()
        self.finish()
        # The peak of allocated memory, or of reserved memory if fragmentation made that larger.
        return max(
            torch.cuda.max_memory_allocated(self._index) - allocated,
            torch.cuda.max_memory_reserved(self._index) - reserved,
        )

    # ---- peers

    def share(self, num_bytes: int) -> SharedMemory:
        try:
            return DevicePool(num_bytes, self._index)
        except RuntimeError as error:
            raise ResourceError(
                f"{self.name} has no {size(num_bytes)} for caches that other instances read; lower "
                "--kv-cache-gib and --image-cache-gib or free its memory",
                param="kv_cache_gib",
            ) from error

    def stage(self, num_bytes: int) -> SharedMemory:
        return StagingPool(num_bytes, self._index)

    def open_staging(self, export: PoolExport, descriptor: int) -> PeerMemory:
        return PeerStaging(descriptor, export.num_bytes, self._index)

    def open_peer(self, export: PoolExport, descriptor: int) -> PeerMemory:
        """Maps host memory too, unpinned: it is as large as a CPU instance's caches."""
        if export.transport == HOST_TRANSPORT:
            return map_pool(descriptor, export.num_bytes)
        if export.transport != TRANSPORT:
            raise TransferError(f"memory of transport {export.transport[:20]!r} cannot be mapped by a GPU")
        return PEER_POOLS.open(export.handle, export.num_bytes, self._index)

    # ---- asynchronous work

    def finish(self) -> None:
        """Waits for the current stream. Raises BackendError if the device failed."""
        try:
            torch.cuda.current_stream(self.torch_device).synchronize()
        except RuntimeError as error:
            raise failure(self.torch_device, error) from error

    def send(self, arrays: Sequence[npt.NDArray[np.generic]]) -> tuple[Tensor, ...]:
        return self._sender.send(arrays)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        return CudaFetch(self.torch_device, tensors)

    def mark(self) -> Mark:
        return CudaMark(self.torch_device)

    def capture(self, launch: Callable[[], None]) -> Graph:
        """Captures before the lane serves: memory freed elsewhere while its stream is captured would become part of the
        graph. Raises BackendError if `launch` cannot be captured."""
        return self._graphs.capture(launch)

    def capture_pieces(self, launch: Callable[[Cut], None]) -> tuple[Graph, ...]:
        return self._graphs.capture_pieces(launch)
