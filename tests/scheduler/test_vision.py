"""The vision step: order, budget, patience, blocks, and the bound on how long an image waits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.core.ids import FeatureKey
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler.images import EncodedFeatures
from hydra_engine.scheduler.policy import features_to_evict
from tests.scheduler.sim import BROKEN, Costs, Img, Simulator, config, make_request
from tests.scheduler.stepper import Stepper


def test_images_of_several_requests_share_a_step_and_those_of_one_go_to_several() -> None:
    s = Stepper(image_budget=24)
    s.add(1, Img(8), Img(8), Img(8), Img(8), 1)
    s.add(2, Img(8), Img(8), 1)
    assert s.vision() == [(1, 0), (1, 1), (1, 2)]
    assert s.vision() == [(1, 3), (2, 0), (2, 1)]
    assert s.vision() == []


def test_an_image_larger_than_the_budget_goes_alone() -> None:
    s = Stepper(image_budget=10)
    s.add(1, Img(4, 50), 1)
    s.add(2, Img(4, 50), 1)
    assert [s.vision(), s.vision(), s.vision()] == [[(1, 0)], [(2, 0)], []]


def test_smaller_images_fill_a_step_behind_one_that_no_longer_fits() -> None:
    s = Stepper(image_budget=10, encode_patience_s=1.0)
    for number, patches in enumerate((6, 8, 4, 3)):
        s.add(number, Img(4, patches), 1)
    assert s.vision() == [(0, 0), (2, 0)]
    assert s.vision() == [(1, 0)]
    assert s.vision() == [(3, 0)]


def test_nothing_is_filled_in_behind_an_image_that_has_waited_longer_than_the_patience() -> None:
    s = Stepper(image_budget=10, encode_patience_s=1.0)
    for number, patches in enumerate((6, 8, 4, 3)):
        s.add(number, Img(4, patches), 1)
    s.now = 1.0
    assert s.vision() == [(0, 0)]
    assert s.vision() == [(1, 0)]
    assert s.vision() == [(2, 0), (3, 0)]


def test_blocks_are_put_aside_for_an_image_that_was_skipped() -> None:
    s = Stepper(image_budget=10, image_blocks=4)
    for number, (tokens, patches) in enumerate([(4, 6), (12, 8), (4, 4)]):
        s.add(number, Img(tokens, patches), 1)
    assert s.vision() == [(0, 0)], "the last block but three belongs to the second image"
    assert s.vision() == [(1, 0)]


def test_a_full_image_cache_holds_back_encodes_in_order_until_prefill_frees_blocks() -> None:
    s = Stepper(image_blocks=4)
    for number in range(3):
        s.add(number, Img(8), 1)
    assert s.vision() == [(0, 0), (1, 0)]
    assert s.vision() == []
    s.language()
    assert s.vision() == [(2, 0)]
    s.finish_all()


def test_images_that_together_exceed_the_cache_go_one_after_the_other() -> None:
    s = Stepper(image_blocks=2, token_budget=64)
    s.add(1, Img(8), 1, Img(8), 1, Img(8), 1, max_new=1)
    s.add(2, 3, max_new=1)
    assert s.vision() == [(1, 0)] and s.vision() == []
    assert s.language() == [(1, 9), (2, 3)]
    assert s.vision() == [(1, 1)]
    s.finish_all()


def test_a_failed_encode_fails_its_request_alone_and_frees_its_other_images() -> None:
    s = Stepper()
    s.add(1, Img(4), 1, Img(4), 1)
    s.add(2, Img(4), 1)
    events = s.end_vision(s.plan_vision(), bad=[1])
    assert [event.request_id for event in events] == [1]
    assert (s.finished[1].reason, s.finished[1].error) == (FinishReason.ERROR, BROKEN)
    assert s.scheduler.ledger().holders == ("request 2 image 0: 1 blocks",)
    s.finish_all()


@pytest.mark.slow
def test_an_image_waits_only_for_those_before_it_and_the_running_step_under_steady_prefill() -> None:
    """The language lane is kept full of prompts; the bound is the sum of the encodes before plus one step."""
    cost_s = 0.05
    sim = Simulator(config(max_num_seqs=4), costs=Costs(vision=lambda plan: cost_s), kv_blocks=100, image_blocks=60)
    for number in range(200):
        sim.submit(make_request(number, 40, max_new=2), number * 0.01)
    arrivals = {}
    for number in range(200, 230):
        arrivals[number] = 0.3 + (number - 200) * 0.013
        sim.submit(make_request(number, 2, Img(8, 20), 2, max_new=2), arrivals[number])
    sim.run()
    sim.assert_all_right()
    assert any(t < 0.3 + 30 * cost_s for t, p in sim.language_plans if p.num_tokens == 16), "prefill was steady"
    for number, arrived_s in arrivals.items():
        before = [n for n in arrivals if n < number and sim.encoded_at[n, 0] >= arrived_s]
        assert sim.encoded_at[number, 0] - arrived_s <= (len(before) + 1) * cost_s + 1e-9


def test_the_vision_lane_never_rests_while_an_image_waits_and_blocks_are_free() -> None:
    sim = Simulator(config(), image_blocks=100, costs=Costs(vision=lambda plan: 0.03))
    for number in range(40):
        sim.submit(make_request(number, Img(8), 4, max_new=3), number * 0.001)
    sim.run()
    starts = [time_s for time_s, _ in sim.vision_plans]
    assert all(abs(b - a - 0.03) < 1e-9 for a, b in itertools.pairwise(starts))
    order = [item.request_id for _, plan in sim.vision_plans for item in plan.items]
    assert order == sorted(order)


# ---- features give way to older requests


def test_an_older_request_takes_the_features_of_a_younger_one_when_it_comes_back() -> None:
    """The first request is preempted and must be encoded again; the cache is full of features that wait behind it."""
    s = Stepper(kv_blocks=7, image_blocks=2, token_budget=32, reuse=False)
    s.add(0, 8, max_new=12)
    s.add(1, Img(8), 1, max_new=8)
    assert s.vision() == [(1, 0)]
    s.language()
    s.add(2, Img(8), 4, max_new=8)
    assert s.vision() == [(2, 0)]
    while not s.state(1).num_preemptions:
        s.language()
    assert s.vision() == [(1, 0)]
    assert s.state(2).images == [ImageProgress.WAITING]
    s.finish_all()


def holder(blocks: int, *users: tuple[RequestState, int]) -> EncodedFeatures:
    name = ",".join(f"{state.order[1]}.{index}" for state, index in users)
    return FeatureKey(name.encode()), list(users), blocks


def test_features_that_a_step_reads_are_never_taken() -> None:
    reader = RequestState.new(make_request(1, Img(8), Img(8), 1), 1, 0.0)
    reader.images = [ImageProgress.ENCODED] * 2
    reader.num_scheduled = 8
    older = RequestState.new(make_request(0, Img(8), 1), 0, 0.0)
    later = RequestState.new(make_request(2, Img(8), 1), 2, 0.0)
    holders = [holder(2, (reader, 0)), holder(2, (reader, 1))]
    assert features_to_evict(older, 0, holders, 2) == [b"1.1"]
    assert features_to_evict(older, 0, holders, 3) == [], "not enough is nothing"
    assert features_to_evict(older, 0, [holder(2, (later, 0), (reader, 0))], 1) == [], "one of the users reads"


def test_shared_features_are_as_old_as_their_oldest_user() -> None:
    states = [RequestState.new(make_request(n, Img(4), Img(4), 1), n, 0.0) for n in range(4)]
    holders = [holder(1, (states[3], 0)), holder(1, (states[0], 1), (states[3], 1)), holder(1, (states[2], 0))]
    assert features_to_evict(states[1], 0, holders, 2) == [b"3.0", b"2.0"]
    assert features_to_evict(states[1], 0, holders, 3) == []
    assert features_to_evict(states[0], 0, holders, 3) == [b"3.0", b"2.0", b"0.1,3.1"]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 6), st.integers(1, 8))
def test_the_youngest_give_way_first_and_no_more_of_them_than_needed(sizes: list[int], order: int, need: int) -> None:
    states = [RequestState.new(make_request(n, Img(4), 1), n, 0.0) for n in range(len(sizes))]
    asking = RequestState.new(make_request(99, Img(4), 1), order, 0.0)
    holders = [holder(size, (state, 0)) for state, size in zip(states, sizes, strict=True)]
    taken = [int(key.split(b".")[0]) for key in features_to_evict(asking, 0, holders, need)]
    younger = [n for n in range(len(sizes)) if n > order]
    assert taken == sorted(younger, reverse=True)[: len(taken)]
    if sum(sizes[n] for n in younger) < need:
        assert not taken
    else:
        assert sum(sizes[n] for n in taken) >= need > sum(sizes[n] for n in taken[:-1])


def test_a_step_without_any_features_says_nothing_about_speed() -> None:
    """Dropped or failed as a whole, it has ended early."""
    for fails in (True, False):
        stepper = Stepper(kv_blocks=64, image_blocks=64)
        for number in range(1, 11):
            stepper.submit(make_request(number, Img(4), 2))
            stepper.vision(bad=[number] if fails else (), took_s=0.5)
        assert bool(stepper.scheduler.status().speeds.vision) == (not fails)
