"""The schedules to compare with: whole requests, and one lane at a time. They are slower, but nothing else is worse."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.roles import Role
from hydra_engine.scheduler.modes import STEAL_PATIENCE_S, Mode
from tests.examples import examples
from tests.unit.sim import Img, Simulator, config, make_request
from tests.unit.stepper import Stepper
from tests.unit.test_scheduler_progress import minimum_pools, workloads


def ask(mode: Mode, *, vision_runs: bool = False, language_runs: bool = False, images_wait: bool = False) -> bool:
    return mode.may_plan_language(vision_runs=vision_runs, language_runs=language_runs, images_wait=images_wait)


def test_the_stage_schedule_lets_both_lanes_run_and_language_look_ahead() -> None:
    mode = Mode(config(look_ahead=True))
    assert ask(mode, vision_runs=True, language_runs=True, images_wait=True)
    assert mode.may_plan_vision(vision_runs=False, language_runs=True)
    assert not mode.may_plan_vision(vision_runs=True, language_runs=False)
    assert not ask(Mode(config(look_ahead=False)), language_runs=True)


def test_without_lanes_one_waits_for_the_other_and_they_take_turns() -> None:
    mode = Mode(config(lanes=False, look_ahead=True))
    assert not ask(mode, vision_runs=True) and not ask(mode, language_runs=True)
    assert not mode.may_plan_vision(vision_runs=False, language_runs=True)
    turns = []
    for _ in range(4):
        turns.append(mode.vision_first)
        mode.planned(vision=mode.vision_first)
    assert turns == [False, True, False, True]


def test_whole_requests_encode_first() -> None:
    mode = Mode(config(schedule="request", look_ahead=True))
    assert mode.vision_first and not ask(mode, vision_runs=True)
    assert ask(mode, images_wait=True), "these could not be encoded, or vision would run"
    assert ask(mode, language_runs=True) and not ask(mode, language_runs=True, images_wait=True)


# ---- whole requests


def test_all_images_of_what_is_served_next_come_before_any_prompt_and_prompts_before_any_decode() -> None:
    s = Stepper(schedule="request", max_num_seqs=3, token_budget=16, image_budget=6)
    for number in range(4):
        s.add(number, 3, Img(6), 20, max_new=3)
    assert s.vision() == [(0, 0)]
    plan = s.plan_vision()
    assert s.plan_language() is None, "an encode runs"
    s.end_vision(plan)
    assert s.vision() == [(2, 0)] and s.vision() == [], "the fourth finds no seat yet"
    assert [s.language() for _ in range(3)] == [[(0, 29)], [(1, 29)], [(2, 29)]]
    assert s.language() == [(0, 1), (1, 1), (2, 1)]
    s.finish_all()


def test_several_prompts_share_a_step_if_they_fit_whole() -> None:
    s = Stepper(schedule="request", token_budget=16)
    for number, length in enumerate((6, 7, 5, 40, 2)):
        s.add(number, length, max_new=2)
    assert s.language() == [(0, 6), (1, 7)]
    assert s.language() == [(2, 5)]
    assert s.language() == [(3, 40)]
    assert s.language() == [(4, 2)]
    assert s.language() == [(number, 1) for number in range(5)]


def test_images_that_exceed_the_cache_together_do_not_block_whole_requests() -> None:
    s = Stepper(schedule="request", image_blocks=2, token_budget=64)
    s.add(1, Img(8), 1, Img(8), 1, max_new=1)
    assert s.vision() == [(1, 0)] and s.vision() == []
    assert s.language() == [(1, 9)]
    s.finish_all()


# ---- one lane at a time


def test_steps_of_the_two_models_never_overlap_and_alternate_while_both_have_work() -> None:
    sim = Simulator(config(lanes=False, image_budget=8), kv_blocks=200, image_blocks=100)
    for number in range(6):
        sim.submit(make_request(number, 40, max_new=20))
    for number in range(10, 16):
        sim.submit(make_request(number, Img(8), 2, max_new=2))
    sim.run()
    sim.assert_all_right()
    vision = [(t, t + sim.costs.vision(plan), "vision") for t, plan in sim.vision_plans]
    steps = sorted(vision + [(started_s, ended_s, "language") for started_s, ended_s, _ in sim.steps])
    assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(steps))
    assert [kind for _, _, kind in steps[:12]] == ["language", "vision"] * 6


# ---- all of them


@settings(max_examples=examples(40), deadline=None)
@given(
    workloads(),
    st.sampled_from(["stage", "request"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.02]),
)
def test_in_every_mode_everything_finishes_with_the_right_tokens(
    work, schedule, lanes, look_ahead, seqs, token_budget, image_budget, late_s
):
    kv_blocks, image_blocks = minimum_pools(work)
    settings_ = config(
        schedule=schedule,
        lanes=lanes,
        look_ahead=look_ahead,
        max_num_seqs=seqs,
        token_budget=token_budget,
        image_budget=image_budget,
    )
    sim = Simulator(settings_, kv_blocks=kv_blocks, image_blocks=image_blocks, late_s=late_s)
    for time_s, request in work:
        sim.submit(request, time_s)
    sim.run()
    sim.assert_all_right()


@pytest.mark.parametrize(
    ("schedule", "lanes"),
    [
        ("stage", True),
        ("request", False),
        pytest.param("stage", False, marks=pytest.mark.slow),
        pytest.param("request", True, marks=pytest.mark.slow),
    ],
)
def test_pictures_and_text_without_end_starve_nobody(schedule: str, lanes: bool) -> None:
    sim = Simulator(
        config(schedule=schedule, lanes=lanes, look_ahead=True, max_queue=20), kv_blocks=60, image_blocks=20
    )
    for number in range(200):
        parts = (2, Img(8, 20), 2) if number % 2 else (20,)
        sim.submit(make_request(number, *parts, max_new=4), number * 0.01)
    sim.run()
    served = [number for number in sim.requests if number not in sim.refused]
    sim.assert_all_right(served)
    waits = [sim.token_times[number][0] - number * 0.01 for number in served]
    assert max(waits) < 2.5, "twenty requests are there at most"


# ---- instances that encode and decode


@pytest.mark.parametrize(("tpot_slo", "patience_s"), [(None, STEAL_PATIENCE_S), (0.04, 0.02), (3.0, STEAL_PATIENCE_S)])
@given(steps=st.lists(st.tuples(st.floats(0.001, 0.3), st.floats(0.001, 0.3)), min_size=1, max_size=30))
def test_borrowed_decodes_stand_still_for_vision_no_longer_than_the_patience(steps, tpot_slo, patience_s) -> None:
    """One vision step behind the other, and language steps whenever they may: vision never waits, not even for the
    language step that runs, and decodes get a step at least every patience."""
    mode = Mode(config(tpot_slo=tpot_slo), Role.E | Role.D)
    mode.language_ended(0.0)
    assert mode.vision_first
    now = language_ended_s = 0.0
    for vision_s, language_s in steps:
        assert mode.may_plan_vision(vision_runs=False, language_runs=True)
        vision_until_s = now + vision_s
        while now < vision_until_s:
            if mode.yields(now, vision_runs=True, language_runs=False, only_borrowed=True):
                assert now <= mode.due_s == language_ended_s + patience_s
                now = min(mode.due_s + 1e-9, vision_until_s)
                continue
            assert now - language_ended_s <= patience_s + 1e-6
            now = language_ended_s = now + language_s
            mode.language_ended(now)
    assert not mode.yields(now, vision_runs=False, language_runs=False, only_borrowed=True), "the lane is free"


@given(st.floats(0.0, 10.0), st.booleans())
def test_only_what_is_borrowed_lets_vision_go_first(since_s: float, language_runs: bool) -> None:
    for letters in ("E", "P", "D", "EP", "PD"):
        mode = Mode(config(), Role.parse(letters))
        assert not mode.yields(since_s, vision_runs=True, language_runs=language_runs, only_borrowed=True)
        assert not mode.vision_first
    for letters in ("ED", "EPD"):
        mode = Mode(config(), Role.parse(letters))
        expected = language_runs or since_s < STEAL_PATIENCE_S
        assert mode.yields(since_s, vision_runs=True, language_runs=language_runs, only_borrowed=True) == expected
        assert not mode.yields(since_s, vision_runs=False, language_runs=language_runs, only_borrowed=True)
        assert not mode.yields(since_s, vision_runs=True, language_runs=language_runs, only_borrowed=False)
