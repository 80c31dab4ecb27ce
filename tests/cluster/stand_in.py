"""An instance that computes nothing: the real process, channel and peer sockets around a loop that only reports.

Started like a real one with `python -m tests.cluster.stand_in`. The environment says how it starts, in a variable
STAND_IN_<NAME>: "fail" (a ConfigError), "exit" (code 3, without a word), "hang" (sleeps before it is ready), "deaf"
(ignores Shutdown), "slow" (computes before it ends), "float32" (its dtype; then as "hang"). SetFault says what it
does later: "exit" (code 7), "leave" (code 0), "offer" and "garble" (argument: the peer).
"""

from __future__ import annotations

import os
import sys
import threading
import time

from hydra_engine.cluster.peers import PeerSockets
from hydra_engine.cluster.process import ConnectPeers, RunInstance, main
from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import (
    WIRE_VERSION,
    Failed,
    Loading,
    NeedImages,
    PeerState,
    Ready,
    SetRole,
    Shutdown,
)
from hydra_engine.core.pools import Exports
from hydra_engine.core.reports import BlockFormat, InstanceSummary, LedgerReport, Status
from hydra_engine.errors import ConfigError
from hydra_engine.instance.ports import FromPeer, Inbox, InstanceContext, Outbox, PeerDown, PeerUp
from hydra_engine.transfer.messages import Offer
from hydra_engine.transfer.network import BlockNetwork
from tests.faults import SetFault

PERIOD_S = 0.05
SLOW_S = 0.8  # of a processor
COMMAND = (sys.executable, "-m", "tests.cluster.stand_in")


def exports() -> tuple[Exports, tuple[int, ...]]:
    """Eight control words, which anyone who gets the descriptor can read."""
    descriptor = os.memfd_create("words")
    os.write(descriptor, bytes(range(64)))
    return Exports((), 0, 8), (descriptor,)


def offer(sequence: int) -> Offer:
    return Offer(1, sequence, RequestId(5), None, 0, 9, (1, 2, 3))


def summary(name: str, context: InstanceContext) -> InstanceSummary:
    zeros = {f: 0 for f in InstanceSummary.__struct_fields__ if InstanceSummary.__annotations__[f] in ("int", "float")}
    texts = dict.fromkeys(("model", "family", "device", "dtype", "backend"), "none")
    values = {**zeros, **texts, "name": name, "role": context.role.letters, "incarnation": context.incarnation}
    return InstanceSummary(**values, deterministic=True)


def status(progress: int) -> Status:
    required = Status.__struct_fields__[: -len(Status.__struct_defaults__)]
    values = dict.fromkeys(required, 0) | {"time_s": time.monotonic(), "progress": progress}
    return Status(**values)


class StandIn:
    def __init__(self, name: str, inbox: Inbox, outbox: Outbox, peers: PeerSockets | None) -> None:
        self.manner = os.environ.get(f"STAND_IN_{name.upper()}")
        self.inbox, self.outbox, self.peers = inbox, outbox, peers
        self.stopped = False

    def turn(self, progress: int) -> None:
        for message in self.inbox.drain():
            match message:
                case Shutdown():
                    begun_s = time.thread_time()
                    while self.manner == "slow" and time.thread_time() - begun_s < SLOW_S:
                        pass
                    self.stopped = self.manner != "deaf"
                case SetRole():
                    self.outbox.send([LedgerReport(0, 0, 0, 0, 0, holders=(message.role,))])
                case SetFault():
                    self.obey(message)
        for event in self.peers.drain() if self.peers is not None else []:
            match event:
                case PeerUp():
                    for descriptor in event.descriptors:  # none comes over a network
                        assert os.pread(descriptor, 64, 0) == bytes(range(64))
                        os.close(descriptor)
                    self.outbox.send([PeerState(event.name, event.incarnation, True)])
                case PeerDown():
                    self.outbox.send([PeerState(event.name, event.incarnation, False, event.problem)])
                case FromPeer():
                    assert isinstance(event.message, Offer)
                    self.outbox.send([NeedImages(RequestId(event.message.sequence), ())])
        self.outbox.send([status(progress)])

    def obey(self, fault: SetFault) -> None:
        if fault.action == "exit":
            sys.exit(7)
        if fault.action == "leave":
            self.stopped = True
            return
        assert self.peers is not None
        match fault.action:
            case "offer":
                self.peers.send(fault.argument, [offer(77)])
            case "garble":
                self.peers._taken[fault.argument].send(b"\x04\0\0\0what")


def run_instance(
    config: EngineConfig,
    name: str,
    inbox: Inbox,
    outbox: Outbox,
    wake: threading.Event,
    *,
    context: InstanceContext,
    connect: ConnectPeers | None,
    network: BlockNetwork | None = None,
) -> int:
    manner = os.environ.get(f"STAND_IN_{name.upper()}")
    dtype = "float32" if manner == "float32" else "none"
    outbox.send([BlockFormat(dtype, 0, 0), Loading("weights", 1, 2)])
    match manner:
        case "fail":
            error = ConfigError("the model is made of paper", param="model")
            outbox.send([Failed(error.info(), error.exit_code)])
            return error.exit_code
        case "exit":
            return 3
        case "hang" | "float32":
            time.sleep(600)
    peers = connect(*exports()) if connect is not None else None
    assert peers is None or isinstance(peers, PeerSockets)
    instance = StandIn(name, inbox, outbox, peers)
    outbox.send([Ready(WIRE_VERSION, summary(name, context))])
    progress = 0
    while not instance.stopped:
        wake.wait(PERIOD_S)
        wake.clear()
        progress += 1
        instance.turn(progress)
    return 0


def load() -> RunInstance:
    return run_instance


if __name__ == "__main__":
    sys.exit(main(load))
