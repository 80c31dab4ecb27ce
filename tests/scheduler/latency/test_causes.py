"""Causes of late tokens in the timelines of requests, with the observer that attributes them."""

from __future__ import annotations

import itertools

import pytest

from hydra_engine.scheduler.step_stats import MIN_GAP_S
from tests.scheduler.sim import Costs, Simulator, config, make_request
from tests.scheduler.stepper import Stepper
from tests.scheduler.test_decodes import explained_of


@pytest.mark.parametrize("said", [1, 2, 3, 5])
def test_the_gap_of_a_request_that_gave_way_reaches_from_its_last_token_over_all_its_chunks(said: int) -> None:
    """Chunks of four tokens; after one and five tokens the last one is not a chunk but a decode."""
    s = Stepper(token_budget=4, reuse=False, tpot_slo=0.05)
    s.add(1, 8, max_new=9)
    while len(s.tokens[1]) < said:
        s.language(took_s=0.01)
    s.scheduler._requests.preempt(s.state(1), s.now)
    s.now += 0.045
    while len(s.tokens[1]) == said:
        s.language(took_s=0.01)
    s.finish_all()
    (gap,) = explained_of(s, 1)
    assert gap.blame[0].kind == "preemption" and gap.blame[0].seconds > 0.045


def test_a_limit_says_which_gaps_the_timeline_shows_and_what_they_went_to() -> None:
    s = Stepper(tpot_slo=0.02, token_budget=64)
    s.add(1, 4, max_new=20)
    for _ in range(8):
        s.language(took_s=0.01)
    s.add(2, 30, max_new=1)
    s.language(took_s=0.04)
    s.finish_all()
    (wait,) = [span for span in s.finished[1].spans if span.stage == "decode_wait"]
    assert wait.cause == "prefill of request 2 (30 tokens)" and wait.end_s - wait.start_s < MIN_GAP_S
    (blame, *_) = wait.blame
    assert (blame.kind, blame.request, blame.amount) == ("prefill", 2, 30)


def test_a_client_of_its_own_is_not_told_whose_work_it_waited_for() -> None:
    s = Stepper(tpot_slo=0.02, token_budget=64)
    s.submit(make_request(1, 4, max_new=20, salt="of a key"))
    for _ in range(8):
        s.language(took_s=0.01)
    s.add(2, 30, max_new=1)
    s.add(3, 20, max_new=1)
    s.language(took_s=0.04)
    s.finish_all()
    (wait,) = [span for span in s.finished[1].spans if span.stage == "decode_wait"]
    assert wait.cause == "prefill of other requests"
    assert [(cause.kind, cause.request, cause.amount) for cause in wait.blame if cause.kind == "prefill"] == [
        ("prefill", None, 0)
    ]
    assert sum(cause.seconds for cause in wait.blame) > 0.02


def test_a_step_made_long_by_prefill_splits_the_decode_and_names_the_cause() -> None:
    costs = Costs(language=lambda plan: 0.01 if plan.num_tokens == len(plan.decodes) else 0.2)
    sim = Simulator(config(), costs=costs)
    sim.submit(make_request(1, 4, max_new=40))
    sim.submit(make_request(2, 8, max_new=2), 0.4)
    sim.run()
    spans = [s for s in sim.finished[1].spans if s.stage.startswith("decode")]
    cause = "prefill of request 2 (8 tokens)"
    assert [(s.stage, s.cause) for s in spans] == [("decode", None), ("decode_wait", cause), ("decode", None)]
    assert sum(s.tokens for s in spans) == 39
    assert abs(spans[1].end_s - spans[1].start_s - 0.19) < 0.011
    assert all(abs(a.end_s - b.start_s) < 1e-9 for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize(("pause_s", "took_s", "cause"), [(0.3, 0.01, "between steps"), (0.0, 0.3, "slow step")])
def test_other_gaps_are_told_apart(pause_s: float, took_s: float, cause: str) -> None:
    s = Stepper()
    s.add(1, 4, max_new=20)
    for _ in range(10):
        s.language(took_s=0.01)
    s.now += pause_s
    s.language(took_s=took_s)
    while s.scheduler.has_work:
        s.language(took_s=0.01)
    assert [span.cause for span in s.finished[1].spans if span.stage == "decode_wait"] == [cause]


def test_a_preempted_request_shows_the_time_from_its_last_token_to_its_next_chunk() -> None:
    s = Stepper(kv_blocks=7, token_budget=32, reuse=False)
    s.add(1, 8, max_new=12)
    s.add(2, 8, max_new=12)
    while s.scheduler.has_work:
        s.language(took_s=0.02)
    stages = [span.stage for span in s.finished[2].spans]
    assert stages == ["prefill", "decode", "preempted", "decode_wait", "prefill", "decode"]
    gap = s.finished[2].spans[3]
    assert gap.cause == "preemption" and [blame.kind for blame in gap.blame] == ["preemption"]
    spans = [span for span in s.finished[2].spans if span is not gap]
    assert gap.start_s == spans[1].end_s and spans[3].start_s <= gap.end_s <= spans[3].end_s
    assert spans[2].cause == "kv blocks" and spans[2].start_s == spans[1].end_s and spans[2].end_s == spans[3].start_s
    assert sum(span.tokens for span in spans if span.stage == "decode") + 2 == 12  # both prefills end in a token
