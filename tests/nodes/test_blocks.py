"""Blocks that are read over TCP: what arrives, what counts, who is refused, and what ends when a connection does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.core.pools import PoolKind
from hydra_engine.errors import ResourceError, TransferError
from hydra_engine.transfer.network import RemoteBlocks, Rows
from hydra_engine.transfer.plans import StagingJob, StagingResult
from hydra_nodes import blocks as wire
from hydra_nodes.block_connection import BATCH_BYTES
from hydra_nodes.blocks import TcpBlocks
from hydra_nodes.macs import HmacSha256, Mac, MacKind, best_mac
from hydra_nodes.session import handshake_client
from hydra_nodes.tls import TlsFiles
from tests.nodes.blocks import FORMATS, POISON, SECRET, SLOT, WORD, Side, connect, greeting, job, network, pull, sides
from tests.nodes.certificates import make_authority, make_node
from tests.virtual_clock import VirtualClock
from tests.worker.pulling import num_descriptors, num_mappings

KV = PoolKind.KV
PATTERNS: dict[str, tuple[list[int], list[int]]] = {
    "none": ([], []),
    "one": ([5], [0]),
    "the last": ([39], [39]),
    "in a row": (list(range(3, 20)), list(range(10, 27))),
    "scattered": ([30, 2, 17, 3, 4, 39, 0], [1, 39, 38, 7, 5, 6, 20]),
    "backwards": (list(range(39, -1, -1)), list(range(40))),
}


def cpu() -> Backend:
    return create_backend("cpu", torch.float32, threads=1)


def assert_arrived(source: Side, target: Side, kind: PoolKind, blocks: Sequence[int], to: Sequence[int]) -> None:
    """The named blocks have the source's bytes, and nothing else was written."""
    expected = np.full_like(target.rows(kind), POISON)
    expected[list(to)] = source.rows(kind)[list(blocks)]
    assert np.array_equal(target.rows(kind), expected)


@pytest.mark.usefixtures("each_network")
@pytest.mark.parametrize("dtype", FORMATS)
def test_blocks_of_all_pools_arrive_and_only_they(dtype: str) -> None:
    with sides(cpu(), cpu(), dtype) as (source, target):
        assert target.exchange.piece_blocks("source", KV) == 0, "a processor's caches are read where they are"
        for kind in PoolKind:
            for blocks, to in PATTERNS.values():
                target.poison()
                checksums = source.exchange.checksums(kind, blocks)
                result = pull(target, "source", kind, blocks, to, checksums=checksums)
                assert result.valid and result.problem is None
                assert result.num_bytes == len(blocks) * target.caches[kind].block_bytes
                assert_arrived(source, target, kind, blocks, to)


@pytest.mark.usefixtures("each_network")
def test_blocks_that_are_staged_arrive_from_the_staging_pool() -> None:
    with sides(cpu(), cpu(), through_host=True, staging_bytes=8 * 512) as (source, target):
        assert target.exchange.piece_blocks("source", KV) == 1
        source.exchange.submit_staging(StagingJob(5, KV, (3, 30, 4), (6, 7, 0)))
        assert source.result() == StagingResult(5)
        assert pull(target, "source", KV, [6, 7, 0], [39, 0, 1]).valid
        assert_arrived(source, target, KV, [3, 30, 4], [39, 0, 1])
        assert "has 8 kv blocks, not block 8" in (pull(target, "source", KV, [8], [0]).problem or "")


@pytest.mark.usefixtures("each_network")
def test_checksums_of_other_blocks_are_noticed() -> None:
    with sides(cpu(), cpu()) as (source, target):
        checksums = source.exchange.checksums(KV, [1])
        assert "checksums differ" in (pull(target, "source", KV, [2], [0], checksums=checksums).problem or "")


@pytest.mark.usefixtures("each_network")
def test_an_offer_that_is_gone_is_not_valid_and_no_problem() -> None:
    with sides(cpu(), cpu()) as (source, target):
        for rest in ({"word": WORD + 1}, {"slot": 4}):
            result = pull(target, "source", KV, [1], [0], **rest)
            assert not result.valid and result.problem is None
        source.exchange.set_word(SLOT, WORD + 256)
        assert not pull(target, "source", KV, [1, 2], [0, 3]).valid
        assert not pull(target, "source", KV, [], []).valid, "without blocks only the word counts"
        assert_arrived(source, target, KV, [], [])


# ---- the network alone


@contextmanager
def served(
    rows: Rows, load_word: Any = lambda slot: WORD, name: str = "source", **options: Any
) -> Iterator[tuple[TcpBlocks, str]]:
    source = network(name, **options)
    try:
        yield source, source.serve({KV: rows}, load_word, 16)
    finally:
        source.close()


@contextmanager
def opened(endpoint: str, peer: str = "source", **options: Any) -> Iterator[RemoteBlocks]:
    target = network("target", **options)
    remote = target.open(peer, endpoint)
    try:
        yield remote
    finally:
        remote.close()
        target.close()


def random_rows(num_blocks: int, num_bytes: int) -> Rows:
    return np.random.default_rng(num_blocks).integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)


def read(remote: RemoteBlocks, target: Rows, blocks: Sequence[int], to: Sequence[int] | None = None) -> bool:
    ids, places = np.array(blocks, np.int32), np.array(blocks if to is None else to, np.int32)
    return remote.read(KV, ids, target, places, SLOT, WORD)


def macs() -> list[MacKind]:
    """The kinds that this Python can make."""
    best = best_mac()
    return [best] if isinstance(best, HmacSha256) else [best, HmacSha256()]


@pytest.mark.parametrize("mac", [*macs(), None], ids=lambda mac: mac.name if mac else "tls")
def test_odd_sizes_and_more_blocks_than_a_request_has_room_for(
    mac: MacKind | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"mac": mac}
    if mac is None:
        make_authority(tmp_path / "authority")
        options["make_layer"] = TlsFiles(make_node(tmp_path / "node", tmp_path / "authority"))
    for num_bytes, num_blocks in ((1, 700), (3 * BATCH_BYTES // 2 + 1, 5), (BATCH_BYTES, 3), (4099, 300)):
        rows, target = random_rows(num_blocks, num_bytes), np.zeros((num_blocks, num_bytes), np.uint8)
        monkeypatch.setattr(wire, "MAX_BLOCKS", 256)
        with served(rows, **options) as (_, endpoint), opened(endpoint, **options) as remote:
            order = np.random.default_rng(3).permutation(num_blocks).tolist()
            assert read(remote, target, order) and read(remote, target, order)
            assert np.array_equal(target, rows)
            with pytest.raises(TransferError, match="not block"):
                read(remote, target, [num_blocks], [0])
            if mac is None:  # a node without certificates is refused
                with opened(endpoint) as plain, pytest.raises(TransferError):
                    read(plain, target, [0])


def test_a_word_that_changes_behind_the_bytes_makes_the_pull_invalid() -> None:
    """The bytes may even change between the socket and their MAC, which looks like an attack but for the word."""
    rows, target = random_rows(4, 100), np.zeros((4, 100), np.uint8)
    words = iter([WORD, WORD + 256, WORD, WORD])
    source = served(rows, lambda slot: next(words), mac=_Overtaken(rows))
    with source as (_, endpoint), opened(endpoint, mac=HmacSha256()) as remote:
        assert not read(remote, target, [1, 2])
        with pytest.raises(TransferError, match="is not authentic: it was altered on its way"):
            read(remote, target, [1, 2])


class _Overtaken(HmacSha256):
    """Changes the pool before a piece that has been sent comes to its MAC."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def begin(self, key: bytes, number: int) -> Mac:
        mac, rows = super().begin(key, number), self._rows

        class Overtaken:
            digest = mac.digest

            def update(self, data: bytes | memoryview) -> None:
                if isinstance(data, memoryview) and len(data) >= rows.shape[1]:
                    rows[:] += 1
                mac.update(data)

        return Overtaken()


@pytest.mark.usefixtures("each_network")
def test_several_targets_read_at_once() -> None:
    rows = random_rows(64, 5000)
    targets = [np.zeros_like(rows) for _ in range(6)]

    def read_all(number: int) -> None:
        rng = np.random.default_rng(number)
        with opened(endpoint) as remote:
            for _ in range(5):
                for part in np.array_split(rng.permutation(64), 3):
                    assert read(remote, targets[number], part.tolist())

    with served(rows) as (_, endpoint):
        threads = [threading.Thread(target=read_all, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(np.array_equal(target, rows) for target in targets)


# ---- what is refused


@pytest.mark.usefixtures("each_network")
def test_requests_that_cannot_be_right_are_refused_and_the_connection_stays() -> None:
    rows, target = random_rows(8, 10), np.zeros((8, 10), np.uint8)
    one, two = np.array([1], np.int32), np.array([2], np.int32)
    with served(rows) as (_, endpoint), opened(endpoint) as remote:
        for blocks, reason in (
            ([8], "has 8 kv blocks, not block 8"),
            ([-1], "not block -1"),
            ([0, -5], "not block -5"),
        ):
            with pytest.raises(TransferError, match=reason):
                read(remote, target, blocks, [0] * len(blocks))
        with pytest.raises(TransferError, match="has 16 control words, not word 16"):
            remote.read(KV, one, target, two, 16, WORD)
        with pytest.raises(TransferError, match="lets nobody read its features blocks"):
            remote.read(PoolKind.FEATURES, one, target, two, SLOT, WORD)
        for bad in ([8], [-1]):
            with pytest.raises(ValueError, match="expected 0 to 7"):
                read(remote, target, [1], bad)
        assert not target.any()
        tcp: Any = getattr(remote, "_tcp", remote)
        sock = tcp._sock
        assert read(remote, target, [1]) and sock is tcp._sock


@pytest.mark.usefixtures("each_network")
def test_another_life_another_instance_and_another_service_are_refused() -> None:
    rows, target = random_rows(8, 10), np.zeros((8, 10), np.uint8)
    with served(rows) as (_, endpoint):
        earlier_life = endpoint.split("/")[0] + "/" + "00" * 16
        restarted = pytest.raises(TransferError, match="instance source has started again since it offered them")
        with opened(earlier_life) as earlier, restarted:
            read(earlier, target, [1])
        with opened(endpoint, "other") as other, pytest.raises(TransferError, match="there is instance 'source'"):
            read(other, target, [1])
    for wrong in ("", "here", "127.0.0.1/00", "127.0.0.1:port/00", "127.0.0.1:1/life"):
        with pytest.raises(TransferError, match="which is no address"), opened(wrong):
            pass
    with pytest.raises(ResourceError, match=r"node 'n' cannot listen at 203\.0\.113\.7"):
        TcpBlocks(SECRET, greeting("n"), "203.0.113.7").serve({KV: rows}, lambda slot: WORD, 1)


def test_without_the_secret_or_with_other_facts_nothing_is_read() -> None:
    rows, target = random_rows(8, 10), np.zeros((8, 10), np.uint8)
    with served(rows) as (_, endpoint):
        without = pytest.raises(TransferError, match="secret differs")
        with opened(endpoint, secret=b"another secret of a test") as stranger, without:
            read(stranger, target, [1])
        other = TcpBlocks(SECRET, greeting("target", model="large"), "127.0.0.1").open("source", endpoint)
        with pytest.raises(TransferError, match="has model "):
            read(other, target, [1])
        other.close()
        address = endpoint.split("/")[0].split(":")
        for data in (b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", b""):
            with socket.create_connection((address[0], int(address[1])), timeout=30) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                assert rows[0].tobytes() not in _all_of(sock)
        assert not target.any()
        with opened(endpoint) as remote:
            assert read(remote, target, [1])


def _all_of(sock: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionResetError):  # what it had not read when it closed
        while piece := sock.recv(4096):
            data += piece
    return data


def test_a_request_that_was_altered_or_is_too_long_ends_its_connection() -> None:
    with served(random_rows(8, 10)) as (_, endpoint):
        address, life = endpoint.split("/")
        host, port = address.split(":")
        for kind, count, tag in ((1, 1, b"\0" * 32), (1, 1 << 20, b""), (9, 1, b"")):
            with socket.create_connection((host, int(port)), timeout=30) as sock:
                handshake_client(sock, SECRET, network("target").greeting)
                request = wire._REQUEST.pack(bytes.fromhex(life), kind, count, SLOT, WORD)
                sock.sendall(request + b"\1\0\0\0" + tag)
                assert _all_of(sock) == b""


@pytest.mark.slow
def test_strangers_take_few_places_and_members_are_served_on() -> None:
    rows, target = random_rows(8, 10), np.zeros((8, 10), np.uint8)
    with served(rows, patience_s=0.4) as (_, endpoint), opened(endpoint) as member:
        assert read(member, target, [1])
        host, port = endpoint.split("/")[0].split(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(wire.MAX_STRANGERS + 4)]
        time.sleep(0.1)
        assert sum(thread.name == "blocks" for thread in threading.enumerate()) <= wire.MAX_STRANGERS + 2
        assert read(member, target, [2])
        with opened(endpoint) as late:  # no place until the strangers' time is over
            wait_until(lambda: can_read(late, target))
        for sock in strangers:
            sock.close()


def can_read(remote: RemoteBlocks, target: Rows) -> bool:
    try:
        return read(remote, target, [1])
    except TransferError:
        return False


def wait_until(condition: Any, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- connections that end


def test_a_connection_that_ends_in_the_middle_fails_its_pull_and_the_next_dials_again() -> None:
    rows, target = random_rows(8, 10), np.zeros((8, 10), np.uint8)
    words: list[Any] = []

    def load_word(slot: int) -> int:
        if words:
            words.pop()()
        return WORD

    with served(rows, load_word) as (source, endpoint), opened(endpoint) as remote:
        assert read(remote, target, [1])
        words[:] = [lambda: [end(sock) for sock in source._source._serving.values()]]  # type: ignore[union-attr]
        with pytest.raises(TransferError, match=r"source did not come from 127\.0\.0\.1 port .*: the connection ended"):
            read(remote, target, [2])
        assert read(remote, target, [2])
        for sock in list(source._source._serving.values()):  # type: ignore[union-attr]
            end(sock)
        wait_until(lambda: not source._source._serving)  # type: ignore[union-attr]
        assert read(remote, target, [3]), "an end at rest is noticed before the request"


def end(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)


def test_a_source_that_is_gone_is_dialled_less_and_less_often() -> None:
    rows = random_rows(8, 10)
    with served(rows) as (_, endpoint):
        pass
    with opened(endpoint) as remote:
        times = []
        for _ in range(4):
            began = time.monotonic()
            with pytest.raises(TransferError, match="Connection refused"):
                read(remote, rows.copy(), [1])
            times.append(time.monotonic() - began)
    assert times[0] < 0.04 < times[1] and times[2] > 0.09 and times[3] > 0.18


def test_the_first_connection_is_made_at_once_whatever_the_clock_says() -> None:
    network_before_zero = network("target", clock=VirtualClock(-3600.0))
    with sides(cpu(), cpu(), target_blocks=network_before_zero) as (source, target):
        assert pull(target, "source", KV, [5], [0]).valid
        assert_arrived(source, target, KV, [5], [0])


def test_both_ends_ask_at_rest_whether_the_other_lives() -> None:
    rows = random_rows(8, 10)
    with served(rows, patience_s=4.0) as (source, endpoint), opened(endpoint, patience_s=4.0) as remote:
        assert read(remote, rows.copy(), [1])
        for sock in (remote._sock, *source._source._serving.values()):  # type: ignore[attr-defined, union-attr]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4000


@pytest.mark.usefixtures("each_network")
def test_a_source_that_falls_silent_is_left_after_a_while() -> None:
    silence = threading.Event()
    rows = random_rows(8, 10)
    with (
        served(rows, lambda slot: silence.wait(60) or WORD) as (_, endpoint),
        opened(endpoint, patience_s=0.2) as remote,
    ):
        with pytest.raises(TransferError, match=r"nothing has moved for 0\.2 s"):
            read(remote, rows.copy(), [1])
        silence.set()


@pytest.mark.slow
def test_a_target_that_does_not_read_costs_the_source_no_memory_and_the_others_no_time() -> None:
    rows, target = random_rows(64, 1 << 20), np.zeros((64, 1 << 20), np.uint8)
    with served(rows, patience_s=0.5) as (source, endpoint), opened(endpoint) as good:
        assert read(good, target, [0])
        host, port = endpoint.split("/")[0].split(":")
        before = resident_bytes()
        slow = network("slow")
        socks = [socket.create_connection((host, int(port))) for _ in range(3)]
        for sock in socks:
            connection, _ = slow.connect(sock)
            mac = connection.begin_sending()
            life = bytes.fromhex(endpoint.split("/")[1])
            connection.send([wire._REQUEST.pack(life, 1, 64, SLOT, WORD)], mac)
            connection.end_sending([np.arange(64, dtype="<i4").tobytes()], mac)
        assert read(good, target, [1, 2, 3])
        assert resident_bytes() - before < 8 << 20
        wait_until(lambda: len(source._source._serving) == 1)  # type: ignore[union-attr]
        assert read(good, target, [4])
        for sock in socks:
            sock.close()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.usefixtures("each_network")
def test_closing_ends_a_read_in_progress_and_every_later_one() -> None:
    rows, silence = random_rows(8, 10), threading.Event()
    with (
        served(rows, lambda slot: silence.wait(60) or WORD) as (_, endpoint),
        opened(endpoint, patience_s=60.0) as remote,
    ):
        timer = threading.Timer(0.1, remote.close)
        timer.start()
        for _ in range(2):
            with pytest.raises(TransferError, match="the connection was closed here"):
                read(remote, rows.copy(), [1])
        silence.set()
        timer.join()


# ---- the exchange around it


@pytest.mark.usefixtures("each_network")
def test_a_source_that_is_slow_holds_up_no_other_copy() -> None:
    silence = threading.Event()
    slow_rows = random_rows(40, 512)
    late = served(slow_rows, lambda slot: silence.wait(60) or WORD, "slow")
    with sides(cpu(), cpu()) as (source, target), late as (_, slow):
        exports = source.exchange.exports()[0]
        target.exchange.open_peer("slow", type(exports)(exports.pools, 0, exports.num_words, endpoint=slow), ())
        target.exchange.submit_pull(job("slow", KV, [1], [0]))
        assert pull(target, "source", KV, [1], [5]).valid
        target.exchange.submit_staging(StagingJob(5, KV, (1,), (0,)))
        assert isinstance(target.result(), StagingResult)
        began = time.monotonic()
        target.exchange.close_peer("slow")
        problem = target.result().problem
        assert problem is not None and time.monotonic() - began < 1.0
        silence.set()


def test_peers_of_other_blocks_or_without_a_network_are_refused() -> None:
    with sides(cpu(), cpu()) as (source, target):
        other = Side(cpu(), "other", "bfloat16", is_source=True)
        with pytest.raises(TransferError, match="give both instances the same model, dtype and block sizes"):
            connect(target, other)
        other.exchange.close()
        exports = source.exchange.exports()[0]
        alone = Side(cpu(), "alone", is_source=False)
        assert alone.exchange._network is not None
        alone.exchange._network.close()
        alone.exchange._network = None
        with pytest.raises(TransferError, match="instance source is on another node"):
            alone.exchange.open_peer("source", exports, ())
        alone.exchange.close()


@pytest.mark.usefixtures("each_network")
def test_a_peer_that_comes_and_goes_leaves_nothing_behind() -> None:
    def threads() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())

    with sides(cpu(), cpu()) as (source, target):
        assert pull(target, "source", KV, [1], [0]).valid
        assert threads().count("blocks") == 3, threads()  # two that listen, and one of the connection
        before = num_descriptors(), num_mappings(), threads()
        for _ in range(3):
            target.exchange.close_peer("source")
            target.exchange.close_peer("source")
            assert pull(target, "source", KV, [1], [0]).problem == "instance source is not connected"
            connect(target, source)
            assert pull(target, "source", KV, [1], [0]).valid
        wait_until(lambda: (num_descriptors(), num_mappings(), threads()) == before)
    assert "blocks" not in threads() and not [name for name in threads() if "blocks of" in name]
