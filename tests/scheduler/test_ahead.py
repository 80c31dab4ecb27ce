"""Planning a language step while one runs: what goes into it, what it must not do, and that nobody can tell."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.messages import Finished, Tokens
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.plans import LanguagePlan
from tests.examples import examples
from tests.scheduler.sim import Img, Simulator, config, expected_tokens, make_request, rows_of
from tests.scheduler.stepper import Stepper
from tests.scheduler.test_progress import minimum_pools, workloads


def ahead(**changes) -> Stepper:
    return Stepper(**({"look_ahead": True, "token_budget": 32} | changes))


def rows(plan: LanguagePlan | None) -> list[tuple[int, int, int]]:
    """(request, first token, how many)"""
    assert plan is not None
    return [(int(row.request_id), row.token_ids[0], len(row.token_ids)) for row in rows_of(plan)]


# ---- what is planned


def test_a_decode_follows_with_a_token_that_nobody_has_read() -> None:
    s = ahead()
    s.add(1, 4, max_new=5)
    first = s.plan_language()
    second = s.plan_language()
    (row,) = rows_of(second)
    assert (row.token_ids, row.start, row.num_generated, row.is_decode) == ((-1,), 4, 1, True)
    assert s.plan_language() is None, "two are in flight"
    s.end_language(first)
    third = s.plan_language()
    (row,) = rows_of(third)
    assert (row.token_ids, row.start, row.num_generated) == ((-1,), 5, 2)
    s.end_language(second)
    s.end_language(third)
    (row,) = rows_of(s.plan_language())
    assert (row.token_ids, row.start) == ((s.tokens[1][-1],), 6), "nothing is on its way any more"


def test_chunks_follow_chunks_and_the_decode_the_last_one() -> None:
    s = ahead(token_budget=8)
    s.add(1, 18, max_new=3)
    plans = [s.plan_language(), s.plan_language()]
    assert [(row.start, len(row.token_ids), row.sample) for plan in plans for row in rows_of(plan)] == [
        (0, 8, False),
        (8, 8, False),
    ]
    s.end_language(plans[0])
    plans.append(s.plan_language())
    s.end_language(plans[1])
    plans.append(s.plan_language())
    assert [(row.start, row.sample, row.is_decode) for plan in plans[2:] for row in rows_of(plan)] == [
        (16, True, False),
        (18, True, True),
    ]
    s.end_language(plans[2])
    s.end_language(plans[3])
    s.finish_all()


def test_requests_that_arrive_while_a_step_runs_are_in_the_next_one() -> None:
    s = ahead()
    s.add(1, 4, max_new=5)
    first = s.plan_language()
    s.add(2, 6, max_new=2)
    second = s.plan_language()
    assert [number for number, _, _ in rows(second)] == [1, 2]
    s.end_language(first)
    s.end_language(second)
    s.finish_all()


@pytest.mark.parametrize("max_new", [1, 2, 3])
def test_nothing_is_planned_behind_the_last_token(max_new: int) -> None:
    s = ahead()
    s.add(1, 4, max_new=max_new)
    plans = [s.plan_language()]
    while len(plans) < max_new:
        plans.append(s.plan_language())
        assert plans[-1] is not None
        s.end_language(plans[-2])
    assert s.plan_language() is None
    (tokens, end) = s.end_language(plans[-1])
    assert isinstance(tokens, Tokens) and isinstance(end, Finished) and end.reason is FinishReason.LENGTH


def test_features_that_a_chunk_in_flight_covers_only_in_part_stay_for_the_next_chunk() -> None:
    s = ahead(token_budget=5)
    s.add(1, 2, Img(8), 2, max_new=1)
    s.vision()
    plans = [s.plan_language(), s.plan_language()]
    assert [[(part.count, part.offset) for part in row.images] for plan in plans for row in rows_of(plan)] == [
        [(3, 0)],
        [(5, 3)],
    ]
    s.end_language(plans[0])
    assert s.scheduler.ledger().image_blocks_held == 2
    plans.append(s.plan_language())
    s.end_language(plans[1])
    assert s.scheduler.ledger().image_blocks_held == 0
    s.end_language(plans[2])
    assert s.tokens[1] == expected_tokens(s.requests[1])


# ---- what it must not do


def test_where_a_decode_lacks_a_block_the_result_comes_first_and_then_somebody_gives_way() -> None:
    s = ahead(kv_blocks=7, reuse=False)
    s.add(1, 8, max_new=12)
    s.add(2, 8, max_new=12)
    gave_up = 0
    while not s.scheduler.status().num_preemptions:
        plan = s.plan_language()
        following = s.plan_language()
        gave_up += following is None
        s.end_language(plan)
        if following is not None:
            s.end_language(following)
    assert gave_up == 1, "blocks lacked once, and the plan after the result preempted"
    s.finish_all()


def test_a_prefill_takes_no_blocks_from_a_younger_one_while_a_step_runs() -> None:
    s = ahead(kv_blocks=9, token_budget=12)
    s.add(1, 4, Img(8), 20, max_new=4)  # nine blocks
    s.add(2, 28, max_new=4)  # seven blocks, promised while the first stands before its image
    s.language()
    s.language()
    s.vision()
    plan = s.plan_language()
    assert rows(plan) == [(1, plan.chunks[0].token_ids[0], 12)]
    assert s.plan_language() is None and s.state(2).num_preemptions == 0
    s.end_language(plan)
    assert s.language() == [(1, 12)] and s.state(2).num_preemptions == 1
    s.finish_all()


def test_a_waiting_request_takes_no_place_from_a_stalled_one_while_a_step_runs() -> None:
    s = ahead(kv_blocks=8, image_budget=1, token_budget=100)
    s.add(0, 2, max_new=3)
    s.add(1, Img(8), 12, max_new=4)
    s.add(2, 9, Img(8), 1, max_new=4)
    assert s.language() == [(0, 2), (2, 9)]
    assert s.vision() == [(1, 0)]
    plan = s.plan_language()
    assert [number for number, _, _ in rows(plan)] == [0, 1] and s.state(2).num_preemptions == 1
    s.end_language(plan)
    s.finish_all()
    s = ahead(kv_blocks=8, image_budget=1, token_budget=100)
    s.add(0, 2, max_new=3)
    s.add(1, Img(8), 12, max_new=4)
    s.add(2, 9, Img(8), 1, max_new=4)
    s.language()
    plan = s.plan_language()
    s.vision()
    assert s.plan_language() is None and s.state(2).num_preemptions == 0
    s.end_language(plan)
    s.finish_all()


def test_without_look_ahead_one_step_is_in_flight_at_most() -> None:
    s = Stepper()
    s.add(1, 4)
    assert s.plan_language() is not None and s.plan_language() is None


# ---- ends


def test_a_request_that_stops_is_ignored_in_the_plan_behind_and_ends_when_that_is_back() -> None:
    s = ahead()
    stop = expected_tokens(make_request(1, 6, max_new=10))[1]
    s.add(1, 6, max_new=10, eos=(stop,))
    s.add(2, 6, max_new=10)
    plans = [s.plan_language(), s.plan_language()]
    s.end_language(plans[0])
    plans.append(s.plan_language())
    (tokens,) = s.end_language(plans[1])
    assert tokens.request_ids == [1, 2] and s.tokens[1][-1] == stop
    assert s.scheduler.ledger().kv_blocks_held == 4, "both still hold their blocks"
    plans.append(s.plan_language())
    assert [number for number, _, _ in rows(plans[3])] == [2]
    tokens, end = s.end_language(plans[2])
    assert tokens.request_ids == [2]
    assert (end.request_id, end.reason, end.stop_token_id, end.num_generated) == (1, FinishReason.STOP, stop, 2)
    s.end_language(plans[3])
    s.finish_all()


@pytest.mark.parametrize("how", ["abort", "fail"])
@pytest.mark.parametrize("prompt", [6, 40])
def test_a_request_that_goes_in_one_step_and_is_in_the_next_ends_when_both_are_back(how: str, prompt: int) -> None:
    """Checked as a decode and as a prefill with chunks in both steps."""
    s = ahead(token_budget=16)
    s.add(1, prompt, max_new=10)
    plans = [s.plan_language(), s.plan_language()]
    if how == "abort":
        assert s.abort(1) == []
    assert s.end_language(plans[0], bad=[1] if how == "fail" else []) == []
    assert s.plan_language() is None
    (end,) = s.end_language(plans[1])
    assert end.reason is (FinishReason.ABORT if how == "abort" else FinishReason.ERROR)
    assert not s.scheduler.ledger().holders and not s.scheduler.has_work


def test_a_slot_is_given_to_nobody_while_a_plan_names_it() -> None:
    s = ahead(max_num_seqs=1)
    s.add(1, 4, max_new=8)
    s.add(2, 4, max_new=2)
    plans = [s.plan_language(), s.plan_language()]
    s.end_language(plans[0])
    s.abort(1)
    assert s.plan_language() is None
    s.end_language(plans[1])
    assert s.language() == [(2, 4)]
    s.finish_all()


# ---- nobody can tell


@settings(max_examples=examples(40), deadline=None)
@given(
    workloads(),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.sampled_from([0.0, 0.004, 0.03]),
    st.booleans(),
)
def test_with_look_ahead_and_late_results_everything_finishes_with_the_same_tokens(
    work, seqs, token_budget, slack, ahead_at, late_s, reuse
):
    kv_blocks, image_blocks = minimum_pools(work)
    settings_ = config(max_num_seqs=seqs, token_budget=token_budget, look_ahead=True)
    sim = Simulator(
        settings_,
        kv_blocks=kv_blocks + slack,
        image_blocks=image_blocks,
        reuse=reuse,
        ahead_at=ahead_at,
        late_s=late_s,
    )
    for time_s, request in work:
        sim.submit(request, time_s)
    sim.run()
    assert not sim.refused
    sim.assert_all_right()


@settings(max_examples=examples(40), deadline=None)
@given(workloads(), st.data())
def test_aborts_and_errors_between_two_plans_in_flight_leave_nothing_behind(work, data):
    kv_blocks, image_blocks = minimum_pools(work)
    numbers = st.sampled_from([r.id for _, r in work])
    aborts = data.draw(st.lists(st.tuples(numbers, st.floats(0, 1.0)), max_size=5))
    bad_images = data.draw(st.sets(st.tuples(numbers, st.integers(0, 2)), max_size=2))
    bad_rows = data.draw(st.sets(st.tuples(numbers, st.integers(0, 6)), max_size=3))
    sim = Simulator(
        config(look_ahead=True),
        kv_blocks=kv_blocks + data.draw(st.integers(0, 8)),
        image_blocks=image_blocks,
        late_s=data.draw(st.sampled_from([0.0, 0.01])),
        bad_images=frozenset(bad_images),
        bad_rows=frozenset(bad_rows),
    )
    for time_s, request in work:
        sim.submit(request, time_s)
    for number, time_s in aborts:
        sim.abort(number, time_s)
    sim.run()
    touched = {n for n, _ in aborts} | {n for n, _ in bad_images} | {n for n, _ in bad_rows}
    sim.assert_all_right([r.id for _, r in work if r.id not in touched])
    for number in touched & sim.finished.keys():
        assert sim.tokens[number] == expected_tokens(sim.requests[number])[: len(sim.tokens[number])]


def test_the_lane_goes_on_without_a_pause() -> None:
    """Results need 3 ms to come back; only with look-ahead does the lane not wait for them."""

    def pauses(look_ahead: bool) -> float:
        sim = Simulator(config(look_ahead=look_ahead), late_s=0.003)
        for number in range(6):
            sim.submit(make_request(number, 10, max_new=30), number * 0.02)
        sim.run()
        sim.assert_all_right()
        busy = sum(ended_s - started_s for started_s, ended_s, _ in sim.steps)
        return sim.steps[-1][1] - sim.steps[0][0] - busy

    assert pauses(look_ahead=False) > 0.09
    assert pauses(look_ahead=True) < 1e-9
