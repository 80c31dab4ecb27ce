"""Images whose features come from elsewhere: asked for, pulled, consumed, lost."""

from __future__ import annotations

from itertools import permutations

import pytest

from hydra_engine.config import ClusterConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import NeedImages
from hydra_engine.core.outputs import FinishReason
from hydra_engine.scheduler.handover.events import UnneededEvent
from hydra_engine.scheduler.handover.pulls import MAX_IMAGE_PULLS
from tests.scheduler.handover.handover import (
    CACHED,
    ENCODED,
    ENCODING,
    WAITING,
    A,
    B,
    D,
    P,
    Part,
)
from tests.scheduler.sim import Img, make_request


def test_remote_images_are_asked_for_pulled_and_consumed() -> None:
    s = Part(P | D, token_budget=64)
    s.put(make_request(1, 3, A, 2, B, 1), external_images=frozenset({0, 1}))
    assert s.told() == [NeedImages(RequestId(1), (0, 1))] and s.plan_vision() is None and not s.pulls()
    s.offer_image(1, 1, 71)
    s.offer_image(1, 0, 70)
    plan, later = s.pulls()
    assert (plan.offer, plan.image_index, plan.first_block, plan.last, len(plan.block_ids)) == (70, 0, 0, True, 1)
    assert (later.offer, later.image_index) == (71, 1) and s.state(1).images == [ENCODING, ENCODING]
    s.pulled(plan, took_s=0.5)
    assert s.language() == [(1, 9)], "up to the image that is still missing"
    s.pulled(later)
    s.finish_all()
    assert not s.told(), "what was pulled is acknowledged by whoever copied it"
    pulls = [
        (span.lane, span.end_s - span.start_s, span.tokens) for span in s.finished[1].spans if "pull" in span.stage
    ]
    assert pulls == [("transfer", 0.5, 4), ("transfer", 0.0, 8)]


def test_without_prefetching_features_are_fetched_when_nothing_goes_before() -> None:
    s = Part(P | D, token_budget=8, max_num_seqs=8, cluster=ClusterConfig(prefetch_features=False))
    s.put(make_request(1, 16, max_new=1), arrival_index=1)
    for number, image in ((2, A), (3, B)):
        s.put(make_request(number, image, 1, max_new=1), arrival_index=number, external_images=frozenset({0}))
        s.offer_image(number, 0, number)
    assert not s.pulls(), "the first request computes before them"
    assert [s.language(), s.language()] == [[(1, 8)], [(1, 8)]]
    plan = s.pull()
    assert plan.request_id == 2
    s.pulled(plan)
    assert not s.pulls(), "it waits for its start now"
    assert s.language() == [(2, 5)]
    s.pulled(s.pull())
    s.finish_all()
    assert len(s.finished) == 3


def test_an_invalid_pull_waits_for_the_next_offer_and_asks_nobody() -> None:
    s = Part(P | D)
    s.put(make_request(1, A, 1), external_images=frozenset({0}))
    s.told()
    s.offer_image(1, 0, 1)
    s.pulled(s.pull(), valid=False)
    assert s.state(1).images == [WAITING] and not s.told() and not s.pulls()
    assert s.scheduler.ledger().image_blocks_held == 0
    s.offer_image(1, 0, 2)
    s.connector.pulls.images.on_offer_gone(2)
    assert not s.pulls()
    s.offer_image(1, 0, 3)
    plan = s.pull()
    s.offer_image(1, 0, 4)  # the one that is copied is gone, as will be seen
    s.pulled(plan, valid=False)
    s.pulled(s.pull())
    s.finish_all()


def test_of_two_offers_for_an_image_none_is_refused_before_the_features_are_here() -> None:
    """The later offer may have expired already, and the message that says so comes later still."""
    s = Part(P | D)
    s.put(make_request(1, A, 1), external_images=frozenset({0}))
    s.told()
    for offer in (1, 2, 3):
        s.offer_image(1, 0, offer)
    s.connector.pulls.images.on_offer_gone(2)
    s.pulled(s.pull(), valid=False)
    assert not s.told()
    plan = s.pull()
    s.offer_image(1, 0, 4)
    s.pulled(plan)
    assert plan.offer == 1 and s.told() == [UnneededEvent(4)]
    s.finish_all()


def test_two_requests_share_one_pull_and_the_second_offer_is_not_needed() -> None:
    s = Part(P | D, token_budget=64)
    s.put(make_request(1, 3, A, 1), external_images=frozenset({0}))
    s.put(make_request(2, 5, A, 1), external_images=frozenset({0}))
    assert len(s.told()) == 2
    s.offer_image(2, 0, 22)
    s.offer_image(1, 0, 11)
    plan = s.pull()
    assert plan.offer == 11
    s.pulled(plan)
    assert s.told() == [UnneededEvent(22)]
    s.finish_all()


def test_an_offer_for_nobody_or_for_what_is_there_is_not_needed() -> None:
    s = Part(P | D, token_budget=64)
    s.offer_image(9, 0, 1)
    s.put(make_request(1, A, 1), external_images=frozenset({0}))
    s.put(make_request(2, A, 1), external_images=frozenset({0}))
    s.offer_image(1, 0, 2)
    s.pulled(s.pull())
    s.offer_image(2, 0, 3)
    assert [event for event in s.told() if isinstance(event, UnneededEvent)] == [UnneededEvent(1), UnneededEvent(3)]
    s.offer_image(1, 0, 4)
    s.abort(1)
    assert s.told() == [UnneededEvent(4)]
    s.finish_all()


def test_offers_of_a_request_that_ends_are_let_go_but_not_the_one_that_is_copied() -> None:
    s = Part(P | D)
    s.put(make_request(1, A, B, 1), external_images=frozenset({0, 1}))
    s.told()
    s.offer_image(1, 0, 1)
    plan = s.pull()
    s.offer_image(1, 1, 2)
    assert not s.abort(1) and s.told() == [UnneededEvent(2)]
    s.pulled(plan)
    assert s.finished[1].reason == FinishReason.ABORT and not s.told()
    assert s.scheduler.ledger().image_blocks_held == 0


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
@pytest.mark.parametrize("lost", [None, 0, 2])
def test_copies_of_one_requests_images_end_in_any_order(order: tuple[int, ...], lost: int | None) -> None:
    """An invalid copy waits for its next offer; the others are not touched."""
    s = Part(P | D, token_budget=64)
    s.put(make_request(1, 3, A, 2, B, 1, Img(3), 1), external_images=frozenset({0, 1, 2}))
    s.told()
    for index in (2, 0, 1):
        s.offer_image(1, index, 10 + index)
    plans = s.pulls()
    assert [plan.image_index for plan in plans] == [0, 1, 2]
    for index in order:
        s.pulled(plans[index], valid=index != lost)
    assert s.state(1).images == [WAITING if index == lost else ENCODED for index in range(3)]
    if lost is not None:
        s.offer_image(1, lost, 20)
        s.pulled(s.pull())
    s.finish_all()
    assert not s.told() and s.scheduler.ledger().image_blocks_held == 0


def test_no_more_images_of_a_request_are_copied_at_once_than_is_allowed() -> None:
    """Images of other requests are copied beside them, and the next one begins as soon as one has ended, whichever it
    was."""
    s = Part(P | D, token_budget=64)
    count = MAX_IMAGE_PULLS + 2
    s.put(make_request(1, *(Img(4, name=str(i)) for i in range(count)), 1), external_images=frozenset(range(count)))
    s.put(make_request(2, 3, A, 1), external_images=frozenset({0}))
    for index in range(count):
        s.offer_image(1, index, index)
    s.offer_image(2, 0, 99)
    plans = s.pulls()
    assert [plan.offer for plan in plans] == [*range(MAX_IMAGE_PULLS), 99] and not s.pulls()
    s.pulled(plans[2])
    assert s.pull().image_index == MAX_IMAGE_PULLS


def test_a_request_that_ends_waits_for_every_copy_of_its_images() -> None:
    s = Part(P | D)
    s.put(make_request(1, A, B, 1), external_images=frozenset({0, 1}))
    s.offer_image(1, 0, 1)
    s.offer_image(1, 1, 2)
    first, second = s.pulls()
    assert not s.abort(1)
    s.pulled(second)
    assert 1 not in s.finished and s.scheduler.ledger().image_blocks_held > 0
    s.pulled(first, valid=False)
    assert s.finished[1].reason == FinishReason.ABORT and s.scheduler.ledger().image_blocks_held == 0


def test_room_is_kept_for_an_earlier_image_and_taken_from_later_ones() -> None:
    s = Part(P | D, image_blocks=2)
    s.put(make_request(2, B, 1), arrival_index=2, external_images=frozenset({0}))
    s.offer_image(2, 0, 2)
    s.pulled(s.pull())
    s.put(make_request(3, A, 1), arrival_index=3, external_images=frozenset({0}))
    s.put(make_request(1, Img(8), 1), arrival_index=1, external_images=frozenset({0}))
    s.told()
    s.offer_image(3, 0, 3)
    assert not s.pulls(), "the oldest may need the room"
    s.offer_image(1, 0, 1)
    plan = s.pull()
    assert plan.request_id == 1 and s.state(2).images == [WAITING]
    assert s.told() == [NeedImages(RequestId(2), (0,))]
    s.put(make_request(4, Img(8), 1), arrival_index=0, external_images=frozenset({0}))
    s.offer_image(4, 0, 4)
    assert not s.pulls(), "a copy in flight is not cut"
    s.pulled(plan)
    assert s.pull().request_id == 4


def test_features_are_asked_for_again_when_kv_that_was_counted_on_is_gone() -> None:
    s = Part(P | D, kv_blocks=6, image_blocks=1, token_budget=64)
    for number, parts, offer in ((1, (A, 5), 1), (2, (Img(4), 10), 2)):
        s.put(make_request(number, *parts, max_new=8, source=0), external_images=frozenset({0}))
        s.offer_image(number, 0, offer)
        if number == 1:
            s.pulled(s.pull())
            s.finish_all()
    s.put(make_request(3, A, 5, max_new=3, source=0), external_images=frozenset({0}))
    assert s.state(3).images == [CACHED]
    s.told()
    s.pulled(s.pull())
    while 2 not in s.finished:
        s.language()
        assert not s.told() or s.state(3).images == [WAITING]
    s.language()
    assert s.state(3).images == [WAITING] and s.state(3) in s.connector._parked.unfetched
    s.offer_image(3, 0, 3)
    s.pulled(s.pull())
    s.finish_all()
