"""`python -m tests.nodes.remote_instance` is `hydra_engine.cluster.process` for an instance whose peers are on other
nodes, as far as it can tell: no descriptor of theirs reaches it, and it has a network."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hydra_engine.cluster.channel import close_all
from hydra_engine.cluster.process import RunInstance, load_instance, main
from hydra_engine.core.pools import Exports
from hydra_engine.instance.ports import FromPeer, PeerDown, PeerPort, PeerUp
from hydra_engine.transfer.messages import TransferMessage
from tests.nodes.blocks import network


class WithoutDescriptors:
    """A `PeerPort` that loses the descriptors of peers."""

    def __init__(self, peers: PeerPort) -> None:
        self._peers = peers

    def drain(self) -> list[PeerUp | PeerDown | FromPeer]:
        return [self._without(event) for event in self._peers.drain()]

    def _without(self, event: PeerUp | PeerDown | FromPeer) -> PeerUp | PeerDown | FromPeer:
        if isinstance(event, PeerUp):
            close_all(event.descriptors)
            return replace(event, descriptors=())
        return event

    def send(self, name: str, messages: Sequence[TransferMessage]) -> None:
        self._peers.send(name, messages)


def load() -> RunInstance:
    run: Any = load_instance()

    def run_remote(config: Any, name: str, *rest: Any, connect: Any, **options: Any) -> int:
        def connect_remote(exports: Exports, descriptors: tuple[int, ...]) -> PeerPort:
            return WithoutDescriptors(connect(exports, descriptors))

        blocks = network(name)
        code: int = run(config, name, *rest, connect=connect_remote, network=blocks, **options)
        return code

    return run_remote


if __name__ == "__main__":
    sys.exit(main(load))
