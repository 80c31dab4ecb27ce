"""Pools of device memory that other processes of this node map.

The owner allocates a pool by itself, so that a handle names all of it and nothing else, and sends a `PoolHandle` to its
peers over their channel. A peer opens every pool once and keeps it: `PEER_POOLS` knows what is open. A pool is named by
its owner's process id and a generation number that no other pool of this boot of the machine has, so a handle of a pool
or a process that is gone never opens its successor. `DevicePool` and `OpenedPool` are the same behind the protocols of
backend/device.py. Knows CUDA and torch; does not know caches, requests or channels.
"""

from __future__ import annotations

import atexit
import itertools
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.errors import TransferError

TRANSPORT = "cuda-ipc"

_HANDLE_BYTES = 64
_PACKED = struct.Struct(f"<{_HANDLE_BYTES}sQQ")  # CUDA's handle, owner, generation
# Monotonic time counts from the start of the machine: a later process with the same id begins at a higher number.
_generations = itertools.count(time.monotonic_ns())


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """What a peer needs to map a pool."""

    handle: bytes  # 64
    nbytes: int
    owner: int  # process id
    generation: int


class Pool:
    """Device memory of our own, [nbytes] rounded up to whole 2 MiB, zeroed by nobody. Raises RuntimeError where CUDA
    cannot be used or memory is short. Memory that was never exported goes with the pool and its tensors; exported
    memory stays until `free` or the end of the process, since CUDA leaves undefined what peers would see."""

    def __init__(self, nbytes: int, device: int) -> None:
        unit = _C.CUDA_POOL_GRANULARITY
        self.nbytes = -(-nbytes // unit) * unit
        self.device = device
        self.generation = next(_generations)
        self._handle: PoolHandle | None = None
        self._address = _C.cuda_allocate(self.nbytes, device)
        self._release = weakref.finalize(self, _C.cuda_release, self._address, device)

    def tensor(self) -> Tensor:
        """[nbytes] uint8 on the pool's memory; must not be used after `free`."""
        return _tensor(self, self._live_address(), self.nbytes)

    def export(self) -> PoolHandle:
        if self._handle is None:
            handle = _C.cuda_ipc_export(self._live_address(), self.device)
            self._handle = PoolHandle(handle, self.nbytes, os.getpid(), self.generation)
            self._release.detach()
        return self._handle

    def free(self, *, peers_closed: bool = False) -> None:
        """At once. A pool that was exported may be freed only once no peer has it open, which the caller knows."""
        if self._handle is not None and not peers_closed:
            raise ValueError("peers_closed: the pool was exported; free it once every peer has closed it")
        address, self._address = self._live_address(), 0
        self._release.detach()
        _C.cuda_release(address, self.device)

    def _live_address(self) -> int:
        if self._address == 0:
            raise ValueError(f"pool: generation {self.generation} is freed")
        return self._address


@dataclass(slots=True)
class PeerPool:
    """A peer's pool, mapped into this process."""

    nbytes: int
    owner: int
    generation: int
    device: int  # ours, whose kernels read it
    address: int  # 0 once closed

    def tensor(self) -> Tensor:
        """[nbytes] uint8, on the device where the memory lies; must not be used after the pool is closed."""
        if self.address == 0:
            raise ValueError(f"pool: generation {self.generation} of process {self.owner} is closed")
        return _tensor(self, self.address, self.nbytes)


class PeerPools:
    """The pools of peers that this process has open, each once. Thread-safe."""

    def __init__(
        self,
        open_memory: Callable[[bytes, int, int], int] = _C.cuda_ipc_open,
        close_memory: Callable[[int, int], None] = _C.cuda_ipc_close,
    ) -> None:
        self._open_memory = open_memory
        self._close_memory = close_memory
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], PeerPool] = {}
        self._closed: set[tuple[int, int]] = set()

    def open(self, handle: PoolHandle, device: int) -> PeerPool:
        """The pool, mapped now if it is not yet. Raises ValueError for a handle of this process, a malformed one, one
        that names another size than before or than the memory has, and one that was closed."""
        key = (handle.owner, handle.generation)
        if handle.owner == os.getpid():
            raise ValueError("owner: the handle is of this process, which has the pool's memory already")
        if len(handle.handle) != _HANDLE_BYTES or handle.nbytes <= 0:
            raise ValueError(
                f"handle: expected {_HANDLE_BYTES} bytes and a positive size, "
                f"got {len(handle.handle)} bytes and {handle.nbytes}"
            )
        with self._lock:
            if key in self._closed:
                raise ValueError(f"generation: {handle.generation} of process {handle.owner} was closed")
            known = self._open.get(key)
            if known is None:
                address = self._open_memory(handle.handle, handle.nbytes, device)
                known = PeerPool(handle.nbytes, handle.owner, handle.generation, device, address)
                self._open[key] = known
        if (known.nbytes, known.device) != (handle.nbytes, device):
            raise ValueError(
                f"nbytes, device: the pool is open with {known.nbytes} bytes on device {known.device}, "
                f"got {handle.nbytes} on {device}"
            )
        return known

    def close(self, owner: int, generation: int) -> None:
        """Unmaps a pool for good. Only once no work on it is in flight and no tensor of it is used again."""
        with self._lock:
            if (owner, generation) not in self._open:
                raise ValueError(f"generation: {generation} of process {owner} is not open")
            self._close(owner, generation)

    def close_all(self) -> None:
        with self._lock:
            for key in list(self._open):
                self._close(*key)

    def __len__(self) -> int:
        return len(self._open)

    def _close(self, owner: int, generation: int) -> None:
        pool = self._open.pop((owner, generation))
        self._closed.add((owner, generation))
        address, pool.address = pool.address, 0
        self._close_memory(address, pool.device)


class _Memory:
    """Says to torch where device memory lies; its tensors keep it, and it keeps the memory's owner."""

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _tensor(owner: object, address: int, nbytes: int) -> Tensor:
    # Without a device: torch would copy to another one than the memory's in silence.
    tensor = torch.as_tensor(_Memory(owner, address, nbytes))
    if tensor.data_ptr() != address:
        raise RuntimeError("torch copied the pool instead of using its memory; this torch cannot share device memory")
    return tensor


PEER_POOLS = PeerPools()
atexit.register(PEER_POOLS.close_all)


class DevicePool:
    """`SharedMemory` of backend/device.py on a device, full of zeros."""

    transport = TRANSPORT
    descriptor = -1

    def __init__(self, num_bytes: int, device: int) -> None:
        """Raises RuntimeError as `Pool`."""
        self._pool = Pool(num_bytes, device)
        self.num_bytes = self._pool.nbytes
        self.tensor().zero_()

    @property
    def handle(self) -> bytes:
        return packed_handle(self._pool.export())

    def tensor(self) -> Tensor:
        """[num_bytes] uint8."""
        return self._pool.tensor()

    def close(self) -> None:
        """Leaves the memory to its tensors, and once it was exported to the end of the process (see `Pool`)."""


class OpenedPool:
    """`PeerMemory` of backend/device.py: a peer's `DevicePool`, of which `handle` and `num_bytes` came."""

    def __init__(self, handle: bytes, num_bytes: int, device: int, pools: PeerPools = PEER_POOLS) -> None:
        """Raises TransferError."""
        if len(handle) != _PACKED.size:
            raise TransferError(f"a peer's memory came with a handle of {len(handle)} bytes, not {_PACKED.size}")
        data, owner, generation = _PACKED.unpack(handle)
        self._pools = pools
        try:
            self._pool = pools.open(PoolHandle(data, num_bytes, owner, generation), device)
        except (ValueError, RuntimeError) as error:
            raise TransferError(f"a peer's memory cannot be mapped: {error}") from error

    def tensor(self) -> Tensor:
        """[num_bytes] uint8."""
        return self._pool.tensor()

    def close(self) -> None:
        """The pool cannot be opened again, since its owner is gone or sends another one when it comes back."""
        if self._pool.address:
            self._pools.close(self._pool.owner, self._pool.generation)


def packed_handle(handle: PoolHandle) -> bytes:
    return _PACKED.pack(handle.handle, handle.owner, handle.generation)
