"""The source's table of states, row by row: what ends an offer, what does not, and that the word always goes first."""

from __future__ import annotations

import math

import pytest

from hydra_engine.transfer.messages import More, Offer, Renew, Withdraw
from hydra_engine.transfer.offers import Source, gone_word, valid_word
from hydra_engine.transfer.plans import KvEnd
from tests.transfer.audit import check_source

INCARNATION = 7
END = KvEnd(num_tokens=30, token_id=5, token_s=1.0, first_token_s=1.0)
NUM_SLOTS = 3
KV = (11, None)
PICTURE = (12, 0)


class Words:
    """Control words as peers see them, and every write in order."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.writes: list[tuple[int, int]] = []

    def __call__(self, slot: int, word: int) -> None:
        self.now[slot] = word
        self.writes.append((slot, word))


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def source(words: Words) -> Source:
    return Source(INCARNATION, NUM_SLOTS, words, lease_s=10.0)


def offer_kv(source: Source, owner=KV, peer="d0", blocks=(4, 5), now=0.0, end=None) -> Offer:
    offer = source.offer(owner, peer, owner[0], None, blocks, now=now, end=end)
    assert offer is not None
    return offer


def offer_picture(source: Source, owner=PICTURE, peer="p0", now=0.0) -> Offer:
    offer = source.offer(owner, peer, 90, 3, (1,), now=now, checksums=(77,))
    assert offer is not None
    return offer


def renewal(*sequences: int, heard: tuple[int, ...] | None = None, incarnation: int = INCARNATION) -> Renew:
    return Renew(incarnation, sequences, heard if heard is not None else (0,) * len(sequences))


# ---- offering


def test_an_offer_names_the_targets_request_and_its_word_is_valid_before_anybody_can_know(source, words) -> None:
    offer = offer_picture(source)
    assert words.now[offer.slot] == offer.word == valid_word(offer.sequence)
    assert (offer.incarnation, offer.request_id, offer.image_index, offer.blocks) == (INCARNATION, 90, 3, (1,))
    assert offer.checksums == (77,) and offer.end is None
    assert [*source._sequence_of] == [PICTURE] and source.num_live == 1
    check_source(source, words.now, NUM_SLOTS)


def test_without_a_free_slot_nothing_happens_and_a_later_attempt_succeeds(source, words) -> None:
    first = offer_kv(source, (1, None))
    offer_kv(source, (2, None))
    offer_kv(source, (3, None))
    before = list(words.writes)
    assert source.offer((4, None), "d0", 4, None, (1,), now=0.0) is None
    assert words.writes == before and source.num_live == source.offered == 3
    assert source.on_ack("d0", INCARNATION, first.sequence) is None  # not complete yet
    assert source.on_refuse("d0", INCARNATION, first.sequence) == (1, None)
    assert offer_kv(source, (4, None)).slot == first.slot
    check_source(source, words.now, NUM_SLOTS)


def test_a_slot_is_used_again_but_a_sequence_number_never(source) -> None:
    seen, slots = set(), set()
    for i in range(20):
        offer = offer_picture(source, (i, 0))
        assert offer.word not in seen
        seen.add(offer.word)
        slots.add(offer.slot)
        assert source.on_ack("p0", INCARNATION, offer.sequence) == (i, 0)
    assert len(slots) == 1


def test_one_owner_has_one_offer_at_a_time(source) -> None:
    offer_kv(source)
    with pytest.raises(AssertionError, match="withdraw it"):
        offer_kv(source)


def test_more_is_numbered_from_one(source) -> None:
    offer = offer_kv(source)
    assert source.extend(KV, (6, 7), checksums=(1, 2)) == More(INCARNATION, offer.sequence, 1, (6, 7), None, (1, 2))
    assert source.extend(KV, (), end=END) == More(INCARNATION, offer.sequence, 2, (), END, ())


def test_more_for_an_owner_without_an_offer_is_none(source) -> None:
    assert source.extend(KV, (6,)) is None
    offer_kv(source)
    source.withdraw(KV)
    assert source.extend(KV, (6,)) is None


def test_nothing_comes_after_the_end(source) -> None:
    offer_kv(source, end=END)
    with pytest.raises(AssertionError, match="everything"):
        source.extend(KV, (9,))
    offer_picture(source)
    with pytest.raises(AssertionError, match="everything"):
        source.extend(PICTURE, (9,))


# ---- OFFERED, PULLED: what ends it


def test_an_acknowledgement_frees_and_the_word_is_gone(source, words) -> None:
    offer = offer_kv(source, end=END)
    assert source.on_ack("d0", INCARNATION, offer.sequence) == KV
    assert words.now[offer.slot] == gone_word(offer.sequence)
    assert (source.acknowledged, source.withdrawn, source.num_live) == (1, 0, 0)
    assert [*source._sequence_of] == []
    check_source(source, words.now, NUM_SLOTS)


def test_kv_cannot_be_acknowledged_before_all_of_it_was_offered(source, words) -> None:
    offer = offer_kv(source)
    assert source.on_ack("d0", INCARNATION, offer.sequence) is None
    assert source.ignored == 1 and words.now[offer.slot] == offer.word
    source.extend(KV, (), end=END)
    assert source.on_ack("d0", INCARNATION, offer.sequence) == KV


def test_a_refusal_is_as_good_at_any_time(source, words) -> None:
    offer = offer_kv(source)
    assert source.on_refuse("d0", INCARNATION, offer.sequence) == KV
    assert words.now[offer.slot] == gone_word(offer.sequence) and source.acknowledged == 1
    check_source(source, words.now, NUM_SLOTS)


@pytest.mark.parametrize("way", ["withdraw", "expire", "peer_lost", "ack", "refuse"])
def test_the_word_is_gone_before_the_caller_can_free(way: str) -> None:
    """The order is seen from inside the write: the offer must still be known then."""
    live_at_write = []
    source = Source(INCARNATION, 1, lambda slot, word: live_at_write.append((word & 1, source.num_live)), 10.0)
    offer = offer_picture(source)
    if way == "withdraw":
        assert source.withdraw(PICTURE) == ("p0", Withdraw(INCARNATION, offer.sequence))
    elif way == "expire":
        assert source.expire(10.0) == [(PICTURE, "p0", Withdraw(INCARNATION, offer.sequence))]
    elif way == "peer_lost":
        assert source.peer_lost("p0") == [PICTURE]
    elif way == "ack":
        assert source.on_ack("p0", INCARNATION, offer.sequence) == PICTURE
    else:
        assert source.on_refuse("p0", INCARNATION, offer.sequence) == PICTURE
    assert live_at_write == [(1, 1), (0, 1)] and source.num_live == 0


def test_withdrawing_twice_is_harmless(source, words) -> None:
    offer_kv(source)
    assert source.withdraw(KV) is not None
    writes = list(words.writes)
    assert source.withdraw(KV) is None and words.writes == writes and source.withdrawn == 1


def test_a_lost_peer_takes_its_offers_along_and_no_others(source, words) -> None:
    first = offer_kv(source, (1, None), peer="d0", now=0.0)
    other = offer_kv(source, (2, None), peer="d1", now=1.0)
    offer_kv(source, (3, None), peer="d0", now=2.0)
    source.on_renew("d0", renewal(first.sequence), 3.0)
    assert source.peer_lost("d0") == [(1, None), (3, None)]  # oldest first, whatever was renewed last
    assert [*source._sequence_of] == [(2, None)] and words.now[other.slot] == other.word
    assert source.withdrawn == 2 and source.expired == 0
    assert source.peer_lost("d0") == []
    check_source(source, words.now, NUM_SLOTS)


# ---- DONE, GONE, unknown, other incarnation: count and ignore


def test_a_second_acknowledgement_finds_nothing(source) -> None:
    offer = offer_picture(source)
    assert source.on_ack("p0", INCARNATION, offer.sequence) == PICTURE
    again = offer_picture(source)
    assert source.on_ack("p0", INCARNATION, offer.sequence) is None
    assert source.on_refuse("p0", INCARNATION, offer.sequence) is None
    assert source.ignored == 2 and [*source._sequence_of] == [PICTURE] and again.sequence != offer.sequence


@pytest.mark.parametrize("kind", ["on_ack", "on_refuse"])
@pytest.mark.parametrize("peer,incarnation,step", [("p1", 7, 0), ("p0", 6, 0), ("p0", 7, 1)])
def test_what_does_not_name_the_offer_exactly_is_ignored(source, words, kind, peer, incarnation, step) -> None:
    offer = offer_picture(source)
    assert getattr(source, kind)(peer, incarnation, offer.sequence + step) is None
    assert source.ignored == 1 and source.num_live == 1 and words.now[offer.slot] == offer.word


# ---- leases


def test_a_lease_ends_without_renewal_and_not_before(source, words) -> None:
    offer_kv(source, now=5.0)
    assert source.next_deadline() == 15.0
    assert source.expire(14.999) == []
    assert [owner for owner, _, _ in source.expire(15.0)] == [KV]
    assert (source.expired, source.withdrawn) == (1, 1) and source.next_deadline() == math.inf
    check_source(source, words.now, NUM_SLOTS)


def test_a_renewal_starts_the_lease_again(source, words) -> None:
    first = offer_kv(source, (1, None), now=0.0)
    offer_kv(source, (2, None), now=1.0)
    source.on_renew("d0", renewal(first.sequence), 9.0)
    check_source(source, words.now, NUM_SLOTS)
    assert source.next_deadline() == 11.0
    assert [owner for owner, _, _ in source.expire(18.0)] == [(2, None)]
    assert [owner for owner, _, _ in source.expire(19.0)] == [(1, None)]


@pytest.mark.parametrize("peer,incarnation", [("d1", 7), ("d0", 6)])
def test_somebody_elses_renewal_does_not_count(source, peer, incarnation) -> None:
    offer = offer_kv(source)
    source.on_renew(peer, renewal(offer.sequence, incarnation=incarnation), 9.0)
    assert source.ignored == 1 and source.next_deadline() == 10.0


def test_a_renewal_of_several_counts_those_that_are_unknown(source) -> None:
    first, second = offer_kv(source, (1, None)), offer_kv(source, (2, None))
    source.withdraw((1, None))
    source.on_renew("d0", renewal(first.sequence, second.sequence), 5.0)
    assert source.ignored == 1 and source.next_deadline() == 15.0


def test_a_renewal_may_cross_what_is_being_added(source) -> None:
    """The target keeps up, but always hears of the newest part after it has sent its renewal."""
    offer = offer_kv(source)
    for now in range(2, 60, 2):
        source.extend(KV, (6,))
        source.on_renew("d0", renewal(offer.sequence, heard=(now // 2 - 1,)), float(now))
        assert source.expire(float(now)) == []


def test_a_target_that_never_heard_of_a_part_cannot_renew_for_ever(source) -> None:
    offer = offer_kv(source)
    source.extend(KV, (), end=END)  # lost on the way
    over = []
    for now in range(2, 60, 2):
        source.on_renew("d0", renewal(offer.sequence, heard=(0,)), float(now))
        over += [(now, owner) for owner, _, _ in source.expire(float(now))]
    assert over == [(12, KV)]


def test_check_sees_tables_that_disagree(source, words) -> None:
    offer_kv(source)
    source._free_slots.pop()
    with pytest.raises(AssertionError, match="slot"):
        check_source(source, words.now, NUM_SLOTS)
