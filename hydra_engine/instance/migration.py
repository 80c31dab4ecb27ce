"""The exchange of one instance with its peers: offers what its scheduler has computed, and pulls what they offer.

Runs on the instance's own thread. Events of the scheduler become offers, offers of others become pulls, and results of
pulls become acknowledgements. The protocol is in `transfer/`; the scheduler decides which request holds which block,
the worker copies bytes. The thread never computes, so leases end on time however long a step takes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Encode, Finished, NeedDecoder, NeedImages, PeerState, Submit
from hydra_engine.core.outputs import Departure
from hydra_engine.core.pools import PoolKind
from hydra_engine.core.reports import TransferReport
from hydra_engine.errors import TransferError
from hydra_engine.instance.instance import MigrationPort
from hydra_engine.instance.ports import FromPeer, PeerDown, PeerUp
from hydra_engine.scheduler.handover.events import FeaturesEvent, FeaturesGoneEvent, KvEvent, KvGoneEvent, UnneededEvent
from hydra_engine.transfer.messages import (
    Ack,
    More,
    Offer,
    Refuse,
    Renew,
    Stage,
    Staged,
    Taken,
    TransferMessage,
    Withdraw,
)
from hydra_engine.transfer.offers import Owner, Source
from hydra_engine.transfer.plans import KvEnd, PullResult, StagingResult
from hydra_engine.transfer.pulls import Committed, Destination, Gone, Offered
from hydra_engine.transfer.staging import StagedPulls, Staging

if TYPE_CHECKING:
    from hydra_engine.config import CacheConfig, ClusterConfig
    from hydra_engine.core.ids import StepId
    from hydra_engine.core.messages import RequestMessage, ToFrontend
    from hydra_engine.core.request import Request
    from hydra_engine.core.results import ConnectorResult
    from hydra_engine.instance.ports import PeerPort, TransferPort
    from hydra_engine.scheduler.handover.connector import PeerConnector
    from hydra_engine.scheduler.handover.events import OfferEvent
    from hydra_engine.transfer.plans import PullJob, PullPlan

logger = logging.getLogger(__name__)
RENEWALS_PER_LEASE = 5  # all but one may be lost or late before a lease ends


class Migration(MigrationPort):
    """The exchange of an instance with its peers, over a transfer lane and connections. `num_slots`: number of its
    control words, which bounds its live offers; further offers wait for one."""

    connected = True

    def __init__(
        self,
        *,
        incarnation: int,
        connector: PeerConnector,
        transfer: TransferPort,
        peers: PeerPort,
        num_slots: int,
        config: ClusterConfig,
        cache: CacheConfig,
    ) -> None:
        self._connector = connector
        self._transfer = transfer
        self._peers = peers
        self._config, self._cache = config, cache
        self._source = Source(incarnation, num_slots, transfer.set_word, config.lease_s)
        self._destination = Destination(config.lease_s / RENEWALS_PER_LEASE)
        self._moves = StagedMoves(self._source, transfer, peers)
        self._up: dict[str, int] = {}  # peer -> incarnation
        self._targets: dict[RequestId, str] = {}  # target of each request or job that leaves; "": not known yet
        self._jobs: dict[RequestId, Encode] = {}
        self._offered: dict[Owner, OfferedBlocks] = {}
        self._unsent: dict[Owner, None] = {}  # owners in `_offered` without an offer: no slot, or target not up yet
        self._plans: dict[StepId, PullPlan] = {}
        self._pulled_bytes = 0
        self._pull_s = 0.0
        self._kv_blocks, self._kv_s = 0, 0.0  # copied KV blocks, and the seconds of the copies
        self._feature_blocks = 0

    # ---- requests

    def on_accepted(self, message: Submit | Encode) -> None:
        request_id = message.request.id
        if isinstance(message, Encode):
            self._jobs[request_id], self._targets[request_id] = message, message.target
        elif "D" not in message.stages:
            self._targets[request_id] = ""
        if isinstance(message, Submit) and (message.source or message.remote_images):
            self._tell(self._destination.expect(request_id, message.source or None))

    def hand_over(self, request: Request, target: str, now: float) -> None:
        if request.id in self._targets:
            self._targets[request.id] = target
            offered = self._offered.get((request.id, None))
            if offered is not None:  # blocks computed meanwhile, or not fetched by an earlier target
                self._withdraw((request.id, None))
                offered.peer, offered.since_s = target, now
                self._begin_offer((request.id, None), offered, now)
        elif self._connector.offers.hand_over(request.id, now):
            self._targets[request.id] = target

    def on_finished(self, request_id: RequestId) -> None:
        for owner in [owner for owner in self._offered if owner[0] == request_id]:
            self._withdraw(owner)
        for peer, refusal in self._destination.end_request(request_id):
            self._peers.send(peer, [refusal])
        self._targets.pop(request_id, None)
        self._jobs.pop(request_id, None)

    # ---- input

    def drain(self, now: float, outgoing: list[ToFrontend]) -> list[RequestMessage]:
        events: list[RequestMessage] = []
        for item in self._peers.drain():
            match item:
                case PeerUp():
                    self._peer_up(item, outgoing)
                case PeerDown():
                    events += self._peer_down(item, now, outgoing)
                case FromPeer() if self._up.get(item.name) == item.incarnation:
                    events += self._receive(item.name, item.message, now)
        for owner, peer, withdrawal in self._source.expire(now):
            self._peers.send(peer, [withdrawal])
            events += self._give_up(owner, now)
        overdue = now - self._config.lease_s
        for owner in [owner for owner in self._unsent if self._offered[owner].waits_since_s < overdue]:
            events += self._give_up(owner, now)
        for peer, renewal in self._destination.renewals(now):
            self._peers.send(peer, [renewal])
        for owner in list(self._unsent):
            self._send(owner, now)
        for result in self._moves.free_ended(self._is_over, now):
            events += self._ended(result, now)
        return events

    def _peer_up(self, peer: PeerUp, outgoing: list[ToFrontend]) -> None:
        """Maps the memory of a peer, accepts its messages from now on and reports it to the frontend as up. If its
        memory cannot be used, only reports it as down, with the reason."""
        problem = ""
        try:
            self._transfer.open_peer(peer.name, peer.exports, peer.descriptors)
        except TransferError as error:
            problem = error.message
            logger.error("instance %s cannot be used: %s", peer.name, problem)
        else:
            self._up[peer.name] = peer.incarnation
            self._destination.peer_up(peer.name, peer.incarnation)
        outgoing.append(PeerState(peer.name, peer.incarnation, not problem, problem))

    def _peer_down(self, peer: PeerDown, now: float, outgoing: list[ToFrontend]) -> list[RequestMessage]:
        """Reports the peer as down. If it was up, ends all offers to it, all requests that move to it, and all pulls
        from it, copies in flight as invalid. Returns the messages of the ended requests."""
        outgoing.append(PeerState(peer.name, peer.incarnation, up=False, problem=peer.problem))
        if self._up.get(peer.name) != peer.incarnation:
            return []
        del self._up[peer.name]
        self._transfer.close_peer(peer.name)
        self._source.peer_lost(peer.name)
        self._tell(self._destination.peer_lost(peer.name))
        events: list[RequestMessage] = []
        for request_id in [request_id for request_id, target in self._targets.items() if target == peer.name]:
            events += self._connector.offers.withdraw(request_id, now, Departure.WITHDRAWN)
        return events

    def _receive(self, peer: str, message: TransferMessage, now: float) -> list[RequestMessage]:
        """Handles a message of a peer that is up. Returns messages of requests that ended by it."""
        match message:
            case Offer():
                self._tell(self._destination.on_offer(peer, message, now))
            case More():
                self._tell(self._destination.on_more(peer, message))
            case Withdraw():
                self._tell(self._destination.on_withdraw(peer, message))
            case Renew():
                self._source.on_renew(peer, message, now)
            case Ack():
                self._connector.record_copy(message.block_s)
                return self._release(self._source.on_ack(peer, message.incarnation, message.sequence), now)
            case Refuse():
                owner = self._source.on_refuse(peer, message.incarnation, message.sequence)
                if message.failed and owner is not None:
                    return self._give_up(owner, now)
                return self._release(owner, now)
            case Stage() | Staged() | Taken():
                return self._cannot_stage(self._moves.receive(peer, message), now)
        return []

    # ---- offers

    def take_events(self, now: float) -> Iterator[Finished | NeedImages | NeedDecoder]:
        for event in self._connector.take_events():
            if isinstance(event, NeedDecoder):
                if self._targets.get(event.request_id) == "":
                    yield event
            elif isinstance(event, Finished | NeedImages):
                yield event
            else:
                self._on_event(event, now)

    def _on_event(self, event: OfferEvent, now: float) -> None:
        """Offers, withdraws or refuses blocks, as the scheduler has decided, and sends the messages."""
        match event:
            case FeaturesEvent(job_id, index, block_ids):
                job = self._jobs[job_id]
                offered = OfferedBlocks(job.target, job.target_request, job.indices[index], now, list(block_ids))
                self._begin_offer((job_id, index), offered, now)
            case FeaturesGoneEvent(job_id, index):
                self._withdraw((job_id, index))
            case KvEvent(request_id, block_ids, end):
                self._more_kv(request_id, block_ids, end, now)
            case KvGoneEvent(request_id):
                self._withdraw((request_id, None))
            case UnneededEvent(offer):
                if (refusal := self._destination.refuse(offer)) is not None:
                    self._peers.send(refusal[0], [refusal[1]])

    def _more_kv(self, request_id: RequestId, block_ids: Sequence[int], end: KvEnd | None, now: float) -> None:
        """Adds blocks to the offer of a request's KV, or begins the offer. With `end` it is complete."""
        owner: Owner = (request_id, None)
        offered = self._offered.get(owner)
        if offered is None:
            offered = OfferedBlocks(self._targets[request_id], request_id, None, now, list(block_ids), end)
            self._begin_offer(owner, offered, now)
            return
        offered.blocks += block_ids
        offered.end = end
        if owner in self._unsent:
            return
        checksums = self._checksums(PoolKind.KV, block_ids)
        message = self._source.extend(owner, block_ids, end=end, checksums=checksums)
        if message is not None:
            self._peers.send(offered.peer, [message])

    def _begin_offer(self, owner: Owner, offered: OfferedBlocks, now: float) -> None:
        """Records blocks to offer, and sends the offer if that is possible already."""
        self._offered[owner] = offered
        self._unsent[owner] = None
        self._send(owner, now)

    def _send(self, owner: Owner, now: float) -> None:
        """Sends an offer if its target is up and a control word is free; otherwise it stays unsent."""
        offered = self._offered[owner]
        if offered.peer not in self._up:
            return
        kind = PoolKind.KV if offered.image_index is None else PoolKind.FEATURES
        offer = self._source.offer(
            owner,
            offered.peer,
            offered.request_id,
            offered.image_index,
            tuple(offered.blocks),
            now=now,
            end=offered.end,
            checksums=self._checksums(kind, offered.blocks),
        )
        if offer is not None:
            del self._unsent[owner]
            self._peers.send(offered.peer, [offer])

    def _withdraw(self, owner: Owner) -> None:
        """Withdraws an offer, sent or not. Its control word, if any, is invalid then: the blocks can be reused."""
        self._offered.pop(owner, None)
        self._unsent.pop(owner, None)
        withdrawn = self._source.withdraw(owner)
        if withdrawn is not None:
            self._peers.send(withdrawn[0], [withdrawn[1]])

    def _release(self, owner: Owner | None, now: float) -> list[RequestMessage]:
        """Ends an offer that the target has copied or refused, and its request, or its job with the last image. Returns
        the messages of what has ended; [] for None."""
        if owner is None:
            return []
        self._offered.pop(owner, None)
        request_id, index = owner
        if index is None:
            return self._connector.offers.release_kv(request_id, now)
        return self._connector.offers.release_features(request_id, index, now)

    def _give_up(self, owner: Owner, now: float) -> list[RequestMessage]:
        """Forgets an offer that has ended without being fetched or could not be sent, and ends its request or job as
        WITHDRAWN. Returns its messages."""
        self._offered.pop(owner, None)
        self._unsent.pop(owner, None)
        return self._connector.offers.withdraw(owner[0], now, Departure.WITHDRAWN)

    def _checksums(self, pool: PoolKind, blocks: Sequence[int]) -> tuple[int, ...]:
        """Checksums of the blocks if transfers are checked, else ()."""
        return self._transfer.checksums(pool, blocks) if self._config.check_transfers else ()

    # ---- pulls

    def _tell(self, events: Iterable[Offered | Gone]) -> None:
        """Passes new and ended offers of other instances on to the scheduler."""
        connector = self._connector
        for event in events:
            match event:
                case Offered(handle, request_id, None, num_blocks, end):
                    connector.pulls.on_kv_offer(request_id, handle, num_blocks, end)
                case Offered(handle, request_id, int() as index):
                    connector.pulls.images.on_offer(request_id, index, handle)
                case Gone(handle, None):
                    connector.pulls.on_kv_offer_gone(handle)
                case Gone(handle):
                    connector.pulls.images.on_offer_gone(handle)

    def plan_pulls(self, now: float) -> list[PullPlan]:
        return self._connector.pulls.plan(now)

    def submit(self, plans: Iterable[PullPlan], now: float) -> list[RequestMessage]:
        events: list[RequestMessage] = []
        for plan in plans:
            job = self._destination.begin(plan)
            if job is None:  # the offer has ended, and only waits for an earlier copy
                events += self._connector.on_pull(plan.step_id, now, valid=False, started_s=now, ended_s=now)
                continue
            self._plans[plan.step_id] = plan
            self._moves.submit(job, self._up[job.peer], now)
        return events

    def on_result(self, result: ConnectorResult, now: float) -> list[RequestMessage]:
        if isinstance(result, PullResult):
            ended = self._moves.on_pull(result)
            return [] if ended is None else self._ended(ended, now)
        assert isinstance(result, StagingResult), "a result of no job of this instance"
        owner = self._moves.on_staging(result)
        if owner is not None:
            logger.error("request %d: its blocks could not be staged: %s", owner[0], result.problem)
        return self._cannot_stage(owner, now)

    def _cannot_stage(self, owner: Owner | None, now: float) -> list[RequestMessage]:
        """Withdraws an offer whose blocks cannot be staged, and ends its request or job as WITHDRAWN. Does nothing for
        None."""
        if owner is None:
            return []
        self._withdraw(owner)
        return self._connector.offers.withdraw(owner[0], now, Departure.WITHDRAWN)

    def _is_over(self, job: PullJob) -> bool:
        """True if the offer of a pull has ended or is cancelled."""
        return self._destination.is_over(self._plans[job.step_id].offer)

    def _ended(self, result: PullResult, now: float) -> list[RequestMessage]:
        """Passes the result of a whole pull on to the scheduler, and acknowledges the offer if all of it is here.
        Returns the messages of a request that ended by it."""
        plan = self._plans.pop(result.step_id)
        if result.problem is not None:
            logger.error("request %d: a pull failed: %s", plan.request_id, result.problem)
        self._pulled_bytes += result.num_bytes
        self._pull_s += result.ended_s - result.started_s
        if plan.image_index is None:
            self._kv_blocks += len(plan.block_ids)
            self._kv_s += result.ended_s - result.started_s
        else:
            self._feature_blocks += len(plan.block_ids)
        valid = result.valid and result.problem is None
        outcome = self._destination.end(plan.offer, valid=valid, last=plan.last)
        events = self._connector.on_pull(
            result.step_id, now, valid=not isinstance(outcome, Gone), started_s=result.started_s, ended_s=result.ended_s
        )
        if isinstance(outcome, Committed):
            block_s = self._kv_s / self._kv_blocks if self._kv_blocks else 0.0
            self._peers.send(outcome.peer, [Ack(outcome.ack.incarnation, outcome.ack.sequence, block_s)])
        return events

    # ---- looking

    @property
    def next_deadline_s(self) -> float:
        waiting = min((self._offered[owner].waits_since_s for owner in self._unsent), default=math.inf)
        return min(self._source.next_deadline(), self._destination.next_deadline(), waiting + self._config.lease_s)

    def report(self) -> TransferReport:
        source, destination = self._source, self._destination
        return TransferReport(
            offers=source.num_live + len(self._unsent),
            staged=self._moves.num_staged,
            pulls=destination.num_live,
            offered=source.offered,
            acknowledged=source.acknowledged,
            withdrawn=source.withdrawn,
            expired=source.expired,
            pulled=destination.pulled,
            pulled_bytes=self._pulled_bytes,
            host_bytes=self._moves.num_bytes,
            pull_s=self._pull_s,
            kv_s=self._kv_s,
            kv_tokens=self._kv_blocks * self._cache.block_size,
            feature_tokens=self._feature_blocks * self._cache.image_block_size,
            invalid=destination.invalid,
            ignored=source.ignored + destination.ignored,
        )


@dataclass(slots=True)
class OfferedBlocks:
    """The blocks of a request or encode job for another instance: offered already, or to be offered once that instance
    is known and up and a control word is free."""

    peer: str  # empty: not known yet
    request_id: RequestId  # id at the target
    image_index: int | None
    since_s: float  # when the first blocks were ready and the target was known
    blocks: list[int] = field(default_factory=list)
    end: KvEnd | None = None

    @property
    def waits_since_s(self) -> float:
        """Start of the wait for a control word, or for the target to be up, if there is one; infinite while the target
        is unknown: the frontend ends that wait."""
        return self.since_s if self.peer else math.inf


class StagedMoves:
    """The pulls and the staging of one instance, in whole copies or in pieces through host memory: both halves of
    `transfer/staging.py`. Only the transfer port decides which peers are read through host memory."""

    def __init__(self, source: Source, transfer: TransferPort, peers: PeerPort) -> None:
        self._source = source
        self._transfer = transfer
        self._peers = peers
        self._staging = Staging(transfer.staging_blocks)
        self._pulls = StagedPulls()
        self.num_bytes = 0  # bytes pulled in pieces

    def submit(self, job: PullJob, incarnation: int, now: float) -> None:
        """Starts a pull: one copy or, if the peer's memory is not mapped, one per piece. The result of the job comes
        from `on_pull`, with that of the last copy, or from `free_ended`."""
        piece_blocks = self._transfer.piece_blocks(job.peer, job.pool)
        if piece_blocks and len(job.source_blocks):
            self._peers.send(job.peer, self._pulls.begin(job, incarnation, piece_blocks, now))
        else:
            self._transfer.submit_pull(job)

    def on_pull(self, result: PullResult) -> PullResult | None:
        """Records the end of a copy. Returns the result of the whole pull; None until it has ended."""
        if not result.ticket:
            return result
        self.num_bytes += result.num_bytes
        peer, messages, ended = self._pulls.end_copy(result)
        self._peers.send(peer, messages)
        return ended

    def receive(self, peer: str, message: Stage | Staged | Taken) -> Owner | None:
        """Handles a staging message. Returns the owner of the blocks if they can never be staged, else None."""
        match message:
            case Stage():
                owner = self._source.owner_of(peer, message.incarnation, message.sequence)
                if owner is None:  # the offer has ended; the target knows or will be notified
                    return None
                pool = PoolKind.KV if owner[1] is None else PoolKind.FEATURES
                if not self._staging.request(peer, message, pool):
                    return owner
                self._start()
            case Staged():
                job = self._pulls.on_staged(peer, message)
                if job is not None:
                    self._transfer.submit_pull(job)
            case Taken():
                self._staging.on_taken(peer, message)
                self._start()
        return None

    def on_staging(self, result: StagingResult) -> Owner | None:
        """Records the end of a staging copy and names the piece to its target. Returns the owner of the blocks if they
        could not be copied and are still offered, else None."""
        done = self._staging.end_copy(result.number)
        self._start()
        if done is None:
            return None
        peer, staged = done
        if result.problem is not None:
            return self._source.owner_of(peer, staged.incarnation, staged.sequence)
        self._peers.send(peer, [staged])
        return None

    def free_ended(self, is_over: Callable[[PullJob], bool], now: float) -> list[PullResult]:
        """Frees the staging blocks of ended offers of this instance. Returns results, not valid, of pulls in pieces
        whose offers have ended and which have no copy in flight. `is_over` takes the job of a pull."""
        self._staging.free_ended(self._source.is_live)
        self._start()
        return list(self._pulls.end_expired(is_over, now))

    @property
    def num_staged(self) -> int:
        """Number of pieces of own offers that wait for staging, are copied, or are held for a target."""
        return self._staging.num_live

    def _start(self) -> None:
        """Submits the staging copies for which blocks are free."""
        for job in self._staging.start():
            self._transfer.submit_staging(job)
