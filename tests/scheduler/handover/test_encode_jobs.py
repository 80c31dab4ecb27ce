"""Jobs that encode for others: offers, release, order."""

from __future__ import annotations

import pytest

from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import Departure, FinishReason
from hydra_engine.scheduler.handover.events import FeaturesEvent, FeaturesGoneEvent
from tests.scheduler.handover.handover import (
    A,
    B,
    E,
    P,
    Part,
)
from tests.scheduler.sim import Img, make_request


def test_an_encode_job_offers_each_image_and_ends_when_all_are_released() -> None:
    s = Part(E, kv_blocks=0)
    s.job(1, A, B)
    assert s.scheduler.plan_language(0.0) is None and s.scheduler.status().num_encoding == 1
    assert s.vision() == [(1, 0), (1, 1)]
    first, second = s.told()
    assert (first.image_index, len(first.block_ids)) == (0, 1)
    assert (second.image_index, len(second.block_ids)) == (1, 2)
    s.now = 2.0
    assert not s.connector.offers.release_features(RequestId(1), 1, s.now)
    assert not s.connector.offers.release_features(RequestId(1), 1, s.now), "once is enough"
    assert s.scheduler.ledger().image_blocks_held == 1
    s.now = 3.0
    s._collect(s.connector.offers.release_features(RequestId(1), 0, s.now))
    assert s.finished[1].reason == Departure.MOVED and not s.told()
    offered = [
        (span.start_s, span.end_s, span.tokens) for span in s.finished[1].spans if span.stage.startswith("offered")
    ]
    assert offered == [(0.0, 2.0, 8), (0.0, 3.0, 4)]
    assert not s.scheduler.has_work and not s.scheduler.ledger().holders


def test_a_job_offers_what_is_cached_already_and_what_another_one_encodes() -> None:
    s = Part(E, kv_blocks=0)
    s.job(1, A)
    s.job(2, A)
    assert s.vision() == [(1, 0)]
    assert [event.request_id for event in s.told()] == [1, 2]
    s.job(3, A)
    assert isinstance(s.told()[0], FeaturesEvent) and s.plan_vision() is None
    for number in (1, 2, 3):
        s._collect(s.connector.offers.release_features(RequestId(number), 0, 0.0))
    s.job(4, A)
    assert isinstance(s.told()[0], FeaturesEvent), "they stay until their room is needed"
    assert s.finished[2].cached_images == 1


def test_features_that_give_way_are_encoded_and_offered_again() -> None:
    s = Part(E, kv_blocks=0, image_blocks=2)
    s.job(1, B, arrival_index=5)
    s.vision()
    s.told()
    s.job(2, B, Img(4), arrival_index=6)
    s.job(3, Img(8), arrival_index=1)
    assert s.vision() == [(3, 0)]
    shared, *gone, offered = s.told()
    assert gone == [FeaturesGoneEvent(RequestId(1), 0), FeaturesGoneEvent(RequestId(2), 0)]
    assert (shared.request_id, offered.request_id) == (2, 3)
    assert s.plan_vision() is None
    s._collect(s.connector.offers.release_features(RequestId(3), 0, 0.0))
    assert s.vision() == [(1, 0)] and [event.request_id for event in s.told()] == [1, 2]


@pytest.mark.parametrize("how", ["abort", "withdraw"])
def test_a_job_that_ends_takes_back_what_it_has_offered(how: str) -> None:
    s = Part(E, kv_blocks=0, image_budget=4)
    s.job(1, A, B)
    s.vision()
    s.told()
    plan = s.plan_vision()
    events = (
        s.scheduler.abort(1, 1.0) if how == "abort" else s.connector.offers.withdraw(RequestId(1), 1.0, "lease over")
    )
    assert not events, "a plan in flight names it"
    assert s.told() == [FeaturesGoneEvent(RequestId(1), 0)]
    s.end_vision(plan)
    assert s.finished[1].reason == (FinishReason.ABORT if how == "abort" else Departure.WITHDRAWN)
    assert not s.told() and not s.scheduler.has_work
    if how == "withdraw":
        assert [span.cause for span in s.finished[1].spans if span.stage.startswith("offered")] == ["lease over"]


def test_an_image_that_fails_ends_its_job() -> None:
    s = Part(E, kv_blocks=0)
    s.job(1, A)
    s.vision(bad=(1,))
    assert s.finished[1].reason == FinishReason.ERROR and not s.told()


def test_jobs_leave_room_for_the_largest_image_of_a_request_that_is_here() -> None:
    s = Part(E | P, image_blocks=5, image_budget=64)
    for number in (1, 2, 3):
        s.job(number, Img(8), arrival_index=number)
    s.put(make_request(4, Img(8), 1), arrival_index=4)
    assert s.vision() == [(1, 0), (4, 0)], "two blocks for it, so three for jobs"
    s.language()
    s.job(5, Img(4), arrival_index=5)
    assert s.vision() == [(2, 0)], "nobody here waits for an image any more"


def test_a_job_too_large_for_that_goes_by_age_alone() -> None:
    s = Part(E | P, image_blocks=3, image_budget=64)
    s.job(1, Img(12), arrival_index=1)
    s.put(make_request(2, Img(8), 1), arrival_index=2)
    assert s.vision() == [(1, 0)]


def test_images_of_one_request_are_encoded_in_the_order_of_its_prompt_whatever_job_they_are_in() -> None:
    """The target takes the first one first: in a cache for one image, the later one has to give way."""
    s = Part(E, kv_blocks=0, image_blocks=2)
    s.job(1, Img(8), arrival_index=3, at=20)
    assert s.vision() == [(1, 0)]
    s.job(2, Img(8), arrival_index=3, at=30)
    s.job(3, Img(8), arrival_index=3, at=10)
    assert s.vision() == [(3, 0)]
    assert FeaturesGoneEvent(RequestId(1), 0) in s.told()
