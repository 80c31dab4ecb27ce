"""Host memory between devices: the CPU backend's shared memory, pinned, so that copy engines reach it at full speed.

If the system refuses to pin it, copies are slower and one line is logged. Does not know blocks.
"""

from __future__ import annotations

import logging
import mmap

from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend.cpu.shared_memory import MappedPool, SharedPool, map_pool
from hydra_engine.core.units import size

logger = logging.getLogger(__name__)


class _Pin:
    """Pins memory until `end`; the memory must stay mapped until then."""

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
    """`SharedMemory` of backend/device.py, pinned by the first `tensor`."""

    def __init__(self, num_bytes: int, device: int) -> None:
        super().__init__(num_bytes, peers_write=True)
        self._device = device
        self._pin: _Pin | None = None

    def tensor(self) -> Tensor:
        memory = super().tensor()
        self._pin = self._pin or _Pin(memory, self._device)
        return memory

    def close(self) -> None:
        """Unpins and closes. No copy from or to it may be in flight."""
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
        return self._pool.tensor()

    def close(self) -> None:
        self._pin.unpin()
        self._pool.close()
