"""The tables of offers that other instances have made: by handle, by source and by request.

Keeps the tables consistent; the states of an offer are in `pulls.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hydra_engine.core.ids import RequestId
from hydra_engine.transfer.plans import KvEnd


@dataclass(slots=True)
class Pull:
    """An offer as its target sees it."""

    handle: int
    peer: str
    incarnation: int
    sequence: int
    request_id: RequestId
    image_index: int | None  # None: KV
    slot: int
    word: int
    blocks: list[int]
    checksums: list[int]  # none, or one for each block
    end: KvEnd | None
    heard_s: float
    heard: int = 0  # number of the latest `More`
    copies: int = 0  # in flight
    begun: int | None = None  # end of the blocks whose copy has begun
    last_ended: bool = False
    cancelled: bool = False  # over; copies are still in flight
    refused: bool = False  # by this instance, as not wanted

    @property
    def complete(self) -> bool:
        """True if no blocks will be added."""
        return self.image_index is not None or self.end is not None


@dataclass(slots=True)
class Peer:
    incarnation: int
    newest: int = 0  # the highest sequence number heard
    wanted: dict[int, Pull] = field(default_factory=dict)  # by sequence
    unclaimed: dict[int, Pull] = field(default_factory=dict)  # by sequence, oldest first


class Records:
    """Tables in which an offer is wanted (its request is known here), unclaimed (not known yet) or cancelled. A
    cancelled offer is found by its handle only: messages about it are ignored."""

    def __init__(self) -> None:
        self.pulls: dict[int, Pull] = {}  # by handle: all of them
        self.peers: dict[str, Peer] = {}  # those that are up
        self.sources: dict[RequestId, str | None] = {}  # requests that may receive, with the peer of their KV
        self._wanted: dict[RequestId, dict[tuple[int | None, str], Pull]] = {}  # by image (None: KV) and source

    def peer(self, name: str, incarnation: int) -> Peer | None:
        peer = self.peers.get(name)
        return peer if peer is not None and peer.incarnation == incarnation else None

    def find(self, name: str, incarnation: int, sequence: int) -> Pull | None:
        peer = self.peer(name, incarnation)
        if peer is None:
            return None
        return peer.wanted.get(sequence) or peer.unclaimed.get(sequence)

    def wanted_pulls(self, request_id: RequestId) -> list[Pull]:
        return list(self._wanted.get(request_id, {}).values())

    def wanted_pull(self, request_id: RequestId, image_index: int | None, peer: str) -> Pull | None:
        return self._wanted.get(request_id, {}).get((image_index, peer))

    def unclaimed_pulls(self, request_id: RequestId) -> list[Pull]:
        """Unclaimed offers for the request, oldest first."""

        def all_unclaimed() -> Iterator[Pull]:
            for peer in self.peers.values():
                yield from peer.unclaimed.values()

        return sorted((p for p in all_unclaimed() if p.request_id == request_id), key=lambda pull: pull.handle)

    def add_unclaimed(self, pull: Pull) -> None:
        self.pulls[pull.handle] = pull
        self.peers[pull.peer].unclaimed[pull.sequence] = pull

    def add_wanted(self, pull: Pull) -> None:
        self.pulls[pull.handle] = pull
        self.peers[pull.peer].wanted[pull.sequence] = pull
        self._wanted.setdefault(pull.request_id, {})[pull.image_index, pull.peer] = pull

    def remove(self, pull: Pull) -> None:
        del self.pulls[pull.handle]
        if pull.cancelled:
            return
        peer = self.peers[pull.peer]
        if peer.unclaimed.pop(pull.sequence, None) is not None:
            return
        del peer.wanted[pull.sequence]
        of_request = self._wanted[pull.request_id]
        del of_request[pull.image_index, pull.peer]
        if not of_request:
            del self._wanted[pull.request_id]

    def cancel(self, pull: Pull) -> None:
        self.remove(pull)
        pull.cancelled = True
        self.pulls[pull.handle] = pull
