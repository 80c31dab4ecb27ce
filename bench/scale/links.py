"""Costs of connections with hundreds of peers: one instance's real sockets over loopback TCP, in a process of its own.

The far ends are real links with their handshakes and MACs too, served by this process, whose seconds do not count.
`run(counts)`; the process is `python -m bench.scale.links NAME`.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.common import ROOT
from hydra_engine.cluster import channel
from hydra_engine.cluster.peers import MAX_QUEUED_BYTES, PeerLink, PeerSockets
from hydra_engine.core.ids import RequestId
from hydra_engine.core.pools import Exports
from hydra_engine.instance.ports import PeerUp
from hydra_engine.transfer.messages import TRANSFER_VERSION, Ack, Hello, Offer
from hydra_nodes.links import LINK, LinkMaker
from hydra_nodes.session import PING_S, Greeting

_SECRET = b"of no other deployment"
_FENCE_S = 10.0
_NAME = "epd"
_EXPORTS = Exports((), -1, 8, endpoint="127.0.0.1:1/00")
_IDLE_S = 3.0
_MESSAGES = 2000
_LIMIT_S = 120.0


def _maker(name: str) -> LinkMaker:
    return LinkMaker(_SECRET, Greeting(LINK, "bench", name, 1), _FENCE_S, None)


# ---- the instance


class _Report(msgspec.Struct):
    links: int
    messages: int
    cpu_s: float
    rss_bytes: int
    descriptors: int


def _report(links: int, messages: int) -> _Report:
    used = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors = len(os.listdir("/proc/self/fd"))
    return _Report(links, messages, used.ru_utime + used.ru_stime, pages * resource.getpagesize(), descriptors)


def serve(fd: int, control_fd: int) -> None:
    """Holds the connections, answers each byte with a report, and reads messages as an instance's loop does."""
    asked, control = socket.socket(fileno=fd), socket.socket(fileno=control_fd)
    woken, counts = threading.Event(), [0, 0]
    peers = PeerSockets(_NAME, 1, control, woken.set, make_codec=_maker(_NAME))
    peers.start(_EXPORTS, ())

    def drain() -> None:
        while True:
            woken.wait()
            woken.clear()
            for event in peers.drain():
                counts[0] += isinstance(event, PeerUp)
                counts[1] += not isinstance(event, PeerUp)

    threading.Thread(target=drain, daemon=True).start()
    while asked.recv(1):
        asked.sendall(msgspec.msgpack.encode(_report(counts[0], counts[1])))


def _ignore(event: object) -> None:
    """Takes what comes from the instance: its introduction."""


# ---- the peers


class _Peers:
    """The other ends, by one thread."""

    def __init__(self) -> None:
        self.links: list[PeerLink] = []
        self._selector = selectors.DefaultSelector()
        self._pinged_s = 0.0

    def open(self, sock: socket.socket, name: str) -> None:
        sock.setblocking(False)
        codec = _maker(name)(sock, channel.Connect(_NAME, 1))
        link = PeerLink(sock, channel.Connect(_NAME, 1), MAX_QUEUED_BYTES, codec)
        self.links.append(link)
        self._selector.register(link, selectors.EVENT_READ)
        link.send_hello(Hello(TRANSFER_VERSION, name, 1, _EXPORTS), ())

    def serve(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (now := time.monotonic()) < until_s:
            if now - self._pinged_s >= 0.25 * PING_S:
                self._pinged_s = now
                for link in self.links:
                    link.keep_alive()
            for key, _ in self._selector.select(min(0.05, max(until_s - now, 0.0))):
                link = key.fileobj
                assert isinstance(link, PeerLink)
                link.receive(_ignore)


class Instance:
    def __init__(self) -> None:
        self.peers = _Peers()
        self._asked, fd = socket.socketpair()
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "bench.scale.links", str(fd.fileno()), str(control.fileno())]
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[fd.fileno(), control.fileno()])
        fd.close()
        control.close()

    def report(self) -> _Report:
        self._asked.sendall(b"?")
        return msgspec.msgpack.decode(self._asked.recv(4096), type=_Report)

    def connect(self, number: int) -> None:
        name = f"peer{number}"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        with far:
            datagram = channel.encode_connect(channel.Connect(name, 1))
            channel.send_with(self._control, datagram, [far.fileno()])
        self.peers.open(near, name)

    def close(self) -> None:
        for link in self.peers.links:
            link.close()
        self._asked.close()
        self._control.close()
        self._process.kill()
        self._process.wait()


def _until(instance: Instance, reached: Any) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    while not reached(instance.report()):
        instance.peers.serve(0.02)
        if time.monotonic() > deadline_s:
            raise SystemExit("the connections do not come up")


def _measure(instance: Instance, count: int) -> dict[str, Any]:
    """Connects up to `count` peers; then idles, then gets messages one by one, a few at a time on their way."""
    before, began_s = instance.report(), time.monotonic()
    added = count - len(instance.peers.links)
    for number in range(len(instance.peers.links), count):
        instance.connect(number)
        instance.peers.serve(0.0005)
    _until(instance, lambda report: report.links == count)
    connected, connected_s = instance.report(), time.monotonic() - began_s
    instance.peers.serve(1.0)
    resting = instance.report()
    instance.peers.serve(_IDLE_S)
    idled = instance.report()
    offer = channel.encode_to_peer([Offer(1, 1, RequestId(5), None, 0, 9, (1, 2, 3)), Ack(1, 1)])
    for number in range(_MESSAGES):
        instance.peers.links[number % count].send(offer)
        if number % 4 == 3:
            instance.peers.serve(0.002)
    _until(instance, lambda report: report.messages - idled.messages >= 2 * _MESSAGES)
    busy, idle_core = instance.report(), (idled.cpu_s - resting.cpu_s) / _IDLE_S
    return {
        "links": count,
        "connect_ms_per_link": 1e3 * connected_s / added,
        "cpu_ms_per_link": 1e3 * (connected.cpu_s - before.cpu_s) / added,
        "kib_per_link": (connected.rss_bytes - before.rss_bytes) / added / 1024,
        "descriptors": connected.descriptors,
        "idle_core": idle_core,
        "us_per_message": 1e6 * (busy.cpu_s - idled.cpu_s) / _MESSAGES,
    }


def run(counts: Sequence[int]) -> list[dict[str, Any]]:
    """`counts` ascend."""
    instance = Instance()
    try:
        return [_measure(instance, count) for count in counts]
    finally:
        instance.close()


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
