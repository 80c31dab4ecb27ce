"""What an instance needs from outside, as protocols. Fakes live in tests, real ones in `worker/` and `cluster/`.

The instance loop is one thread. `wake` of a port is called from any thread and must only set an event.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.media import PixelPayload
from hydra_engine.core.messages import (
    Encode,
    Finished,
    NeedDecoder,
    NeedImages,
    RequestMessage,
    Submit,
    ToFrontend,
    ToInstance,
    TransferReport,
)
from hydra_engine.core.plans import (
    LaneResult,
    LanguagePlan,
    PullJob,
    PullPlan,
    PullResult,
    StagingJob,
    StagingResult,
    VisionPlan,
)
from hydra_engine.core.pools import Exports, PoolKind
from hydra_engine.core.request import Request
from hydra_engine.core.roles import EPD, Role
from hydra_engine.transfer.messages import TransferMessage


@dataclass(frozen=True, slots=True)
class InstanceContext:
    """The place of an instance in its topology. `neighbours`: roles of all instances on its device, its own among them,
    which divide its memory; () where it is alone. `neighbour_configs`: the configuration of each, its limits among
    them. `has_peers`: others can map its caches."""

    role: Role = EPD
    incarnation: int = 0
    neighbours: tuple[Role, ...] = ()
    neighbour_configs: tuple[EngineConfig, ...] = ()
    has_peers: bool = False

    @property
    def shares(self) -> int:
        return max(len(self.neighbours), 1)


ALONE = InstanceContext()


class WorkerPort(Protocol):
    """Two lanes that run plans in order. Never blocks the caller; never raises because of a request's content: a failed
    row or image comes back as an outcome with an error, and the lane goes on."""

    def add_request(self, request: Request, pixels: Sequence[PixelPayload]) -> str | None:
        """Called before the first plan that names the request. Keeps pixels until `remove_request`. Returns what the
        request has to be held for, in a word, until its `ReadyResult`; None where it may start. Raises Unavailable, and
        then keeps nothing."""
        ...

    def remove_request(self, request_id: RequestId) -> None:
        """Called after the last plan that names it has come back. Unknown ids are a bug (assert). The `ReadyResult` of
        a request that is gone may still come."""
        ...

    def submit_vision(self, plan: VisionPlan) -> None: ...

    def submit_language(self, plan: LanguagePlan) -> None: ...

    def poll(self) -> list[LaneResult]:
        """Results since the last call, in order per lane, those of copies among them; empty when none. Calls `wake`
        whenever one arrives."""
        ...

    @property
    def pixel_bytes(self) -> int: ...

    def close(self) -> None: ...


class TransferPort(Protocol):
    """A lane that copies blocks of other instances into our caches, and what they may know of ours. Its results come
    with those of the worker."""

    def submit_pull(self, job: PullJob) -> None:
        """Copies blocks of an open peer, then reads its control word; the result says whether the offer still stood."""
        ...

    def submit_staging(self, job: StagingJob) -> None:
        """Copies blocks of ours into the staging pool; the result says when all of them are there."""
        ...

    @property
    def staging_blocks(self) -> Mapping[PoolKind, int]:
        """Blocks of the staging pool of each kind of cache that has one."""
        ...

    def piece_blocks(self, peer: str, pool: str) -> int:
        """How many blocks of an open peer's pool to ask for at once; 0 where its memory is mapped."""
        ...

    def exports(self) -> tuple[Exports, tuple[int, ...]]:
        """The memory that peers may map, and its descriptors, which stay ours."""
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


class MigrationPort:
    """What an instance does with its peers. This one is for an instance that has none and does nothing; that of one
    with peers derives from it, see `migration.py`. All methods are called by the instance's thread."""

    connected = False

    def add(self, message: Submit | Encode) -> None:
        """A part of a request, or an encode job, that the scheduler has accepted. What is offered for it may have come
        before it."""

    def hand_over(self, request: Request, target: str, now: float) -> None:
        """A request is to decode at `target` from here on; nothing happens if it is not one that can."""

    def finished(self, request_id: RequestId) -> None:
        """The scheduler is done with it; whatever it had offered has been withdrawn or acknowledged."""

    def drain(self, now: float, outgoing: list[ToFrontend]) -> list[RequestMessage]:
        """Takes in messages of peers and ends leases that are over. Returns events of requests that have ended by
        that."""
        return []

    def take_events(self, now: float) -> Iterable[Finished | NeedImages | NeedDecoder]:
        """Carries out what the scheduler's latest decisions mean for other instances, and yields messages for the
        frontend, each in its turn."""
        return ()

    def plan_pulls(self, now: float) -> list[PullPlan]:
        return []

    def submit(self, plans: Iterable[PullPlan], now: float) -> list[RequestMessage]:
        """Pulls that the scheduler has planned; what its events ask for has been done before."""
        return []

    def on_pull(self, result: PullResult, now: float) -> list[RequestMessage]:
        return []

    def on_staging(self, result: StagingResult, now: float) -> list[RequestMessage]:
        return []

    @property
    def next_deadline_s(self) -> float:
        """The time at which a lease, a renewal or a wait is due; infinite if none is."""
        return math.inf

    def report(self) -> TransferReport:
        return TransferReport()


class Inbox(Protocol):
    def drain(self) -> list[ToInstance]:
        """Messages since the last call; raises EOFError once the other side is gone."""
        ...


class Outbox(Protocol):
    def send(self, messages: Sequence[ToFrontend]) -> None:
        """Queues and flushes; a slow frontend makes this block at most until its socket buffer drains."""
        ...
