"""The part of a request's state that exists only because other instances take part in it, and the queues of requests
that wait for them. Attached to `RequestState.connector_state`; the core does not look at it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from hydra_engine.core.state import RequestPhase, RequestState
from hydra_engine.scheduler.queues import ArrivalQueue, UrgencyQueue
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.transfer.plans import KvEnd


class Parking(Enum):
    """The reason why a request is in `RequestPhase.PARKED`.

    A request that decodes elsewhere goes PREFILLING (or DECODING, if handed over) -> HANDING_OVER -> ENDED; one that is
    prefilled elsewhere goes REMOTE_PREFILL -> KV_OFFERED -> PREFILLING (while its KV is copied) -> DECODING, and stays
    REMOTE_PREFILL while it is held. An ENCODE_JOB stays one until its features have been fetched.
    """

    HANDING_OVER = auto()  # KV blocks; computed, and offered to the instance that decodes
    REMOTE_PREFILL = auto()  # no KV blocks; another instance prefills and has offered nothing yet
    KV_OFFERED = auto()  # no KV blocks yet; another instance offers KV to copy into them
    ENCODE_JOB = auto()  # images for another instance, and nothing else


@dataclass(slots=True)
class RemoteKv:
    """Progress of the KV that another instance computes and this one copies. Blocks are counted in the order of the
    request's table; those before `num_copied` are here."""

    offer: int | None = None  # number of the offer at this instance; None: no offer now
    num_offered: int = 0  # blocks
    end: KvEnd | None = None  # with it, nothing more will be offered
    num_copied: int = 0
    copied_offer: int | None = None  # the offer that a copy in flight belongs to
    preempt_after_copy: bool = False  # another request needs the blocks as soon as no copy is in flight


@dataclass(slots=True, eq=False)
class HandoverState:
    """State of a request towards other instances.

    Incoming: its KV until that is here (`remote_kv`), and features of `RequestState.external_images`. Outgoing: its
    first `num_offered` KV blocks, all of them with `offers_all`; for an encode job every image that is ENCODED.
    """

    remote_kv: RemoteKv | None = None
    parking: Parking | None = None  # the queue that it is in
    requested_images: set[int] = field(default_factory=set)  # external images that others have been asked for
    image_offers: dict[int, list[int]] = field(default_factory=dict)  # image -> offers of it, none being copied
    images_copied: set[int] = field(default_factory=set)  # images whose features are being copied for it
    is_lent: bool = False  # True: a decode that another instance has lent to this one
    num_offered: int = 0
    offers_all: bool = False
    offered_s: dict[int, float] = field(default_factory=dict)  # start of each offer by image of a job, -1: KV


def find_handover(state: RequestState) -> HandoverState | None:
    """The handover state of a request; None if no other instance takes part in it."""
    handover = state.connector_state
    assert handover is None or isinstance(handover, HandoverState)
    return handover


def handover_of(state: RequestState) -> HandoverState:
    """The handover state of a request in which other instances take part. Asserts that there is one."""
    handover = state.connector_state
    assert isinstance(handover, HandoverState), f"request {state.request.id} is of no concern to other instances"
    return handover


def remote_kv_of(state: RequestState) -> RemoteKv | None:
    """Progress of the KV that another instance computes for the request; None once all of it is here, or if it is
    computed here."""
    handover = find_handover(state)
    return None if handover is None else handover.remote_kv


def offers_all_kv(state: RequestState) -> bool:
    """True if another instance offers all KV of the request, so that only the copy is missing."""
    remote_kv = remote_kv_of(state)
    return remote_kv is not None and remote_kv.end is not None


class ParkedRequests:
    """The parked requests of a scheduler, each in the queue of its `Parking`. `unfetched` is an index beside the
    queues: all requests, parked or not, with an image that waits for features from another instance."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self.kv_offered, self.unfetched = UrgencyQueue(), UrgencyQueue()
        self.encode_jobs, self.handing_over, self.remote_prefills = ArrivalQueue(), ArrivalQueue(), ArrivalQueue()
        self.queues: dict[Parking, ArrivalQueue] = {
            Parking.HANDING_OVER: self.handing_over,
            Parking.REMOTE_PREFILL: self.remote_prefills,
            Parking.KV_OFFERED: self.kv_offered,
            Parking.ENCODE_JOB: self.encode_jobs,
        }
        requests.startable.append(self.kv_offered)

    def parking_of(self, state: RequestState) -> Parking | None:
        """The reason why the request waits for another instance, from its state and blocks; None if it does not."""
        if state.is_encode_job:
            return Parking.ENCODE_JOB
        handover = handover_of(state)
        if state.request.id in self._requests.kv.tables:
            return Parking.HANDING_OVER if handover.offers_all else None
        if handover.remote_kv is None:
            return None
        waits = state.held or handover.remote_kv.offer is None
        return Parking.REMOTE_PREFILL if waits else Parking.KV_OFFERED

    def requeue(self, state: RequestState) -> None:
        """Moves a request whose phase is up to date into the queue of its `Parking`, or out of all if it is not PARKED.
        Updates `unfetched`. Bypasses are counted while its KV is offered, not while it waits for an offer."""
        handover = handover_of(state)
        parking = self.parking_of(state) if state.phase is RequestPhase.PARKED else None
        if parking is not handover.parking:
            if handover.parking is not None:
                self.queues[handover.parking].discard(state)
            handover.parking = parking
            if parking is not None:
                self.queues[parking].push(state)
            if parking is Parking.REMOTE_PREFILL:
                state.bypasses_at_wait = None  # bypasses are not counted while it waits for an offer
            elif parking is Parking.KV_OFFERED:
                self._requests.count_bypasses(state)
        self.unfetched.update(state, belongs=state.ending is None and state.needs_load)
