"""Host memory shared by the instances of a node: pools that one process writes and its peers read, and control words.

The memory is an unnamed file (memfd), reached by descriptors only: it is in no folder, a killed owner leaves nothing
behind, and a process that has mapped it can read it as long as it likes. It is sealed against changes of its size,
which would kill its readers, and, unless peers may write, against new writers if the kernel supports it. Memory is
unmapped with the last tensor over it, never earlier. Does not know caches or blocks, nor how descriptors travel.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from hydra_engine.core.units import size
from hydra_engine.errors import BackendError, ResourceError, TransferError

TRANSPORT = "memfd"
WORD_BYTES = 8

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FINAL = fcntl.F_SEAL_SEAL  # no further seals
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, missing in Python's fcntl: earlier mappings stay writable


class SharedPool:
    """`SharedMemory` of backend/device.py: zeroed pages that are allocated when first written."""

    transport = TRANSPORT
    handle = b""

    def __init__(self, num_bytes: int, *, peers_write: bool = False) -> None:
        """Creates the pool. peers_write: peers may map it writable too. Raises ResourceError if the system refuses, but
        not if pages are missing later; ValueError for a size below 1."""
        if num_bytes <= 0:
            raise ValueError(f"num_bytes: expected a positive size, got {num_bytes}")
        self.num_bytes = num_bytes
        self._map: mmap.mmap | None = None
        self._descriptor = -1
        try:
            self._descriptor = os.memfd_create("hydra-engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._descriptor, num_bytes)
            self._map = mmap.mmap(self._descriptor, num_bytes)
            with suppress(OSError):  # as numpy does; most systems have no huge pages for memfds
                self._map.madvise(mmap.MADV_HUGEPAGE)
            _seal(self._descriptor, peers_write=peers_write)
        except OSError as error:
            self.close()
            raise ResourceError(
                f"the system gives no shared memory of {size(num_bytes)} ({error.strerror}); lower --kv-cache-gib and "
                "--image-cache-gib, or allow more open files"
            ) from error

    @property
    def descriptor(self) -> int:
        if self._descriptor < 0:
            raise ValueError("descriptor: the pool is closed")
        return self._descriptor

    def tensor(self) -> Tensor:
        if self._map is None:
            raise ValueError("tensor: the pool is closed")
        return torch.frombuffer(self._map, dtype=torch.uint8)  # it keeps the mapping

    def close(self) -> None:
        """Closes the descriptor at once; the memory is freed when no tensor and no peer uses it. Idempotent."""
        self._map = None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class MappedPool:
    """`PeerMemory` of backend/device.py, made by `map_pool`. Writing to its tensor ends the process (SIGSEGV),
    except in a mapping with PROT_WRITE."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._map: mmap.mmap | None = mapping

    def tensor(self) -> Tensor:
        if self._map is None:
            raise ValueError("tensor: the peer's pool is closed")
        return torch.from_numpy(np.asarray(_Window(self._map)))

    def close(self) -> None:
        """Closes the pool: no further tensors. It is unmapped with the last tensor over it. Idempotent."""
        self._map = None


class _Window:
    """An array interface over a mapping, declared writable whether it is or not: torch has no read-only tensors and
    warns about each read-only array. The array keeps this object, which keeps the mapping."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._map = mapping
        address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        self.__array_interface__ = {
            "shape": (len(mapping),),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def map_pool(descriptor: int, num_bytes: int, prot: int = mmap.PROT_READ) -> MappedPool:
    """Maps a peer's pool. It must not be written, even if `prot` allows that. The caller closes the descriptor.

    Raises TransferError unless it is a memfd of exactly `num_bytes`, sealed against any change of its size, that can be
    mapped.
    """
    try:
        size = os.fstat(descriptor).st_size
        if size != num_bytes or num_bytes <= 0:
            raise TransferError(f"a peer's memory has {size} bytes where {num_bytes} were announced")
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise TransferError("a peer's memory is no memfd") from error
        if seals & (_SEALS | _FINAL) != _SEALS | _FINAL:
            raise TransferError("a peer's memory is not sealed: it could shrink under its readers")
        return MappedPool(mmap.mmap(descriptor, num_bytes, prot=prot))
    except OSError as error:
        raise TransferError(f"a peer's memory cannot be mapped: {error.strerror}") from error


def _seal(descriptor: int, *, peers_write: bool) -> None:
    """Seals a memfd against changes of its size and further seals, and, unless `peers_write`, against new writable
    mappings if the kernel supports it. Raises OSError."""
    writers = 0 if peers_write else _FUTURE_WRITE
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | _FINAL | writers)
    except OSError:  # a kernel without F_SEAL_FUTURE_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | _FINAL)


# ---- control words


class _Words:
    """An array of 64-bit words in a pool, which it closes."""

    def __init__(self, memory: SharedPool | MappedPool) -> None:
        self._memory = memory
        self._bytes: Tensor | None = memory.tensor()

    def close(self) -> None:
        """Closes the pool; `store` and `load` raise ValueError from then on. Idempotent."""
        self._bytes = None
        self._memory.close()

    def _address(self, slot: int) -> int:
        """The address of a word. Raises ValueError if there is none or the words are closed."""
        words = self._bytes
        if words is None:
            raise ValueError("slot: the control words are closed")
        if not 0 <= slot < len(words) // WORD_BYTES:
            raise ValueError(f"slot: expected 0 to {len(words) // WORD_BYTES - 1}, got {slot}")
        return words.data_ptr() + slot * WORD_BYTES


class ControlWords(_Words):
    """64-bit words that this process writes and its peers read, zero at first.

    Order: a peer that has read a byte which this thread wrote after a `store`, and then loads the word, sees the stored
    word or a later one. So a word that declares blocks invalid is stored before they are overwritten.
    """

    def __init__(self, num_words: int) -> None:
        """Creates the words. Raises ResourceError if the system has no memory, BackendError on other processors than
        x86 without the native extension, which orders the accesses."""
        self._store = _accessors()[0]
        self.num_words = num_words
        self._pool = SharedPool(num_words * WORD_BYTES)
        super().__init__(self._pool)

    @property
    def descriptor(self) -> int:
        return self._pool.descriptor

    def store(self, slot: int, word: int) -> None:
        """Stores a word before all later writes of this thread. Raises ValueError for a wrong slot."""
        self._store(self._address(slot), word)


class PeerWords(_Words):
    """A peer's `ControlWords`, mapped to be read."""

    def __init__(self, descriptor: int, num_words: int) -> None:
        """Maps a peer's words. Raises TransferError as `map_pool`, and BackendError as `ControlWords`."""
        self._load = _accessors()[1]
        super().__init__(map_pool(descriptor, num_words * WORD_BYTES))

    def load(self, slot: int) -> int:
        """Loads a word after all earlier reads of this thread, and of threads that it has waited for. Raises ValueError
        for a wrong slot."""
        return self._load(self._address(slot))


def _accessors() -> tuple[Callable[[int, int], None], Callable[[int], int]]:
    """Returns (store, load) of the extension; without it plain ones on x86, which keeps the order that `ControlWords`
    needs. Raises BackendError on other processors."""
    try:
        from hydra_engine import _C
    except ImportError:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise BackendError(
                "instances that share memory need the native extension on this processor; `make build` builds it"
            ) from None
        return _plain_store, _plain_load
    return _C.store_word, _C.load_word


def _plain_store(address: int, word: int) -> None:
    """Stores 8 aligned bytes at once; on x86 plain stores that follow do not overtake it. Streaming stores could, but
    threads that make them get their work through locks, which order them after this store."""
    ctypes.c_uint64.from_address(address).value = word


def _plain_load(address: int) -> int:
    """Loads 8 aligned bytes at once, on x86 after all earlier loads of this thread; threads that copied must have been
    waited for."""
    return ctypes.c_uint64.from_address(address).value
