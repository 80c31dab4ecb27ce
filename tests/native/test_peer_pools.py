"""Handles that a process opens: once each, none of its own, none that was closed. The memory behind them is
counted here and real in tests/gpu/test_ipc.py."""

import os

import pytest

from hydra_engine.backend.cuda.shared_memory import PeerPools, PoolHandle
from hydra_engine.errors import TransferError

PEER = os.getpid() + 1


class Memory:
    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []
        self.closed: list[tuple[int, int]] = []

    def open(self, handle: bytes, nbytes: int, device: int) -> int:
        self.opened.append((nbytes, device))
        return 0x1000 * len(self.opened)

    def close(self, address: int, device: int) -> None:
        self.closed.append((address, device))


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def pools(memory: Memory) -> PeerPools:
    return PeerPools(memory.open, memory.close)


def handle(generation: int = 7, owner: int = PEER, data: bytes = bytes(64)) -> bytes:
    return PoolHandle(data, owner, generation).pack()


def test_a_pool_is_opened_once(pools: PeerPools, memory: Memory) -> None:
    first = pools.open(handle(), 4096, 1)
    assert pools.open(handle(), 4096, 1) is first and first.address == 0x1000
    pools.open(handle(8), 4096, 1)
    pools.open(handle(7, owner=PEER + 1), 4096, 1)
    assert memory.opened == [(4096, 1)] * 3 and len(pools) == 3
    pools.close_all()
    assert memory.closed == [(0x1000, 1), (0x2000, 1), (0x3000, 1)] and len(pools) == 0


def test_what_is_closed_stays_closed(pools: PeerPools, memory: Memory) -> None:
    pool = pools.open(handle(data=bytes(range(64))), 4096, 0)
    for _ in range(2):
        pool.close()
        assert memory.closed == [(0x1000, 0)] and len(pools) == 0
    with pytest.raises(ValueError, match=r"generation 7 of process .* is closed"):
        pool.tensor()
    with pytest.raises(TransferError, match=r"7 of process .* was closed"):
        pools.open(handle(), 4096, 0)
    assert len(memory.opened) == len(memory.closed) == 1


@pytest.mark.parametrize(
    ("bad", "num_bytes", "message"),
    [
        (handle(owner=os.getpid()), 4096, "the handle is of this process"),
        (handle()[1:], 4096, "came with a handle of 79 bytes, not 80"),
        (b"abc", 4096, "came with a handle of 3 bytes, not 80"),
        (handle(), 0, "for 0 bytes"),
    ],
    ids=["own", "short", "none", "empty"],
)
def test_bad_handles_reach_no_memory(
    pools: PeerPools, memory: Memory, bad: bytes, num_bytes: int, message: str
) -> None:
    with pytest.raises(TransferError, match=message):
        pools.open(bad, num_bytes, 0)
    assert not memory.opened


def test_another_size_or_device_is_refused(pools: PeerPools, memory: Memory) -> None:
    pools.open(handle(), 4096, 0)
    for num_bytes, device in ((8192, 0), (4096, 1)):
        with pytest.raises(TransferError, match="open with 4096 bytes on device 0"):
            pools.open(handle(), num_bytes, device)
    assert len(memory.opened) == 1


def test_memory_that_does_not_open_is_not_remembered(memory: Memory) -> None:
    def fail(handle: bytes, nbytes: int, device: int) -> int:
        raise RuntimeError("CUDA error 400")

    pools = PeerPools(fail, memory.close)
    for _ in range(2):
        with pytest.raises(TransferError, match="400"):
            pools.open(handle(), 4096, 0)
    assert len(pools) == 0
