"""Entry point of an instance process on a node: `hydra_nodes.process --name NAME --fd N --control M`, started by the
agent there with a socket that is connected to the frontend.

Its first datagram of the control socket is an `Order`; nothing secret is in its arguments or its environment. Then it
is what `hydra_engine.cluster.process` is, over an authenticated session.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from hydra_engine.cluster import process
from hydra_engine.cluster.channel import EXIT_ORPHANED, InstanceSocket, WireError
from hydra_engine.config import EngineConfig
from hydra_engine.errors import HydraError
from hydra_engine.preprocess.model_files import find_model_files
from hydra_nodes.blocks import TcpBlocks
from hydra_nodes.clock import SyncedClock
from hydra_nodes.facts import deployment_facts
from hydra_nodes.links import CHANNEL, LINK, LinkMaker, set_options
from hydra_nodes.nixl_blocks import choose_network
from hydra_nodes.session import Greeting, handshake_client
from hydra_nodes.tls import TlsFiles

logger = logging.getLogger(__name__)

_ORDER_BYTES = 1 << 16
_ORDER_S = 10.0
_FENCE_S = 10.0  # until the configuration says it


class Order(msgspec.Struct, frozen=True):
    """Facts that an instance process has to know before it speaks with the frontend. `model`: its folder, of which the
    digest is compared; "": none is. `gguf`, `mmproj`: files of which each node makes that folder; "": none. `host`: the
    address at which peers on other nodes reach it; "": the one from which it is connected with the frontend. `tls`: the
    folder of its certificates; "": sessions are not encrypted."""

    secret: bytes
    node: str
    name: str
    incarnation: int
    model: str = ""
    host: str = ""
    tls: str = ""
    gguf: str = ""
    mmproj: str = ""

    def on_this_node(self) -> Order:
        """Returns the order with the folder that this node has for GGUF files, or these if it cannot have one."""
        if not self.gguf:
            return self
        try:
            folder = find_model_files(EngineConfig(model=self.gguf, mmproj=self.mmproj or None)).model_path
        except HydraError as error:
            logger.error("node %s cannot read the model: %s", self.node, error)
            folder = Path(self.gguf)
        return msgspec.structs.replace(self, model=str(folder))

    def greeting(self, purpose: str) -> Greeting:
        facts = deployment_facts(Path(self.model) if self.model else None)
        return Greeting(purpose, self.node, self.name, self.incarnation, facts)


def encode_order(order: Order) -> bytes:
    return msgspec.msgpack.encode(order)


def _receive_order(control: socket.socket) -> Order:
    """Raises WireError and OSError, TimeoutError included."""
    control.settimeout(_ORDER_S)
    try:
        return msgspec.msgpack.decode(control.recv(_ORDER_BYTES), type=Order)
    except msgspec.DecodeError as error:
        raise WireError(f"unreadable order from the agent: {error}") from error


def main(load: Callable[[], Callable[..., int]] = process.load_instance) -> int:
    sock, control = process.take_sockets()
    try:
        order = _receive_order(control).on_this_node()
        set_options(sock, _FENCE_S)
        greeting = order.greeting(CHANNEL)
        make_layer = TlsFiles(Path(order.tls)) if order.tls else None
        layer = None if make_layer is None else make_layer(False)
        session = handshake_client(sock, order.secret, greeting, layer=layer)
        clock = SyncedClock(session.clock_samples.popleft())
        session.observe_clock = clock.observe
        end = InstanceSocket(sock, session)
        host = order.host or sock.getsockname()[0]
        tcp = TcpBlocks(order.secret, greeting, host, make_layer=make_layer)
        run_instance = partial(load(), clock=clock)
        start = end.receive_start()
        backend = start.config.cluster.transfer_backend
        network = tcp if backend == "tcp" or order.tls else choose_network(tcp, host, asked=backend == "nixl")
        if order.gguf:
            config = replace(start.config, model_folder=order.model)
            start = msgspec.structs.replace(start, config=config)
    except (WireError, OSError, EOFError) as error:
        logger.error("an instance on this node has not joined the frontend: %s", error)
        return EXIT_ORPHANED
    except HydraError as error:
        logger.error("an instance on this node cannot start: %s", error)
        return error.exit_code
    fence_s = start.config.cluster.fence_s
    set_options(sock, fence_s)
    session.set_fence(fence_s)
    suspect_s = start.config.cluster.suspect_s  # of a peer that the frontend still reaches: others serve meanwhile
    links = LinkMaker(order.secret, msgspec.structs.replace(greeting, purpose=LINK), suspect_s, make_layer)
    return process.serve(start, end, control, partial(run_instance, network=network), make_codec=links)


if __name__ == "__main__":
    sys.exit(main())
