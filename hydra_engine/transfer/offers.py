"""The offers of this instance to other instances: a table of leases and control words.

An offer is live from `offer` until exactly one of: acknowledged or refused by its target, withdrawn by its owner, its
lease expired, its target lost. In each case the control word is invalidated before the caller is notified, and only
then may the caller reuse the blocks. The source does not wait for the target: one that reads too late learns it from
the control word.

Does not know what is in the blocks or which requests hold them. Sends nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra_engine.core.ids import RequestId
from hydra_engine.transfer.messages import More, Offer, Renew, Withdraw
from hydra_engine.transfer.plans import KvEnd

Owner = tuple[RequestId, int | None]
"""Image of an encode job (job id, index within the job), or the KV of a request (request id, None)."""


def valid_word(sequence: int) -> int:
    """The control word of a live offer; no other offer of the same incarnation ever has it."""
    return (sequence << 8) | 1


def gone_word(sequence: int) -> int:
    """The control word after the offer has ended; it differs from every `valid_word`."""
    return sequence << 8


@dataclass(slots=True)
class _Live:
    """A live offer."""

    owner: Owner
    peer: str
    sequence: int
    slot: int  # of its control word
    complete: bool  # everything has been offered
    deadline_s: float
    num_mores: int = 0
    due: int = 0  # number of the `More` that the target must have heard of when it renews next


class Source:
    """The source's table of live offers, of one incarnation of an instance. `now` is in seconds and never decreases.

    `set_word(slot, word)` writes a control word, one of `num_slots`, where peers read it. `lease_s`: seconds without a
    renewal after which an offer expires.
    """

    def __init__(self, incarnation: int, num_slots: int, set_word: Callable[[int, int], None], lease_s: float) -> None:
        self.offered = 0  # number of offers so far, as the next three
        self.acknowledged = 0  # refusals included
        self.withdrawn = 0
        self.expired = 0  # included in `withdrawn`
        self.ignored = 0  # messages about offers that are not live
        self._incarnation = incarnation
        self._set_word = set_word
        self._lease_s = lease_s
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._live: dict[int, _Live] = {}  # by sequence; all leases are equally long, so this is the order of deadlines
        self._sequence_of: dict[Owner, int] = {}
        self._next_sequence = 1

    # ---- what the owner does

    def offer(
        self,
        owner: Owner,
        peer: str,
        request_id: RequestId,
        image_index: int | None,
        blocks: Sequence[int],
        *,
        now: float,
        end: KvEnd | None = None,
        checksums: tuple[int, ...] = (),
    ) -> Offer | None:
        """Makes an offer, which the caller sends to `peer`. `request_id` and `image_index` (None: KV) are the peer's
        names of the content. The blocks must be computed: they may be read before this returns. Returns None, without
        any change, while no control word is free. Asserts that the owner has no live offer."""
        assert owner not in self._sequence_of, f"{owner} has a live offer; withdraw it before offering again"
        if not self._free_slots:
            return None
        slot, sequence = self._free_slots.pop(), self._next_sequence
        self._next_sequence += 1
        complete = image_index is not None or end is not None
        self._live[sequence] = _Live(owner, peer, sequence, slot, complete, now + self._lease_s)
        self._sequence_of[owner] = sequence
        self._set_word(slot, valid_word(sequence))
        self.offered += 1
        return Offer(
            incarnation=self._incarnation,
            sequence=sequence,
            request_id=request_id,
            image_index=image_index,
            slot=slot,
            word=valid_word(sequence),
            blocks=tuple(blocks),
            end=end,
            checksums=checksums,
        )

    def extend(
        self, owner: Owner, blocks: Sequence[int], *, end: KvEnd | None = None, checksums: tuple[int, ...] = ()
    ) -> More | None:
        """Adds blocks of KV. Returns the message to the offer's peer; None if the owner has no live offer. With `end`
        the offer is complete; asserts that it was not before."""
        if owner not in self._sequence_of:
            return None
        live = self._live[self._sequence_of[owner]]
        assert not live.complete, f"{owner} has offered everything already"
        live.num_mores += 1
        live.complete = end is not None
        return More(self._incarnation, live.sequence, live.num_mores, tuple(blocks), end, checksums)

    def withdraw(self, owner: Owner) -> tuple[str, Withdraw] | None:
        """Ends the owner's offer: its blocks may be overwritten after this call. Returns (peer, message), which only
        saves the peer a useless copy; None if the owner has no live offer."""
        if owner not in self._sequence_of:
            return None
        live = self._live[self._sequence_of[owner]]
        return live.peer, self._take_back(live)

    # ---- what targets say

    def on_ack(self, peer: str, incarnation: int, sequence: int) -> Owner | None:
        """Ends an offer that the target has copied. Returns the owner whose blocks are free now; None, counted as
        ignored, if the offer is not live or not complete."""
        live = self._find(peer, incarnation, sequence)
        # An incomplete offer cannot have been copied completely, so the message must be about another one.
        if live is None or not live.complete:
            self.ignored += 1
            return None
        self.acknowledged += 1
        return self._end(live)

    def on_refuse(self, peer: str, incarnation: int, sequence: int) -> Owner | None:
        """Ends an offer that the target does not want. Returns the owner whose blocks are free now; None, counted as
        ignored, if the offer is not live."""
        live = self._find(peer, incarnation, sequence)
        if live is None:
            self.ignored += 1
            return None
        self.acknowledged += 1
        return self._end(live)

    def on_renew(self, peer: str, renew: Renew, now: float) -> None:
        """Restarts the leases of the peer's offers, except of one whose target still misses a `More` that was sent
        before its previous renewal: that message is lost, and only the end of the lease ends the wait on both sides.
        Counts numbers of offers that are not live as ignored."""
        for sequence, heard in zip(renew.sequences, renew.heard, strict=False):
            live = self._find(peer, renew.incarnation, sequence)
            if live is None:
                self.ignored += 1
                continue
            if heard >= live.due:
                live.deadline_s = now + self._lease_s
                self._live[sequence] = self._live.pop(sequence)  # keeps the order of deadlines
            live.due = live.num_mores

    # ---- what time and death do

    def expire(self, now: float) -> list[tuple[Owner, str, Withdraw]]:
        """Withdraws offers that were not renewed in time. Returns (owner, peer, message) of each. The caller reads all
        pending messages first: after a pause of this process, renewals may be waiting to be read."""
        over = []
        while self._live:
            live = next(iter(self._live.values()))
            if live.deadline_s > now:
                break
            self.expired += 1
            over.append((live.owner, live.peer, self._take_back(live)))
        return over

    def peer_lost(self, peer: str) -> list[Owner]:
        """Withdraws all offers to `peer`, without a message. Returns their owners, oldest offer first."""
        owners = []
        for live in sorted(self._live.values(), key=lambda live: live.sequence):
            if live.peer == peer:
                self._take_back(live)
                owners.append(live.owner)
        return owners

    def next_deadline(self) -> float:
        """The time at which the next offer expires without a renewal; infinite if none is live."""
        return next(iter(self._live.values())).deadline_s if self._live else math.inf

    # ---- looking

    def owner_of(self, peer: str, incarnation: int, sequence: int) -> Owner | None:
        """The owner of the offer; None if it is not live."""
        live = self._find(peer, incarnation, sequence)
        return None if live is None else live.owner

    def is_live(self, sequence: int) -> bool:
        return sequence in self._live

    @property
    def num_live(self) -> int:
        return len(self._live)

    # ---- inside

    def _find(self, peer: str, incarnation: int, sequence: int) -> _Live | None:
        """The live offer of this number and incarnation, if it was made to `peer`; otherwise None."""
        live = self._live.get(sequence)
        if live is None or incarnation != self._incarnation or live.peer != peer:
            return None
        return live

    def _take_back(self, live: _Live) -> Withdraw:
        """Ends the offer, counts it as withdrawn and returns the message for its peer."""
        self._end(live)
        self.withdrawn += 1
        return Withdraw(self._incarnation, live.sequence)

    def _end(self, live: _Live) -> Owner:
        """Ends the offer, frees its slot and returns its owner. Writes the control word first: once the owner is
        notified, its blocks may be overwritten."""
        self._set_word(live.slot, gone_word(live.sequence))
        del self._live[live.sequence]
        del self._sequence_of[live.owner]
        self._free_slots.append(live.slot)
        return live.owner
