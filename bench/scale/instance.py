"""An instance that computes nothing, on a node: the real process, session and peers, and a status as often as a real
one sends it. Started by an agent."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from bench.frontend.instance import status, summary
from hydra_engine.cluster.process import ConnectPeers, RunInstance
from hydra_engine.config import EngineConfig
from hydra_engine.core.messages import WIRE_VERSION, PeerState, Ready, Shutdown
from hydra_engine.core.pools import Exports
from hydra_engine.instance.instance import STATUS_PERIOD_S
from hydra_engine.instance.ports import Inbox, InstanceContext, Outbox, PeerDown, PeerUp
from hydra_engine.transfer.network import BlockNetwork
from hydra_nodes.process import main

COMMAND = (sys.executable, "-m", "bench.scale.instance")


def run_instance(
    config: EngineConfig,  # noqa: ARG001
    name: str,
    inbox: Inbox,
    outbox: Outbox,
    wake: threading.Event,
    *,
    context: InstanceContext,
    connect: ConnectPeers | None,
    network: BlockNetwork,
    **_: Any,
) -> int:
    network.close()
    assert connect is not None
    peers, reported_s, progress = connect(Exports((), -1, 8, endpoint="127.0.0.1:1/00"), ()), 0.0, 0
    outbox.send([Ready(WIRE_VERSION, summary(name, context))])
    while not any(isinstance(message, Shutdown) for message in inbox.drain()):
        for event in peers.drain():
            if isinstance(event, PeerUp):
                outbox.send([PeerState(event.name, event.incarnation, True)])
            elif isinstance(event, PeerDown):
                outbox.send([PeerState(event.name, event.incarnation, False, event.problem)])
        if (now := time.monotonic()) - reported_s >= STATUS_PERIOD_S:
            reported_s, progress = now, progress + 1
            outbox.send([status(progress, 0)])
        wake.wait(STATUS_PERIOD_S)
        wake.clear()
    return 0


def load() -> RunInstance:
    return run_instance


if __name__ == "__main__":
    sys.exit(main(load))
