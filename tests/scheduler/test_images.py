"""Features of equal pictures: encoded once, shared while they are there, whoever comes, fails or leaves."""

from __future__ import annotations

import itertools

import pytest

from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.state import ImageProgress
from tests.scheduler.sim import Img
from tests.scheduler.stepper import Stepper

WAITING, ENCODING, ENCODED = ImageProgress.WAITING, ImageProgress.ENCODING, ImageProgress.ENCODED
CACHED = ImageProgress.CACHED
A, B = Img(4, name="a"), Img(8, name="b")


def test_a_picture_is_encoded_once_for_all_who_want_it_at_the_same_time() -> None:
    s = Stepper(token_budget=64)
    s.add(1, 3, A, 2)
    s.add(2, A, 5, A, 1)
    plan = s.plan_vision()
    assert [(item.request_id, item.image_index) for item in plan.items] == [(1, 0)]
    assert s.state(2).images == [ENCODING, ENCODING]
    s.add(3, 7, A, 1)
    assert s.state(3).images == [ENCODING] and s.plan_vision() is None
    s.end_vision(plan)
    assert s.state(3).images == [ENCODED] and s.scheduler.ledger().image_blocks_held == 1
    s.finish_all()
    assert s.encodes == [(1, 0)] and [s.hit(n)[1] for n in (1, 2, 3)] == [0, 2, 1]


def test_sharing_reaches_over_pictures_that_do_not_fit_into_the_step() -> None:
    s = Stepper(image_budget=4)
    s.add(1, A, 1)
    for number in range(2, 30):
        s.add(number, Img(4), 1)
    s.add(30, A, 1)
    plan = s.plan_vision()
    assert s.state(30).images == [ENCODING]
    s.end_vision(plan)
    assert s.state(30).images == [ENCODED]
    s.finish_all()


def test_features_stay_for_later_requests_until_their_room_is_needed() -> None:
    s = Stepper(token_budget=64, image_blocks=3)
    s.run(1, B, 1)
    s.run(2, 5, B, 1, source=2)
    assert s.encodes == [(1, 0)] and s.scheduler.ledger().image_blocks_held == 0
    s.run(3, Img(4), 1)
    s.run(4, 6, B, 1, source=3)
    assert s.encodes == [(1, 0), (3, 0)], "there was a plainly free block"
    s.run(5, Img(8), 1)
    s.run(6, 7, B, 1, source=4)
    assert s.encodes == [(1, 0), (3, 0), (5, 0), (6, 0)]


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))))
@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_sharers_that_leave_in_any_order_before_and_after_the_encode(order, failed: bool, when: int) -> None:
    """The first of three is the one that the encode was planned for."""
    s = Stepper(token_budget=64)
    for number in (1, 2, 3):
        s.add(number, number, A, 1)
    vision = s.plan_vision()
    for number in order[:when]:
        s.abort(number)
    s.end_vision(vision, bad=[1] if failed else [])
    left = [number for number in order[when:] if number not in s.finished]
    assert (1 in left) == (1 in order[when:] and not failed)
    for number in left:
        assert s.state(number).images == [WAITING if failed else ENCODED]
    for number in left[:1]:
        s.abort(number)
    s.finish_all()
    assert all(s.finished[n].reason is FinishReason.ABORT for n in (*order[:when], *left[:1]))
    assert all(s.finished[n].reason is FinishReason.LENGTH for n in left[1:])
    assert len(s.encodes) == 1 + (failed and len(left) > 1)
    s.run(4, 9, A, 1)
    assert len(s.encodes) == 1 + failed, "somebody's encode went well and is still there, or it is done now"


def test_whoever_shares_a_failing_picture_fails_by_an_encode_of_its_own() -> None:
    s = Stepper()
    for number in (1, 2, 3):
        s.add(number, A, 1)
    for number in (1, 2, 3):
        assert s.vision(bad=[1, 2, 3]) == [(number, 0)]
        assert s.finished[number].reason is FinishReason.ERROR
    assert not s.scheduler.has_work


def test_shared_features_give_way_to_an_image_before_all_their_users_and_to_no_other() -> None:
    s = Stepper(kv_blocks=12, image_blocks=2, token_budget=64)
    s.run(1, 4, Img(8, name="x"), 5, max_new=1)
    s.add(2, 30, max_new=10)
    s.language()
    s.add(3, 4, Img(8, name="x"), 9, source=0, max_new=1)
    s.add(4, 20, B, 1, max_new=1)
    s.add(5, 21, B, 1, max_new=1)
    s.add(6, 20, Img(8, name="y"), 1, max_new=1)
    assert s.vision() == [(4, 0)]
    assert [s.state(n).images for n in (3, 4, 5)] == [[CACHED], [ENCODED], [ENCODED]]
    assert s.vision() == [], "the last one is younger than both"
    while s.state(3).images == [CACHED]:
        assert s.language() == [(2, 1)]
    assert s.vision() == [(3, 0)]
    assert [s.state(n).images for n in (4, 5)] == [[WAITING], [WAITING]]
    s.finish_all()
    assert s.encodes == [(1, 0), (4, 0), (3, 0), (4, 0), (6, 0)]
