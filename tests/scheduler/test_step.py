"""The language step: who is in it, in what order and with how much; preemption, bypass and the end of requests."""

from __future__ import annotations

import pytest

from hydra_engine.core.messages import Finished, Tokens
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.state import ImageProgress
from tests.scheduler.sim import BROKEN, Costs, Img, Simulator, config, expected_tokens, make_request, rows_of
from tests.scheduler.stepper import Stepper

# ---- what a step holds


def test_decodes_come_first_then_running_prefills_then_waiting_ones_until_the_budget_is_full() -> None:
    s = Stepper(token_budget=16)
    s.add(1, 4)
    s.add(2, 30)
    s.add(3, 10)
    s.add(4, 10)
    assert s.language() == [(1, 4), (2, 12)]
    assert s.language() == [(1, 1), (2, 15)]
    assert s.language() == [(1, 1), (2, 3), (3, 10), (4, 2)]
    assert s.language() == [(1, 1), (2, 1), (3, 1), (4, 8)]
    s.finish_all()


def test_the_last_chunk_of_a_prefill_gives_the_first_token_in_the_same_step() -> None:
    s = Stepper(token_budget=8)
    s.add(1, 12)
    plan = s.plan_language()
    assert [row.sample for row in rows_of(plan)] == [False]
    assert s.end_language(plan) == []
    plan = s.plan_language()
    assert [(row.sample, row.start, row.num_generated, row.is_decode) for row in rows_of(plan)] == [(True, 8, 0, False)]
    assert [type(event) for event in s.end_language(plan)] == [Tokens]
    plan = s.plan_language()
    assert [(row.sample, row.start, row.num_generated, row.is_decode) for row in rows_of(plan)] == [(True, 12, 1, True)]


def test_one_plan_per_lane_is_in_flight_at_most() -> None:
    s = Stepper()
    s.add(1, 4)
    s.add(2, Img(4), 1)
    language, vision = s.plan_language(), s.plan_vision()
    assert language is not None and vision is not None
    assert s.plan_language() is None and s.plan_vision() is None
    s.end_language(language)
    assert s.plan_language() is not None and s.plan_vision() is None


def test_no_more_requests_hold_kv_blocks_than_max_num_seqs() -> None:
    s = Stepper(max_num_seqs=2)
    for number in range(4):
        s.add(number, 3, max_new=2)
    assert s.language() == [(0, 3), (1, 3)]
    assert s.language() == [(0, 1), (1, 1)]
    assert s.language() == [(2, 3), (3, 3)]


def test_with_fewer_tokens_in_a_step_than_sequences_every_running_request_still_gets_one() -> None:
    s = Stepper(token_budget=3, max_num_seqs=8)
    s.add(1, 1, Img(6), 1, max_new=2)
    for number in range(2, 8):
        s.add(number, 1, max_new=30)
    assert s.language() == [(1, 1), (2, 1), (3, 1)]
    assert s.language() == [(2, 1), (3, 1)]
    s.vision()
    assert s.language() == [(2, 1), (3, 1), (1, 1)]
    s.finish_all()


# ---- images


def test_prefill_runs_up_to_and_not_into_the_first_image_without_features() -> None:
    s = Stepper()
    s.add(1, 5, Img(6), 3)
    assert s.language() == [(1, 5)]
    assert s.language() == []
    vision = s.plan_vision()
    assert s.language() == [], "an encode in flight is not features"
    s.end_vision(vision)
    assert s.language() == [(1, 9)]
    s.finish_all()


def test_a_prefill_starts_as_soon_as_the_images_that_its_chunk_covers_are_encoded() -> None:
    s = Stepper(image_budget=1)
    s.add(1, 2, Img(4), 2, Img(4), 2)
    assert s.vision() == [(1, 0)]
    assert s.language() == [(1, 8)]
    assert s.vision() == [(1, 1)]
    assert s.language() == [(1, 6)]
    s.finish_all()


def test_chunks_end_and_begin_inside_image_spans_with_the_right_rows_of_the_features() -> None:
    s = Stepper(token_budget=5)
    s.add(1, 3, Img(9), 1)
    s.vision()
    seen = []
    while (plan := s.plan_language()) and not rows_of(plan)[0].is_decode:
        seen.append([(part.row, part.count, part.offset) for part in rows_of(plan)[0].images])
        s.end_language(plan)
    assert seen == [[(3, 2, 0)], [(0, 5, 2)], [(0, 2, 7)]]
    s.end_language(plan)
    s.finish_all()


def test_image_blocks_are_freed_as_soon_as_prefill_has_passed_the_span() -> None:
    s = Stepper(token_budget=5)
    s.add(1, 2, Img(5), 1, Img(4), 4)
    s.vision()
    used = []
    while s.state(1).num_computed < 16 and s.language():
        used.append((s.state(1).num_computed, s.scheduler.status().image_blocks_used))
    assert used == [(5, 3), (10, 1), (15, 0), (16, 0)]


@pytest.mark.slow
def test_text_never_waits_behind_requests_that_wait_for_encodes() -> None:
    """A burst of pictures on a slow encoder, then text: it is served as if it were alone."""
    slow = Costs(vision=lambda plan: 1.0)
    sim = Simulator(config(max_num_seqs=4), costs=slow)
    for number in range(100):
        sim.submit(make_request(number, 3, Img(8), 2, max_new=2))
    for number in range(100, 140):
        sim.submit(make_request(number, 6, max_new=2), 0.105 + (number - 100) * 0.1)
    sim.run()
    sim.assert_all_right()
    waits = [sim.token_times[n][0] - (0.105 + (n - 100) * 0.1) for n in range(100, 140)]
    assert max(waits) < 0.05, f"text waited {max(waits):.3f} s"


def test_requests_before_an_image_hold_at_most_half_of_the_sequences() -> None:
    s = Stepper(max_num_seqs=6, token_budget=100)
    for number in range(20):
        s.add(number, 2, Img(4), 1)
    s.language()
    assert s.scheduler.status().num_running == 3


def test_a_waiting_request_takes_room_from_younger_prefills_that_stand_before_an_image() -> None:
    """The older one lacks blocks; the younger one holds some and cannot use them."""
    s = Stepper(kv_blocks=6, image_budget=1, token_budget=100)
    s.add(1, Img(8), 12, max_new=4)  # five blocks, and nothing to compute before its image
    s.add(2, 9, Img(8), 1, max_new=4)
    assert s.language() == [(2, 9)]
    assert s.vision() == [(1, 0)]
    assert s.language() == [(1, 20)]
    assert s.state(2).num_preemptions == 1
    s.finish_all()


# ---- room


def test_a_prompt_is_admitted_only_when_all_of_it_has_room() -> None:
    s = Stepper(kv_blocks=8, token_budget=8)
    s.add(1, 20, max_new=4)  # five blocks now, six in the end
    s.add(2, 13, max_new=3)  # four blocks
    assert s.language() == [(1, 8)], "the second would run short in its middle"
    s.finish_all()
    assert s.scheduler.status().num_preemptions == 0


@pytest.mark.parametrize("max_bypass", [1, 3, 7])
def test_a_waiter_is_overtaken_at_most_max_bypass_times(max_bypass: int) -> None:
    sim = Simulator(config(max_bypass=max_bypass, max_num_seqs=6), kv_blocks=12)
    sim.submit(make_request(0, 4, max_new=8))
    sim.submit(make_request(1, 40, max_new=8), 0.001)  # the whole pool
    for number in range(2, 60):
        sim.submit(make_request(number, 4, max_new=8), 0.002 + number * 0.02)
    sim.run()
    sim.assert_all_right()
    starts = [row.request_id for _, plan in sim.language_plans for row in rows_of(plan) if row.start == 0]
    assert starts.index(1) == 1 + max_bypass


def test_when_a_decode_lacks_a_block_the_youngest_running_request_gives_way_and_comes_back_with_its_full_demand() -> (
    None
):
    s = Stepper(kv_blocks=7, token_budget=32, reuse=False)
    s.add(1, 8, max_new=12)  # five blocks in the end
    s.add(2, 8, max_new=12)
    assert s.language() == [(1, 8), (2, 8)]
    while not s.state(2).num_preemptions:
        s.language()
    assert s.state(1).num_preemptions == 0
    assert s.scheduler.status().num_waiting == 1
    said = len(s.tokens[2])
    assert said > 0 and s.state(2).num_computed == 0 and s.state(2).num_generated == said
    while 1 not in s.finished:
        s.language()
        assert 1 in s.finished or s.scheduler.status().num_waiting == 1, "it waits for its full demand"
    plan = s.plan_language()
    (row,) = rows_of(plan)
    assert (row.start, len(row.token_ids), row.num_generated, row.sample) == (0, 8 + said, said, True)
    assert row.num_blocks == 5, "all that it can ever need"
    s.end_language(plan)
    s.finish_all()
    assert [s.finished[n].num_preemptions for n in (1, 2)] == [0, 1]


def test_a_preempted_request_with_pictures_is_encoded_again() -> None:
    s = Stepper(kv_blocks=7, token_budget=32, reuse=False)
    s.add(1, 8, max_new=12)
    s.add(2, 2, Img(5), 1, max_new=12)
    assert s.vision() == [(2, 0)]
    s.language()
    while not s.state(2).num_preemptions:
        s.language()
    assert s.state(2).images == [ImageProgress.WAITING]
    assert s.scheduler.status().num_encoding == 1
    while 1 not in s.finished:
        s.language()
    assert s.language() == [], "its full demand would be taken from others while it waits for the encode"
    assert s.vision() == [(2, 0)]
    s.finish_all()
    assert s.scheduler.status().images_encoded == 2


def test_prefill_chunks_never_preempt_decodes() -> None:
    """A younger decode has taken blocks that a prefill was promised before it came to stand before an image: the
    prefill waits for it to end."""
    s = Stepper(kv_blocks=8, token_budget=32)
    s.add(1, 4, Img(12), 4, max_new=4)
    s.add(2, 8, max_new=20)  # seven blocks in the end
    assert s.language() == [(1, 4), (2, 8)]
    while len(s.tokens[2]) < 10:
        s.language()
    s.vision()
    while 2 not in s.finished:
        assert s.language() == [(2, 1)]
    assert s.language() == [(1, 16)]
    s.finish_all()
    assert s.scheduler.status().num_preemptions == 0


def test_nobody_younger_starts_while_a_running_prefill_lacks_blocks() -> None:
    s = Stepper(kv_blocks=8, token_budget=32)
    s.add(1, 4, Img(12), 4, max_new=4)
    s.add(2, 8, max_new=20)
    assert s.language() == [(1, 4), (2, 8)]
    while len(s.tokens[2]) < 10:
        s.language()
    s.vision()
    s.add(3, 1, max_new=1)
    assert s.scheduler._requests.kv.pool.num_free == 2, "room for the third and its neighbour's next block"
    assert s.language() == [(2, 1)]
    s.finish_all()


def test_an_older_prefill_takes_blocks_from_a_younger_one() -> None:
    s = Stepper(kv_blocks=9, token_budget=12)
    s.add(1, 4, Img(8), 20, max_new=4)  # nine blocks
    s.add(2, 28, max_new=4)  # seven blocks, promised while the first stands before its image
    assert s.language() == [(1, 4), (2, 8)]
    assert s.language() == [(2, 12)]
    s.vision()
    assert s.language() == [(1, 12)]
    assert s.state(2).num_preemptions == 0
    assert s.language() == [(1, 12)]
    assert (s.state(1).num_preemptions, s.state(2).num_preemptions) == (0, 1)
    s.finish_all()


# ---- ends


def token_of(number: int, *, at: int) -> int:
    """The model's token at position `at` for a prompt of six tokens of that request."""
    return expected_tokens(make_request(number, 6, max_new=10))[at]


@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
def test_a_stop_token_is_reported_and_ends_the_request(how: str) -> None:
    s = Stepper()
    stop = token_of(1, at=3)
    s.add(1, 6, max_new=10, **{how: (stop,)})
    s.finish_all()
    assert len(s.tokens[1]) == 4 and s.tokens[1][-1] == stop
    end = s.finished[1]
    assert (end.reason, end.stop_token_id, end.num_generated) == (FinishReason.STOP, stop, 4)


def test_ignore_eos_goes_on_to_the_length() -> None:
    s = Stepper()
    stop = token_of(1, at=3)
    s.add(1, 6, max_new=10, eos=(stop,), ignore_eos=True)
    s.finish_all()
    end = s.finished[1]
    assert (end.reason, end.stop_token_id, end.num_generated) == (FinishReason.LENGTH, None, 10)


def test_a_stop_token_at_the_last_allowed_place_is_a_stop() -> None:
    s = Stepper()
    s.add(1, 6, max_new=4, eos=(token_of(1, at=3),))
    s.finish_all()
    assert s.finished[1].reason is FinishReason.STOP


def test_the_finish_event_comes_after_the_token_and_all_blocks_are_free_by_then() -> None:
    s = Stepper()
    s.add(1, 6, max_new=1)
    events = s.end_language(s.plan_language())
    assert [type(event) for event in events] == [Tokens, Finished]
    assert not s.scheduler.has_work and not s.scheduler.ledger().kv_blocks_held


def test_a_failed_row_fails_its_request_alone() -> None:
    s = Stepper()
    s.add(1, 4)
    s.add(2, 4)
    plan = s.plan_language()
    events = s.end_language(plan, bad=[1])
    tokens, end = events
    assert (tokens.request_ids, end.request_id) == ([2], 1)
    assert (s.finished[1].reason, s.finished[1].error) == (FinishReason.ERROR, BROKEN)
    s.finish_all()
    assert s.finished[2].reason is FinishReason.LENGTH


def test_an_aborted_request_in_flight_keeps_its_blocks_until_the_plan_has_come_back() -> None:
    s = Stepper()
    s.add(1, 6)
    plan = s.plan_language()
    assert s.abort(1) == [] and s.abort(1) == []
    assert s.scheduler.ledger().kv_blocks_held == 2 and s.scheduler.has_work
    assert s.plan_language() is None
    (event,) = s.end_language(plan)
    assert (event.reason, event.num_generated) == (FinishReason.ABORT, 0)
    assert s.scheduler.ledger().kv_blocks_held == 0 and not s.scheduler.has_work


def test_a_request_named_by_both_lanes_ends_when_the_second_plan_is_back() -> None:
    for language_first in (True, False):
        s = Stepper(token_budget=4)
        s.add(1, 8, Img(4), 2)
        language, vision = s.plan_language(), s.plan_vision()
        s.abort(1)
        first, second = [lambda s=s, p=language: s.end_language(p), lambda s=s, p=vision: s.end_vision(p)][
            :: 1 if language_first else -1
        ]
        assert first() == []
        assert [event.reason for event in second()] == [FinishReason.ABORT]
        assert not s.scheduler.ledger().holders


def test_a_waiting_request_is_aborted_at_once_and_unknown_ids_are_ignored() -> None:
    s = Stepper()
    s.add(1, 6)
    assert [event.reason for event in s.abort(1)] == [FinishReason.ABORT]
    assert s.abort(1) == [] and s.abort(99) == []


def test_stats_count_what_happened() -> None:
    s = Stepper()
    s.add(1, 6, max_new=3)
    s.add(2, 2, Img(5), 1, max_new=2)
    stats = s.scheduler.status()
    assert (stats.num_waiting, stats.num_encoding, stats.num_running) == (1, 1, 0)
    s.language()
    s.vision()
    s.language()
    stats = s.scheduler.status()
    assert (stats.num_waiting, stats.num_encoding, stats.num_running) == (0, 0, 2)
    s.finish_all()
    stats = s.scheduler.status()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.images_encoded) == (14, 5, 1)
    assert (stats.kv_blocks_used, stats.kv_blocks_total, stats.image_blocks_total) == (0, 64, 64)


def test_the_first_reason_to_end_is_the_one_reported() -> None:
    s = Stepper()
    s.add(1, 4, Img(4), 1)
    language, vision = s.plan_language(), s.plan_vision()
    s.abort(1)
    assert s.end_vision(vision, bad=[1]) == []
    (event,) = s.end_language(language, bad=[1])
    assert (event.reason, event.error) == (FinishReason.ABORT, None)


def test_a_decode_alone_waits_for_blocks_of_an_aborted_request_instead_of_giving_way_to_nobody() -> None:
    s = Stepper(kv_blocks=8, token_budget=32)
    s.add(1, 8, max_new=12)  # five blocks in the end
    s.add(2, 16, Img(4), 1, max_new=1)  # four blocks before its image
    assert s.language() == [(1, 8), (2, 16)]
    vision = s.plan_vision()
    s.abort(2)
    while s.language():
        assert len(s.tokens[1]) <= 9
    assert len(s.tokens[1]) == 9 and s.state(1).num_preemptions == 0
    s.end_vision(vision)
    assert s.language() == [(1, 1)]
    s.finish_all()
