"""The engines to compare with: whole requests, one lane at a time, encodes that never pause. They are slower, but
nothing else is worse."""

from __future__ import annotations

import base64
import itertools
import json
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.baselines import NAMES
from bench.serve.servers import ours, running
from hydra_engine.scheduler.scheduler import StageScheduler
from hydra_planner.simulator.schedules import BatchScheduler, OneLaneScheduler, RequestScheduler
from hydra_terminal.load.pictures import jpeg
from tests.examples import examples
from tests.instance.test_instance import Rig
from tests.scheduler.sim import Img, Simulator, config, expected_tokens, make_request
from tests.scheduler.stepper import Stepper
from tests.scheduler.test_progress import minimum_pools, workloads

SCHEDULERS = [StageScheduler, OneLaneScheduler, RequestScheduler, BatchScheduler]


# ---- whole requests


def test_all_images_of_what_is_served_next_come_before_any_prompt_and_prompts_before_any_decode() -> None:
    s = Stepper(scheduler=RequestScheduler, max_num_seqs=3, token_budget=16, image_budget=6)
    for number in range(4):
        s.add(number, 3, Img(6), 20, max_new=3)
    assert s.vision() == [(0, 0)]
    plan = s.plan_vision()
    assert s.plan_language() is None, "an encode runs"
    s.end_vision(plan)
    assert s.vision() == [(2, 0)] and s.vision() == [], "the fourth finds no slot yet"
    assert [s.language() for _ in range(3)] == [[(0, 29)], [(1, 29)], [(2, 29)]]
    assert s.language() == [(0, 1), (1, 1), (2, 1)]
    s.finish_all()


def test_several_prompts_share_a_step_if_they_fit_whole() -> None:
    s = Stepper(scheduler=RequestScheduler, token_budget=16)
    for number, length in enumerate((6, 7, 5, 40, 2)):
        s.add(number, length, max_new=2)
    assert s.language() == [(0, 6), (1, 7)]
    assert s.language() == [(2, 5)]
    assert s.language() == [(3, 40)]
    assert s.language() == [(4, 2)]
    assert s.language() == [(number, 1) for number in range(5)]


def test_images_that_exceed_the_cache_together_do_not_block_whole_requests() -> None:
    s = Stepper(scheduler=RequestScheduler, image_blocks=2, token_budget=64)
    s.add(1, Img(8), 1, Img(8), 1, max_new=1)
    assert s.vision() == [(1, 0)] and s.vision() == []
    assert s.language() == [(1, 9)]
    s.finish_all()


def test_a_batch_runs_to_completion_before_the_next_one_begins() -> None:
    s = Stepper(scheduler=BatchScheduler, token_budget=64)
    s.add(0, 5, max_new=2)
    s.add(1, 3, Img(6), max_new=3)
    assert s.vision() == [(1, 0)]
    assert s.language() == [(0, 5), (1, 9)]
    s.add(2, 5, max_new=2)
    s.add(3, Img(6), 1, max_new=2)
    assert s.vision() == [] and s.language() == [(0, 1), (1, 1)]
    assert s.vision() == [] and s.language() == [(1, 1)]
    assert s.vision() == [(3, 0)] and s.language() == [(2, 5), (3, 7)]
    s.finish_all()


# ---- one lane at a time


def test_steps_of_the_two_models_never_overlap_and_alternate_while_both_have_work() -> None:
    sim = Simulator(config(image_budget=8), kv_blocks=200, image_blocks=100, scheduler_class=OneLaneScheduler)
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
    st.sampled_from(SCHEDULERS),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.02]),
)
def test_with_every_scheduler_everything_finishes_with_the_right_tokens(
    work, scheduler, look_ahead, seqs, token_budget, image_budget, late_s
):
    kv_blocks, image_blocks = minimum_pools(work)
    settings_ = config(
        look_ahead=look_ahead,
        max_num_seqs=seqs,
        token_budget=token_budget,
        image_budget=image_budget,
    )
    sim = Simulator(settings_, kv_blocks=kv_blocks, image_blocks=image_blocks, late_s=late_s, scheduler_class=scheduler)
    for time_s, request in work:
        sim.submit(request, time_s)
    sim.run()
    sim.assert_all_right()


@pytest.mark.quick("StageScheduler")
@pytest.mark.parametrize(
    "scheduler", [StageScheduler, RequestScheduler, pytest.param(OneLaneScheduler, marks=pytest.mark.slow)]
)
def test_pictures_and_text_without_end_starve_nobody(scheduler: type[StageScheduler]) -> None:
    limits = config(look_ahead=True, max_queue=20)
    sim = Simulator(limits, kv_blocks=60, image_blocks=20, scheduler_class=scheduler)
    for number in range(100):
        parts = (2, Img(8, 20), 2) if number % 2 else (20,)
        sim.submit(make_request(number, *parts, max_new=4), number * 0.01)
    sim.run()
    served = [number for number in sim.requests if number not in sim.refused]
    sim.assert_all_right(served)
    waits = [sim.token_times[number][0] - number * 0.01 for number in served]
    assert max(waits) < 2.5, "twenty requests are there at most"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_pictures_and_text_through_an_instance(scheduler: type[StageScheduler]) -> None:
    rig = Rig(scheduler=scheduler)
    requests = [make_request(n, 3, Img(6), 2, max_new=3) if n % 2 else make_request(n, 7, max_new=3) for n in range(6)]
    for request in requests:
        rig.submit(request)
    rig.turn()
    while rig.worker.language or rig.worker.vision:
        both = bool(rig.worker.language) and bool(rig.worker.vision)
        assert not (both and scheduler is OneLaneScheduler)
        if rig.worker.vision:
            rig.worker.end_vision(rig.clock.now())
            rig.turn()
        if rig.worker.language:
            rig.step(0.01)
    assert rig.tokens() == {request.id: expected_tokens(request) for request in requests}


@pytest.mark.slow
def test_every_baseline_answers_as_the_engine_does(tmp_path: Path) -> None:
    """Latency limits make it measure step times too."""
    flags = f"--tpot-slo 100ms --ttft-slo 2s --profile-dir {tmp_path}"
    url = "data:image/jpeg;base64," + base64.b64encode(jpeg(224, 224, 1)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    asked = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16}
    answers = set()
    for name in ("", *NAMES):
        with running(ours(name or "ours", "demo", flags, baseline=name)) as target:
            body, headers = json.dumps(asked | {"model": target.model}).encode(), {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{target.base_url}/v1/chat/completions", body, headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                answers.add(json.load(answer)["choices"][0]["message"]["content"])
    assert len(answers) == 1 and answers.pop()
