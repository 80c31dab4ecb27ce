"""A launcher whose instances are on nodes as far as they can tell: each dials the frontend by TCP, takes an order from
its control socket, and is connected with its peers by TCP. It stands in for agents; all run on this machine."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hydra_engine.clock import MonotonicClock
from hydra_engine.cluster import channel
from hydra_engine.cluster.children import Child, ProcessChild
from hydra_engine.cluster.launcher import OnFailure
from hydra_engine.cluster.spawn import start_python
from hydra_engine.core.processes.preloaded import Preloaded
from hydra_nodes.facts import deployment_facts
from hydra_nodes.links import CHANNEL
from hydra_nodes.listener import Listener
from hydra_nodes.process import Order, encode_order, main
from hydra_nodes.session import Greeting
from hydra_nodes.tls import TlsFiles
from tests.nodes.proxy import Proxy

COMMAND = (sys.executable, "-m", "tests.nodes.tcp_launcher")
AHEAD_VARIABLE = "NODE_CLOCK_AHEAD_S"
SECRET = b"the secret of this deployment"


class TcpLauncher:
    """Takes the place of `LocalLauncher`, with its arguments, of which it needs none. `proxies`: between each
    incarnation, by name, and the frontend."""

    tls = ""  # folder of certificates, of all nodes

    def __init__(self, **_: object) -> None:
        self.proxies: dict[str, list[Proxy]] = {}
        self._listener: Listener | None = None

    async def open(self) -> None:
        greeting = Greeting(CHANNEL, "front", must_agree=deployment_facts(None))
        self._listener = await Listener.open(
            "127.0.0.1", SECRET, greeting, make_layer=TlsFiles(Path(self.tls)) if self.tls else None
        )

    async def launch(self, start: channel.Start, node: str, preloaded: Preloaded | None) -> Child:
        assert self._listener is not None
        proxy = Proxy(self._listener.address)
        self.proxies.setdefault(start.name, []).append(proxy)
        expected = self._listener.expect(start.name, start.incarnation)
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        order = Order(SECRET, f"node of {start.name}", start.name, start.incarnation, tls=self.tls)
        with theirs, socket.create_connection(proxy.address) as sock:
            control.send(encode_order(order))
            process = start_python([*COMMAND, "--name", start.name], sock, theirs)
        async with asyncio.timeout(30):
            end = await expected
        end.send_start(start)
        return ProcessChild(start.name, start.incarnation, end, control, process)

    def connect(self, one: Child, other: Child, on_failure: OnFailure) -> None:
        assert isinstance(one, ProcessChild) and isinstance(other, ProcessChild)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        with near, far:
            one.connect(channel.Connect(other.name, other.incarnation), near)
            other.connect(channel.Connect(one.name, one.incarnation), far)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for proxy in (proxy for proxies in self.proxies.values() for proxy in proxies):
            proxy.close()


def run_with_another_clock(arguments: Sequence[str] = ()) -> int:
    """Runs an instance whose machine's monotonic clock is ahead, and drifts by 100 ppm."""
    ahead_s, begun_s = float(os.environ.get(AHEAD_VARIABLE, "0")), time.monotonic()

    def now(_: MonotonicClock) -> float:
        return time.monotonic() + ahead_s + 1e-4 * (time.monotonic() - begun_s)

    MonotonicClock.now = now  # type: ignore[method-assign]
    return main()


if __name__ == "__main__":
    sys.exit(run_with_another_clock())
