"""The order of requests by priorities and due first tokens, which never lets anybody wait for ever."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.request import Request, Slo
from tests.examples import examples
from tests.scheduler.sim import Costs, Img, Simulator, config, make_request, rows_of
from tests.scheduler.stepper import Stepper
from tests.scheduler.test_progress import minimum_pools, requests


def ranked(request: Request, *, priority: int = 0, ttft_s: float | None = None, arrival_s: float = 0.0) -> Request:
    return replace(request, priority=priority, slo=Slo(ttft_s=ttft_s), arrival_s=arrival_s)


def started(sim: Simulator) -> list[int]:
    """Requests in the order in which they started, as often as they did."""
    running: set[int] = set()
    found = []
    for _, plan in sim.language_plans:
        rows = rows_of(plan)
        for row in rows:
            if row.request_id not in running or (row.start == 0 and not row.is_decode):
                found.append(int(row.request_id))
                running.add(row.request_id)
    return found


# ---- order


def test_priority_goes_before_arrival_and_the_smaller_number_first() -> None:
    s = Stepper(token_budget=4)
    for number, priority in enumerate((2, 0, 1, 0, -1)):
        s.submit(ranked(make_request(number, 4, max_new=1), priority=priority))
    order = [s.language()[0][0] for _ in range(5)]
    assert order == [4, 1, 3, 2, 0]


def test_within_a_priority_the_first_token_that_is_due_first_goes_first() -> None:
    s = Stepper(token_budget=4)
    limits = {0: None, 1: 5.0, 2: 1.0, 3: 3.0}
    for number, ttft_s in limits.items():
        s.submit(ranked(make_request(number, 4, max_new=1), ttft_s=ttft_s))
    s.submit(ranked(make_request(4, 4, max_new=1), priority=1, ttft_s=0.1))
    assert [s.language()[0][0] for _ in range(5)] == [2, 3, 1, 0, 4]


def test_requests_without_a_limit_of_their_own_take_that_of_the_engine() -> None:
    s = Stepper(token_budget=4, ttft_slo=2.0)
    s.submit(ranked(make_request(0, 4, max_new=1), arrival_s=1.0))
    s.submit(ranked(make_request(1, 4, max_new=1), arrival_s=1.0, ttft_s=1.5))
    s.submit(ranked(make_request(2, 4, max_new=1), arrival_s=0.9))
    assert [s.language()[0][0] for _ in range(3)] == [1, 2, 0]


def test_running_prefills_keep_their_turn_whoever_comes() -> None:
    s = Stepper(token_budget=4)
    s.add(0, 12, max_new=1)
    s.language()
    s.submit(ranked(make_request(1, 4, max_new=1), priority=-5))
    assert [s.language() for _ in range(3)] == [[(0, 4)], [(0, 4)], [(1, 4)]]


# ---- never for ever


@pytest.mark.quick("True-3", "False-1")
@pytest.mark.parametrize("max_bypass", [1, 3, 7])
@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_request_of_low_priority_starts_after_it_has_been_overtaken_max_bypass_times(
    max_bypass: int, look_ahead: bool
) -> None:
    sim = Simulator(config(max_bypass=max_bypass, max_num_seqs=2, look_ahead=look_ahead))
    sim.submit(ranked(make_request(0, 4, max_new=4)))
    sim.submit(ranked(make_request(1, 4, max_new=4)))
    sim.submit(ranked(make_request(2, 4, max_new=4), priority=9), 0.001)
    for number in range(3, 40):
        sim.submit(ranked(make_request(number, 4, max_new=4), priority=-1), 0.002 + number * 0.001)
    sim.run()
    sim.assert_all_right()
    assert started(sim).index(2) == 2 + max_bypass


@settings(max_examples=examples(25), deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.booleans(), st.integers(1, 6))
def test_over_any_load_with_priorities_and_limits_nobody_is_overtaken_more_often_than_allowed(
    rng: random.Random, max_bypass: int, look_ahead: bool, seqs: int
) -> None:
    """Counted from outside, for requests that never had to give way: younger ones that started before they did."""
    sim = Simulator(
        config(max_bypass=max_bypass, token_budget=32, max_num_seqs=seqs, look_ahead=look_ahead), kv_blocks=26
    )
    for number in range(30):
        request = make_request(number, rng.choice((2, 4, 6, 60, 90)), max_new=rng.randint(1, 10))
        priority, ttft_s = rng.choice((0, 0, -3, 4)), rng.choice((None, 0.05, 1.0))
        sim.submit(ranked(request, priority=priority, ttft_s=ttft_s), rng.uniform(0, 0.4))
    sim.run()
    sim.assert_all_right()
    order = {number: place for place, number in enumerate(sim.requests)}
    starts = started(sim)
    for number in sim.requests:
        if sim.finished[number].num_preemptions == 0:
            before = starts[: starts.index(number)]
            assert sum(order[other] > order[number] for other in before) <= max_bypass


SORTS = {
    "text": lambda n: make_request(n, 6, max_new=2),
    "long prompt": lambda n: make_request(n, 60, max_new=1),
    "long answer": lambda n: make_request(n, 3, max_new=24),
    "picture": lambda n: make_request(n, 2, Img(6, 12), 1, max_new=2),
    "large picture": lambda n: make_request(n, Img(30, 60), 1, max_new=1),
    "pictures": lambda n: make_request(n, 2, Img(5), 1, Img(30, 24), 2, Img(7), 1, max_new=2),
}


# Every sort comes often and once; the other pairs take five times as long.
PAIRS = [
    pytest.param(many, one, marks=() if (row + column) % 6 == 0 else pytest.mark.slow)
    for (row, many), (column, one) in itertools.product(enumerate(SORTS), enumerate(SORTS))
]


@pytest.mark.drawn
@pytest.mark.quick("large picture-long answer")
@pytest.mark.parametrize(("many", "one"), PAIRS)
def test_one_request_of_any_sort_ends_while_more_urgent_ones_of_any_sort_keep_coming(many: str, one: str) -> None:
    """A request ends although more with a higher priority come than can be served, and both caches are small."""
    sim = Simulator(
        config(max_bypass=3, max_queue=30, encode_patience_s=0.1, look_ahead=len(one) % 2 == 0),
        kv_blocks=24,
        image_blocks=10,
    )
    for number in range(20):
        sim.submit(ranked(SORTS[many](number), priority=-1))
    sim.submit(ranked(SORTS[one](500), priority=5), 0.001)
    for number in range(20, 240):
        sim.submit(ranked(SORTS[many](number), priority=-1), 0.01 * number)
    sim.run(until_s=2.4)
    assert 500 in sim.finished, f"starved behind {len(sim.finished)} others"
    sim.assert_all_right(list(sim.finished))


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), st.booleans(), st.sampled_from([0.0, 0.02]))
def test_full_caches_on_both_sides_priorities_and_limits_still_let_everybody_end(data, look_ahead, late_s) -> None:
    count = data.draw(st.integers(2, 9))
    work = []
    for number in range(count):
        request = data.draw(requests(number))
        priority, ttft_s = data.draw(st.integers(-1, 1)), data.draw(st.sampled_from([None, 0.01, 0.3]))
        work.append((number * 0.01, ranked(request, priority=priority, ttft_s=ttft_s, arrival_s=number * 0.01)))
    kv_blocks, image_blocks = minimum_pools(work)
    settings_ = config(
        max_num_seqs=data.draw(st.integers(1, 5)),
        token_budget=data.draw(st.integers(1, 20)),
        encode_patience_s=data.draw(st.sampled_from([0.0, 0.05, 2.0])),
        max_bypass=data.draw(st.integers(1, 3)),
        look_ahead=look_ahead,
    )
    sim = Simulator(settings_, kv_blocks=kv_blocks, image_blocks=image_blocks, late_s=late_s)
    for time_s, request in work:
        sim.submit(request, time_s)
    sim.run()
    sim.assert_all_right()


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=8), st.lists(st.floats(0, 2), max_size=30), st.booleans())
def test_text_waits_for_the_running_step_at_most_however_many_images_wait(texts, pictures, look_ahead) -> None:
    """Encodes take half a second and more, language steps up to 50 ms. With look-ahead a step may have been planned."""
    longest_s = 0.05
    costs = Costs(language=lambda plan: longest_s, vision=lambda plan: 0.5)
    sim = Simulator(
        config(max_num_seqs=64, token_budget=2000, look_ahead=look_ahead), kv_blocks=2000, image_blocks=40, costs=costs
    )
    for number, time_s in enumerate(pictures):
        sim.submit(make_request(number, 3, Img(20, 24), 2, max_new=3), time_s)
    for number, time_s in enumerate(texts, start=100):
        sim.submit(make_request(number, 6, max_new=2), time_s)
    sim.run()
    sim.assert_all_right()
    steps = 3 if look_ahead else 2
    for number, time_s in enumerate(texts, start=100):
        assert sim.token_times[number][0] - time_s <= steps * longest_s + 1e-9


# ---- images


def test_images_are_encoded_in_order_of_urgency_while_there_are_blocks() -> None:
    s = Stepper(image_budget=8)
    for number, priority in enumerate((1, 0, -1)):
        s.submit(ranked(make_request(number, Img(8), 1), priority=priority))
    assert [s.vision(), s.vision(), s.vision()] == [[(2, 0)], [(1, 0)], [(0, 0)]]
    s.finish_all()


def test_where_blocks_lack_the_images_go_by_age() -> None:
    """Two blocks: the most urgent image has the one that is free now, then the oldest takes it back."""
    s = Stepper(image_budget=100, image_blocks=2)
    s.submit(ranked(make_request(0, Img(8), 1, max_new=1), priority=1))
    s.submit(ranked(make_request(1, Img(4), 1, max_new=1)))
    assert s.vision() == [(1, 0)], "the other one lacks a block behind it"
    assert s.vision() == [(0, 0)], "and takes it now, for it is older"
    s.finish_all()
    assert s.encodes == [(1, 0), (0, 0), (1, 0)]


def test_an_image_that_has_waited_longer_than_the_patience_is_overtaken_no_more() -> None:
    s = Stepper(image_budget=8, encode_patience_s=1.0)
    s.submit(ranked(make_request(0, Img(8), 1), priority=1))
    for number in (1, 2, 3):
        s.submit(ranked(make_request(number, Img(8), 1), priority=0))
    assert s.vision() == [(1, 0)]
    s.now = 1.0
    assert [s.vision(), s.vision(), s.vision()] == [[(0, 0)], [(2, 0)], [(3, 0)]]
    s.finish_all()


@pytest.mark.quick("True")
@pytest.mark.parametrize("look_ahead", [False, True])
def test_an_image_of_low_priority_waits_no_longer_than_the_patience_and_those_before_it(look_ahead: bool) -> None:
    cost_s, patience_s = 0.05, 0.4
    sim = Simulator(
        config(encode_patience_s=patience_s, look_ahead=look_ahead, max_num_seqs=16),
        costs=Costs(vision=lambda plan: cost_s),
        kv_blocks=200,
        image_blocks=60,
    )
    for number in range(4):
        sim.submit(ranked(make_request(number, Img(8, 20), 1, max_new=2), priority=9))
    for number in range(10, 60):
        sim.submit(ranked(make_request(number, Img(8, 20), 1, max_new=2), priority=-1), (number - 10) * 0.045)
    sim.run()
    sim.assert_all_right()
    waits = [sim.encoded_at[number, 0] for number in range(4)]
    assert waits[0] > 0.3, "those of higher priority went first"
    assert all(waited_s <= patience_s + (number + 1) * cost_s + 1e-9 for number, waited_s in enumerate(waits))
