"""The table of decodes against plain lists: stop tokens, ends, gaps, spans, block tables and the summary of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.messages import Delta, Finished, Tokens
from hydra_engine.core.outputs import FinishReason, StageSpan
from hydra_engine.core.request import Slo
from hydra_engine.core.results import LanguageResult, TokenLogprobs
from hydra_engine.core.state import RequestState
from hydra_engine.scheduler.decodes import SPARE_COLUMNS, DecodeTimes
from hydra_engine.scheduler.timeline import Timeline
from tests.examples import examples
from tests.scheduler.sim import Simulator, config, expected_tokens, make_request, rows_of
from tests.scheduler.stepper import Stepper

# ---- ends


@pytest.mark.parametrize("count", [1, 2, 9, 60])
def test_any_number_of_stop_tokens_ends_a_request_beside_others(count: int) -> None:
    s = Stepper(token_budget=32)
    stop = expected_tokens(make_request(1, 6, max_new=10))[4]
    others = [1001 + n for n in range(count - 1)]  # no token of the model
    s.add(1, 6, max_new=10, stop_token_ids=(*others[: count // 2], stop, *others[count // 2 :]))
    s.add(2, 6, max_new=10)
    s.add(3, 6, max_new=10, eos=(2001, 2002, 2003))
    s.finish_all()
    assert (s.finished[1].stop_token_id, len(s.tokens[1])) == (stop, 5)
    assert [s.finished[n].reason for n in (2, 3)] == [FinishReason.LENGTH] * 2


def test_stop_tokens_of_whoever_sat_in_a_slot_before_are_forgotten() -> None:
    s = Stepper(max_num_seqs=1)
    said = expected_tokens(make_request(2, 6, max_new=6))
    s.add(1, 6, max_new=2, stop_token_ids=tuple(said))
    s.add(2, 6, max_new=6)
    s.finish_all()
    assert s.tokens[2] == said


def test_a_request_with_many_stop_tokens_leaves_them_behind_too() -> None:
    s = Stepper(max_num_seqs=1)
    said = expected_tokens(make_request(2, 6, max_new=6))
    s.add(1, 6, max_new=2, stop_token_ids=(*said, *range(3000, 3020)))
    s.add(2, 6, max_new=6)
    s.finish_all()
    assert s.tokens[2] == said


# ---- gaps


def explained_of(s: Stepper, number: int) -> list[StageSpan]:
    found = [span for span in s.finished[number].spans if span.stage == "decode_wait"]
    assert all(span.blame for span in found), "a gap without a reason"
    return found


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.001, 0.2), st.floats(0, 0.2)), min_size=12, max_size=30),
    st.lists(st.sampled_from([None, 0.01, 0.05, 0.1]), min_size=1, max_size=4),
    st.sampled_from([None, 0.08]),
    st.booleans(),
    st.sampled_from([3, 4, 5, 32]),
)
def test_late_gaps_are_counted_as_the_times_between_tokens_say(steps, limits, engine_s, tight, budget) -> None:
    """Steps and pauses of any length, also with few blocks, so that requests give way in the middle."""
    s = Stepper(tpot_slo=engine_s, kv_blocks=9 if tight else 64, reuse=not tight, token_budget=budget)
    for number, tpot_limit_s in enumerate(limits):
        s.submit(replace(make_request(number, 4, max_new=10), slo=Slo(tpot_s=tpot_limit_s)))
    times: dict[int, list[float]] = {number: [] for number in range(len(limits))}
    for took_s, pause_s in steps * 12:
        before = {number: len(s.tokens[number]) for number in times}
        s.language(took_s=took_s)
        for number in times:
            times[number] += [s.now] * (len(s.tokens[number]) - before[number])
        s.now += pause_s
    s.finish_all()
    for number, tpot_limit_s in enumerate(limits):
        assert len(times[number]) == 10
        gaps = [b - a for a, b in zip(times[number], times[number][1:], strict=False)]
        tpot_limit_s = tpot_limit_s if tpot_limit_s is not None else engine_s
        explained = explained_of(s, number)
        if tpot_limit_s is not None:
            assert len(explained) == sum(gap > tpot_limit_s for gap in gaps)
            assert explained == s.late[number], "in the timeline and beside the tokens"


def test_the_spans_of_a_decode_hold_all_its_tokens_and_the_rows_beside_it() -> None:
    s = Stepper(token_budget=64)
    s.add(1, 4, max_new=11)
    s.add(2, 4, max_new=6)
    s.finish_all()
    spans = {n: [x for x in s.finished[n].spans if x.stage == "decode"] for n in (1, 2)}
    assert [(x.tokens, x.batch) for x in spans[1]] == [(10, 2)], "five steps of two rows, five of one"
    assert [(x.tokens, x.batch) for x in spans[2]] == [(5, 2)]


# ---- block tables


@pytest.mark.quick("True")
@pytest.mark.parametrize("look_ahead", [False, True])
def test_contexts_of_many_blocks_keep_their_tables_whole(look_ahead: bool) -> None:
    """A context may have more blocks than the table has columns at first, beside a short one."""
    sim = Simulator(config(token_budget=64, look_ahead=look_ahead), kv_blocks=200)
    sim.submit(make_request(1, 250, max_new=280))
    sim.submit(make_request(2, 5, max_new=40), 0.05)
    sim.run()
    sim.assert_all_right()
    widest = max(plan.decodes.block_tables.shape[1] for _, plan in sim.language_plans)
    assert -(-529 // 4) <= widest < -(-529 // 4) + SPARE_COLUMNS


def test_a_plan_keeps_its_arrays_whatever_happens_behind_it() -> None:
    s = Stepper(look_ahead=True)
    s.add(1, 4, max_new=9)
    s.language()
    first = s.plan_language()
    seen = [column.copy() for column in (first.decodes.starts, first.decodes.token_ids, first.decodes.block_tables)]
    s.plan_language()
    s.end_language(first)
    s.plan_language()
    now = (first.decodes.starts, first.decodes.token_ids, first.decodes.block_tables)
    assert all((a == b).all() for a, b in zip(seen, now, strict=True))


@pytest.mark.parametrize("leaver", [1, 2, 3])
def test_a_plan_keeps_its_block_tables_when_others_come_and_go(leaver: int) -> None:
    """The last member moves to the row of one that leaves, and a new one joins; a plan in flight keeps its own
    tables."""
    s = Stepper(look_ahead=True, token_budget=64)
    for number in (1, 2, 3):
        s.add(number, 4 + number, max_new=30)
    s.language()
    s.language()
    s.add(4, 9, max_new=9)
    first = s.plan_language()  # all three, and the prompt of the fourth
    tables, needed = first.decodes.block_tables, first.decodes.starts // 4 + 1
    seen = [row[:count].tolist() for row, count in zip(tables, needed.tolist(), strict=True)]
    s.abort(leaver)
    second = s.plan_language()
    s.end_language(first)
    s.add(5, 14, max_new=9)
    third = s.plan_language()
    assert [row[:count].tolist() for row, count in zip(tables, needed.tolist(), strict=True)] == seen
    assert sorted(second.decodes.request_ids.tolist()) == sorted({1, 2, 3, 4} - {leaver})
    s.end_language(second)
    s.end_language(third)
    s.finish_all()


def test_plans_share_what_does_not_change_while_the_same_requests_decode() -> None:
    s = Stepper(token_budget=64)
    for number in (1, 2):
        s.add(number, 4, max_new=30 if number == 1 else 12)
    plans = []
    while len(s.tokens[2]) < 12:
        plans.append(s.plan_language())
        s.end_language(plans[-1])
    first, *rest = plans[1:]
    assert all(plan.decodes.seq_slots is first.decodes.seq_slots for plan in rest)
    assert all(np.shares_memory(plan.decodes.block_tables, first.decodes.block_tables) for plan in rest)
    alone = s.plan_language()
    assert alone.decodes.seq_slots.tolist() == [0] and len(first.decodes.seq_slots) == 2
    s.end_language(alone)
    s.finish_all()


# ---- the summary of a step


def test_tokens_with_log_probabilities_travel_alone_and_all_others_together() -> None:
    s = Stepper(token_budget=32)
    for number in range(4):
        s.add(number, 4, max_new=2)
    s.language()
    s.add(9, 4, max_new=1)
    s.add(10, 4, max_new=1)
    plan = s.plan_language()
    rows = [int(row.request_id) for row in rows_of(plan)]
    asked = {rows.index(number): TokenLogprobs(number, -1.0, 1) for number in (2, 10)}
    result = s.lanes.compute(plan, 0.0, 0.0, lambda row: False)
    tokens, *rest = s.scheduler.on_language(
        LanguageResult(plan.step_id, 0.0, 0.0, result.token_ids, tuple(asked.items())), 0.0
    )
    assert isinstance(tokens, Tokens) and tokens.request_ids == [0, 1, 3, 9]
    assert tokens.positions == [1, 1, 1, 0]
    assert tokens.token_ids == [int(result.token_ids[rows.index(number)]) for number in tokens.request_ids]
    alone = [event for event in rest if isinstance(event, Delta)]
    assert [(e.request_id, e.position, e.logprobs[0].token_id) for e in alone] == [(2, 1, 2), (10, 0, 10)]
    assert [e.request_id for e in rest[2:] if isinstance(e, Finished)] == [0, 1, 2, 3, 9, 10]


def test_a_row_without_a_token_and_without_an_error_is_noticed() -> None:
    s = Stepper()
    s.add(1, 4, max_new=5)
    s.language()
    plan = s.plan_language()
    with pytest.raises(AssertionError, match="without a token"):
        s.scheduler.on_language(LanguageResult(plan.step_id, 0.0, 0.0, np.array([-1])), 0.0)


# ---- times by row: the wait of a member before it joined moves with it


def times_of(*latest_token_s: float) -> tuple[DecodeTimes, list[Timeline]]:
    """Members with a limit of 50 ms whose latest steps ended at 1.0 and whose latest tokens came at these times."""
    times, timelines = DecodeTimes(4), []
    for number, token_s in enumerate(latest_token_s):
        state = RequestState.new(make_request(number, 4), number, 0.0)
        timelines.append(timeline := Timeline("here", 0.0, has_images=False, tpot_limit_s=0.05))
        timeline.first_token_s, timeline.last_token_s, timeline.last_s = 0.5, token_s, 1.0
        times.join(state, timeline)
    return times, timelines


@pytest.mark.parametrize("alone", [slice(0, 1), np.array([0])], ids=["the first", "one of them"])
def test_what_a_member_waited_before_it_joined_is_kept_until_its_first_token(alone: slice | np.ndarray) -> None:
    times, _ = times_of(1.0, 0.9)
    times.add_tokens(alone, 1.02, batch=1, gap_s=9.0)
    assert times.elapsed(slice(0, 2))[1].tolist() == [0, 0]
    times.add_tokens(slice(0, 2), 1.04, batch=2, gap_s=9.0)
    assert times.elapsed(slice(0, 2))[1].tolist() == [0, 1], "0.1 s before its latest step, and 0.04 s behind"
    times.add_tokens(slice(0, 2), 1.08, batch=2, gap_s=9.0)
    assert times.elapsed(slice(0, 2))[1].tolist() == [0, 1], "counted once"


def test_the_last_member_takes_its_times_along_to_the_place_of_who_left() -> None:
    times, timelines = times_of(1.0, 1.0, 0.9)
    times.leave(0)
    times.add_tokens(slice(0, 2), 1.04, batch=2, gap_s=9.0)
    for place in (0, 0):
        times.leave(place)
    assert [timeline.late_gaps for timeline in timelines] == [0, 0, 1]
    assert [timeline.last_s for timeline in timelines] == [1.0, 1.04, 1.04]
    assert [timeline.last_token_s for timeline in timelines] == [1.0, 1.04, 1.04]


def test_who_leaves_before_a_token_came_leaves_the_time_of_its_latest_one_as_it_was() -> None:
    times, (timeline,) = times_of(0.7)
    times.leave(0)
    assert (timeline.last_token_s, timeline.last_s) == (0.7, 1.0)
