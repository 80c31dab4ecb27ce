"""Two networks joined by a cable, in which nothing can reach the rest of the world:
`python -m tests.campaigns.siege.networks COMMAND...` runs a command in one of them, with the hostile hosts of
`hosts.py` in the other and their resolver as the command's own.

The addresses are those of documentation. `count_as_public` lets a server under siege fetch from them.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from bench.common import ROOT
from tests.campaigns.siege.hosts import GOOD_HOST, HOST, SERVER

NETWORK = ipaddress.ip_network("203.0.113.0/24")

_CLONE_NEWNS = 0x00020000  # <linux/sched.h>
_CLONE_NEWNET = 0x40000000
_START_S = 30.0


def count_as_public() -> None:
    """Lets this process take the addresses of `NETWORK` for public ones."""
    from hydra_engine.preprocess.media import fetch, sources

    real = sources.is_public

    def is_public(address: sources.IPAddress) -> bool:
        return address in NETWORK or real(address)

    sources.is_public = is_public
    fetch.is_public = is_public


def why_not() -> str | None:
    """The reason why this machine does not permit such networks; None if it does."""
    probe = subprocess.run(
        [*_unshare("--mount"), "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False
    )
    return None if probe.returncode == 0 else (probe.stderr.strip() or "no network namespaces")


def _unshare(*also: str) -> list[str]:
    return ["unshare", "--net", *also, "--"]


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Moves this process into the server's network, for good; the hosts run until the end of this."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET | _CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "no network of its own for the server")
    _run("mount", "--make-rprivate", "/")
    hosts = subprocess.Popen(
        [*_unshare(), sys.executable, "-m", "tests.campaigns.siege.hosts"],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )
    try:
        _await_network(hosts)
        inside = ("nsenter", "--net", "--target", str(hosts.pid))
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "siege0", "type", "veth", "peer", "name", "siege1", "netns", str(hosts.pid))
        _run("ip", "address", "add", f"{SERVER}/24", "dev", "siege0")
        _run("ip", "link", "set", "siege0", "up")
        for address in (HOST, GOOD_HOST):
            _run(*inside, "ip", "address", "add", f"{address}/24", "dev", "siege1")
        _run(*inside, "ip", "link", "set", "siege1", "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        with tempfile.NamedTemporaryFile("w", prefix="resolv.") as names:
            names.write(f"nameserver {HOST}\noptions timeout:1 attempts:9\n")
            names.flush()
            _run("mount", "--bind", names.name, os.path.realpath("/etc/resolv.conf"))
            _await_hosts(hosts)
            yield
    finally:
        hosts.kill()
        hosts.wait()


def _await_network(hosts: subprocess.Popen[bytes]) -> None:
    own = os.readlink("/proc/self/ns/net")
    deadline = time.monotonic() + _START_S
    while os.readlink(f"/proc/{hosts.pid}/ns/net") == own:
        if hosts.poll() is not None or time.monotonic() > deadline:
            raise OSError("no network of its own for the hosts")
        time.sleep(0.01)


def _await_hosts(hosts: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((HOST, 80), 1):
            return
        if hosts.poll() is not None or time.monotonic() > deadline:
            raise OSError("the hosts do not listen")
        time.sleep(0.05)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def main(command: Sequence[str]) -> int:
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return 3
    with joined():
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
