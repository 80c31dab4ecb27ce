"""Hosts on this machine, for faults of nodes and of the network between them.

A host is a network with an address, a hostname, a /dev/shm and a folder for Ray's files of its own. A cable connects it
with a switch in this process, which cuts, delays and loses frames: kernels need no netem and no nftables for that, only
TAP devices. Everything is inside of `SANDBOX`, which leaves the machine's network alone and takes all with it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import select
import signal
import struct
import subprocess
import threading
import time
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path

SANDBOX = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0"
_TAP, _SET_TAP = 0x0002 | 0x1000, 0x400454CA  # IFF_TAP | IFF_NO_PI, TUNSETIFF
_FRAME_BYTES = 1 << 16
_IDLE_S = 0.1


def find_obstacle() -> str:
    """Returns why no hosts can be made here, "" if they can."""
    try:
        tried = subprocess.run([*SANDBOX, "ip", "tuntap", "add", "t", "mode", "tap"], capture_output=True, text=True)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return tried.stderr.strip() if tried.returncode else ""


class Switch(threading.Thread):
    """An Ethernet switch. `cuts`: pairs of ports between which nothing passes. `slow`: seconds of delay and share of
    lost frames at a port, both ways."""

    def __init__(self) -> None:
        super().__init__(name="switch", daemon=True)
        self.cuts: set[frozenset[str]] = set()
        self.slow: dict[str, tuple[float, float]] = {}
        self._random = random.Random(1)
        self._ports: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._port_of: dict[bytes, str] = {}  # by hardware address
        self._delayed: list[tuple[float, int, str, bytes]] = []
        self._numbers = itertools.count()  # frames of one time stay in order
        self._poll = select.epoll()

    def plug(self, name: str) -> str:
        """Adds a port. Returns the network device at the other end of its cable."""
        device = f"tap-{name}"
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, _SET_TAP, struct.pack("16sH22x", device.encode(), _TAP))
        self._ports[name], self._names[port] = port, name
        self._poll.register(port, select.EPOLLIN)
        return device

    def cut_off(self, name: str, *others: str) -> None:
        """Cuts a port from others, or from all."""
        self.cuts |= {frozenset((name, other)) for other in others or self._ports}

    def run(self) -> None:
        while True:
            wait_s = self._delayed[0][0] - time.monotonic() if self._delayed else _IDLE_S
            for port, _ in self._poll.poll(max(wait_s, 0)):
                with suppress(BlockingIOError):
                    self._forward(self._names[port], os.read(port, _FRAME_BYTES))
            while self._delayed and self._delayed[0][0] <= time.monotonic():
                *_, target, frame = heappop(self._delayed)
                self._write(target, frame)

    def _forward(self, source: str, frame: bytes) -> None:
        self._port_of[frame[6:12]] = source
        target = self._port_of.get(frame[:6])
        for name in self._ports if target is None else (target,):
            if name == source or frozenset((source, name)) in self.cuts:
                continue
            delay_s, loss = max(self.slow.get(source, (0.0, 0.0)), self.slow.get(name, (0.0, 0.0)))
            if self._random.random() < loss:
                continue
            if delay_s:
                heappush(self._delayed, (time.monotonic() + delay_s, next(self._numbers), name, frame))
            else:
                self._write(name, frame)

    def _write(self, name: str, frame: bytes) -> None:
        with suppress(OSError):  # a device that is down or full loses it
            os.write(self._ports[name], frame)


class Host:
    """`folder`: where it has files of its own. `within`: a command that runs others on it."""

    def __init__(self, switch: Switch, name: str, number: int, folder: Path) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        mounts = f"mount -t tmpfs none /dev/shm && mount -t tmpfs none {folder}"
        script = f"hostname {name} && {mounts} && echo made && exec sleep infinity"
        self._init = subprocess.Popen(
            ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", script], stdout=subprocess.PIPE, text=True
        )
        assert self._init.stdout is not None and self._init.stdout.readline() == "made\n"
        pid = str(self._init.pid)
        self._network = os.readlink(f"/proc/{pid}/ns/net")
        self.within = (
            *("nsenter", "--target", pid, "--net", "--uts", "--ipc", "--mount"),
            *("env", f"--chdir={ROOT}", f"PYTHONPATH={ROOT}"),
        )
        ip("link", "set", switch.plug(name), "netns", pid)
        on = ("nsenter", "--target", pid, "--net")
        ip("link", "set", f"tap-{name}", "name", "eth0", within=on)
        configure("eth0", self.address, within=on)

    def processes(self, part: str = "") -> list[int]:
        """Returns the processes on it whose command lines contain `part`."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # one that ends meanwhile
                is_here = os.readlink(path / "ns/net") == self._network and int(path.name) != self._init.pid
                if is_here and part in (path / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(path.name))
        return found

    def kill(self, part: str = "") -> None:
        """Kills all its processes, or those whose command lines contain `part`."""
        while found := self.processes(part):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def shared_memory(self) -> list[str]:
        """Returns names of files in its /dev/shm."""
        return os.listdir(f"/proc/{self._init.pid}/root/dev/shm")


def configure(device: str, address: str, *, within: tuple[str, ...] = ()) -> None:
    ip("addr", "add", f"{address}/24", "dev", device, within=within)
    for name in (device, "lo"):
        ip("link", "set", name, "up", within=within)


def ip(*arguments: str, within: tuple[str, ...] = ()) -> None:
    subprocess.run([*within, "ip", *arguments], check=True, capture_output=True)
