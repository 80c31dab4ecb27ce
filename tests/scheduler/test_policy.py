"""The orders that can be chosen: what goes first, how long it may be put off, and that no token depends on it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.config import SchedulerConfig
from hydra_engine.errors import ConfigError
from tests.examples import examples
from tests.scheduler.sim import Costs, Img, Simulator, config, make_request
from tests.scheduler.stepper import Stepper
from tests.scheduler.test_fairness import ranked, started
from tests.scheduler.test_progress import minimum_pools, requests

STARTS, ENCODES = ("priority", "fcfs", "sjf"), ("priority", "fcfs", "srpt")


def test_the_names_are_checked() -> None:
    with pytest.raises(ConfigError, match="scheduling_policy must be priority, fcfs or sjf"):
        SchedulerConfig(scheduling_policy="lifo")
    with pytest.raises(ConfigError, match="encode_policy must be priority, fcfs or srpt"):
        SchedulerConfig(encode_policy="sjf")


# ---- prompts


def starts(policy: str) -> list[int]:
    s = Stepper(token_budget=4, scheduling_policy=policy)
    for number, (tokens, priority) in enumerate(((12, 0), (8, 0), (4, 1), (8, -1), (4, 0))):
        s.submit(ranked(make_request(number, tokens, max_new=1), priority=priority))
    order = [step[0][0] for _ in range(9) if (step := s.language())]
    return list(dict.fromkeys(order))


def test_each_policy_has_its_order() -> None:
    assert starts("priority") == [3, 0, 1, 4, 2]
    assert starts("fcfs") == [0, 1, 2, 3, 4]
    assert starts("sjf") == [3, 4, 1, 0, 2]


def test_what_the_cache_has_is_not_left_to_do() -> None:
    s = Stepper(token_budget=4, scheduling_policy="sjf", kv_blocks=64)
    s.run(0, 24, max_new=1)
    s.add(1, 9, max_new=1)
    s.add(2, 24, 4, max_new=1, source=0)
    assert s.language()[0][0] == 2, "of its 28 tokens 24 are cached"


@settings(max_examples=examples(30), deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(STARTS), st.integers(1, 5), st.booleans(), st.integers(1, 6))
def test_nobody_is_overtaken_more_often_than_max_bypass_whatever_the_policy(
    rng: random.Random, policy: str, max_bypass: int, look_ahead: bool, seqs: int
) -> None:
    """Long prompts among many short ones, which never end."""
    settings_ = config(
        scheduling_policy=policy, max_bypass=max_bypass, token_budget=32, max_num_seqs=seqs, look_ahead=look_ahead
    )
    sim = Simulator(settings_, kv_blocks=40)
    for number in range(30):
        request = make_request(number, rng.choice((2, 3, 4, 60, 90)), max_new=rng.randint(1, 6))
        sim.submit(ranked(request, priority=rng.choice((0, 0, 0, 2))), rng.uniform(0, 0.3))
    sim.run()
    sim.assert_all_right()
    order = {number: place for place, number in enumerate(sim.requests)}
    first = started(sim)
    for number in sim.requests:
        if sim.finished[number].num_preemptions == 0:
            before = first[: first.index(number)]
            assert sum(order[other] > order[number] for other in before) <= max_bypass


def test_short_prompts_come_sooner_and_a_long_one_no_later_than_its_turn() -> None:
    def run(policy: str) -> tuple[float, float]:
        sim = Simulator(config(scheduling_policy=policy, token_budget=32, max_num_seqs=2, max_bypass=8), kv_blocks=200)
        for number in range(30):
            sim.submit(make_request(number, 8 if number % 3 else 200, max_new=2), 0.0)
        sim.run()
        sim.assert_all_right()
        first = {number: times[0] for number, times in sim.token_times.items()}
        return sum(first.values()) / len(first), max(first.values())

    (mean, last), (shortest_first, bound) = run("fcfs"), run("sjf")
    assert shortest_first < 0.9 * mean
    assert bound <= 1.1 * last


# ---- pictures


def test_the_request_with_the_fewest_patches_left_is_encoded_first() -> None:
    s = Stepper(image_budget=8, encode_policy="srpt")
    s.add(0, Img(8), 1, Img(8), 1, Img(8), 1)
    s.add(1, Img(8), 1, Img(8), 1)
    assert s.vision() == [(1, 0)]
    s.add(2, Img(8), 1, Img(8), 1)
    s.add(3, Img(8), 1)
    assert [s.vision() for _ in range(4)] == [[(1, 1)], [(3, 0)], [(2, 0)], [(2, 1)]]
    s.finish_all()
    assert [request for request, _ in s.encodes] == [1, 1, 3, 2, 2, 0, 0, 0]


def test_with_srpt_prompts_still_start_as_the_other_policy_says() -> None:
    s = Stepper(token_budget=4, encode_policy="srpt")
    s.add(0, 8, max_new=1)
    s.add(1, 4, max_new=1)
    assert [s.language() for _ in range(3)] == [[(0, 4)], [(0, 4)], [(1, 4)]]


@pytest.mark.quick("0.1")
@pytest.mark.parametrize("patience_s", [0.1, 0.4])
def test_a_large_picture_waits_no_longer_than_the_patience_and_those_before_it(patience_s: float) -> None:
    """Small ones keep coming as fast as they are encoded."""
    encode_s = 0.02
    sim = Simulator(
        config(encode_policy="srpt", encode_patience_s=patience_s, image_budget=8, max_num_seqs=64),
        kv_blocks=2000,
        image_blocks=40,
        costs=Costs(vision=lambda plan: encode_s),
    )
    for number in range(4):
        sim.submit(make_request(number, Img(8), 1, max_new=1))
    sim.submit(make_request(500, Img(20, 40), 1, max_new=1), 0.001)
    for number in range(10, 110):
        sim.submit(make_request(number, Img(8), 1, max_new=1), encode_s * (number - 9))
    sim.run()
    sim.assert_all_right()
    place = next(at for at, (_, plan) in enumerate(sim.vision_plans) if plan.items[0].request_id == 500)
    ahead = 4  # came before it, and are as patient
    assert patience_s / encode_s - 1 <= place <= patience_s / encode_s + ahead + 2


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), st.sampled_from(STARTS), st.sampled_from(ENCODES), st.booleans())
def test_with_full_caches_every_policy_lets_everybody_end_with_the_same_tokens(
    data: st.DataObject, start: str, encode: str, look_ahead: bool
) -> None:
    work = []
    for number in range(data.draw(st.integers(2, 8))):
        request = replace(data.draw(requests(number)), priority=data.draw(st.integers(-1, 1)))
        work.append((number * 0.01, request))
    kv_blocks, image_blocks = minimum_pools(work)
    settings_ = config(
        scheduling_policy=start,
        encode_policy=encode,
        max_num_seqs=data.draw(st.integers(1, 5)),
        token_budget=data.draw(st.integers(1, 20)),
        encode_patience_s=data.draw(st.sampled_from([0.0, 0.05, 2.0])),
        max_bypass=data.draw(st.integers(1, 3)),
        look_ahead=look_ahead,
    )
    sim = Simulator(settings_, kv_blocks=kv_blocks, image_blocks=image_blocks)
    for time_s, request in work:
        sim.submit(request, time_s)
    sim.run()
    sim.assert_all_right()
