"""Pools and control words across two real processes: what a reader sees, what it cannot do, what a death leaves."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hydra_engine.backend.cpu import shared_memory
from hydra_engine.backend.cpu.device import CpuDevice
from hydra_engine.backend.cpu.shared_memory import ControlWords, MappedPool, PeerWords, SharedPool, map_pool
from hydra_engine.core.pools import PoolExport, PoolKind, PoolLayout
from hydra_engine.errors import BackendError, ResourceError, TransferError
from tests.ops.memory_peer import NUM_WORDS, PRIME, pattern

ROOT = Path(__file__).parents[2]
NUM_BYTES = 3 * 65536 + 40  # no whole number of pages


class Owner:
    """A process that owns a pool and words, and their descriptors in this one."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.ops.memory_peer", str(theirs.fileno()), str(NUM_BYTES)]
        self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()
        ours.settimeout(60)
        _, self.descriptors, _, _ = socket.recv_fds(ours, 1, 2, socket.MSG_CMSG_CLOEXEC)
        self._stream = ours.makefile("rw")
        ours.close()

    def tell(self, *command: Any) -> Any:
        self._stream.write(json.dumps(command) + "\n")
        self._stream.flush()
        return json.loads(self._stream.readline())

    def map(self) -> MappedPool:
        return map_pool(self.descriptors[0], NUM_BYTES)

    def words(self) -> PeerWords:
        return PeerWords(self.descriptors[1], NUM_WORDS)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._stream.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.end()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def named_segments() -> set[str]:
    """Segments in /dev/shm without those of torch's OpenMP library: every process has one, and a killed one leaves
    it."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("__KMP_")}


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:hydra-engine")


def test_a_reader_sees_the_owners_bytes_and_words(owner: Owner) -> None:
    mapped, words = owner.map(), owner.words()
    seen = mapped.tensor()
    assert torch.equal(seen, pattern(NUM_BYTES))
    assert [words.load(slot) for slot in (0, 3)] == [0, (1 << 64) - 1]
    owner.tell("write", NUM_BYTES - 1, 7)
    owner.tell("store", 3, 5)
    assert int(seen[-1]) == 7 and words.load(3) == 5
    mapped.close()
    words.close()


def test_a_killed_owner_leaves_readable_bytes_and_nothing_else(owner: Owner) -> None:
    before = named_segments(), num_mappings()
    mapped, words = owner.map(), owner.words()
    seen = mapped.tensor()
    assert num_mappings() == before[1] + 2
    owner.process.send_signal(signal.SIGKILL)
    owner.process.wait(timeout=30)
    assert torch.equal(seen, pattern(NUM_BYTES)) and words.load(3) == (1 << 64) - 1
    del seen
    for _ in range(2):
        mapped.close()
        words.close()
    assert named_segments() == before[0] and num_mappings() == before[1]
    for call in (mapped.tensor, lambda: words.load(3)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_readers_and_owners_leave_no_descriptors_behind(owner: Owner) -> None:
    ours, theirs = num_descriptors(), owner.tell("descriptors")
    for _ in range(5):
        mapped, words = owner.map(), owner.words()
        mapped.tensor()
        mapped.close()
        words.close()
    pool, own_words = SharedPool(4096), ControlWords(4)
    assert num_descriptors() > ours
    for _ in range(2):
        pool.close()
        own_words.close()
    assert num_descriptors() == ours and owner.tell("descriptors") == theirs


@pytest.mark.slow
def test_nobody_but_the_owner_can_write(owner: Owner) -> None:
    descriptor = owner.descriptors[0]
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, NUM_BYTES)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    for size in (0, 2 * NUM_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    code = (
        "import sys\nfrom hydra_engine.backend.cpu.shared_memory import map_pool\n"
        f"tensor = map_pool(int(sys.argv[1]), {NUM_BYTES}).tensor()\n"
        "print(int(tensor[5]), flush=True)\ntensor[5] = 1\nprint('written')"
    )
    command = [sys.executable, "-c", code, str(descriptor)]
    done = subprocess.run(command, cwd=ROOT, pass_fds=[descriptor], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "5\n"), done.stderr


def test_a_word_that_is_still_there_after_a_copy_vouches_for_every_byte(owner: Owner) -> None:
    """The owner rewrites the pool all the time. Copies that pass the check are whole; those that are only checked
    before they begin are not, or this test could not fail."""
    mapped, words = owner.map(), owner.words()
    seen, copy = mapped.tensor().numpy(), np.empty(NUM_BYTES, dtype=np.uint8)
    owner.tell("rewrite")
    passed = torn = 0
    end = time.monotonic() + 30
    while passed < 50 or torn < 5:
        assert time.monotonic() < end, (passed, torn)
        before = words.load(0)
        np.copyto(copy, seen)
        after = words.load(0)
        if before and before % 2 == 0:
            whole = bool((copy == before // 2 % PRIME).all())
            assert whole or before != after
            passed += before == after
            torn += not whole
    del seen
    mapped.close()
    words.close()


def memfd(num_bytes: int, seals: int = 0) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


ALL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize(
    ("size", "seals", "message"),
    [
        (4095, ALL, "has 4095 bytes where 4096 were announced"),
        (8192, ALL, "has 8192 bytes"),
        (0, ALL, "has 0 bytes"),
        (4096, 0, "not sealed"),
        (4096, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL, "not sealed"),
        (4096, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, "not sealed"),
        (4096, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, "not sealed"),
    ],
)
def test_memory_that_is_not_what_was_announced_is_refused(size: int, seals: int, message: str) -> None:
    descriptor = memfd(size, seals)
    before = num_descriptors()
    with pytest.raises(TransferError, match=message):
        map_pool(descriptor, 4096)
    assert num_descriptors() == before
    os.close(descriptor)


def test_what_is_no_memfd_is_refused() -> None:
    with tempfile.TemporaryFile(dir=ROOT) as file:
        file.truncate(4096)
        with pytest.raises(TransferError, match="no memfd"):
            map_pool(file.fileno(), 4096)
    descriptor = memfd(4096, ALL)
    os.close(descriptor)
    with pytest.raises(TransferError, match="cannot be mapped: Bad file descriptor"):
        map_pool(descriptor, 4096)
    with pytest.raises(TransferError, match="has 4096 bytes where 0 were announced"):
        descriptor = memfd(4096, ALL)
        map_pool(descriptor, 0)
    os.close(descriptor)


def test_memory_outlives_close_under_its_tensors() -> None:
    before = num_mappings()
    pool = SharedPool(1 << 20)
    data = pool.tensor()
    reader = map_pool(pool.descriptor, 1 << 20)
    seen = reader.tensor()
    pool.close()
    reader.close()
    data.fill_(9)
    assert int(seen.sum()) == 9 << 20
    for use in (pool.tensor, lambda: pool.descriptor, reader.tensor):
        with pytest.raises(ValueError, match="closed"):
            use()
    del data, seen
    assert num_mappings() == before


def test_more_than_there_is_is_refused_with_what_to_change() -> None:
    before = num_descriptors()
    with pytest.raises(ResourceError, match="lower --kv-cache-gib"):
        SharedPool(1 << 62)
    with pytest.raises(ValueError, match="num_bytes"):
        SharedPool(0)
    assert num_descriptors() == before


@pytest.mark.parametrize("slot", [-1, 4, 1 << 40])
def test_slots_that_do_not_exist_are_refused(slot: int) -> None:
    words = ControlWords(4)
    peers = PeerWords(words.descriptor, 4)
    with pytest.raises(ValueError, match="slot: expected 0 to 3"):
        words.store(slot, 1)
    with pytest.raises(ValueError, match="slot: expected 0 to 3"):
        peers.load(slot)
    words.close()
    with pytest.raises(ValueError, match="closed"):
        words.store(0, 1)
    assert peers.load(3) == 0
    peers.close()


def test_words_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hydra_engine._C", None)
    monkeypatch.delattr("hydra_engine._C", raising=False)
    words = ControlWords(4)
    peers = PeerWords(words.descriptor, 4)
    for word in (1, (1 << 64) - 1, 0):
        words.store(2, word)
        assert peers.load(2) == word
    words.close()
    peers.close()
    monkeypatch.setattr(shared_memory.platform, "machine", lambda: "aarch64")
    with pytest.raises(BackendError, match="make build"):
        ControlWords(4)


def test_a_processor_maps_no_other_devices_memory() -> None:
    layout = PoolLayout(PoolKind.KV, 1, (1, 2, 4, 1, 1), "float32", 32)
    with pytest.raises(TransferError, match="'cuda-ipc' cannot be mapped by a processor"):
        CpuDevice(1).open_peer(PoolExport(layout, "cuda-ipc", 32), -1)
