"""KV that moves on to another instance, and KV that arrives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.config import ClusterConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import NeedDecoder, NeedImages, Tokens
from hydra_engine.core.outputs import Departure
from hydra_engine.scheduler.handover.connector import part_end
from hydra_engine.scheduler.handover.events import KvEvent, KvGoneEvent, UnneededEvent
from hydra_engine.transfer.plans import KvEnd
from tests.examples import examples
from tests.scheduler.audit import check
from tests.scheduler.handover.handover import (
    CONSUMED,
    A,
    D,
    P,
    Part,
    arrive,
    end_of,
)
from tests.scheduler.sim import expected_tokens, make_request

# ---- KV that moves on


def test_kv_is_offered_chunk_by_chunk_and_the_request_stays_until_it_is_fetched() -> None:
    s = Part(P, token_budget=6)
    request = s.put(make_request(1, 14, max_new=5))
    plan = s.plan_language()
    assert s.told() == [NeedDecoder(RequestId(1))], "it is asked for before the first blocks are there"
    s.end_language(plan, took_s=1.0)
    (event,) = s.told()
    assert len(event.block_ids) == 1 and event.end is None
    s.language(took_s=1.0)
    (event,) = s.told()
    assert len(event.block_ids) == 2
    plan = s.plan_language()
    events = s.end_language(plan, took_s=1.0)
    assert isinstance(events[0], Tokens) and s.tokens[1] == expected_tokens(request)[:1]
    (event,) = s.told()
    assert len(event.block_ids) == 1 and event.end == KvEnd(14, s.tokens[1][0], 3.0, 3.0)
    assert s.plan_language() is None and s.scheduler.status().num_handing_over == 1
    s.now = 5.0
    s._collect(s.connector.offers.release_kv(RequestId(1), s.now))
    assert s.finished[1].reason == Departure.MOVED and s.finished[1].num_generated == 1
    assert [
        (span.start_s, span.end_s, span.tokens) for span in s.finished[1].spans if span.stage.startswith("offered")
    ] == [(3.0, 5.0, 14)]
    assert not s.told() and s.scheduler.ledger().kv_blocks_held == 0


def test_a_prompt_that_moves_on_is_computed_in_parts_of_which_each_can_be_copied_behind_the_next() -> None:
    s = Part(P | D, token_budget=128, handover_tokens=10)
    s.put(make_request(1, 100, max_new=5), stages=P)
    s.put(make_request(2, 30, max_new=2))
    assert s.language() == [(1, 52), (2, 30)], "others have what is left of the step"
    assert s.language() == [(2, 1), (1, 24)] and s.language() == [(1, 12)] and s.language() == [(1, 12)]
    offered = [event for event in s.told() if isinstance(event, KvEvent)]
    assert [len(event.block_ids) for event in offered] == [13, 6, 3, 3] and offered[-1].end is not None


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 5000), st.integers(1, 300), st.sampled_from([1, 4, 16]))
def test_parts_end_behind_blocks_and_are_not_too_small(num_tokens: int, least: int, block_size: int) -> None:
    ends = [0]
    while ends[-1] < num_tokens:
        ends.append(part_end(ends[-1], num_tokens, least, block_size))
    assert ends[-1] == num_tokens and all(end % block_size == 0 for end in ends[:-1])
    sizes = [end - start for start, end in pairwise(ends)]
    assert all(size >= least for size in sizes[:-1]) and sizes[-1] > min(num_tokens, least) - block_size
    assert all(after < before + block_size for before, after in pairwise(sizes))


def test_without_early_kv_all_of_it_is_offered_when_it_is_computed() -> None:
    s = Part(P, token_budget=8, cluster=ClusterConfig(early_kv=False))
    s.put(make_request(1, 18))
    for _ in range(2):
        s.language()
        assert not [event for event in s.told() if isinstance(event, KvEvent)]
    s.language()
    (event,) = [event for event in s.told() if isinstance(event, KvEvent)]
    assert isinstance(event, KvEvent) and event.end is not None
    assert (len(event.block_ids), event.end.num_tokens) == (5, 18)
    s.connector.offers.release_kv(RequestId(1), 1.0)
    assert not s.scheduler.has_work


def test_blocks_of_the_prefix_cache_are_offered_with_the_first_chunk() -> None:
    s = Part(P, token_budget=64)
    s.put(make_request(1, 13, source=0))
    s.language()
    s.told()
    s._collect(s.connector.offers.release_kv(RequestId(1), 0.0))
    s.put(make_request(2, 15, source=0))
    assert s.language() == [(2, 3)]
    _, event = s.told()
    assert len(event.block_ids) == 4 and event.end is not None


@pytest.mark.parametrize("how", ["stop", "length", "abort", "error"])
def test_a_request_that_ends_where_it_is_prefilled_takes_its_offer_back(how: str) -> None:
    s = Part(P, token_budget=8)
    eos = range(1000) if how == "stop" else ()
    s.put(make_request(1, 12, eos=eos, max_new=1 if how == "length" else 5))
    s.language()
    s.told()
    if how == "abort":
        s.abort(1)
    else:
        s.language(bad=(1,) if how == "error" else ())
    assert s.told() == [KvGoneEvent(RequestId(1))] and s.finished[1].reason.value == how
    assert not s.scheduler.has_work


def test_what_gives_way_before_an_image_takes_its_offer_back_and_offers_again() -> None:
    s = Part(P, kv_blocks=5, token_budget=32)
    s.put(make_request(1, 8, A, 1), arrival_index=5, external_images=frozenset({0}))
    assert s.language() == [(1, 8)]
    s.told()
    s.put(make_request(2, 12), arrival_index=1)
    assert s.language() == [(2, 12)]
    assert s.told()[0] == KvGoneEvent(RequestId(1))
    s.offer_image(1, 0, 1)
    s.pulled(s.pull())
    assert not s.language(), "what is handed over gives way to nobody"
    s._collect(s.connector.offers.release_kv(RequestId(2), 0.0))
    assert s.language() == [(1, 13)]
    assert s.finished[2].reason == Departure.MOVED and s.state(1).num_preemptions == 1


def test_a_prefill_that_moves_on_takes_all_its_blocks_at_once() -> None:
    """A younger one could otherwise get between them, and wait at its target for what this one holds there."""
    s = Part(P, kv_blocks=6, token_budget=4)
    s.put(make_request(1, 20, max_new=30))
    s.language()
    assert s.scheduler.ledger().kv_blocks_held == 5


def test_a_lease_that_is_over_ends_the_part() -> None:
    s = Part(P, token_budget=64)
    s.put(make_request(1, 9))
    s.language()
    s._collect(s.connector.offers.withdraw(RequestId(1), 2.0, "lease over"))
    assert s.finished[1].reason == Departure.WITHDRAWN
    assert s.told()[-1] == KvGoneEvent(RequestId(1))
    assert not s.connector.offers.withdraw(RequestId(1), 2.0, "lease over") and not s.connector.offers.release_kv(
        RequestId(1), 2.0
    )


# ---- KV that arrives


def test_kv_is_pulled_behind_the_prefill_and_the_request_goes_on_from_its_first_token() -> None:
    s = Part(D, image_blocks=0)
    request = s.put(make_request(1, 9, A, 2, max_new=5), external_kv=True)
    assert s.plan_language() is None and not s.pulls() and s.scheduler.status().num_arriving == 1
    s.offer_kv(1, 7, 2)
    first = s.pull()
    assert (first.first_block, len(first.block_ids), first.last) == (0, 2, False)
    assert s.scheduler.ledger().kv_blocks_held == 4, "room for the prompt and a token more"
    s.offer_kv(1, 7, 4, end_of(request))
    assert not s.pulls(), "one copy at a time"
    s.pulled(first, took_s=1.0)
    second = s.pull()
    assert (second.first_block, len(second.block_ids), second.last) == (2, 2, True)
    assert not s.pulled(second) and s.state(1).images == [CONSUMED]
    assert s.scheduler.status().num_arriving == 0
    s.tokens[1] = expected_tokens(request)[:1]
    assert s.language() == [(1, 1)]
    s.finish_all()
    assert s.finished[1].num_generated == 5 and not s.told()
    spans = [(span.lane, span.end_s - span.start_s) for span in s.finished[1].spans if span.stage == "pull_kv"]
    assert spans == [("transfer", 1.0), ("transfer", 0.0)]


def test_cached_blocks_are_not_pulled_and_others_find_pulled_ones_only_when_all_are_there() -> None:
    s = Part(D)
    one = s.put(make_request(1, 13, source=0), external_kv=True)
    s.offer_kv(1, 1, 3)
    s.pulled(s.pull())
    two = s.put(make_request(2, 13, source=0), external_kv=True)
    s.offer_kv(2, 2, 4, end_of(two))
    plan = s.pull()
    assert plan.first_block == 0, "nobody has proved yet what the first one holds"
    s.offer_kv(1, 1, 4, end_of(one))
    s.pulled(s.pull())
    s.put(make_request(3, 13, source=0), external_kv=True)
    s.offer_kv(3, 3, 4, end_of(s.requests[3]))
    late = s.pull()
    assert (late.first_block, len(late.block_ids)) == (3, 1)
    s.pulled(plan)
    s.pulled(late)
    for number in (1, 2, 3):
        s.tokens[number] = expected_tokens(s.requests[number])[:1]
    s.finish_all()
    assert s.finished[3].cached_tokens == 12


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_offer_that_is_gone_frees_the_blocks_as_soon_as_nothing_is_copied_into_them(in_flight: bool) -> None:
    s = Part(D)
    s.put(make_request(1, 13), external_kv=True)
    s.offer_kv(1, 1, 2)
    plan = s.pull()
    if not in_flight:
        s.pulled(plan)
    s.connector.pulls.on_kv_offer_gone(1)
    check(s.scheduler)
    assert s.scheduler.ledger().kv_blocks_held == 4 * in_flight
    if in_flight:
        s.pulled(plan, valid=False)
    assert s.scheduler.ledger().kv_blocks_held == 0 and s.scheduler.status().num_arriving == 1
    arrive(s, 1, 2)
    s.finish_all()
    assert s.finished[1].num_preemptions == 0


def test_an_invalid_copy_of_kv_begins_anew_with_the_next_offer() -> None:
    s = Part(D)
    s.put(make_request(1, 13), external_kv=True)
    s.offer_kv(1, 1, 4, end_of(s.requests[1]))
    s.pulled(s.pull(), valid=False)
    assert not s.pulls() and s.scheduler.ledger().kv_blocks_held == 0
    arrive(s, 1, 2)
    s.finish_all()


def test_an_offer_of_kv_for_nobody_is_not_needed_and_neither_is_that_of_a_request_that_ends() -> None:
    s = Part(D)
    s.offer_kv(9, 1, 1)
    assert s.told() == [UnneededEvent(1)]
    s.put(make_request(1, 13), external_kv=True)
    s.offer_kv(1, 2, 1)
    s.abort(1)
    assert s.told() == [UnneededEvent(2)]
    s.put(make_request(2, 13), external_kv=True)
    s.offer_kv(2, 3, 1)
    plan = s.pull()
    assert not s.abort(2) and not s.told()
    s.pulled(plan)
    assert s.told() == [UnneededEvent(3)] and not s.scheduler.has_work


def test_an_older_arrival_takes_the_room_of_one_that_is_still_pulled() -> None:
    s = Part(D, kv_blocks=6)
    s.put(make_request(5, 17, max_new=4), arrival_index=5, external_kv=True)
    s.offer_kv(5, 5, 2)
    plan = s.pull()
    s.put(make_request(1, 12, max_new=4), arrival_index=1, external_kv=True)
    s.offer_kv(1, 1, 3, end_of(s.requests[1]))
    assert not s.pulls(), "between two language steps nobody gives way"
    assert s.plan_language() is None and s.scheduler.ledger().kv_blocks_held == 5, "the copy is not cut"
    s.pulled(plan)
    assert s.state(5).num_preemptions == 1 and s.scheduler.ledger().kv_blocks_held == 0
    plan = s.pull()
    assert plan.request_id == 1 and plan.last
    s.pulled(plan)
    s.tokens[1] = expected_tokens(s.requests[1])[:1]
    while 1 not in s.finished:
        s.language()
    again = s.pull()
    assert again.offer == 5 and again.first_block == 0, "pulled again from the start"
    assert s.scheduler.ledger().kv_blocks_held == 6, "with room for all that it can need"


def test_what_is_computed_to_its_end_takes_the_room_of_older_ones_that_are_not() -> None:
    """A request with all its KV preempts older ones without: it would hold blocks that others need where it was
    computed."""
    s = Part(D, kv_blocks=6)
    s.put(make_request(1, 17, max_new=4), arrival_index=1, external_kv=True)
    s.offer_kv(1, 1, 2)
    s.pulled(s.pull())
    s.put(make_request(5, 12, max_new=4), arrival_index=5, external_kv=True)
    s.offer_kv(5, 5, 2)
    assert s.plan_language() is None and not s.pulls() and not s.state(1).num_preemptions, "both are on their way"
    s.offer_kv(5, 5, 3, end_of(s.requests[5]))
    assert s.plan_language() is None and s.state(1).num_preemptions == 1
    assert s.pull().request_id == 5


def test_what_is_computed_to_its_end_goes_before_a_prefill_that_stands_before_an_image() -> None:
    s = Part(P | D, kv_blocks=6, token_budget=32)
    s.put(make_request(1, 16, A, 1, max_new=2), arrival_index=1, external_images=frozenset({0}))
    assert s.language() == [(1, 16)]
    s.put(make_request(5, 12, max_new=4), arrival_index=5, external_kv=True)
    s.offer_kv(5, 5, 3, end_of(s.requests[5]))
    assert s.plan_language() is None and s.state(1).num_preemptions == 1
    assert s.pull().request_id == 5


def test_an_older_prefill_takes_no_room_of_what_goes_on_in_the_same_step() -> None:
    """Running prefills come first in a step whatever their age, so this one has its row when the older one lacks
    blocks."""
    s = Part(P | D, kv_blocks=6, token_budget=12)
    s.put(make_request(1, 23, max_new=1), arrival_index=1)
    assert s.language() == [(1, 12)]
    s.put(make_request(2, 7, max_new=2), arrival_index=2, external_kv=True)
    arrive(s, 2, 2)
    assert s.language() == [(2, 1)] and 2 in s.finished
    assert s.language() == [(1, 11)] and s.finished[1].num_preemptions == 0


def test_a_decode_without_prefill_returns_when_it_must_give_way() -> None:
    s = Part(D, kv_blocks=8)
    for number in (1, 2):
        s.put(make_request(number, 12, max_new=16), arrival_index=number, external_kv=True)
        arrive(s, number, number)
    while not s.finished:
        s.language()
        s.told()
    assert s.finished[2].reason == Departure.RETURNED and s.finished[2].num_preemptions == 1
    assert s.finished[2].num_generated == len(s.tokens[2])
    while 1 not in s.finished:
        s.language()
    assert s.tokens[1] == expected_tokens(s.requests[1])


def test_a_decode_with_prefill_in_its_part_is_computed_again_here() -> None:
    s = Part(P | D, kv_blocks=9, token_budget=32)
    for number in (1, 2):
        s.put(
            make_request(number, 8, A, max_new=20),
            arrival_index=number,
            external_kv=True,
            external_images=frozenset({0}),
        )
        arrive(s, number, number)
    assert not s.told()
    while s.state(2) not in s.scheduler._requests.encoding:
        s.language()
    assert s.told() == [NeedImages(RequestId(2), (0,))]
    s.offer_image(2, 0, 9)
    s.pulled(s.pull())
    s.finish_all()
    assert s.finished[2].num_preemptions == 1


def test_arrivals_start_by_urgency_and_none_passes_another_too_often() -> None:
    s = Part(D, kv_blocks=8, max_bypass=2, max_num_seqs=8)
    s.put(make_request(1, 12, max_new=16), arrival_index=1, external_kv=True)
    arrive(s, 1, 1)
    s.put(make_request(2, 20, max_new=4), arrival_index=2, external_kv=True)
    s.offer_kv(2, 2, 5, end_of(s.requests[2]))
    order = []
    for number in range(3, 7):
        s.put(make_request(number, 3, max_new=1 + 1), arrival_index=number, external_kv=True)
        s.offer_kv(number, number, 1, end_of(s.requests[number]))
        for plan in s.pulls():
            order.append(int(plan.request_id))
            s.pulled(plan)
            s.tokens[plan.request_id] = expected_tokens(s.requests[plan.request_id])[:1]
        while number in order and number not in s.finished:
            s.language()
    assert order == [3, 4], "then room is saved for the second"
