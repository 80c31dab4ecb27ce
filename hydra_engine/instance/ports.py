"""The outside interfaces of an instance, as protocols. Fakes are in the tests, implementations in `worker/` and
`cluster/`.

The instance loop is one thread. `wake` of a port is called from any thread and must only set an event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.messages import PixelPayload, ToFrontend, ToInstance
from hydra_engine.core.plans import LanguagePlan, VisionPlan
from hydra_engine.core.pools import Exports, PoolKind
from hydra_engine.core.request import Request
from hydra_engine.core.results import LaneResult
from hydra_engine.transfer.messages import TransferMessage
from hydra_engine.transfer.plans import PullJob, StagingJob


@dataclass(frozen=True, slots=True)
class InstanceContext:
    """The place of an instance in its topology. `neighbours`: roles of all instances on its device, itself included,
    which divide its memory; it may be () if it is alone. `neighbour_configs`: their configurations, with their limits.
    `has_peers`: other instances can map its caches."""

    role: Role = EPD
    incarnation: int = 0
    neighbours: tuple[Role, ...] = ()
    neighbour_configs: tuple[EngineConfig, ...] = ()
    has_peers: bool = False

    @property
    def num_sharing(self) -> int:
        """Number of instances on the device, itself included."""
        return max(len(self.neighbours), 1)


ALONE = InstanceContext()


class WorkerPort(Protocol):
    """Two lanes that run plans in order. Blocks the caller in `close` only. Never raises because of a request's
    content: a failed row or image comes back as a result with an error, and the lane continues. `pixel_bytes`: bytes of
    the pixels that are kept for requests."""

    def add_request(self, request: Request, pixels: Sequence[PixelPayload]) -> str | None:
        """Registers a request, before any plan names it, and keeps its pixels until `remove_request`. Returns
        the reason, in a word, why the request must be held until its `ReadyResult`; None if it may start. Raises
        Unavailable, and keeps nothing, if too many are held already."""
        ...

    def remove_request(self, request_id: RequestId) -> None:
        """Forgets a request; no plan in flight may name it. Asserts that the id is known. Its `ReadyResult` may still
        come."""
        ...

    def submit_vision(self, plan: VisionPlan) -> None: ...

    def submit_language(self, plan: LanguagePlan) -> None: ...

    def drop_vision(self, step_id: StepId) -> None:
        """Stops a vision step in flight between two of its layers, if it still can: its result then comes at once, with
        an error for every image."""
        ...

    def poll(self) -> list[LaneResult]:
        """Results since the last call, in order for each lane, including results of copies; empty if there are none.
        The worker calls `wake` whenever one arrives. Raises what ended a lane: BackendError if the device failed."""
        ...

    @property
    def pixel_bytes(self) -> int: ...

    def close(self) -> None: ...


class TransferPort(Protocol):
    """The lane that copies blocks of other instances into the caches of this one, and the memory that they may read
    here. Its results come from the worker's `poll`."""

    def submit_pull(self, job: PullJob) -> None:
        """Queues a copy of a peer's blocks, after which the offer's control word is read: the result is `valid` if that
        is unchanged. If the peer is not open, the copy fails or checksums differ, the result names the problem."""
        ...

    def submit_staging(self, job: StagingJob) -> None:
        """Queues a copy of blocks of this instance into its staging pool; the result comes when all of them are there,
        or with the problem."""
        ...

    @property
    def staging_blocks(self) -> Mapping[PoolKind, int]:
        """Number of blocks of the staging pool, for each kind of cache that has one."""
        ...

    def piece_blocks(self, peer: str, pool: str) -> int:
        """Maximum number of blocks of a piece staged through host memory; 0 if the peer's memory is mapped, or the peer
        is not open. `pool`: a PoolKind."""
        ...

    def exports(self) -> tuple[Exports, tuple[int, ...]]:
        """The memory that peers may map, and its file descriptors, which this instance keeps open."""
        ...

    def set_word(self, slot: int, word: int) -> None:
        """Writes a control word of this instance. Peers see it before any plan that is submitted later can overwrite a
        block."""
        ...

    def checksums(self, pool: str, blocks: Sequence[int]) -> tuple[int, ...]:
        """Checksums of blocks of this instance, one for each. For debugging only: computed at once, in the caller's
        thread."""
        ...

    def open_peer(self, name: str, exports: Exports, descriptors: Sequence[int]) -> None:
        """Maps a peer's memory. Closes the descriptors in any case. Raises TransferError if the memory cannot be mapped
        or its layout differs from this instance's."""
        ...

    def close_peer(self, name: str) -> None:
        """Unmaps a peer's memory after the jobs submitted for it. Ignores an unknown name."""
        ...


@dataclass(frozen=True, slots=True)
class PeerUp:
    """The event that a peer has introduced itself. The receiver owns the file descriptors."""

    name: str
    incarnation: int
    exports: Exports
    descriptors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The event that a connection has ended, and why: the peer is gone, or sent an invalid message. No message of it
    follows."""

    name: str
    incarnation: int
    problem: str


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A message of a peer that is up."""

    name: str
    incarnation: int
    message: TransferMessage


class PeerPort(Protocol):
    """The connections to other instances, one for each."""

    def drain(self) -> list[PeerUp | PeerDown | FromPeer]:
        """Events since the last call, in order for each peer. Each new one wakes the instance's loop."""
        ...

    def send(self, name: str, messages: Sequence[TransferMessage]) -> None:
        """Sends messages without blocking to the incarnation whose PeerUp was drained last. Drops them if there is
        none, or if its connection has ended, which `drain` reports."""
        ...


class Inbox(Protocol):
    def drain(self) -> list[ToInstance]:
        """Messages of the frontend since the last call, in order; does not wait. Never reports that the frontend is
        gone: a socket ends the process then."""
        ...


class Outbox(Protocol):
    def send(self, messages: Sequence[ToFrontend]) -> None:
        """Sends messages to the frontend. A socket blocks while its buffer is full, since the frontend is slow, and
        ends the process if the frontend is gone."""
        ...
