"""Reuse of what is computed already: KV of equal beginnings, features of equal pictures, and what may not be reused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.state import ImageProgress
from tests.scheduler.sim import Costs, Img, Simulator, config, make_request, next_turn, rows_of
from tests.scheduler.stepper import Stepper

WAITING, ENCODING, ENCODED = ImageProgress.WAITING, ImageProgress.ENCODING, ImageProgress.ENCODED
CACHED, CONSUMED = ImageProgress.CACHED, ImageProgress.CONSUMED
A, B = Img(4, name="a"), Img(8, name="b")


# ---- KV: how much is found


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (17, 16)])
def test_a_prompt_seen_before_is_found_in_whole_blocks_and_one_token_is_always_left(length: int, found: int) -> None:
    s = Stepper(token_budget=32)
    s.run(1, length, max_new=1)
    s.add(2, length, source=0, max_new=3)
    assert s.language() == [(2, length - found)]
    s.finish_all()
    assert (s.hit(1), s.hit(2)) == ((0, 0), (found, 0))
    assert s.scheduler.status().prompt_tokens == 2 * length - found, "what was found is not computed"


@pytest.mark.parametrize("same", [0, 3, 4, 11, 12, 19, 20])
def test_prompts_share_exactly_the_blocks_before_they_part(same: int) -> None:
    s = Stepper(token_budget=64)
    first = s.add(1, 20, max_new=1)
    s.finish_all()
    other = make_request(2, 24, max_new=1)
    s.submit(replace(other, prompt_token_ids=(*first.prompt_token_ids[:same], *other.prompt_token_ids[same:])))
    s.finish_all()
    assert s.hit(2)[0] == same // 4 * 4


def test_the_next_turn_of_a_conversation_finds_the_answer_too() -> None:
    s = Stepper(token_budget=64)
    first = s.add(1, 3, A, 4, max_new=9)
    s.finish_all()
    s.submit(next_turn(2, first, s.tokens[1], more=5))  # 11 + 9 tokens, the last of which has no KV
    assert s.state(2).images == [CACHED] and s.vision() == []
    s.finish_all()
    assert s.hit(2) == (16, 1) and s.encodes == [(1, 0)]


@pytest.mark.parametrize(("kv", "images"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_reset_forgets_what_nobody_holds(kv: bool, images: bool) -> None:
    s = Stepper(token_budget=64)
    s.run(1, 3, A, 6)
    s.reset(kv=kv, images=images)
    s.run(2, 3, A, 6)
    assert s.hit(2) == ((0, 0) if kv and images else (0, 1) if kv else (12, 1))
    assert s.encodes == ([(1, 0), (2, 0)] if kv and images else [(1, 0)])


def test_a_reset_leaves_what_running_requests_hold() -> None:
    s = Stepper(token_budget=64)
    s.add(1, 13, source=0, max_new=8)
    s.language()
    held = s.scheduler.ledger().kv_blocks_held
    s.reset()
    assert s.scheduler.ledger().kv_blocks_held == held
    s.add(2, 13, source=0, max_new=2)
    s.finish_all()
    assert s.hit(2)[0] == 12
    s.reset()
    s.run(3, 13)
    assert s.hit(3)[0] == 0


def test_who_counted_on_what_a_reset_took_has_it_computed() -> None:
    s = Stepper(token_budget=64, max_num_seqs=1)
    s.run(1, 3, A, 6)
    s.add(2, 5, max_new=4)
    s.language()
    s.add(3, 3, A, 6, source=0)
    assert s.state(3).images == [CACHED], "its KV is there, and it waits for a slot"
    s.reset()
    s.finish_all()
    assert s.hit(3) == (0, 0) and s.encodes == [(1, 0), (3, 0)]


def test_running_requests_share_blocks_and_the_last_one_frees_them() -> None:
    s = Stepper(token_budget=64)
    s.add(1, 13, source=0, max_new=8)
    s.language()
    s.add(2, 13, source=0, max_new=2)
    s.language()
    tables = s.scheduler._requests.kv.tables
    assert tables[1].blocks()[:3] == tables[2].blocks()[:3] and tables[1].blocks()[3] != tables[2].blocks()[3]
    assert s.scheduler.ledger().kv_blocks_held == 5
    s.abort(1)
    assert s.scheduler.ledger().kv_blocks_held == 4
    s.finish_all()
    assert s.scheduler.ledger().kv_blocks_held == 0


def test_shared_blocks_cost_no_room() -> None:
    """Eight blocks: the first request holds six, the second needs six and shares five."""
    s = Stepper(kv_blocks=8, token_budget=64)
    s.add(1, 21, source=0, max_new=3)
    s.language()
    s.add(2, 21, source=0, max_new=3)
    s.add(3, 21, max_new=3)
    assert s.language() == [(1, 1), (2, 1)], "the third shares nothing and waits"
    s.finish_all()
    assert s.scheduler.status().num_preemptions == 0


@pytest.mark.parametrize(("reuse", "salts"), [(True, ("x", "y")), (False, ("", ""))])
def test_salts_and_an_engine_without_reuse_keep_everything_apart(reuse: bool, salts: tuple[str, str]) -> None:
    s = Stepper(token_budget=64, reuse=reuse)
    s.run(1, 8, A, 4, salt=salts[0])
    s.run(2, 8, A, 4, salt=salts[1])
    assert s.hit(2) == (0, 0) and s.encodes == [(1, 0), (2, 0)]


def test_other_pictures_behind_the_same_placeholders_share_only_the_text_before() -> None:
    s = Stepper(token_budget=64)
    s.run(1, 8, Img(8, name="x"), 4)
    s.run(2, 8, Img(8, name="y"), 4)
    assert s.hit(2) == (8, 0) and len(s.encodes) == 2


# ---- KV: what may be found


def test_blocks_are_lent_only_when_a_token_has_proved_them() -> None:
    s = Stepper(token_budget=8)
    s.add(1, 20, source=0)
    s.language()
    s.language()
    assert s.state(1).num_computed == 16 and s.state(1).num_published == 0
    s.language()
    s.scheduler.publish()
    assert s.state(1).num_computed == 20 and s.state(1).num_published == 5
    s.finish_all()


def test_a_failed_row_lends_nothing() -> None:
    s = Stepper(token_budget=8)
    s.add(1, 20, source=0)
    s.language()
    s.language()
    s.end_language(s.plan_language(), bad=[1])
    assert s.finished[1].reason is FinishReason.ERROR
    s.run(2, 20)
    assert s.hit(2) == (0, 0)


def test_a_request_that_fails_later_has_lent_what_was_proved_and_nothing_behind_it() -> None:
    s = Stepper(token_budget=64)
    first = s.add(1, 6, max_new=20)
    while s.state(1).num_computed < 11:
        s.language()
    s.end_language(s.plan_language(), bad=[1])  # its third block would be full
    s.submit(next_turn(2, first, s.tokens[1], more=9))
    s.finish_all()
    assert s.hit(2)[0] == 8


def test_an_aborted_row_lends_nothing_new() -> None:
    s = Stepper(token_budget=64)
    s.add(1, 9, source=0)
    plan = s.plan_language()
    s.abort(1)
    s.end_language(plan)
    s.run(2, 9)
    assert s.hit(2) == (0, 0)


@pytest.mark.parametrize("taken", range(1, 9))
def test_eviction_shortens_what_is_found_from_its_end(taken: int) -> None:
    """Six of eight blocks are named; the two others are allocated first."""
    s = Stepper(kv_blocks=8, token_budget=64)
    s.run(1, 25, max_new=3)
    s.add(2, 4 * taken - 1, max_new=1)
    plan = s.plan_language()
    s.add(3, 25, source=0, max_new=1)
    assert len(s.scheduler._requests.prefixes.find(s.state(3))) == 6 - max(0, taken - 2)
    s.end_language(plan)
    s.finish_all()


@pytest.mark.parametrize("tidied", range(8))
@pytest.mark.parametrize("behind", [1, 2, 3])
def test_of_two_requests_with_the_same_content_the_first_to_prove_a_block_lends_it(behind: int, tidied: int) -> None:
    """The first request to compute a block publishes it, at whatever step; the oracle checks which of two equal ones is
    found."""
    s = Stepper(token_budget=64, kv_blocks=40)
    first = s.add(1, 6, source=0, max_new=24)
    for _ in range(behind):
        s.language()
    s.add(2, 6, source=0, max_new=24)
    for step in range(9):
        s.language()
        if step == tidied:
            s.scheduler.publish()
    s.submit(next_turn(3, first, s.tokens[1], more=5))
    s.language()
    assert s.state(3).cached_tokens == (6 + len(s.tokens[1]) - 2) // 4 * 4
    s.finish_all()


# ---- preemption


def test_a_preempted_request_computes_only_what_has_been_evicted() -> None:
    s = Stepper(kv_blocks=7, token_budget=32)
    s.add(1, 8, max_new=12)
    s.add(2, 2, Img(5), 1, max_new=12)
    s.vision()
    while not (2 in s.requests and s.state(2).num_preemptions):
        s.language()
    assert s.state(2).images == [CACHED], "its own blocks have just become free and are still there"
    assert s.scheduler.status().num_waiting == 1
    while 1 not in s.finished:
        s.language()
    said = len(s.tokens[2])
    (row,) = rows_of(s.plan_language())
    assert row.start > 0 and row.start + len(row.token_ids) == 8 + said
    assert row.num_blocks == 5, "all that it can ever need"


def test_a_request_may_come_back_straight_to_its_next_token() -> None:
    """Everything but the last token is there again: one row, not a decode to the planner, with one token."""
    s = Stepper(kv_blocks=16, token_budget=32)
    s.add(1, 8, max_new=30)
    while s.state(1).num_computed != 12:
        s.language()
    s.scheduler._requests.preempt(s.state(1), s.now)
    s.oracle.look()
    (row,) = rows_of(plan := s.plan_language())
    assert (row.start, len(row.token_ids), row.sample, row.is_decode, row.num_generated) == (12, 1, True, False, 5)
    s.end_language(plan)
    s.finish_all()
    assert s.hit(1) == (0, 0), "its own work is not a hit"


def test_a_request_preempted_before_its_first_token_has_nothing_to_come_back_to_but_its_features() -> None:
    s = Stepper(token_budget=8)
    s.add(1, 2, A, 20)
    s.vision()
    s.language()
    assert s.state(1).images == [CONSUMED]
    s.scheduler._requests.preempt(s.state(1), s.now)
    assert s.state(1).images == [ENCODED], "no token has proved its KV; the features are still there"
    s.scheduler._requests.images.evict(s.state(1).image_keys[0], s.now)
    assert s.state(1).images == [WAITING] and s.scheduler.status().num_encoding == 1
    s.oracle.look()
    s.finish_all()
    assert s.encodes == [(1, 0), (1, 0)]


# ---- images inside what is found


def test_an_image_inside_the_prefix_is_consumed_without_an_encode() -> None:
    s = Stepper(token_budget=64)
    s.run(1, 3, A, 5, B, 4, max_new=1)
    s.add(2, 3, A, 5, B, 4, source=0, max_new=1)
    assert s.state(2).images == [CACHED, CACHED]
    assert s.plan_vision() is None and s.scheduler.status().num_waiting == 1
    plan = s.plan_language()
    assert [(row.start, row.images) for row in rows_of(plan)] == [(20, ())]
    assert s.state(2).images == [CONSUMED, CONSUMED]
    s.end_language(plan)
    assert s.hit(2) == (20, 2) and s.encodes == [(1, 0), (1, 1)]


def test_an_image_partly_inside_needs_features_for_the_rest_of_its_span() -> None:
    s = Stepper(token_budget=64, image_blocks=2)
    s.run(1, 2, B, 2, max_new=1)  # two full blocks, up to the middle of the picture
    s.run(2, Img(8), 1)  # evicts the features
    s.add(3, 2, B, 2, source=0, max_new=1)
    assert s.state(3).images == [WAITING]
    assert s.vision() == [(3, 0)]
    plan = s.plan_language()
    (row,) = rows_of(plan)
    assert (row.start, [(i.row, i.count, i.offset) for i in row.images]) == (8, [(0, 2, 6)])
    s.end_language(plan)
    assert s.hit(3) == (8, 0)


def test_an_image_that_was_counted_on_and_is_gone_is_encoded_after_all() -> None:
    s = Stepper(kv_blocks=8, image_blocks=2, token_budget=64)
    s.run(1, 4, B, 4, max_new=1)
    s.run(2, Img(8), 1, max_new=1)  # evicts the features
    s.add(3, 30, max_new=2)
    s.add(4, 4, B, 4, source=0, max_new=1)
    assert s.state(4).images == [CACHED] and s.vision() == []
    assert s.language() == [(3, 30)], "all blocks but the first are taken"
    s.language()
    assert s.state(4).images == [WAITING]
    assert s.vision() == [(4, 0)]
    s.finish_all()
    assert s.hit(4)[1] == 0


def test_an_image_whose_kv_is_gone_may_still_have_its_features() -> None:
    s = Stepper(kv_blocks=8, token_budget=64)
    s.run(1, 4, B, 4, max_new=1)
    s.add(3, 30, max_new=2)
    s.add(4, 4, B, 4, source=0, max_new=1)
    assert s.state(4).images == [CACHED]
    s.language()
    s.language()
    assert s.state(4).images == [ENCODED]
    s.finish_all()
    assert s.encodes == [(1, 0)] and s.hit(4)[1] == 1


def test_kv_that_appears_while_an_image_is_being_encoded_is_used_at_once() -> None:
    s = Stepper(token_budget=8, image_blocks=1)
    s.add(1, 4, A, 16, source=0, max_new=1)
    s.vision()
    s.language()  # the picture is consumed, and nothing is proved
    s.add(2, Img(4), 1)
    s.vision()
    s.abort(2)  # the features have been evicted
    s.add(3, 4, A, 16, source=0, max_new=1)
    vision = s.plan_vision()
    assert s.state(3).images == [ENCODING]
    assert [s.language(), s.language()] == [[(1, 8)], [(1, 8)]] and 1 in s.finished
    assert s.language() == [(3, 4)]
    assert s.state(3).images == [CONSUMED] and s.state(3).num_generated == 1
    s.end_vision(vision)
    s.finish_all()
    assert s.hit(3) == (20, 0), "its image was encoded for it, in vain"


def test_what_is_found_before_an_image_lets_go_of_the_features_that_the_image_waits_for() -> None:
    """KV up to the second picture, the first one's features in its way: there is no chunk, and yet it must start."""
    s = Stepper(token_budget=9, image_blocks=2)
    s.add(1, 4, A, 1, source=0, max_new=1)
    s.vision()
    s.add(2, 4, A, B, 1, source=0, max_new=1)
    assert s.state(2).images == [ENCODED, WAITING] and s.vision() == []
    assert s.language() == [(1, 9)]
    assert s.plan_language() is None
    assert s.state(2).images == [CONSUMED, WAITING] and s.state(2).num_computed == 8
    assert s.vision() == [(2, 1)]
    s.finish_all()


def test_the_oldest_may_start_when_its_first_image_is_cached_and_a_later_one_fills_the_image_cache() -> None:
    s = Stepper(token_budget=64, image_blocks=2, max_num_seqs=1)
    s.run(1, 4, A, 4, max_new=1)
    s.add(2, 4, A, B, Img(8), 1, source=0, max_new=1)
    assert s.vision() == [(2, 1)] and s.vision() == []
    assert s.state(2).images == [CACHED, ENCODED, WAITING]
    assert s.language() == [(2, 8)]
    assert s.vision() == [(2, 2)]
    s.finish_all()


# ---- what is reported


def test_the_timeline_says_what_was_found_and_what_was_shared() -> None:
    s = Stepper(token_budget=64)
    s.run(1, 9, max_new=1)
    s.run(2, 9, max_new=1)
    spans = [(span.stage, span.tokens) for span in s.finished[2].spans]
    assert spans == [("cached", 8), ("prefill", 1)]
    s.now = 10.0
    s.add(3, A, 1, max_new=1)
    plan = s.plan_vision()
    s.add(4, A, 1, max_new=1)
    s.end_vision(plan, took_s=0.5)
    s.now += 0.25
    s.language(took_s=0.1)
    assert [(x.stage, x.cause, x.end_s - x.start_s) for x in s.finished[4].spans[:3]] == [
        ("encode_wait", "shared", 0.5),
        ("prefill_wait", "images", 0.5),
        ("prefill_wait", "queue", 0.25),
    ]


@pytest.mark.slow
def test_the_same_work_with_and_without_reuse_gives_the_same_tokens_for_less() -> None:
    """Twelve conversations over three pictures, five turns each, in small pools."""

    def tokens(reuse: bool) -> tuple[dict, int, int]:
        sim = Simulator(config(token_budget=32), kv_blocks=60, image_blocks=6, reuse=reuse, costs=Costs())
        said: dict[int, list[int]] = {}
        for turn in range(5):
            for chat in range(12):
                number = 100 * turn + chat
                if turn == 0:
                    picture = Img(8, 20, name=f"p{chat % 3}")
                    request = make_request(number, 6, picture, 3, source=chat % 2, max_new=6)
                else:
                    before = sim.requests[number - 100]
                    request = next_turn(number, before, sim.tokens[number - 100], more=5, max_new=6)
                sim.submit(request, sim.clock.now())
            sim.run()
        sim.assert_all_right()
        said = {number: list(found) for number, found in sim.tokens.items()}
        computed = sum(plan.num_tokens for _, plan in sim.language_plans)
        return said, computed, sum(len(plan.items) for _, plan in sim.vision_plans)

    said, computed, encoded = tokens(reuse=True)
    plain_said, plain_computed, plain_encoded = tokens(reuse=False)
    assert said == plain_said
    assert computed < 0.8 * plain_computed and encoded < 0.5 * plain_encoded, (computed, plain_computed, encoded)
