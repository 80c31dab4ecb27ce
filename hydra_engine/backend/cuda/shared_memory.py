"""Memory that other processes of this node map: pools of device memory, and host memory for devices that cannot map
each other's.

The owner allocates a device pool by itself, so that a handle names exactly the pool, and sends the handle to its peers
over their channel. A peer opens every pool once and keeps it open (`PEER_POOLS`). A pool is identified by its owner's
process id and a generation number, unique since the machine booted, so a handle of a dead pool or process never opens
its successor.

Host memory is the CPU backend's, pinned, so that copy engines reach it at full speed. If the system refuses to pin it,
copies are slower and one line is logged.

Does not know caches, blocks, requests or channels.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend.cpu.shared_memory import MappedPool, SharedPool, map_pool
from hydra_engine.core.units import size
from hydra_engine.errors import TransferError

TRANSPORT = "cuda-ipc"

_HANDLE_BYTES = 64
_PACKED = struct.Struct(f"<{_HANDLE_BYTES}sQQ")  # CUDA's handle, owner, generation
# Monotonic time counts from boot: a later process with the same id starts at a higher number.
_generations = itertools.count(time.monotonic_ns())


class PoolHandle(NamedTuple):
    """Identity of a pool, sent to peers together with its size."""

    data: bytes  # CUDA's handle, 64 bytes
    owner: int  # process id
    generation: int

    def pack(self) -> bytes:
        """The handle as bytes, as `PeerPools.open` takes it."""
        return _PACKED.pack(*self)


class DevicePool:
    """`SharedMemory` of backend/device.py on GPU number `device`: `num_bytes` rounded up to multiples of 2 MiB, zeroed.

    Memory that was never exported is freed with the pool and its tensors. Memory whose `handle` was read stays until
    the process ends, since CUDA does not define what peers would see.
    """

    transport = TRANSPORT
    descriptor = -1

    def __init__(self, num_bytes: int, device: int) -> None:
        """Allocates the pool. Raises RuntimeError if CUDA cannot be used or memory runs out."""
        unit = _C.CUDA_POOL_GRANULARITY
        self.num_bytes = -(-num_bytes // unit) * unit
        self._device = device
        self._handle = b""
        self._address = _C.cuda_allocate(self.num_bytes, device)
        self._release = weakref.finalize(self, _C.cuda_release, self._address, device)
        self.tensor().zero_()

    @property
    def handle(self) -> bytes:
        """The packed `PoolHandle`. Reading it for the first time exports the memory, which then stays until the process
        ends."""
        if not self._handle:
            data = _C.cuda_ipc_export(self._address, self._device)
            self._handle = PoolHandle(data, os.getpid(), next(_generations)).pack()
            self._release.detach()
        return self._handle

    def tensor(self) -> Tensor:
        """The memory as uint8 [num_bytes]. The tensor keeps the pool alive."""
        return _tensor(self, self._address, self.num_bytes)

    def close(self) -> None:
        """Does nothing: the memory is freed with its tensors, or when the process ends if it was exported."""


class OpenedPool:
    """`PeerMemory` of backend/device.py: a peer's `DevicePool`, mapped by `PeerPools.open`."""

    def __init__(self, pools: PeerPools, handle: PoolHandle, num_bytes: int, device: int, address: int) -> None:
        self.num_bytes = num_bytes
        self.device = device  # of this process, whose kernels read the pool
        self.address = address  # 0 once closed
        self._pools = pools
        self._handle = handle

    def tensor(self) -> Tensor:
        """The memory as uint8 [num_bytes], on the device that has it. Raises ValueError after `close`."""
        if self.address == 0:
            raise ValueError(f"pool: {_named(*self._handle[1:])} is closed")
        return _tensor(self, self.address, self.num_bytes)

    def close(self) -> None:
        """Unmaps the pool for good: its owner is gone, or sends a new one when it comes back. Conditions as for
        `PeerPools.close`."""
        self._pools.close(self._handle.owner, self._handle.generation)


class PeerPools:
    """The peers' pools that this process has mapped, each once. Thread-safe. open_memory, close_memory: replaced by
    tests."""

    def __init__(
        self,
        open_memory: Callable[[bytes, int, int], int] = _C.cuda_ipc_open,
        close_memory: Callable[[int, int], None] = _C.cuda_ipc_close,
    ) -> None:
        self._open_memory = open_memory
        self._close_memory = close_memory
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], OpenedPool] = {}  # by owner and generation
        self._closed: set[tuple[int, int]] = set()

    def open(self, packed: bytes, num_bytes: int, device: int) -> OpenedPool:
        """Maps a peer's pool by its `DevicePool.handle` and size, or returns the present mapping.

        Raises TransferError if the handle is malformed or of this process, if its pool was closed or cannot be mapped
        with this size, or if size or device differ from those of the present mapping.
        """
        if len(packed) != _PACKED.size or num_bytes <= 0:
            raise TransferError(
                f"a peer's memory came with a handle of {len(packed)} bytes, not {_PACKED.size}, for {num_bytes} bytes"
            )
        handle = PoolHandle(*_PACKED.unpack(packed))
        key = (handle.owner, handle.generation)
        if handle.owner == os.getpid():
            raise TransferError("a peer's memory cannot be mapped: the handle is of this process")
        with self._lock:
            if key in self._closed:
                raise TransferError(f"a peer's memory cannot be mapped: {_named(*key)} was closed")
            pool = self._open.get(key)
            if pool is None:
                try:
                    address = self._open_memory(handle.data, num_bytes, device)
                except (ValueError, RuntimeError) as error:
                    raise TransferError(f"a peer's memory cannot be mapped: {error}") from error
                pool = self._open[key] = OpenedPool(self, handle, num_bytes, device, address)
        if (pool.num_bytes, pool.device) != (num_bytes, device):
            raise TransferError(
                f"a peer's memory cannot be mapped: {_named(*key)} is open with {pool.num_bytes} bytes on device "
                f"{pool.device}, not {num_bytes} on {device}"
            )
        return pool

    def close(self, owner: int, generation: int) -> None:
        """Unmaps a pool for good: `open` refuses it from now on. No work on it may be in flight; its tensors are
        invalid afterwards. Does nothing if it is not open."""
        with self._lock:
            pool = self._open.pop((owner, generation), None)
            if pool is not None:
                self._closed.add((owner, generation))
                address, pool.address = pool.address, 0
                self._close_memory(address, pool.device)

    def close_all(self) -> None:
        """Closes all open pools, as `close`."""
        for key in list(self._open):
            self.close(*key)

    def __len__(self) -> int:
        """Number of pools that are open."""
        return len(self._open)


def _named(owner: int, generation: int) -> str:
    """Words for a pool in error messages."""
    return f"generation {generation} of process {owner}"


class _Memory:
    """Device memory for `torch.as_tensor`; its tensors keep it, and it keeps the memory's owner."""

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _tensor(owner: object, address: int, nbytes: int) -> Tensor:
    """Device memory as uint8 [nbytes], not copied. The tensor keeps `owner` alive. Raises RuntimeError if torch copies
    it."""
    # No device argument: if it were not the memory's, torch would copy silently.
    tensor = torch.as_tensor(_Memory(owner, address, nbytes))
    if tensor.data_ptr() != address:
        raise RuntimeError("torch copied the pool instead of using its memory; this torch cannot share device memory")
    return tensor


PEER_POOLS = PeerPools()
atexit.register(PEER_POOLS.close_all)


logger = logging.getLogger(__name__)


class _Pin:
    """Pins host memory until `unpin`; the memory must stay mapped until then. If CUDA refuses, a warning is logged and
    the memory stays unpinned."""

    def __init__(self, memory: Tensor, device: int) -> None:
        self._address, self._device = memory.data_ptr(), device
        try:
            _C.cuda_pin(self._address, memory.nbytes, device)
        except RuntimeError as error:
            self._address = 0
            logger.warning("%s of host memory cannot be pinned, copies are slower: %s", size(memory.nbytes), error)

    def unpin(self) -> None:
        """Unpins. No copy from or to the memory may be in flight. Idempotent."""
        address, self._address = self._address, 0
        if address:
            _C.cuda_unpin(address, self._device)


class StagingPool(SharedPool):
    """`SharedMemory` of backend/device.py in host memory, which peers may map writable so that they can pin it. Pinned
    by the first `tensor`."""

    def __init__(self, num_bytes: int, device: int) -> None:
        super().__init__(num_bytes, peers_write=True)
        self._device = device
        self._pin: _Pin | None = None

    def tensor(self) -> Tensor:
        """The memory as uint8 [num_bytes], pinned if CUDA allows it. Raises ValueError after `close`."""
        memory = super().tensor()
        self._pin = self._pin or _Pin(memory, self._device)
        return memory

    def close(self) -> None:
        """Unpins and closes the pool. No copy from or to it may be in flight. Idempotent."""
        if self._pin is not None:
            self._pin.unpin()
        super().close()


class PeerStaging:
    """`PeerMemory` of backend/device.py: a peer's staging pool, pinned here too."""

    def __init__(self, descriptor: int, num_bytes: int, device: int) -> None:
        """Maps and pins the pool. Raises TransferError as `map_pool`."""
        # On most CPUs read-only mappings cannot be pinned.
        self._pool: MappedPool = map_pool(descriptor, num_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._pin = _Pin(self._pool.tensor(), device)

    def tensor(self) -> Tensor:
        """The memory as uint8 [num_bytes], to be read only. Raises ValueError after `close`."""
        return self._pool.tensor()

    def close(self) -> None:
        """Unpins the pool, and unmaps it with the last tensor over it. No copy from it may be in flight. Idempotent."""
        self._pin.unpin()
        self._pool.close()
