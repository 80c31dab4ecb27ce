"""Which handles a process opens: once each, none of its own, none that was closed. The memory behind them is
counted here and real in tests/gpu/test_ipc.py."""

import os

import pytest

from hydra_engine.backend.cuda.ipc import OpenedPool, PeerPools, PoolHandle, packed_handle
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


def handle(generation: int = 7, owner: int = PEER, nbytes: int = 4096, data: bytes = bytes(64)) -> PoolHandle:
    return PoolHandle(data, nbytes, owner, generation)


def test_a_pool_is_opened_once(pools: PeerPools, memory: Memory) -> None:
    first = pools.open(handle(), 1)
    assert pools.open(handle(), 1) is first and first.address == 0x1000
    pools.open(handle(8), 1)
    pools.open(handle(7, owner=PEER + 1), 1)
    assert memory.opened == [(4096, 1)] * 3 and len(pools) == 3
    pools.close_all()
    assert memory.closed == [(0x1000, 1), (0x2000, 1), (0x3000, 1)] and len(pools) == 0


def test_what_is_closed_stays_closed(pools: PeerPools, memory: Memory) -> None:
    pool = pools.open(handle(), 0)
    pools.close(PEER, 7)
    assert memory.closed == [(0x1000, 0)]
    with pytest.raises(ValueError, match="is closed"):
        pool.tensor()
    with pytest.raises(ValueError, match=r"7 of process .* was closed"):
        pools.open(handle(), 0)
    with pytest.raises(ValueError, match="not open"):
        pools.close(PEER, 7)
    assert len(memory.opened) == len(memory.closed) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (handle(owner=os.getpid()), "owner: the handle is of this process"),
        (handle(data=bytes(63)), "handle: expected 64 bytes .*got 63"),
        (handle(nbytes=0), "positive size"),
    ],
    ids=["own", "short", "empty"],
)
def test_bad_handles_reach_no_memory(pools: PeerPools, memory: Memory, bad: PoolHandle, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pools.open(bad, 0)
    assert not memory.opened


def test_another_size_or_device_is_refused(pools: PeerPools, memory: Memory) -> None:
    pools.open(handle(), 0)
    for other, device in ((handle(nbytes=8192), 0), (handle(), 1)):
        with pytest.raises(ValueError, match="open with 4096 bytes on device 0"):
            pools.open(other, device)
    assert len(memory.opened) == 1


def test_memory_that_does_not_open_is_not_remembered(memory: Memory) -> None:
    def fail(handle: bytes, nbytes: int, device: int) -> int:
        raise RuntimeError("CUDA error 400")

    pools = PeerPools(fail, memory.close)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="400"):
            pools.open(handle(), 0)
    assert len(pools) == 0


def test_a_packed_handle_opens_the_pool_it_names_and_closes_it_once(pools: PeerPools, memory: Memory) -> None:
    packed = packed_handle(handle(9, data=bytes(range(64))))
    opened = OpenedPool(packed, 4096, 1, pools)
    assert pools.open(handle(9), 1).generation == 9 and memory.opened == [(4096, 1)]
    opened.close()
    opened.close()
    assert memory.closed == [(0x1000, 1)] and len(pools) == 0
    with pytest.raises(TransferError, match="was closed"):
        OpenedPool(packed, 4096, 1, pools)


def test_handles_that_are_none_and_memory_that_does_not_open_are_transfer_errors(memory: Memory) -> None:
    def fail(handle: bytes, nbytes: int, device: int) -> int:
        raise RuntimeError("CUDA error 400")

    pools = PeerPools(fail, memory.close)
    with pytest.raises(TransferError, match="handle of 3 bytes"):
        OpenedPool(b"abc", 4096, 0, pools)
    with pytest.raises(TransferError, match="400"):
        OpenedPool(packed_handle(handle()), 4096, 0, pools)
    with pytest.raises(TransferError, match="of this process"):
        OpenedPool(packed_handle(handle(owner=os.getpid())), 4096, 0, pools)
