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

from hydra_engine.backend.cpu.device import CpuDevice, ThreadLane, WholeDevice, set_torch_threads
from hydra_engine.backend.cpu.shared_memory import TRANSPORT as HOST_TRANSPORT
from hydra_engine.backend.cpu.shared_memory import map_pool
from hydra_engine.backend.cuda.copies import CudaFetch, CudaMark, Sender, failure
from hydra_engine.backend.cuda.graphs import GraphPools
from hydra_engine.backend.cuda.lanes import CudaLane
from hydra_engine.backend.cuda.shared_memory import PEER_POOLS, TRANSPORT, DevicePool, PeerStaging, StagingPool
from hydra_engine.backend.cuda.sm_split import SplitDevice
from hydra_engine.backend.device import Cut, Fetch, Graph, Lane, Mark, Partitions, PeerMemory, SharedMemory
from hydra_engine.core.pools import PoolExport
from hydra_engine.core.units import size
from hydra_engine.errors import ResourceError, TransferError


class CudaDevice:
    """`Device` of backend/device.py on GPU number `index`.

    threads: CPU threads of each lane. set_threads: sets them for the calling thread. priorities: stream priorities by
    lane, 0 for a lane that is not named. split: None if the device is not divided between lanes.
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
        """Starts a lane with a stream of its own; the caller closes it. If the device is divided, start one language
        and one vision lane at most."""
        stream = torch.cuda.Stream(self.torch_device, priority=self._priorities.get(name, 0))
        if self._split is None:
            return CudaLane(name, self.torch_device, stream, self._threads, self._set_threads)
        return self._split.lane(name, stream, self._threads, self._set_threads)

    def reader(self, name: str) -> Lane:
        """Starts a thread that waits for what lanes have launched; the caller closes it. This device is made current in
        the thread: otherwise waiting would create a context on GPU 0."""
        return ThreadLane(name, 1, set_threads=self._begin_reader)

    def _begin_reader(self, threads: int) -> None:
        """Prepares the calling thread, a reader's: sets its CPU threads and its current device."""
        set_torch_threads(threads)
        torch.cuda.set_device(self.torch_device)

    # ---- memory

    def memory(self) -> tuple[int, int]:
        """Bytes (free, total); memory that torch has reserved and does not use counts as free."""
        free, total = torch.cuda.mem_get_info(self._index)
        idle = torch.cuda.memory_reserved(self._index) - torch.cuda.memory_allocated(self._index)
        return free + idle, total

    def trim(self) -> None:
        """Returns freed host memory, and device memory that torch has reserved and does not use, to the system: weights
        arrive in parts, and what the parts leave behind is of no use to the caches."""
        self._host.trim()
        torch.cuda.empty_cache()

    def peak_bytes(self, job: Callable[[], None]) -> int | None:
        """Runs `job`, waits for the current stream, and returns the peak of additional device memory in bytes. That
        includes what other lanes allocate meanwhile. First waits for the whole device and empties torch's cache."""
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
        """Allocates a zeroed `DevicePool`, whose memory peers can map. Raises ResourceError if CUDA cannot allocate
        it."""
        try:
            return DevicePool(num_bytes, self._index)
        except RuntimeError as error:
            raise ResourceError(
                f"{self.name} has no {size(num_bytes)} for caches that other instances read; lower "
                "--kv-cache-gib and --image-cache-gib or free its memory",
                param="kv_cache_gib",
            ) from error

    def stage(self, num_bytes: int) -> SharedMemory:
        """Allocates a `StagingPool`: host memory that peers can map, pinned when its tensor is first used. Raises
        ResourceError if the system has no such memory."""
        return StagingPool(num_bytes, self._index)

    def open_staging(self, export: PoolExport, descriptor: int) -> PeerMemory:
        """Maps and pins a peer's `stage` memory; the descriptor stays the caller's. Raises TransferError if it is not
        as `export` says."""
        return PeerStaging(descriptor, export.num_bytes, self._index)

    def open_peer(self, export: PoolExport, descriptor: int) -> PeerMemory:
        """Maps a peer's `share` memory, also that of a CPU instance. Host memory is not pinned: it is as large as all
        caches of that instance. Raises TransferError if the memory cannot be mapped or is not as `export` says."""
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
        """Implements `Device.send`. The arrays may be changed afterwards; waits if too many copies are in flight
        (`Sender`)."""
        return self._sender.send(arrays)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        """Starts to copy tensors to pinned host memory, after all work on the current stream. Raises ValueError as
        `CudaFetch`."""
        return CudaFetch(self.torch_device, tensors)

    def mark(self) -> Mark:
        """Marks the present end of the current stream, for waiting and timing."""
        return CudaMark(self.torch_device)

    def keep_free(self, num_bytes: int) -> None:
        """Sets how many bytes captures must leave to all other work, warm-ups of later captures included."""
        self._graphs.kept_free = num_bytes

    def capture(self, launch: Callable[[], None]) -> Graph:
        """Captures `launch`, which runs twice, as a graph. Raises BackendError if it cannot be captured, and
        torch.OutOfMemoryError.

        Call it before the lane serves: memory that is freed elsewhere while the lane's stream is captured would become
        part of the graph.
        """
        return self._graphs.capture(launch)

    def capture_pieces(self, launch: Callable[[Cut], None]) -> tuple[Graph, ...]:
        """Captures `launch`, which runs twice, as several graphs, cut where it calls its argument. The
        conditions and errors of `capture` apply."""
        return self._graphs.capture_pieces(launch)
