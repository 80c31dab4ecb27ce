"""The protocol's real classes, and the order in which a copy is checked, with one safeguard missing each."""

from __future__ import annotations

import math
from collections.abc import Callable

from hydra_engine.transfer.messages import Ack, More, Offer, Renew, Withdraw
from hydra_engine.transfer.offers import Owner, Source
from hydra_engine.transfer.pulls import Committed, Destination, Gone, Pull, PullEvent
from tests.transfer.nodes import Running
from tests.transfer.world import World


class WordStaysValid(Source):
    """Blocks are taken back, the control word is not."""

    def __init__(self, incarnation: int, num_slots: int, set_word: Callable[[int, int], None], lease_s: float) -> None:
        def set_if_valid(slot: int, word: int) -> None:
            if word & 1:
                set_word(slot, word)

        super().__init__(incarnation, num_slots, set_if_valid, lease_s)


class SequenceUsedAgain(Source):
    """Gives an offer the smallest sequence number that no live offer has, so later offers repeat numbers."""

    def offer(self, *args, **more) -> Offer | None:
        self._next_sequence = next(n for n in range(1, 1000) if n not in self._live)
        return super().offer(*args, **more)


class AcknowledgesByPeer(Source):
    """An acknowledgement ends whatever was offered to that peer first."""

    def on_ack(self, peer: str, incarnation: int, sequence: int) -> Owner | None:
        sequences = [live.sequence for live in self._live.values() if live.peer == peer]
        return super().on_ack(peer, self._incarnation, min(sequences)) if sequences else None


class NeverExpires(Source):
    def expire(self, now: float) -> list[tuple[Owner, str, Withdraw]]:
        return []


class RenewsTheDeaf(Source):
    """A target that has missed a part keeps its lease."""

    def on_renew(self, peer: str, renew: Renew, now: float) -> None:
        heard = (1 << 30,) * len(renew.sequences)
        super().on_renew(peer, Renew(renew.incarnation, renew.sequences, heard), now)


class TakesAnyCopy(Destination):
    """The control word is read, and nobody cares."""

    def end(self, handle: int, *, valid: bool, last: bool) -> Committed | Gone | None:
        return super().end(handle, valid=True, last=last)


class CommitsDoomed(Destination):
    """A copy that was in time counts although nobody wants it any more."""

    def end(self, handle: int, *, valid: bool, last: bool) -> Committed | Gone | None:
        pull = self._records.pulls[handle]
        outcome = super().end(handle, valid=valid, last=last)
        return committed(pull) if isinstance(outcome, Gone) and valid and last else outcome


class CommitsEarly(Destination):
    """Commits when all copies have ended although not everything has been copied."""

    def end(self, handle: int, *, valid: bool, last: bool) -> Committed | Gone | None:
        pull = self._records.pulls[handle]
        outcome = super().end(handle, valid=valid, last=last)
        if outcome is not None or pull.copies:
            return outcome
        self._records.remove(pull)
        return committed(pull)


class CutsCopies(Destination):
    """Frees withdrawn blocks at once, with copies in flight or without."""

    def _give_up(self, pull: Pull) -> list[Gone]:
        super()._give_up(pull)
        return [Gone(pull.handle, pull.image_index)]


class LosesTooEarly(Destination):
    """The first invalid part ends the offer while others are in flight."""

    def end(self, handle: int, *, valid: bool, last: bool) -> Committed | Gone | None:
        pull = self._records.pulls[handle]
        outcome = super().end(handle, valid=valid, last=last)
        return outcome if valid else outcome or Gone(handle, pull.image_index)


class TakesAnyPart(Destination):
    """Parts are not numbered: doubled ones count twice, and nobody sees that one is missing."""

    def on_more(self, peer: str, more: More) -> list[PullEvent]:
        pull = self._records.find(peer, more.incarnation, more.sequence)
        if pull is not None:
            pull.heard = more.number - 1
        return super().on_more(peer, more)


class TakesAnyIncarnation(Destination):
    """Offers of a peer outlive it and are pulled from the one that starts in its place."""

    kept: tuple[Pull, ...] = ()

    def peer_lost(self, peer: str) -> list[Gone]:
        wanted = self._records.peers[peer].wanted
        self.kept = tuple(wanted.pop(pull.sequence) for pull in list(wanted.values()) if not pull.copies)
        return super().peer_lost(peer)

    def peer_up(self, peer: str, incarnation: int) -> None:
        super().peer_up(peer, incarnation)
        for pull in self.kept:
            pull.sequence *= -1  # its numbers start again
            self._records.peers[peer].wanted[pull.sequence] = pull


class KeepsRecords(Destination):
    """An offer for a request that never comes is kept for ever."""

    def _forgotten_s(self, pull: Pull) -> float:
        return math.inf


class ReadsTheWordFirst(World):
    """The control word is read when a copy begins, not when it has ended."""

    def is_valid(self, running: Running) -> bool:
        return running.was_valid


def committed(pull: Pull) -> Committed:
    return Committed(pull.peer, Ack(pull.incarnation, pull.sequence))
