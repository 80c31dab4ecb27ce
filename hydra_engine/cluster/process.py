"""Entry point of an instance process: `hydra_engine.cluster.process --name NAME --fd N --control M`, started by the
supervisor.

Takes its configuration from the inherited channel and its connections to other instances from the control socket,
ignores the signals that a terminal or a service manager sends to the whole group (draining is the frontend's business),
and ends when the frontend asks or is gone. Does not know what an instance computes.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Protocol

from hydra_engine import log
from hydra_engine.cluster.channel import InstanceSocket, Start
from hydra_engine.cluster.peers import MakeCodec, PeerSockets
from hydra_engine.cluster.spawn import INSTANCE
from hydra_engine.config import EngineConfig
from hydra_engine.core.messages import WIRE_VERSION, Failed
from hydra_engine.core.pools import Exports
from hydra_engine.core.processes.launch import bind_to_parent
from hydra_engine.errors import ConfigError
from hydra_engine.instance.ports import Inbox, InstanceContext, Outbox, PeerPort
from hydra_engine.transfer.network import BlockNetwork

ConnectPeers = Callable[[Exports, tuple[int, ...]], PeerPort]


class RunInstance(Protocol):
    """The signature of `build.run_instance`, which returns the exit code. It calls `connect` once, only if the instance
    has peers, to accept them; its caller closes the returned port. `network`: for the blocks of peers on other nodes,
    closed by the instance."""

    def __call__(
        self,
        config: EngineConfig,
        name: str,
        inbox: Inbox,
        outbox: Outbox,
        wake: threading.Event,
        *,
        context: InstanceContext,
        connect: ConnectPeers | None,
        network: BlockNetwork | None = None,
    ) -> int: ...


def load_instance() -> RunInstance:
    """Imports torch and the instance, which takes seconds; the supervisor can end this process meanwhile. Freezes the
    imported objects, since garbage collections, also during steps, would find nothing to free among them."""
    gc.disable()
    run: RunInstance = import_module(INSTANCE).run_instance
    gc.freeze()
    gc.enable()
    atexit.register(_thaw_for_triton)
    return run


def _thaw_for_triton() -> None:
    """Unfreezes at exit if triton is loaded: it prints its objects that were not collected."""
    if "triton" in sys.modules:
        gc.unfreeze()


def take_sockets() -> tuple[socket.socket, socket.socket]:
    """Sets up the process and returns the inherited ends of its channel and its control socket."""
    bind_to_parent()  # again, for what is not started by `launch`
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # as `spawn.start_python` has left it
    parser = argparse.ArgumentParser(description="internal: one instance of hydra-engine")
    parser.add_argument("--name", help="of the instance, for whoever lists processes")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--control", type=int, required=True)
    arguments = parser.parse_args()
    log.never_wait()
    return socket.socket(fileno=arguments.fd), socket.socket(fileno=arguments.control)


def main(load: Callable[[], RunInstance] = load_instance) -> int:
    sock, control = take_sockets()
    end = InstanceSocket(sock)
    run_instance = load()  # before the configuration, which may come later
    return serve(end.receive_start(), end, control, run_instance)


def serve(
    start: Start,
    end: InstanceSocket,
    control: socket.socket,
    run_instance: RunInstance,
    *,
    make_codec: MakeCodec | None = None,
) -> int:
    """Runs the instance; returns its exit code. `make_codec`: for connections to peers on other machines."""
    log.configure(start.config.log_level, instance=start.name, log_format=start.config.log_format)
    if start.version != WIRE_VERSION:
        error = ConfigError(f"the frontend speaks wire version {start.version}, not {WIRE_VERSION}")
        end.send([Failed(error.info(), error.exit_code)])
        return error.exit_code
    end.start_reading()
    context = start.context
    with ExitStack() as opened:
        opened.callback(control.close)

        def connect(exports: Exports, descriptors: tuple[int, ...]) -> PeerPort:
            peers = PeerSockets(start.name, start.incarnation, control, end.wake.set, make_codec=make_codec)
            opened.callback(peers.close)
            peers.start(exports, descriptors)
            return peers

        code = run_instance(
            start.config,
            start.name,
            end,
            end,
            end.wake,
            context=context,
            connect=connect if context.has_peers else None,
        )
    end.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
