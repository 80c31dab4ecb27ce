"""The offers of other instances to this one, and how much of each has been copied.

An offer goes through these states; each offer that was reported to the owner (`Offered`) ends exactly once:

    unclaimed   its request is not known here (yet): recorded, not renewed
    wanted      `Offered` was given out, no copy of it is in flight; ends by `Gone`, `refuse` or `end_request`
    copying     at least one copy is in flight; ends by `Committed`, or is wanted again after its last copy for now
    cancelled   copying, but withdrawn, refused, invalid, or its source lost; ends by `Gone` with its last copy

A copy in flight is never interrupted, and its target blocks stay reserved until it has ended. Whether a copy was in
time is not decided here: the lane that copies reads the source's control word afterwards, for `end`.

Messages may be lost, doubled, late and out of order: a message that does not fit is counted and ignored, and an offer
that cannot continue ends with the source's lease. Sends nothing itself; does not know why a request wants the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hydra_engine.core.ids import RequestId
from hydra_engine.core.pools import PoolKind
from hydra_engine.transfer.messages import Ack, More, Offer, Refuse, Renew, Withdraw
from hydra_engine.transfer.plans import KvEnd, PullJob, PullPlan

MAX_UNCLAIMED = 4096  # offers of one peer for requests that are not known here
RENEWALS_UNCLAIMED = 10  # an unclaimed offer is forgotten after so many periods: its lease ended long before


@dataclass(slots=True)
class Pull:
    """An offer of another instance, and how much of it has been copied."""

    handle: int
    peer: str
    incarnation: int
    sequence: int
    request_id: RequestId
    image_index: int | None  # None: KV
    slot: int
    word: int
    blocks: list[int]
    checksums: list[int]  # one for each block; empty if transfers are not checked
    end: KvEnd | None
    heard_s: float  # when the offer arrived
    heard: int = 0  # number of the latest `More`
    copies: int = 0  # in flight
    begun: int | None = None  # end of the blocks whose copy has begun
    last_ended: bool = False  # the copy that completes it has ended
    cancelled: bool = False  # over; copies are still in flight
    refused: bool = False  # by this instance, as not wanted

    @property
    def complete(self) -> bool:
        """True if no blocks will be added."""
        return self.image_index is not None or self.end is not None


@dataclass(slots=True)
class Peer:
    """The offers of one peer that is up."""

    incarnation: int
    newest: int = 0  # the highest sequence number heard
    wanted: dict[int, Pull] = field(default_factory=dict)  # by sequence
    unclaimed: dict[int, Pull] = field(default_factory=dict)  # by sequence, oldest first


class Records:
    """Tables of offers by handle, by source and by request. In them an offer is wanted (its request is known here),
    unclaimed (not known yet) or cancelled. A cancelled offer is found by its handle only: messages about it are
    ignored."""

    def __init__(self) -> None:
        self.pulls: dict[int, Pull] = {}  # by handle: all of them
        self.peers: dict[str, Peer] = {}  # those that are up
        self.sources: dict[RequestId, str | None] = {}  # requests that may receive, with the peer of their KV
        self._wanted: dict[RequestId, dict[tuple[int | None, str], Pull]] = {}  # by image (None: KV) and source

    def peer(self, name: str, incarnation: int) -> Peer | None:
        """The peer; None if it is not up with this incarnation."""
        peer = self.peers.get(name)
        return peer if peer is not None and peer.incarnation == incarnation else None

    def find(self, name: str, incarnation: int, sequence: int) -> Pull | None:
        """The wanted or unclaimed offer with this number; None if there is none, or the peer is not up."""
        peer = self.peer(name, incarnation)
        if peer is None:
            return None
        return peer.wanted.get(sequence) or peer.unclaimed.get(sequence)

    def wanted_pulls(self, request_id: RequestId) -> list[Pull]:
        """Wanted offers for the request, of all peers."""
        return list(self._wanted.get(request_id, {}).values())

    def wanted_pull(self, request_id: RequestId, image_index: int | None, peer: str) -> Pull | None:
        """The peer's wanted offer of this image, or of the KV (`image_index` None); None if there is none."""
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
        """Removes an offer, whatever its state, from all tables."""
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
        """Marks an offer with copies in flight as cancelled: from now on it is found by its handle only."""
        self.remove(pull)
        pull.cancelled = True
        self.pulls[pull.handle] = pull


@dataclass(frozen=True, slots=True)
class Offered:
    """The event that blocks for a request of this instance can be pulled, `num_blocks` of this offer in all. KV
    (`image_index` None) may grow until `end` is known: it is reported again, under the same handle."""

    handle: int
    request_id: RequestId
    image_index: int | None
    num_blocks: int
    end: KvEnd | None


@dataclass(frozen=True, slots=True)
class Gone:
    """The event that the offer is over and no copy of it is in flight: only now may its target blocks be reused.
    `image_index` None: KV."""

    handle: int
    image_index: int | None


PullEvent = Offered | Gone


@dataclass(frozen=True, slots=True)
class Committed:
    """The result that all blocks of the offer have been copied and were valid. `ack` must be sent to `peer`."""

    peer: str
    ack: Ack


class Destination:
    """The target's table of offers by other instances, each under a local handle that is never reused. Reads no clock:
    times are arguments, in seconds. `renew_s`: period of the renewals of wanted offers."""

    def __init__(self, renew_s: float) -> None:
        self.pulled = 0  # offers
        self.invalid = 0  # offers whose copies were thrown away though they were wanted
        self.ignored = 0  # messages
        self._renew_s = renew_s
        self._renewed_s = -math.inf
        self._next_handle = 1
        self._records = Records()
        self._refusals: list[tuple[str, Refuse]] = []  # not sent yet

    # ---- requests of ours

    def expect(self, request_id: RequestId, peer: str | None) -> list[PullEvent]:
        """Lets the request receive features from any peer, and KV from `peer` only (None: no KV). Returns the events of
        its offers that are here already; KV of any other peer is ignored. Asserts that it was not called before."""
        records = self._records
        assert request_id not in records.sources, f"request {request_id} is expected already"
        offers = records.unclaimed_pulls(request_id)
        records.sources[request_id] = peer
        events: list[PullEvent] = []
        for pull in offers:
            records.remove(pull)
            events += self._claim(pull)
            # Unclaimed offers are not renewed: the lease may be nearly over.
            self._renewed_s = -math.inf
        return events

    def end_request(self, request_id: RequestId) -> list[tuple[str, Refuse]]:
        """Refuses the offers for a finished request; unknown ids are ignored. Returns (peer, message) pairs to send.
        Offers with a copy in flight end as `Gone` with their last copy."""
        self._records.sources.pop(request_id, None)
        pulls = [*self._records.wanted_pulls(request_id), *self._records.unclaimed_pulls(request_id)]
        return [self._refuse(pull) for pull in pulls]

    # ---- what sources say

    def peer_up(self, peer: str, incarnation: int) -> None:
        """Accepts messages of this incarnation from now on, until `peer_lost`."""
        assert peer not in self._records.peers, f"{peer} is up already; report its loss first"
        self._records.peers[peer] = Peer(incarnation)

    def peer_lost(self, peer: str) -> list[Gone]:
        """Ends all offers of the peer and ignores its messages from now on. Returns `Gone` for wanted offers without a
        copy in flight; those with one end as `Gone` in `end`. An unknown peer is ignored."""
        lost = self._records.peers.get(peer)
        if lost is None:
            return []
        for pull in list(lost.unclaimed.values()):
            self._records.remove(pull)
        events: list[Gone] = []
        for pull in list(lost.wanted.values()):
            events += self._give_up(pull)
        del self._records.peers[peer]
        self._refusals = [(name, refusal) for name, refusal in self._refusals if name != peer]
        return events

    def on_offer(self, peer: str, offer: Offer, now: float) -> list[PullEvent]:
        """Records an offer and, if its request is known here, returns the events that follow. It replaces an earlier
        one of the same image or KV from the same peer. Sequence numbers of a peer grow: an offer whose number is not
        new is a duplicate or out of order and is ignored; if it was out of order, the source's lease ends it. For
        unknown requests at most `MAX_UNCLAIMED` offers of a peer are kept."""
        state = self._records.peer(peer, offer.incarnation)
        if state is None or offer.sequence <= state.newest:
            self.ignored += 1
            return []
        state.newest = offer.sequence
        is_ours = offer.request_id in self._records.sources
        if not is_ours and len(state.unclaimed) >= MAX_UNCLAIMED:
            self.ignored += 1
            return []
        pull = Pull(
            handle=self._next_handle,
            peer=peer,
            incarnation=offer.incarnation,
            sequence=offer.sequence,
            request_id=offer.request_id,
            image_index=offer.image_index,
            slot=offer.slot,
            word=offer.word,
            blocks=list(offer.blocks),
            checksums=list(offer.checksums),
            end=offer.end,
            heard_s=now,
        )
        self._next_handle += 1
        if is_ours:
            return self._claim(pull)
        self._records.add_unclaimed(pull)
        return []

    def on_more(self, peer: str, more: More) -> list[PullEvent]:
        """Appends blocks to an offer of KV and, if its request is known here, returns it as `Offered` again. A message
        that does not follow the last one is ignored; if the one between stays missing, the source lets the lease end.
        """
        pull = self._records.find(peer, more.incarnation, more.sequence)
        if pull is None or pull.complete or more.number != pull.heard + 1:
            self.ignored += 1
            return []
        pull.heard = more.number
        pull.blocks += more.blocks
        pull.checksums += more.checksums
        pull.end = more.end
        if pull.request_id not in self._records.sources:
            return []
        return [_offered(pull)]

    def on_withdraw(self, peer: str, withdraw: Withdraw) -> list[PullEvent]:
        """Ends an offer that its source has withdrawn. Returns `Gone` if its request is known here and no copy of it is
        in flight; with one, it ends in `end`."""
        pull = self._records.find(peer, withdraw.incarnation, withdraw.sequence)
        if pull is None:
            self.ignored += 1
            return []
        is_ours = pull.request_id in self._records.sources
        events = self._give_up(pull)
        return [*events] if is_ours else []

    # ---- copies

    def begin(self, plan: PullPlan) -> PullJob | None:
        """Returns the copy job of the plan; `end` must follow. Parts of an offer begin in order, each after the part
        before. The first may start at any block (cached blocks are not pulled). The last may be empty, if the end came
        without blocks: then only the control word is read. While no copy is in flight, a target that has freed its
        blocks may begin again at any block. Returns None if the offer is cancelled and only waits for copies in flight:
        the part is invalid, and `end` must not follow. Raises KeyError for any other handle that is over."""
        handle, first_block = plan.offer, plan.first_block
        pull = self._records.pulls[handle]
        if pull.cancelled:
            return None
        assert pull.request_id in self._records.sources, f"offer {handle} is not for a request of ours"
        stop = first_block + len(plan.block_ids)
        assert first_block >= 0 and stop <= len(pull.blocks), (
            f"blocks {first_block} to {stop} of offer {handle}, which has {len(pull.blocks)} so far"
        )
        in_order = pull.begun == first_block or not pull.copies
        assert in_order, f"offer {handle} goes on at block {pull.begun}, not {first_block}"
        pull.begun = stop
        pull.copies += 1
        return PullJob(
            step_id=plan.step_id,
            peer=pull.peer,
            pool=PoolKind.KV if pull.image_index is None else PoolKind.FEATURES,
            source_blocks=np.array(pull.blocks[first_block:stop], np.int32),
            target_blocks=plan.block_ids,
            slot=pull.slot,
            word=pull.word,
            checksums=tuple(pull.checksums[first_block:stop]),
            sequence=pull.sequence,
        )

    def end(self, handle: int, *, valid: bool, last: bool) -> Committed | Gone | None:
        """Ends one copy. `valid`: the control word was still the offer's after the copy, and the checksums matched.
        `last`: this copy completes the offer. Returns None while blocks are missing or copies in flight. A copy that is
        not valid cancels the offer and refuses it as failed; its target blocks may be reused only after `Gone`."""
        pull = self._records.pulls[handle]
        assert pull.copies > 0, f"no copy of offer {handle} is in flight"
        if not valid and not pull.cancelled:
            # If it was not too late, but the bytes were wrong, the source still holds the blocks for us.
            self._refusals.append((pull.peer, Refuse(pull.incarnation, pull.sequence, failed=True)))
            self._records.cancel(pull)
        pull.copies -= 1
        pull.last_ended |= last
        if pull.copies:
            return None
        if pull.cancelled:
            self.invalid += not pull.refused
            self._records.remove(pull)
            return Gone(handle, pull.image_index)
        if not pull.last_ended:
            return None
        assert pull.complete and pull.begun == len(pull.blocks), f"offer {handle} has not been copied to its end"
        self._records.remove(pull)
        self.pulled += 1
        return Committed(pull.peer, Ack(pull.incarnation, pull.sequence))

    def is_over(self, handle: int) -> bool:
        """True if copies of the offer no longer count: it has ended or is cancelled."""
        pull = self._records.pulls.get(handle)
        return pull is None or pull.cancelled

    def refuse(self, handle: int) -> tuple[str, Refuse] | None:
        """Refuses an offer that is not wanted. Returns (peer, message) to send; None if it is over already. An offer
        with copies in flight ends as `Gone` with the last of them."""
        return None if self.is_over(handle) else self._refuse(self._records.pulls[handle])

    # ---- time

    def renewals(self, now: float) -> list[tuple[str, Renew | Refuse]]:
        """Returns (peer, message) pairs to send: the refusals that `expect`, `on_offer` and `end` have left to send,
        and every `renew_s` one renewal to each peer whose offers are wanted. Also forgets old unclaimed offers."""
        messages: list[tuple[str, Renew | Refuse]] = [*self._refusals]
        self._refusals.clear()
        for state in self._records.peers.values():
            for pull in list(state.unclaimed.values()):
                if self._forgotten_s(pull) > now:
                    break
                self._records.remove(pull)
        if now < self._renewed_s + self._renew_s:
            return messages
        for peer, state in self._records.peers.items():
            if state.wanted:
                self._renewed_s = now
                heard = tuple(pull.heard for pull in state.wanted.values())
                messages.append((peer, Renew(state.incarnation, tuple(state.wanted), heard)))
        return messages

    def next_deadline(self) -> float:
        """The next time at which `renewals` has work; minus infinity if it has some now, infinite if never."""
        if self._refusals:
            return -math.inf
        deadline = math.inf
        for state in self._records.peers.values():
            if state.wanted:
                deadline = min(deadline, self._renewed_s + self._renew_s)
            if state.unclaimed:
                deadline = min(deadline, self._forgotten_s(next(iter(state.unclaimed.values()))))
        return deadline

    # ---- looking

    @property
    def num_live(self) -> int:
        """Number of known offers that have not ended, offers for unknown requests included."""
        return len(self._records.pulls)

    # ---- inside

    def _forgotten_s(self, pull: Pull) -> float:
        """The time at which an unclaimed offer is forgotten."""
        return pull.heard_s + RENEWALS_UNCLAIMED * self._renew_s

    def _claim(self, pull: Pull) -> list[PullEvent]:
        """Makes the offer wanted; ignores KV of a peer that is not the request's source. It replaces an earlier offer
        of the same content by the same peer, which is refused. If two peers offer the same image, both offers are kept,
        because one may be about to be withdrawn."""
        if pull.image_index is None and self._records.sources[pull.request_id] != pull.peer:
            self.ignored += 1
            return []
        events: list[PullEvent] = []
        earlier = self._records.wanted_pull(pull.request_id, pull.image_index, pull.peer)
        if earlier is not None:
            if not earlier.copies:
                events.append(Gone(earlier.handle, earlier.image_index))
            self._refusals.append(self._refuse(earlier))
        self._records.add_wanted(pull)
        events.append(_offered(pull))
        return events

    def _refuse(self, pull: Pull) -> tuple[str, Refuse]:
        """Ends an offer as not wanted. Returns (peer, message) to send."""
        pull.refused = True
        self._give_up(pull)
        return pull.peer, Refuse(pull.incarnation, pull.sequence)

    def _give_up(self, pull: Pull) -> list[Gone]:
        """Ends the offer. With copies in flight it is cancelled and ends with the last of them; returns `Gone` only
        without any."""
        if pull.copies:
            self._records.cancel(pull)
            return []
        self._records.remove(pull)
        return [Gone(pull.handle, pull.image_index)]


def _offered(pull: Pull) -> Offered:
    return Offered(pull.handle, pull.request_id, pull.image_index, len(pull.blocks), pull.end)
