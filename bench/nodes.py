"""Times reading blocks of 64 KiB from another process by each way that their bytes can go between nodes.

Two real processes over loopback. Per size, in turns within one run: memcpy of blocks anywhere to blocks anywhere within
this process, a bare TCP socket with the same scatter-gather and nothing else (calls that send 1 MiB, which are the
fastest here, or 256 KiB), the network of the engine (`hydra_nodes/blocks.py`) with each of its MACs, in TLS, and, as a
yardstick that it does not offer, bare, and NIXL (`hydra_nodes/nixl_blocks.py`) where it is installed: over RDMA if a
port is up, else over TCP. Throughput is bytes over the median time of a read; each waits for the one
before. CPU seconds are those of both processes. Then the time from the death of a source in the middle of a read until
the target knows it.

`python -m bench.nodes [--quick] [--json FILE]`; the last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.common import ROOT, card, emit, write_document
from hydra_engine.core.pools import PoolKind
from hydra_engine.errors import TransferError
from hydra_engine.transfer.network import BlockNetwork, RemoteBlocks, Rows
from hydra_nodes.block_connection import BATCH_BYTES, batches, block_views
from hydra_nodes.blocks import TcpBlocks
from hydra_nodes.macs import HmacSha256, Mac, MacKind, best_mac
from hydra_nodes.nixl_blocks import NixlBlocks, active_ports, installed_version
from hydra_nodes.session import Greeting
from hydra_nodes.tls import AUTHORITY, CERTIFICATE, KEY, TlsFiles

BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 2048  # of a pool: more than any cache of the processor has
COUNTS = (1, 16, 75, 1024)  # 64 KiB, 1, 4.7 and 64 MiB
SECRET = b"of no other deployment"
SLOT, WORD = 5, 0x1234
KIND = PoolKind.KV
HOST = "127.0.0.1"
CALL_BYTES = 1 << 18  # of a bare socket's calls that receive, and of the smaller ones that send
_ASKED = struct.Struct("<II")  # number of blocks, bytes of a call that sends
_SECONDS = struct.Struct("<d")

_LIBC = ctypes.CDLL(None)
_LIBC.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

Read = Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], None]  # blocks from, blocks to


class NoMac:
    name = "none"
    tag_bytes = 0

    def begin(self, key: bytes, number: int) -> Mac:
        return _Nothing()


class _Nothing:
    def update(self, data: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes:
        return b""


def macs() -> list[MacKind]:
    best = best_mac()
    return [*([] if isinstance(best, HmacSha256) else [best]), HmacSha256(), NoMac()]


def networks(name: str, certificates: Path) -> dict[str, BlockNetwork]:
    greeting = Greeting("bench", name, name)
    found: dict[str, BlockNetwork] = {
        f"tcp, {mac.name}": TcpBlocks(SECRET, greeting, HOST, mac=mac) for mac in macs()
    } | {"tcp, tls": TcpBlocks(SECRET, greeting, HOST, make_layer=TlsFiles(certificates))}
    if installed_version():
        found[nixl_name()] = NixlBlocks(TcpBlocks(SECRET, greeting, HOST), HOST)
    return found


def nixl_name() -> str:
    return "nixl, rdma" if active_ports() else "nixl, tcp"


def make_certificates(folder: Path) -> None:
    """Makes a certificate that is its own authority."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(folder / KEY)]
    command = ["openssl", "req", "-x509", *key, "-out", str(folder / CERTIFICATE), "-days", "2", "-subj", "/CN=bench"]
    subprocess.run(command, check=True, capture_output=True)
    shutil.copy(folder / CERTIFICATE, folder / AUTHORITY)


def pool(seed: int) -> Rows:
    return np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)


# ---- the source


def serve(control: socket.socket, certificates: Path) -> None:
    """Serves the pool in all ways, says where, and then answers each byte with its seconds of CPU so far."""
    rows = pool(1)
    served = networks("source", certificates)
    endpoints = [one.serve({KIND: rows}, lambda _: WORD, 16) for one in served.values()]
    listener = socket.create_server((HOST, 0))
    threading.Thread(target=_serve_bare, args=(listener, rows), daemon=True).start()
    control.sendall(" ".join([str(listener.getsockname()[1]), *endpoints]).encode() + b"\n")
    while control.recv(1):
        control.sendall(_SECONDS.pack(time.process_time()))


def _serve_bare(listener: socket.socket, rows: Rows) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_serve_one, args=(sock, rows), daemon=True).start()


def _serve_one(sock: socket.socket, rows: Rows) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while head := sock.recv(_ASKED.size, socket.MSG_WAITALL):
        count, call_bytes = _ASKED.unpack(head)
        ids = np.frombuffer(sock.recv(4 * count, socket.MSG_WAITALL), np.int32)
        for batch in batches(block_views(rows, ids), call_bytes):
            waiting = batch
            while waiting:
                waiting = _rest(waiting, sock.sendmsg(waiting))


def _rest(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


# ---- the target


class Source:
    """The process that serves, as this one sees it."""

    def __init__(self, certificates: Path) -> None:
        self.control, theirs = socket.socketpair()
        command = [sys.executable, "-m", "bench.nodes", "--serve", str(theirs.fileno()), "--tls", str(certificates)]
        self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()
        line = self.control.makefile().readline()
        if not line:
            raise SystemExit("the source has not started")
        port, *endpoints = line.split()
        self.port = int(port)
        opened = networks("target", certificates)
        self.remotes = {
            name: one.open("source", endpoint) for (name, one), endpoint in zip(opened.items(), endpoints, strict=True)
        }

    def cpu_s(self) -> float:
        self.control.sendall(b"?")
        return float(_SECONDS.unpack(self.control.recv(_SECONDS.size, socket.MSG_WAITALL))[0])

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def source() -> Iterator[Source]:
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder))
        started = Source(Path(folder))
        try:
            yield started
        finally:
            started.close()


def bare_reader(port: int, target: Rows, call_bytes: int) -> Read:
    sock = socket.create_connection((HOST, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(blocks: np.ndarray[Any, Any], to: np.ndarray[Any, Any]) -> None:
        sock.sendall(_ASKED.pack(len(blocks), call_bytes) + blocks.tobytes())
        for batch in batches(block_views(target, to), CALL_BYTES):
            waiting = batch
            while waiting:
                waiting = _rest(waiting, sock.recvmsg_into(waiting, 0, socket.MSG_WAITALL)[0])

    return read


def remote_reader(remote: RemoteBlocks, target: Rows) -> Read:
    def read(blocks: np.ndarray[Any, Any], to: np.ndarray[Any, Any]) -> None:
        if not remote.read(KIND, blocks, target, to, SLOT, WORD):
            raise SystemExit("a word has changed")

    return read


def memcpy(target: Rows) -> Read:
    local = pool(1)
    here = target.ctypes.data

    def read(blocks: np.ndarray[Any, Any], to: np.ndarray[Any, Any]) -> None:
        there = local.ctypes.data
        for block, place in zip(blocks.tolist(), to.tolist(), strict=True):
            _LIBC.memcpy(here + place * BLOCK_BYTES, there + block * BLOCK_BYTES, BLOCK_BYTES)

    return read


def readers(served: Source, target: Rows) -> dict[str, Read]:
    named = {name: remote_reader(remote, target) for name, remote in served.remotes.items()}
    bare = {"bare socket": BATCH_BYTES, "bare, calls of 256K": CALL_BYTES}
    bare_readers = {name: bare_reader(served.port, target, call_bytes) for name, call_bytes in bare.items()}
    return {"memcpy": memcpy(target), **bare_readers, **named}


def check(named: dict[str, Read], target: Rows) -> None:
    """Raises SystemExit unless every way brings every byte. Touches every page that is measured afterwards."""
    expected, order = pool(1), np.random.default_rng(2).permutation(NUM_BLOCKS).astype(np.int32)
    for name, read in named.items():
        target[:] = 0
        read(order, order[::-1].copy())
        if not np.array_equal(target[order[::-1]], expected[order]):
            raise SystemExit(f"{name}: blocks did not arrive as they were")


def measure(served: Source, named: dict[str, Read], count: int, rounds: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(count)
    repeats = max(1, 64 // count)  # of one turn
    took: dict[str, list[float]] = {name: [] for name in named}
    cpu: dict[str, float] = dict.fromkeys(named, 0.0)
    for turn in range(rounds + 1):
        for name, read in named.items():
            pairs = [[rng.permutation(NUM_BLOCKS)[:count].astype(np.int32) for _ in "ab"] for _ in range(repeats)]
            before = served.cpu_s() + time.process_time()
            for blocks, to in pairs:
                began = time.perf_counter()
                read(blocks, to)
                seconds = time.perf_counter() - began
                if turn:  # the first one warms up
                    took[name].append(seconds)
            if turn:
                cpu[name] += served.cpu_s() + time.process_time() - before
    num_bytes = count * BLOCK_BYTES
    rows = []
    for name, seconds in took.items():
        middle = median(seconds)
        rows.append(
            {
                "way": name,
                "bytes": num_bytes,
                "ms": 1e3 * middle,
                "p90_ms": 1e3 * float(np.percentile(seconds, 90)),
                "gbytes_per_s": num_bytes / middle / 1e9,
                "of_bare_socket": median(took["bare socket"]) / middle,
                "of_bare_socket_within_rounds": _ratio_within(took["bare socket"], seconds),
                "cpu_s_per_gbyte": cpu[name] / (num_bytes * len(seconds)) * 1e9,
            }
        )
    return rows


def _ratio_within(bare: Sequence[float], seconds: Sequence[float]) -> float:
    """The median, over the turns, of how much faster the bare socket was."""
    return median(one / other for one, other in zip(bare, seconds, strict=True))


def deaths(name: str, rounds: int) -> list[float]:
    """Milliseconds from SIGKILL of a source in the middle of a read until the read raises."""
    found = []
    target, everything = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8), np.arange(NUM_BLOCKS, dtype=np.int32)
    while len(found) < rounds:
        with source() as served:
            read = remote_reader(served.remotes[name], target)
            read(everything[:1], everything[:1])
            killed_s: list[float] = []

            def kill(served: Source = served, killed_s: list[float] = killed_s) -> None:
                killed_s.append(time.perf_counter())
                served.process.send_signal(signal.SIGKILL)

            timer = threading.Timer(0.01, kill)
            timer.start()
            try:
                read(everything, everything)
            except TransferError:
                found.append(1e3 * (time.perf_counter() - killed_s[0]))
            timer.join()
    return found


HEADER = f"{'way':20} {'MiB':>6} {'ms':>8} {'p90':>8} {'GB/s':>6} {'of bare':>8} {'in turns':>9} {'CPU s/GB':>9}"


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['way']:20} {row['bytes'] / 2**20:6.1f} {row['ms']:8.2f} {row['p90_ms']:8.2f} {row['gbytes_per_s']:6.2f} "
        f"{row['of_bare_socket']:8.2f} {row['of_bare_socket_within_rounds']:9.2f} {row['cpu_s_per_gbyte']:9.2f}",
        flush=True,
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    target = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    rows = []
    with source() as served:
        named = readers(served, target)
        check(named, target)
        print(HEADER)
        for count in COUNTS:
            for row in measure(served, named, count, options.rounds):
                rows.append(row)
                show(row)
    noticed = {}
    for name in (f"tcp, {best_mac().name}", *([nixl_name()] if installed_version() else [])):
        found = noticed[name] = deaths(name, options.deaths)
        print(f"death in the middle, {name}: noticed after {median(found):.1f} ms, at most {max(found):.1f} ms")
    return {
        "bench": "nodes",
        "block_bytes": BLOCK_BYTES,
        "rounds": options.rounds,
        "results": rows,
        "death_noticed_ms": noticed,
        "card": card(),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--deaths", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few rounds, some seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the document there too")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tls", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.deaths = 3, 1
    return options


def main() -> None:
    options = parse()
    if options.serve is not None:
        serve(socket.socket(fileno=options.serve), options.tls)
        return
    document = run(options)
    if options.json is not None:
        write_document(options.json, document)
    emit(document)


if __name__ == "__main__":
    main()
