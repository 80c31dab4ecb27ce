"""Requests with a recurrent state: slots while they run, snapshots where others continue. The fake lanes' states are
what they have seen, so a row that reads the state of another prefix is noticed (`sim.py`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hydra_engine.scheduler import checkpoints
from hydra_engine.scheduler.checkpoints import positions
from tests.scheduler.sim import Img, Simulator, config, make_request, next_turn, rows_of
from tests.scheduler.stepper import Stepper

A, B = Img(24, name="a"), Img(24, name="b")


@pytest.mark.parametrize("num_slots", [1, 2, 5])
@pytest.mark.parametrize("num_snapshots", [0, 2, 40])
def test_every_running_request_has_a_slot_of_its_own(num_slots: int, num_snapshots: int) -> None:
    """Few blocks, so that requests give way; the books are checked after every step."""
    settings = config(max_num_seqs=num_slots, token_budget=12, look_ahead=num_snapshots == 40)
    sim = Simulator(kv_blocks=12, image_blocks=6, config=settings, num_snapshots=num_snapshots)
    for number in range(12):
        sim.submit(make_request(number, 5, Img(6, 20, name="a"), 3 + number % 4, max_new=9, source=0), number * 1e-3)
    sim.abort(3, 0.01)
    sim.run()
    assert len(sim.finished) == 12
    sim.assert_all_right([number for number in range(12) if number != 3])
    slots: dict[int, set[int]] = {}
    for _, plan in sim.language_plans:
        held = [row.seq_slot for row in rows_of(plan)]
        assert len(set(held)) == len(held) and all(0 <= slot < num_slots for slot in held)
        begins = [row.request_id for row in rows_of(plan) if row.start == 0]
        begins += [chunk.request_id for chunk in plan.chunks if chunk.state_slots[0] >= 2 * num_slots]
        for row in rows_of(plan):
            if row.request_id in begins:
                slots[row.request_id] = {row.seq_slot}
            assert slots[row.request_id] == {row.seq_slot}, "a state moved without beginning anew"
    assert sim.preemptions() > 0 or num_slots < 5
    assert sim.scheduler.ledger().state_slots_held == 0
    assert any(event.cached_tokens for event in sim.finished.values()) == (num_snapshots > 0)


def test_a_prompt_keeps_its_state_where_others_may_continue() -> None:
    prompt = make_request(1, 8, A, 40)
    assert positions(prompt, 0, 0, 17, 4) == [32, 68], "behind the picture, and at the end"
    assert positions(prompt, 0, 7, 17, 4) == [28, 68], "where cached KV ended; the picture's end is too near"
    assert positions(prompt, 8, 8, 17, 4) == [68]
    assert positions(prompt, 16, 16, 17, 4) == [], "the rest costs less than a step"
    assert positions(make_request(1, 15), 0, 0, 3, 4) == [12]
    assert positions(make_request(1, 7), 0, 0, 1, 4) == []
    turn = replace(prompt, eos_token_ids=(prompt.prompt_token_ids[58], prompt.prompt_token_ids[4]))
    assert positions(turn, 0, 0, 17, 4) == [32, 56, 68], "at the end of the last turn"


def test_a_turn_computes_exactly_its_own_tokens_and_encodes_its_own_picture() -> None:
    s = Stepper(kv_blocks=200, token_budget=64, image_budget=64, num_snapshots=8)
    request = s.add(1, 8, A, 10, max_new=9)
    s.finish_all()
    before = 0
    for number in range(2, 11):
        turn = next_turn(number, request, s.tokens[number - 1], more=6, max_new=9)
        before = turn.num_prompt - 6
        request = s.submit(turn)
        s.finish_all()
        assert s.hit(number) == ((before - 1) // 4 * 4, 1)
    assert len(s.encodes) == 1


def test_a_second_prompt_with_the_same_beginning_keeps_it_for_the_third() -> None:
    s = Stepper(token_budget=128, num_snapshots=8)
    for number in (1, 2, 3):
        first = make_request(0, 32, max_new=1).prompt_token_ids
        other = make_request(number, 70, max_new=2)
        s.submit(replace(other, prompt_token_ids=(*first, *other.prompt_token_ids[32:])))
        s.finish_all()
    assert [s.hit(number)[0] for number in (1, 2, 3)] == [0, 0, 32]


def test_chunks_far_apart_keep_their_states_and_end_at_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "FAR_BLOCKS", 4)
    s = Stepper(kv_blocks=100, token_budget=21, num_snapshots=9)
    s.add(1, 200, max_new=1)
    steps = []
    while s.scheduler.has_work:
        steps += [tokens for _, tokens in s.language()]
    assert steps == [21, 19] * 4 + [21, 15, 4], "24 tokens are far; other chunks end anywhere"


def test_a_preempted_request_resumes_from_its_own_state() -> None:
    """Two answers outgrow the cache; the older one takes the younger one's last blocks, with the states behind them."""
    s = Stepper(kv_blocks=24, token_budget=64, num_snapshots=6)
    s.add(1, 24, max_new=48)
    s.add(2, 24, max_new=48)
    chunks = []
    while s.scheduler.has_work:
        plan = s.plan_language()
        assert plan is not None
        chunks += [(chunk.request_id, chunk.start, len(chunk.token_ids)) for chunk in plan.chunks if chunk.start]
        s.end_language(plan)
    s.finish_all()
    assert s.finished[2].num_preemptions > 0
    resumed = [(start, tokens) for request_id, start, tokens in chunks if request_id == 2 and tokens > 8]
    assert [start for start, _ in resumed] == [24], resumed


def test_a_state_that_was_computed_behind_nothing_sampled_is_never_found() -> None:
    s = Stepper(token_budget=16, num_snapshots=6)
    s.add(1, 60, max_new=1, source=0)
    s.language()
    s.language(bad=[1])
    assert s.scheduler._requests.checkpoints.snapshots.pool.num_free == 6
    s.run(2, 60, max_new=1)
    assert s.hit(2) == (0, 0)
    s.run(3, 60, max_new=1)
    assert s.hit(3) == (56, 0)


def test_snapshots_go_with_their_blocks_and_with_a_reset() -> None:
    s = Stepper(kv_blocks=20, token_budget=128, num_snapshots=6)
    pool = s.scheduler._requests.checkpoints.snapshots.pool
    s.run(1, 40, max_new=1, source=0)
    assert len(pool._evictable) == 2, "before its last token and behind it"
    s.run(2, 70, max_new=1, source=7)
    assert len(pool._evictable) == 1, "the block of the first one was evicted"
    s.run(3, 40, max_new=1, source=0)
    assert s.hit(3) == (0, 0)
    s.reset()
    assert not pool._evictable
    s.run(4, 40, max_new=1, source=0)
    assert s.hit(4) == (0, 0)


def test_a_salt_separates_snapshots() -> None:
    s = Stepper(token_budget=64, num_snapshots=6)
    for number, salt in enumerate(("one", "other", "one"), 1):
        s.run(number, 40, max_new=1, salt=salt)
    assert [s.hit(number)[0] for number in (1, 2, 3)] == [0, 0, 36]
