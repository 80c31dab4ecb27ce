"""What an instance needs from outside, as protocols. Fakes live in tests, real ones in `worker/` and `cluster/`.

The instance loop is one thread. `wake` of a port is called from any thread and must only set an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hydra_engine.core.ids import RequestId
from hydra_engine.core.media import PixelPayload
from hydra_engine.core.messages import ToFront, ToInstance
from hydra_engine.core.plans import LanguagePlan, LanguageResult, PullJob, PullResult, VisionPlan, VisionResult
from hydra_engine.core.pools import Exports
from hydra_engine.core.request import Request
from hydra_engine.core.roles import EPD, Role
from hydra_engine.transfer.messages import TransferMessage


@dataclass(frozen=True, slots=True)
class InstanceContext:
    """The place of an instance in its topology. `neighbours`: roles of all instances on its device, its own among them,
    which divide its memory; () where it is alone. `has_peers`: others can map its caches."""

    role: Role = EPD
    incarnation: int = 0
    neighbours: tuple[Role, ...] = ()
    has_peers: bool = False

    @property
    def shares(self) -> int:
        return max(len(self.neighbours), 1)


ALONE = InstanceContext()


class WorkerPort(Protocol):
    """Two lanes that run plans in order, and a third that copies blocks of other instances. Never blocks the caller;
    never raises because of a request's content: a failed row or image comes back as an outcome with an error, and the
    lane goes on."""

    def add_request(self, request: Request, pixels: Sequence[PixelPayload]) -> None:
        """Called before the first plan that names the request. Keeps pixels until `remove_request`."""
        ...

    def remove_request(self, request_id: RequestId) -> None:
        """Called after the last plan that names it has come back. Unknown ids are a bug (assert)."""
        ...

    def submit_vision(self, plan: VisionPlan) -> None: ...

    def submit_language(self, plan: LanguagePlan) -> None: ...

    def submit_pull(self, job: PullJob) -> None:
        """Copies blocks of an open peer, then reads its control word; the result says whether the offer still stood."""
        ...

    def poll(self) -> list[VisionResult | LanguageResult | PullResult]:
        """Results since the last call, in order per lane; empty when none. Calls `wake` whenever one arrives."""
        ...

    @property
    def pixel_bytes(self) -> int: ...

    def exports(self) -> tuple[Exports, tuple[int, ...]]:
        """The memory that peers may map, and its descriptors, which stay ours. Only where the instance has peers."""
        ...

    def set_word(self, slot: int, word: int) -> None:
        """Writes a control word of ours. Before anything that is submitted later can overwrite a block."""
        ...

    def checksums(self, pool: str, blocks: Sequence[int]) -> tuple[int, ...]:
        """Checksums of own blocks (debugging only: computed at once)."""
        ...

    def open_peer(self, name: str, exports: Exports, descriptors: Sequence[int]) -> None:
        """Maps a peer's memory and closes the descriptors. Raises TransferError if its layout is not ours."""
        ...

    def close_peer(self, name: str) -> None:
        """Unmaps a peer's memory after the jobs that were submitted for it. An unknown name is ignored."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A peer has introduced itself. The receiver owns the descriptors."""

    name: str
    incarnation: int
    exports: Exports
    descriptors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The connection has ended: the peer is gone, or sent what cannot be read. Nothing of it comes later."""

    name: str
    incarnation: int
    problem: str


@dataclass(frozen=True, slots=True)
class FromPeer:
    name: str
    incarnation: int
    message: TransferMessage


class PeerPort(Protocol):
    """Connections to other instances, one each."""

    def drain(self) -> list[PeerUp | PeerDown | FromPeer]:
        """Events since the last call, in order for each peer. Sets the instance's event when something
        does."""
        ...

    def send(self, name: str, messages: Sequence[TransferMessage]) -> None:
        """Never blocks. To a peer that is down: dropped, for it has been or will be reported."""
        ...


class Inbox(Protocol):
    def drain(self) -> list[ToInstance]:
        """Messages since the last call; raises EOFError once the other side is gone."""
        ...


class Outbox(Protocol):
    def send(self, messages: Sequence[ToFront]) -> None:
        """Queues and flushes; a slow front makes this block at most until its socket buffer drains."""
        ...
