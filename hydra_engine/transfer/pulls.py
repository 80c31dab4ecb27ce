"""What other instances offer to this one, and how far it has been copied.

An offer goes through these states; each one that was reported to the owner (`Offered`) ends for it exactly once:

    unclaimed   its request is not known here (yet): recorded, not renewed
    wanted      `Offered` was given out, no copy of it is in flight; ends by `Gone`, `refuse` or `forget`
    copying     at least one copy is in flight; ends by `Committed`, or is wanted again after its last copy for now
    cancelled   copying, but withdrawn, refused, invalid, or its source lost; ends by `Gone` with its last copy

A copy in flight is never cut and its target blocks stay what they are until it has ended. Whether a copy was in time is
not decided here: the lane that copies reads the source's control word afterwards, and `end` gets the answer.

Messages may be lost, doubled, late and out of order: what does not fit is counted and ignored, and the source's lease
ends what cannot go on. Sends nothing itself, does not know why a request wants what it wants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import KvEnd, PullJob, PullPlan
from hydra_engine.core.pools import PoolKind
from hydra_engine.transfer.messages import Ack, More, Offer, Refuse, Renew, Withdraw
from hydra_engine.transfer.records import Peer, Pull, Records

MAX_UNCLAIMED = 4096  # offers of one peer for requests that are not known here
RENEWALS_UNCLAIMED = 10  # an unclaimed offer is forgotten after so many periods: its lease ended long before


@dataclass(frozen=True, slots=True)
class Offered:
    """Blocks for a request of this instance can be pulled, `num_blocks` in all. KV (`image_index` None) may grow until
    `end` is known: it is reported again, under the same handle."""

    handle: int
    request_id: RequestId
    image_index: int | None
    num_blocks: int
    end: KvEnd | None


@dataclass(frozen=True, slots=True)
class Gone:
    """The offer is over, and no copy of it is in flight: only now may its target blocks be used for anything else.
    `image_index` None: it was of KV."""

    handle: int
    image_index: int | None


PullEvent = Offered | Gone


@dataclass(frozen=True, slots=True)
class Committed:
    """All blocks of the offer are here and were valid. `ack` goes to `peer`."""

    peer: str
    ack: Ack


class Destination:
    """Offers of others, each under a handle of ours that is never used again. Times in seconds. `renew_s`: how often
    offers that are still wanted are renewed at their sources."""

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
        """The request may receive features from any peer, and KV from `peer` alone. Returns what is offered for it
        already."""
        records = self._records
        assert request_id not in records.sources, f"request {request_id} is expected already"
        offers = records.unclaimed(request_id)
        records.sources[request_id] = peer
        events: list[PullEvent] = []
        for pull in offers:
            records.remove(pull)
            events += self._claim(pull)
            # Unclaimed offers are not renewed: the lease may be nearly over.
            self._renewed_s = -math.inf
        return events

    def forget(self, request_id: RequestId) -> list[tuple[str, Refuse]]:
        """The request is over here; unknown ids are fine. Returns what is to be sent. What is being copied for it ends
        as `Gone`."""
        self._records.sources.pop(request_id, None)
        pulls = [*self._records.wanted(request_id), *self._records.unclaimed(request_id)]
        return [self._refuse(pull) for pull in pulls]

    # ---- what sources say

    def peer_up(self, peer: str, incarnation: int) -> None:
        """Accepts messages of this incarnation from now on, until `peer_lost`."""
        assert peer not in self._records.peers, f"{peer} is up already; report its loss first"
        self._records.peers[peer] = Peer(incarnation)

    def peer_lost(self, peer: str) -> list[Gone]:
        """Offers that are not being copied are gone; the others end as `Gone`. An unknown peer is ignored."""
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
        """A later offer of the same thing takes the place of an earlier one. Sequence numbers of a peer grow, so one
        that is not new is a copy of an old message, or out of order; in that case the source's lease ends."""
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
        """One that does not follow on what is known is ignored; if the one between stays missing, the source lets the
        lease end."""
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
        pull = self._records.find(peer, withdraw.incarnation, withdraw.sequence)
        if pull is None:
            self.ignored += 1
            return []
        is_ours = pull.request_id in self._records.sources
        events = self._give_up(pull)
        return [*events] if is_ours else []

    # ---- copies

    def begin(self, plan: PullPlan) -> PullJob | None:
        """The copy that the plan comes to; `end` follows. Parts of an offer are begun in order, each behind the one
        before; the first one may start anywhere (what is cached here is not pulled), and the last one may be empty, if
        the end came without blocks: then only the word is read. While no copy is in flight a target that has given its
        blocks away may begin anew. None if the offer is over but for earlier copies in flight: nothing is to be copied
        or ended, and the part is not valid. Other handles that are over are a bug (KeyError)."""
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
        """A copy has ended. `valid`: after it the control word was still the offer's, and the bytes were right. `last`:
        with it everything is here. None while something is missing or in flight. The target blocks may be used for
        anything else only after `Gone`, with which no copy of the offer is in flight."""
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
        """No copy of it counts any more."""
        pull = self._records.pulls.get(handle)
        return pull is None or pull.cancelled

    def refuse(self, handle: int) -> tuple[str, Refuse] | None:
        """The offer is not wanted. Returns what is to be sent; None if it is over already. What is being copied ends as
        `Gone`."""
        return None if self.is_over(handle) else self._refuse(self._records.pulls[handle])

    # ---- time

    def renewals(self, now: float) -> list[tuple[str, Renew | Refuse]]:
        """Messages to send: refusals at once, and every `renew_s` a renewal to each peer whose offers are wanted."""
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
        """The time at which `renewals` has something to send or to forget; infinite if never."""
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
    def live(self) -> int:
        """Offers that are known and not over, those for unknown requests included."""
        return len(self._records.pulls)

    def check(self) -> None:
        """AssertionError if the tables disagree."""
        self._records.check()
        assert all(handle < self._next_handle for handle in self._records.pulls)
        assert all(len(peer.unclaimed) <= MAX_UNCLAIMED for peer in self._records.peers.values())

    # ---- inside

    def _forgotten_s(self, pull: Pull) -> float:
        return pull.heard_s + RENEWALS_UNCLAIMED * self._renew_s

    def _claim(self, pull: Pull) -> list[PullEvent]:
        """The offer is for a request of ours. It takes the place of an earlier one of the same source; of two sources
        that offer one image both are kept, for one may be about to withdraw."""
        if pull.image_index is None and self._records.sources[pull.request_id] != pull.peer:
            self.ignored += 1
            return []
        events: list[PullEvent] = []
        earlier = self._records.wanted_for(pull.request_id, pull.image_index, pull.peer)
        if earlier is not None:
            if not earlier.copies:
                events.append(Gone(earlier.handle, earlier.image_index))
            self._refusals.append(self._refuse(earlier))
        self._records.add_wanted(pull)
        events.append(_offered(pull))
        return events

    def _refuse(self, pull: Pull) -> tuple[str, Refuse]:
        pull.refused = True
        self._give_up(pull)
        return pull.peer, Refuse(pull.incarnation, pull.sequence)

    def _give_up(self, pull: Pull) -> list[Gone]:
        """Over at once, or when its last copy in flight has ended."""
        if pull.copies:
            self._records.cancel(pull)
            return []
        self._records.remove(pull)
        return [Gone(pull.handle, pull.image_index)]


def _offered(pull: Pull) -> Offered:
    return Offered(pull.handle, pull.request_id, pull.image_index, len(pull.blocks), pull.end)
