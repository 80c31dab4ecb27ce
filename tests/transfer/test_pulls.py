"""The target's table of states, row by row, and what it owes to its sources."""

from __future__ import annotations

import math

import pytest

from hydra_engine.core.pools import PoolKind
from hydra_engine.transfer.messages import Ack, More, Offer, Refuse, Renew, Withdraw
from hydra_engine.transfer.offers import valid_word
from hydra_engine.transfer.plans import KvEnd
from hydra_engine.transfer.pulls import MAX_UNCLAIMED, Committed, Destination, Gone, Offered
from tests.transfer.audit import check_destination
from tests.transfer.world import begin, copying

END = KvEnd(num_tokens=30, token_id=5, token_s=1.0, first_token_s=1.0)


@pytest.fixture
def target() -> Destination:
    target = Destination(renew_s=2.0)
    target.peer_up("e0", 3)
    target.peer_up("e1", 3)
    target.peer_up("p0", 4)
    return target


def picture(sequence: int, request_id: int = 9, index: int = 0, blocks=(5, 6), incarnation: int = 3, **more) -> Offer:
    word = valid_word(sequence)
    return Offer(incarnation, sequence, request_id, index, 2, word, blocks, **more)


def kv(sequence: int, request_id: int = 9, blocks=(5, 6), end=None, **more) -> Offer:
    return Offer(4, sequence, request_id, None, 1, valid_word(sequence), blocks, end=end, **more)


def offered(events: list) -> int:
    """The handle of the only event."""
    (event,) = events
    assert isinstance(event, Offered)
    return event.handle


# ---- pictures of one request, side by side


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("other", ["valid", "torn", "peer lost", "refused"])
def test_copies_of_two_pictures_of_one_request_do_not_know_of_each_other(target, first: int, other: str) -> None:
    """A copy ends as usual whichever of two ends first, and however the other one ends."""
    target.expect(9, None)
    handles = [offered(target.on_offer(f"e{i}", picture(1, index=i), 0.0)) for i in range(2)]
    for handle in handles:
        assert begin(target, handle, 0, 2) is not None
    last = 1 - first
    assert target.end(handles[first], valid=True, last=True) == Committed(f"e{first}", Ack(3, 1))
    if other == "peer lost":
        assert target.peer_lost(f"e{last}") == []
    elif other == "refused":
        assert target.refuse(handles[last]) == (f"e{last}", Refuse(3, 1))
    ended = target.end(handles[last], valid=other == "valid", last=True)
    assert ended == (Committed(f"e{last}", Ack(3, 1)) if other == "valid" else Gone(handles[last], last))
    check_destination(target)
    assert not target.num_live


# ---- OFFER: who may offer what to whom


def test_features_may_come_from_anybody_and_kv_from_its_source_alone(target) -> None:
    assert target.expect(9, "p0") == []
    assert target.on_offer("e0", picture(1), 0.0) == [Offered(1, 9, 0, 2, None)]
    assert target.on_offer("e1", picture(1, index=1), 0.0) == [Offered(2, 9, 1, 2, None)]
    wrong = Offer(3, 2, 9, None, 1, valid_word(2), (5,))
    assert target.on_offer("e0", wrong, 0.0) == []
    assert target.ignored == 1
    assert target.on_offer("p0", kv(1, end=END), 0.0) == [Offered(4, 9, None, 2, END)]
    check_destination(target)


def test_a_request_without_a_source_takes_no_kv(target) -> None:
    target.expect(9, None)
    assert target.on_offer("p0", kv(1), 0.0) == []
    assert target.ignored == 1 and target.num_live == 0


def test_an_offer_may_come_before_its_request(target) -> None:
    assert target.on_offer("p0", kv(1), 0.0) == []
    assert target.on_more("p0", More(4, 1, 1, (7,), END)) == []
    assert target.num_live == 1 and target.renewals(0.0) == []
    assert target.expect(9, "p0") == [Offered(1, 9, None, 3, END)]
    assert target.renewals(0.1) == [("p0", Renew(4, (1,), (1,)))]  # at once: its lease has been running
    check_destination(target)


def test_kv_of_the_wrong_peer_is_dropped_when_the_request_comes(target) -> None:
    target.on_offer("p0", kv(1), 0.0)
    assert target.expect(9, "p1") == []
    assert target.num_live == 0 and target.ignored == 1
    check_destination(target)


def test_an_early_offer_that_is_withdrawn_or_whose_peer_is_lost_is_nobodys_business(target) -> None:
    target.on_offer("e0", picture(1, request_id=50), 0.0)
    target.on_offer("e1", picture(1, request_id=50, index=1), 0.0)
    assert target.on_withdraw("e0", Withdraw(3, 1)) == []
    assert target.peer_lost("e1") == []
    assert target.num_live == 0 and target.expect(50, None) == []
    check_destination(target)


def test_an_unclaimed_offer_is_forgotten_long_after_its_lease(target) -> None:
    target.on_offer("e0", picture(1), 5.0)
    assert target.next_deadline() == 25.0
    target.renewals(24.9)
    assert target.num_live == 1
    target.renewals(25.0)
    assert target.num_live == 0 and target.next_deadline() == math.inf
    check_destination(target)


def test_unclaimed_offers_are_bounded_for_each_peer(target) -> None:
    for sequence in range(1, MAX_UNCLAIMED + 1):
        target.on_offer("e0", picture(sequence, request_id=sequence), 0.0)
    assert target.ignored == 0
    target.on_offer("e0", picture(MAX_UNCLAIMED + 1, request_id=MAX_UNCLAIMED + 1), 0.0)
    assert (target.num_live, target.ignored) == (MAX_UNCLAIMED, 1)
    target.expect(99999, None)
    assert offered(target.on_offer("e0", picture(MAX_UNCLAIMED + 2, request_id=99999), 0.0))
    target.on_offer("e1", picture(1, request_id=70000), 0.0)
    assert target.num_live == MAX_UNCLAIMED + 2
    check_destination(target)


@pytest.mark.parametrize("incarnation,peer", [(2, "e0"), (4, "e0"), (3, "unknown")])
def test_other_incarnations_and_unknown_peers_are_ignored(target, incarnation, peer) -> None:
    target.expect(9, None)
    assert target.on_offer(peer, picture(1, incarnation=incarnation), 0.0) == []
    handle = offered(target.on_offer("e0", picture(1), 0.0))
    assert target.on_more(peer, More(incarnation, 1, 1, (1,))) == []
    assert target.on_withdraw(peer, Withdraw(incarnation, 1)) == []
    assert target.ignored == 3 and begin(target, handle, 0, 2) is not None


def test_a_doubled_or_late_offer_is_ignored(target) -> None:
    target.expect(9, None)
    handle = offered(target.on_offer("e0", picture(4), 0.0))
    assert target.on_offer("e0", picture(4), 0.0) == []
    assert target.on_offer("e0", picture(3), 0.0) == []  # older than what it would replace
    assert target.ignored == 2 and target.num_live == 1
    begin(target, handle, 0, 2)
    target.end(handle, valid=True, last=True)
    assert target.on_offer("e0", picture(4), 0.0) == []  # done already


def test_a_second_offer_replaces_the_first_and_their_source_hears_of_it(target) -> None:
    target.expect(9, None)
    first = offered(target.on_offer("e0", picture(1), 0.0))
    gone, second = target.on_offer("e0", picture(5), 0.0)
    assert gone == Gone(first, 0) and isinstance(second, Offered)
    assert target.next_deadline() == -math.inf
    assert target.renewals(0.0)[0] == ("e0", Refuse(3, 1))
    assert target.num_live == 1 and target.refuse(first) is None
    check_destination(target)


def test_offers_of_one_picture_by_two_sources_are_both_kept(target) -> None:
    """The one that came first may be withdrawn later, and the other way round."""
    target.expect(9, None)
    first = offered(target.on_offer("e0", picture(1), 0.0))
    second = offered(target.on_offer("e1", picture(1), 0.0))
    assert target.on_withdraw("e0", Withdraw(3, 1)) == [Gone(first, 0)]
    assert target.num_live == 1
    assert begin(target, second, 0, 2) is not None
    assert isinstance(target.end(second, valid=True, last=True), Committed)
    check_destination(target)


def test_a_second_offer_dooms_the_first_while_that_is_copied(target) -> None:
    target.expect(9, None)
    first = offered(target.on_offer("e0", picture(1), 0.0))
    assert begin(target, first, 0, 2) is not None
    second = offered(target.on_offer("e0", picture(2), 0.0))
    check_destination(target)
    assert target.end(first, valid=True, last=True) == Gone(first, 0)
    assert begin(target, second, 0, 2) is not None
    assert isinstance(target.end(second, valid=True, last=True), Committed)


def test_handles_are_never_used_again(target) -> None:
    target.expect(9, None)
    handles = []
    for sequence in range(1, 6):
        handles.append(offered(target.on_offer("e0", picture(sequence), 0.0)))
        target.refuse(handles[-1])
    assert len(set(handles)) == 5


# ---- MORE


def test_a_target_that_has_given_its_blocks_away_begins_anew(target) -> None:
    target.expect(9, "p0")
    handle = offered(target.on_offer("p0", kv(1, blocks=(5, 6, 7), end=END), 0.0))
    begin(target, handle, 0, 2)
    with pytest.raises(AssertionError, match="goes on at block 2"):
        begin(target, handle, 0, 1)
    assert target.end(handle, valid=True, last=False) is None
    copy = begin(target, handle, 0, 3)
    assert copy is not None and copy.source_blocks.tolist() == [5, 6, 7]
    assert isinstance(target.end(handle, valid=True, last=True), Committed)


def test_kv_grows_in_order_and_only_once(target) -> None:
    target.expect(9, "p0")
    handle = offered(target.on_offer("p0", kv(1), 0.0))
    assert target.on_more("p0", More(4, 1, 2, (8,), END)) == []  # the one before has not come
    assert target.on_more("p0", More(4, 1, 1, (7,))) == [Offered(handle, 9, None, 3, None)]
    assert target.on_more("p0", More(4, 1, 1, (7,))) == []
    assert target.on_more("p0", More(4, 1, 2, (8,), END)) == [Offered(handle, 9, None, 4, END)]
    assert target.on_more("p0", More(4, 1, 3, (9,))) == []  # nothing follows the end
    assert target.ignored == 3
    copy = begin(target, handle, 0, 4)
    assert copy is not None and copy.source_blocks.tolist() == [5, 6, 7, 8]


def test_more_of_what_is_not_known_is_ignored(target) -> None:
    assert target.on_more("p0", More(4, 1, 1, (7,))) == []
    assert target.ignored == 1


# ---- QUEUED: what ends it


def test_a_withdrawn_offer_is_gone(target) -> None:
    target.expect(9, None)
    handle = offered(target.on_offer("e0", picture(1), 0.0))
    assert target.on_withdraw("e0", Withdraw(3, 1)) == [Gone(handle, 0)]
    assert target.on_withdraw("e0", Withdraw(3, 1)) == []
    assert target.num_live == 0 and target.refuse(handle) is None
    with pytest.raises(KeyError):
        begin(target, handle, 0, 1)
    check_destination(target)


def test_a_lost_peer_takes_its_offers_along_and_no_others(target) -> None:
    target.expect(9, None)
    first = offered(target.on_offer("e0", picture(1), 0.0))
    target.on_offer("e1", picture(1, index=1), 0.0)
    assert target.peer_lost("e0") == [Gone(first, 0)]
    assert target.peer_lost("e0") == [] and target.num_live == 1
    target.peer_up("e0", 8)
    assert target.on_offer("e0", picture(1), 0.0) == []  # of the incarnation that died
    assert offered(target.on_offer("e0", picture(1, incarnation=8), 0.0))  # numbers start again
    check_destination(target)


def test_a_peer_that_is_up_cannot_come_up(target) -> None:
    with pytest.raises(AssertionError, match="e0 is up"):
        target.peer_up("e0", 4)


def test_forgetting_a_request_refuses_what_is_offered_for_it(target) -> None:
    target.expect(9, "p0")
    target.on_offer("e0", picture(1), 0.0)
    target.on_offer("p0", kv(2), 0.0)
    target.on_offer("e1", picture(1, request_id=10), 0.0)
    assert target.end_request(9) == [("e0", Refuse(3, 1)), ("p0", Refuse(4, 2))]
    assert target.end_request(9) == [] and target.num_live == 1
    assert target.end_request(10) == [("e1", Refuse(3, 1))]  # never expected
    assert target.on_offer("e0", picture(2), 0.0) == []  # late: kept for a while as of an unknown request
    check_destination(target)


def test_a_refused_offer_is_over(target) -> None:
    target.expect(9, None)
    handle = offered(target.on_offer("e0", picture(1), 0.0))
    assert target.refuse(handle) == ("e0", Refuse(3, 1))
    assert target.refuse(handle) is None and target.num_live == 0
    assert target.on_withdraw("e0", Withdraw(3, 1)) == []


# ---- COPYING


def test_a_copy_is_acknowledged_after_it_has_ended_and_was_valid(target) -> None:
    target.expect(9, None)
    handle = offered(target.on_offer("e0", picture(1, checksums=(70, 71)), 0.0))
    copy = begin(target, handle, 0, 2)
    assert copy is not None and copy.source_blocks.tolist() == [5, 6]
    assert (copy.peer, copy.pool, copy.slot, copy.word) == ("e0", PoolKind.FEATURES, 2, valid_word(1))
    assert copy.checksums == (70, 71) and copying(target, handle)
    assert target.end(handle, valid=True, last=True) == Committed("e0", Ack(3, 1))
    assert (target.pulled, target.num_live, copying(target, handle)) == (1, 0, False)
    check_destination(target)


def test_kv_is_pulled_behind_the_prefill(target) -> None:
    target.expect(9, "p0")
    handle = offered(target.on_offer("p0", kv(1, checksums=(1, 2)), 0.0))
    first = begin(target, handle, 1, 1)  # block 0 is cached here
    assert first is not None and first.pool == PoolKind.KV and first.checksums == (2,)
    assert target.end(handle, valid=True, last=False) is None
    assert not copying(target, handle) and target.num_live == 1
    target.on_more("p0", More(4, 1, 1, (7, 8), END, (3, 4)))
    second = begin(target, handle, 2, 2)
    assert second is not None and second.source_blocks.tolist() == [7, 8] and second.checksums == (3, 4)
    assert target.end(handle, valid=True, last=True) == Committed("p0", Ack(4, 1))


def test_an_end_without_blocks_is_followed_by_a_look_at_the_word(target) -> None:
    target.expect(9, "p0")
    handle = offered(target.on_offer("p0", kv(1), 0.0))
    begin(target, handle, 0, 2)
    assert target.end(handle, valid=True, last=False) is None
    target.on_more("p0", More(4, 1, 1, (), END))
    copy = begin(target, handle, 2, 0)
    assert copy is not None and copy.source_blocks.tolist() == []
    assert isinstance(target.end(handle, valid=True, last=True), Committed)


def test_nothing_is_committed_while_a_copy_is_in_flight(target) -> None:
    target.expect(9, "p0")
    handle = offered(target.on_offer("p0", kv(1, end=END), 0.0))
    begin(target, handle, 0, 1)
    begin(target, handle, 1, 1)
    assert target.end(handle, valid=True, last=True) is None
    assert isinstance(target.end(handle, valid=True, last=False), Committed)


def test_a_copy_that_was_too_late_is_lost_and_its_source_need_not_keep_it(target) -> None:
    target.expect(9, None)
    handle = offered(target.on_offer("e0", picture(1), 0.0))
    begin(target, handle, 0, 2)
    assert target.end(handle, valid=False, last=True) == Gone(handle, 0)
    assert (target.invalid, target.pulled, target.num_live) == (1, 0, 0)
    assert target.renewals(0.0) == [("e0", Refuse(3, 1, failed=True))]
    check_destination(target)


def test_an_invalid_part_is_lost_only_with_the_last_copy_in_flight(target) -> None:
    target.expect(9, "p0")
    handle = offered(target.on_offer("p0", kv(1, end=END), 0.0))
    begin(target, handle, 0, 1)
    begin(target, handle, 1, 1)
    assert target.end(handle, valid=False, last=False) is None
    assert copying(target, handle)
    check_destination(target)
    assert target.end(handle, valid=True, last=True) == Gone(handle, None)


@pytest.mark.parametrize("what", ["withdraw", "peer_lost", "forget", "refuse"])
def test_whatever_happens_a_copy_in_flight_is_waited_for(target, what) -> None:
    target.expect(9, None)
    handle = offered(target.on_offer("e0", picture(1), 0.0))
    begin(target, handle, 0, 1)
    if what == "withdraw":
        assert target.on_withdraw("e0", Withdraw(3, 1)) == []
    elif what == "peer_lost":
        assert target.peer_lost("e0") == []
    elif what == "forget":
        assert target.end_request(9) == [("e0", Refuse(3, 1))]
    else:
        assert target.refuse(handle) == ("e0", Refuse(3, 1))
    check_destination(target)
    assert copying(target, handle) and target.num_live == 1
    assert begin(target, handle, 1, 1) is None  # no further part
    assert target.refuse(handle) is None
    assert target.renewals(100.0) == []
    assert target.end(handle, valid=True, last=True) == Gone(handle, 0)
    assert target.num_live == 0 and target.invalid == (what in ("withdraw", "peer_lost"))
    check_destination(target)


def test_a_cancelled_copy_outlives_its_source(target) -> None:
    target.expect(9, None)
    handle = offered(target.on_offer("e0", picture(1), 0.0))
    begin(target, handle, 0, 2)
    target.peer_lost("e0")
    target.peer_up("e0", 8)
    assert target.on_withdraw("e0", Withdraw(8, 1)) == []
    assert offered(target.on_offer("e0", picture(1, incarnation=8), 0.0)) != handle
    assert target.end(handle, valid=False, last=True) == Gone(handle, 0)
    assert [m for m in target.renewals(0.0) if isinstance(m[1], Refuse)] == []  # nobody holds it any more
    check_destination(target)


def test_what_is_not_offered_cannot_be_copied(target) -> None:
    target.expect(9, "p0")
    handle = offered(target.on_offer("p0", kv(1), 0.0))
    for first, count in [(0, 3), (2, 1), (-1, 2)]:
        with pytest.raises(AssertionError, match="has 2 so far"):
            begin(target, handle, first, count)
    begin(target, handle, 0, 1)
    with pytest.raises(AssertionError, match="goes on at block 1"):
        begin(target, handle, 0, 1)


@pytest.mark.parametrize("end,count", [(None, 2), (END, 1)])
def test_nothing_is_acknowledged_before_its_end(target, end, count) -> None:
    target.expect(9, "p0")
    handle = offered(target.on_offer("p0", kv(1, end=end), 0.0))
    begin(target, handle, 0, count)
    with pytest.raises(AssertionError, match="to its end"):
        target.end(handle, valid=True, last=True)


def test_a_copy_that_nobody_began_cannot_end(target) -> None:
    target.expect(9, None)
    handle = offered(target.on_offer("e0", picture(1), 0.0))
    with pytest.raises(AssertionError, match="no copy"):
        target.end(handle, valid=True, last=True)


# ---- renewals


def test_renewals_are_one_message_for_each_peer_and_period(target) -> None:
    target.expect(9, "p0")
    target.on_offer("e0", picture(1), 0.0)
    target.on_offer("e0", picture(2, index=1), 0.0)
    target.on_offer("e0", picture(3, request_id=77), 0.0)  # unknown: not renewed
    target.on_offer("p0", kv(6), 0.0)
    target.on_more("p0", More(4, 6, 1, (7,)))
    expected = [("e0", Renew(3, (1, 2), (0, 0))), ("p0", Renew(4, (6,), (1,)))]
    assert target.renewals(0.0) == expected
    assert target.renewals(1.9) == [] and target.next_deadline() == 2.0
    assert target.renewals(2.0) == expected


def test_what_is_being_copied_is_renewed_too(target) -> None:
    target.expect(9, "p0")
    handle = offered(target.on_offer("p0", kv(1), 0.0))
    begin(target, handle, 0, 1)
    assert target.renewals(0.0) == [("p0", Renew(4, (1,), (0,)))]
    target.end(handle, valid=True, last=False)
    assert target.renewals(2.0) == [("p0", Renew(4, (1,), (0,)))]


def test_with_nothing_wanted_there_is_no_deadline(target) -> None:
    assert target.next_deadline() == math.inf
    target.expect(9, None)
    handle = offered(target.on_offer("e0", picture(1), 0.0))
    assert target.next_deadline() < 0.0  # the first renewal is due at once
    target.refuse(handle)
    assert target.next_deadline() == math.inf


def test_a_lost_peer_is_sent_nothing(target) -> None:
    target.expect(9, None)
    handle = offered(target.on_offer("e0", picture(1), 0.0))
    begin(target, handle, 0, 2)
    target.end(handle, valid=False, last=True)
    target.peer_lost("e0")
    assert target.renewals(0.0) == []


def test_expecting_twice_is_a_bug(target) -> None:
    target.expect(9, None)
    with pytest.raises(AssertionError, match="expected already"):
        target.expect(9, "p0")


def test_check_sees_tables_that_disagree(target) -> None:
    target.expect(9, None)
    target.on_offer("e0", picture(1), 0.0)
    target._records.sources.clear()
    with pytest.raises(AssertionError, match="not wanted"):
        check_destination(target)
