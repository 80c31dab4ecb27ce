"""The door: what can never fit is refused with quota and remedy, a full queue with a time to retry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.core.instances import EPD, Role
from hydra_engine.errors import InvalidRequest, RequestTooLarge, Unavailable, retry_after_s
from hydra_engine.scheduler.admission import Limits, check_fits, check_queue
from hydra_engine.scheduler.scheduler import StageScheduler
from tests.scheduler.sim import Img, config, make_request

LIMITS = Limits(EPD, num_kv_blocks=5, kv_block_size=4, num_image_blocks=2, image_block_size=4)


@pytest.mark.parametrize(("prompt", "max_new"), [(1, 19), (19, 1), (10, 10)])
def test_a_request_that_fills_the_whole_pool_is_accepted(prompt: int, max_new: int) -> None:
    check_fits(make_request(1, prompt, max_new=max_new), LIMITS)


def test_too_many_new_tokens_are_refused_with_the_number_that_would_fit() -> None:
    with pytest.raises(RequestTooLarge, match=r"need 6 KV blocks, this deployment has 5.*at most 12") as caught:
        check_fits(make_request(1, 8, max_new=13), LIMITS)
    assert caught.value.param == "max_tokens"
    assert caught.value.code == "request_too_large_for_deployment"


def test_a_prompt_that_alone_exceeds_the_pool_is_refused_as_such() -> None:
    with pytest.raises(RequestTooLarge, match="shorten the prompt") as caught:
        check_fits(make_request(1, 20, max_new=1), LIMITS)
    assert caught.value.param == "messages"


def test_an_image_larger_than_the_image_cache_is_refused_by_its_number() -> None:
    check_fits(make_request(1, Img(8), 1, Img(8), max_new=1), LIMITS)  # together too large, one by one not
    with pytest.raises(RequestTooLarge, match=r"image 2 needs 3 blocks.*has 2"):
        check_fits(make_request(1, Img(2), Img(9), max_new=1), LIMITS)


def test_an_empty_prompt_is_invalid() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        check_fits(make_request(1), LIMITS)


def test_each_part_of_a_request_needs_only_what_it_uses() -> None:
    """P accepts an answer that is too long for it, D an image that is too large, and E a request without a prompt."""
    request = make_request(1, 8, Img(8), max_new=13)
    check_fits(request, LIMITS, Role.E | Role.P)
    with pytest.raises(RequestTooLarge, match="need 8 KV blocks"):
        check_fits(request, LIMITS, Role.D)
    no_images = Limits(Role.D, 8, 4, 0, 4)
    check_fits(request, no_images)
    with pytest.raises(RequestTooLarge, match=r"image 1 needs 2 blocks.*has 0"):
        check_fits(request, Limits(Role.P, 8, 4, 0, 4))
    job = replace(request, prompt_token_ids=())
    check_fits(job, Limits(Role.E, 0, 4, 2, 4))
    with pytest.raises(RequestTooLarge, match="image 1"):
        check_fits(job, Limits(Role.E, 0, 4, 1, 4))


def test_tokens_of_earlier_attempts_are_part_of_what_is_prefilled() -> None:
    request = replace(make_request(1, 8, max_new=13), generated_token_ids=(1, 2, 3))
    check_fits(request, Limits(Role.P, 3, 4, 0, 4))
    with pytest.raises(RequestTooLarge):
        check_fits(request, Limits(Role.P, 2, 4, 0, 4))


def test_a_part_that_the_role_does_not_serve_is_refused() -> None:
    with pytest.raises(Unavailable, match="stages ED are asked of an instance that serves PD") as caught:
        check_fits(make_request(1, 8), Limits(Role.P | Role.D, 5, 4, 2, 4), Role.E | Role.D)
    assert caught.value.code == "wrong_role"


def test_a_full_queue_is_refused_and_an_oversized_request_is_told_so_even_then() -> None:
    scheduler = StageScheduler(EPD, CacheManager(5, 4), CacheManager(2, 4), config(max_queue=2), instance="t")
    for number in range(2):
        scheduler.add(make_request(number, 4), 0.0)
    with pytest.raises(Unavailable, match=r"max_queue\) is 2") as caught:
        scheduler.add(make_request(2, 4), 0.0)
    assert caught.value.code == "overloaded" and caught.value.retry_after_s == 1
    with pytest.raises(RequestTooLarge):
        scheduler.add(make_request(3, 400), 0.0)
    assert scheduler.ledger().num_requests == 2, "a refusal changes nothing"
    scheduler.abort(0, 0.0)
    scheduler.add(make_request(2, 4), 0.0)


@pytest.mark.parametrize(
    ("live", "finishes", "expected"),
    [(100, [], 1), (100, [5.0], 1), (100, [0.0, 0.001], 1), (100, [0.0, 1.0, 2.0], 10), (500, [0.0, 9.0], 30)],
)
def test_the_time_to_retry_follows_the_pace_of_the_queue(live: int, finishes: list[float], expected: int) -> None:
    assert retry_after_s(live, finishes) == expected


def test_below_the_limit_nothing_is_said() -> None:
    check_queue(1, 2, [])


def test_a_state_that_moves_needs_blocks_beside_those_of_the_tokens() -> None:
    limits = Limits(EPD, 10, 4, 0, 1)
    check_fits(make_request(1, 20, max_new=20), limits)
    check_fits(make_request(1, 20, max_new=8), limits, EPD, 3)
    with pytest.raises(RequestTooLarge, match="at most 8"):
        check_fits(make_request(1, 20, max_new=9), limits, EPD, 3)


def test_continued_requests_are_accepted_though_the_queue_is_full() -> None:
    """The request was accepted where it came from."""
    scheduler = StageScheduler(EPD, CacheManager(5, 4), CacheManager(2, 4), config(max_queue=1), instance="t")
    scheduler.add(make_request(0, 4), 0.0)
    scheduler.add(make_request(1, 4), 0.0, stages=Role.D, external_kv=True)
    scheduler.add(replace(make_request(2, Img(4)), prompt_token_ids=()), 0.0, stages=Role.E)
    with pytest.raises(Unavailable):
        scheduler.add(make_request(3, 4), 0.0)


def test_the_role_decides_what_is_accepted_and_what_was_accepted_is_done() -> None:
    scheduler = StageScheduler(Role.E | Role.P, CacheManager(5, 4), CacheManager(2, 4), config(), instance="t")
    with pytest.raises(Unavailable):
        scheduler.add(make_request(0, 4), 0.0, stages=Role.D, external_kv=True)
    scheduler.set_role(EPD)
    scheduler.add(make_request(0, 4), 0.0)
    scheduler.set_role(Role.E)
    with pytest.raises(Unavailable):
        scheduler.add(make_request(1, 4), 0.0, stages=Role.P)
    assert scheduler.plan_language(0.0) is not None
