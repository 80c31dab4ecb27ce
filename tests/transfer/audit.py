"""Self-checks of the transfer state machines: whether the tables of each agree."""

from __future__ import annotations

from collections.abc import Mapping

from hydra_engine.transfer.offers import Source, valid_word
from hydra_engine.transfer.pulls import MAX_UNCLAIMED, Destination, Records
from hydra_engine.transfer.staging import Staging


def check_source(source: Source, words: Mapping[int, int], num_slots: int) -> None:
    """Raises AssertionError if the tables disagree, or the control words (by slot) as peers see them."""
    assert {live.owner: live.sequence for live in source._live.values()} == source._sequence_of, "owners and offers"
    slots = [live.slot for live in source._live.values()]
    assert sorted(slots + source._free_slots) == list(range(num_slots)), "a slot is lost or given out twice"
    assert all(sequence == live.sequence < source._next_sequence for sequence, live in source._live.items())
    valid = {slot: word for slot, word in words.items() if word & 1}
    assert valid == {live.slot: valid_word(live.sequence) for live in source._live.values()}, "words and offers"
    deadlines = [live.deadline_s for live in source._live.values()]
    assert deadlines == sorted(deadlines), "leases out of order: `now` went back"
    assert all(live.due <= live.num_mores for live in source._live.values())
    assert source.offered == source.num_live + source.acknowledged + source.withdrawn, "an offer ended twice, or never"
    assert source.expired <= source.withdrawn


def check_destination(destination: Destination) -> None:
    """Raises AssertionError if the tables disagree."""
    check_records(destination._records)
    assert all(handle < destination._next_handle for handle in destination._records.pulls)
    assert all(len(peer.unclaimed) <= MAX_UNCLAIMED for peer in destination._records.peers.values())


def check_records(records: Records) -> None:
    """Raises AssertionError if the tables disagree."""
    wanted = [pull for pulls in records._wanted.values() for pull in pulls.values()]
    assert all(records._wanted.values()), "a request without offers has an entry"
    by_peer = {pull.handle for peer in records.peers.values() for pull in peer.wanted.values()}
    assert {pull.handle for pull in wanted} == by_peer, "offers by request and by peer"
    for pull in wanted:
        assert pull.request_id in records.sources and not pull.cancelled, f"offer {pull.handle} is not wanted"
        assert records._wanted[pull.request_id][pull.image_index, pull.peer] is pull
        assert pull.image_index is not None or records.sources[pull.request_id] == pull.peer, "KV of the wrong peer"
    for name, peer in records.peers.items():
        assert not peer.wanted.keys() & peer.unclaimed.keys()
        for sequence, pull in [*peer.wanted.items(), *peer.unclaimed.items()]:
            assert (name, peer.incarnation, sequence) == (pull.peer, pull.incarnation, pull.sequence)
            assert sequence <= peer.newest and records.pulls[pull.handle] is pull
        for pull in peer.unclaimed.values():
            assert pull.request_id not in records.sources and not pull.copies and not pull.cancelled
    num_known = sum(len(peer.wanted) + len(peer.unclaimed) for peer in records.peers.values())
    cancelled = [pull for pull in records.pulls.values() if pull.cancelled]
    assert len(records.pulls) == num_known + len(cancelled), "an offer is in no table"
    assert all(pull.copies > 0 for pull in cancelled), "a cancelled offer without a copy in flight"
    for handle, pull in records.pulls.items():
        assert handle == pull.handle
        assert len(pull.checksums) in (0, len(pull.blocks)) and (pull.begun or 0) <= len(pull.blocks)


def check_staging(staging: Staging) -> None:
    """Raises AssertionError if a block of a pool is lost or allocated twice."""
    for pool, count in staging._num_blocks.items():
        held = [block for piece in staging._pieces.values() if piece.pool is pool for block in piece.blocks]
        assert sorted(held + staging._free[pool]) == list(range(count)), f"a {pool} block is lost or given out twice"
        waiting = [piece for piece in staging._pieces.values() if piece.pool is pool and not piece.blocks]
        assert waiting == list(staging._waiting[pool]), "a piece waits twice, or for ever"
