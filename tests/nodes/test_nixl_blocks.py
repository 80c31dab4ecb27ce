"""Blocks over NIXL: what a source or a target that is silent or dies does to the other, and what is refused. What holds
over TCP too is in test_blocks.py."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hydra_engine.backend.select import create_backend
from hydra_engine.config import ClusterConfig, EngineConfig
from hydra_engine.core.pools import PoolKind
from hydra_engine.errors import ConfigError, TransferError
from hydra_engine.transfer.network import RemoteBlocks
from hydra_engine.worker.transfer import served_pools
from hydra_nodes import nixl_blocks
from hydra_nodes.blocks import TcpBlocks, TcpRemoteBlocks
from hydra_nodes.nixl_blocks import NixlBlocks, active_ports, choose_network, interface_of, pieces, runs, scatter
from tests.nodes.block_peer import BLOCK_BYTES, NUM_BLOCKS
from tests.nodes.blocks import POISON, SLOT, WORD, Side, network

ALL = np.arange(NUM_BLOCKS, dtype=np.int32)
ROWS = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)


def test_regions_are_cut_and_come_back_in_order() -> None:
    pool = np.random.default_rng(2).integers(0, 256, (50, 7), dtype=np.uint8)
    for blocks in ([3], [3, 4, 5], [9, 2, 3, 4, 1], [*range(49, -1, -1)], [*range(50)]):
        for max_bytes in (1, 5, 7, 20, 1000):
            target = np.zeros((len(blocks), 7), np.uint8)
            waiting = deque([target.reshape(-1).data[:3], target.reshape(-1).data[3:]])
            found = list(pieces(runs(np.array(blocks, np.int32), 0, 7), max_bytes))
            assert all(sum(size for _, size in piece) == max_bytes for piece in found[:-1])
            for piece in found:
                flat = pool.reshape(-1)
                scatter(b"".join(flat[begin : begin + size].tobytes() for begin, size in piece), waiting)  # type: ignore[arg-type]
            assert not waiting and np.array_equal(target, pool[blocks])


def test_ports_and_interfaces_of_this_node(tmp_path: Path) -> None:
    for port, state in (
        ("mlx5_0/ports/1", "4: ACTIVE\n"),
        ("mlx5_1/ports/1", "1: DOWN\n"),
        ("rxe0/ports/2", "4: ACTIVE"),
    ):
        (tmp_path / port).mkdir(parents=True)
        (tmp_path / port / "state").write_text(state)
    assert active_ports(tmp_path) == ["mlx5_0:1", "rxe0:2"] and active_ports(tmp_path / "none") == []
    assert [interface_of(host) for host in ("127.0.0.1", "127.0.0.9", "203.0.113.7")] == ["lo", "lo", ""]


def test_tls_and_nodes_without_nixl_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cluster_tls does not encrypt what moves over NIXL"):
        EngineConfig(cluster=ClusterConfig(cluster_tls=str(tmp_path), transfer_backend="nixl"))
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match=r"node source cannot use NIXL.*pip install 'nixl"):
        choose_network(network("source"), "127.0.0.1", asked=True).serve({PoolKind.KV: ROWS}, lambda slot: WORD, 16)
    monkeypatch.setattr(nixl_blocks, "active_ports", lambda: [])
    monkeypatch.setattr(nixl_blocks, "installed_version", lambda: "1.5.1")
    assert isinstance(choose_network(network("source"), "127.0.0.1", asked=False), TcpBlocks)
    monkeypatch.setattr(nixl_blocks, "active_ports", lambda: ["mlx5_0:1"])
    assert isinstance(choose_network(network("source"), "127.0.0.1", asked=False), NixlBlocks)


@pytest.mark.parametrize("writable", [False, True])
def test_pools_that_a_device_registers_are_mapped_writable(writable: bool) -> None:
    """RDMA refuses what its process may not write; this one is registered as TcpBlocks and NixlBlocks say."""
    assert (TcpBlocks.registers_pools, NixlBlocks.registers_pools) == (False, True)
    for through_host in (False, True):
        side = Side(create_backend("cpu", torch.float32), "source", is_source=True, through_host=through_host)
        pools = served_pools(side.caches, side.exchange._staging, writable=writable)
        assert {permissions(rows.ctypes.data)[:2] for rows in pools.values()} == {"rw" if writable else "r-"}
        side.exchange.close()


def permissions(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        region, found, *_ = line.split()
        begin, end = (int(part, 16) for part in region.split("-"))
        if begin <= address < end:
            return found
    return ""


# ---- with NIXL


class Source:
    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.nodes.block_peer", "serve"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()


@pytest.fixture
def source(nixl: None) -> Iterator[Source]:
    started = Source()
    yield started
    started.process.kill()
    started.process.communicate()


@contextmanager
def opened(
    endpoint: str, *, patience_s: float = 5.0, ports: list[str] | None = None
) -> Iterator[tuple[Any, RemoteBlocks]]:
    target = NixlBlocks(network("target", patience_s=patience_s), "127.0.0.1", ports or [])
    remote = target.open("serve", endpoint)
    try:
        yield target, remote
    finally:
        remote.close()
        target.close()


def read(remote: RemoteBlocks, target: np.ndarray[Any, Any]) -> bool:
    return remote.read(PoolKind.KV, ALL, target, ALL, SLOT, WORD)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_read_that_was_given_up_writes_into_no_block(source: Source) -> None:
    target, other = np.full_like(ROWS, POISON), np.full_like(ROWS, POISON)
    with opened(source.endpoint, patience_s=0.5) as (network_, remote):
        assert read(remote, other) and np.array_equal(other, ROWS)
        source.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TransferError, match=r"instance serve did not come over NIXL: nothing has moved for 0\.5 s"):
            read(remote, target)
        (landing,) = network_._lost
        landing._memory[:] = POISON
        assert not network_._lost[0].has_ended(network_.agent)
        source.process.send_signal(signal.SIGCONT)
        wait_until(lambda: landing.has_ended(network_.agent))
        assert (landing._memory != POISON).any(), "what was given up does write"
        assert (target == POISON).all()
        assert read(remote, target) and np.array_equal(target, ROWS)
        assert network_._lost == []


@pytest.mark.slow
def test_closing_ends_a_read_from_a_source_that_is_silent(source: Source) -> None:
    with opened(source.endpoint, patience_s=60.0) as (network_, remote):
        assert read(remote, np.empty_like(ROWS))
        source.process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(0.2, remote.close)
        timer.start()
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(TransferError, match="the connection was closed here"):
                read(remote, np.empty_like(ROWS))
        network_.close()
        assert time.monotonic() - began < 30


@pytest.mark.slow
def test_each_side_outlives_the_death_of_the_other_in_the_middle(source: Source) -> None:
    for delay_s in (0.0, 0.01, 0.02, 0.04):
        command = [sys.executable, "-m", "tests.nodes.block_peer", "read", source.endpoint]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None and reader.stdout.readline() == b"reads\n"
            time.sleep(delay_s)
            reader.kill()
    with opened(source.endpoint, patience_s=60.0) as (_, remote):
        assert read(remote, np.empty_like(ROWS)) and source.process.poll() is None
        timer = threading.Timer(0.02, source.process.kill)
        timer.start()
        with pytest.raises(TransferError):
            while True:
                read(remote, np.empty_like(ROWS))
        timer.join()
        began = time.monotonic()
        with pytest.raises(TransferError):
            read(remote, np.empty_like(ROWS))
        assert time.monotonic() - began < 30


@pytest.mark.slow
def test_nodes_that_differ_and_too_many_lost_reads_leave_it_to_tcp(
    source: Source, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = source.endpoint.rsplit("/", 1)[0]
    for remote in (
        network("target").open("serve", source.endpoint),
        NixlBlocks(network("target"), "127.0.0.1", []).open("serve", plain),
        NixlBlocks(network("target"), "127.0.0.1", ["mlx5_0:1"]).open("serve", source.endpoint),
    ):
        assert isinstance(remote, TcpRemoteBlocks) and read(remote, np.empty_like(ROWS))
        remote.close()
    with pytest.raises(TransferError, match="which is no address"), opened(f"{plain}/AAAA"):
        pass
    monkeypatch.setattr(nixl_blocks, "MAX_LOST", 0)
    target = np.empty_like(ROWS)
    with opened(source.endpoint) as (network_, remote):
        assert read(remote, target) and read(remote, target) and np.array_equal(target, ROWS)
        assert network_._agent is None
    assert [record.message for record in caplog.records if "over NIXL have not ended" in record.message] != []


@pytest.mark.slow
def test_a_source_listens_at_its_address_alone_and_sleeps(source: Source) -> None:
    pid = source.process.pid
    with opened(source.endpoint) as (_, remote):
        assert read(remote, np.empty_like(ROWS))
        inodes = {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
        assert len(listening) == 2 and {address.split(":")[0] for address in listening} == {"0100007F"}
        before = cpu_ticks(pid)
        time.sleep(1.0)
        assert cpu_ticks(pid) - before < 20  # of a hundred


def cpu_ticks(pid: int) -> int:
    values = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(values[11]) + int(values[12])
