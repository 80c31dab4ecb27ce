"""Priority and reports of parts of requests: earlier attempts, and steps that look ahead."""

from __future__ import annotations

from dataclasses import replace

from hydra_engine.core.instances import EPD
from tests.scheduler.handover.handover import (
    A,
    B,
    D,
    E,
    P,
    Part,
    arrive,
    end_of,
)
from tests.scheduler.sim import Img, expected_tokens, make_request

# ---- order


def test_age_goes_before_arrival() -> None:
    s = Part(EPD, token_budget=4)
    s.put(make_request(1, 8), arrival_index=7)
    s.put(make_request(2, 8), arrival_index=3)
    s.put(make_request(3, 8), arrival_index=3)
    assert s.language() == [(2, 4)] and s.language() == [(2, 4)]
    assert s.language()[-1][0] == 3


def test_an_older_request_that_comes_later_takes_room_from_one_that_stands_before_an_image() -> None:
    s = Part(EPD, kv_blocks=4, token_budget=32)
    s.put(make_request(1, 10, Img(4), max_new=2), arrival_index=5)
    assert s.language() == [(1, 10)]
    s.put(make_request(2, 8, max_new=2), arrival_index=6)
    s.language()
    assert s.state(1).num_preemptions == 0, "a younger one takes nothing"
    s.put(make_request(3, 12, max_new=2), arrival_index=1)
    s.language()
    assert s.state(1).num_preemptions == 1
    s.finish_all()


# ---- where requests are, for a person


def reported(part: Part) -> list[tuple[object, ...]]:
    return [(r.request_id, r.stage, r.done, r.of) for r in part.scheduler.status().stages]


def test_what_requests_wait_for_is_reported_with_how_far_it_is() -> None:
    s = Part(EPD, kv_blocks=8, token_budget=6, image_budget=4, max_num_seqs=1)
    s.put(make_request(1, A, 2, Img(4, name="c"), 4, max_new=3))
    s.put(make_request(2, 5, max_new=2))
    assert reported(s) == [(1, "queue", 0, 2), (2, "queue", None, None)]
    plan = s.plan_vision()
    assert reported(s)[0] == (1, "encode", 0, 2)
    s.end_vision(plan)
    assert reported(s)[0] == (1, "queue", 1, 2)
    s.vision()
    s.language()
    assert reported(s)[0] == (1, "prefill", 6, 14)
    s.language()
    s.language()
    assert reported(s) == [(2, "queue", None, None)], "one that gets tokens waits for nothing"
    s.finish_all()


def test_jobs_and_what_comes_from_elsewhere_are_reported_too() -> None:
    e = Part(E, kv_blocks=0)
    e.job(1, A, B)
    plan = e.plan_vision()
    assert reported(e) == [(1, "encode", 0, 2)]
    e.end_vision(plan)
    assert reported(e) == [(1, "transfer", None, None)]
    p = Part(P | D)
    p.put(make_request(1, A, 2, max_new=2), stages=P | D)
    p.told()
    assert reported(p) == [(1, "queue", 0, 1)]
    p.offer_image(1, 0, 7)
    pull = p.pull()
    assert reported(p) == [(1, "transfer", 0, 1)]
    p.pulled(pull)
    p.language()
    p.put(make_request(2, 8, max_new=2), stages=D, external_kv=True)
    assert reported(p) == [(2, "transfer", None, None)]


# ---- earlier attempts


def test_tokens_of_earlier_attempts_are_prefilled_and_counted() -> None:
    s = Part(EPD, token_budget=64)
    request = make_request(1, 9, max_new=6)
    known = expected_tokens(request)[:4]
    s.put(replace(request, generated_token_ids=tuple(known)))
    s.tokens[1] = list(known)
    assert s.language() == [(1, 13)]
    assert s.tokens[1] == expected_tokens(request)[:5]
    s.finish_all()
    assert s.finished[1].num_generated == 6 and s.scheduler.status().generation_tokens == 2


def test_what_gave_way_elsewhere_starts_only_with_room_for_all() -> None:
    s = Part(EPD, kv_blocks=8, token_budget=64)
    s.put(make_request(1, 10, max_new=2))
    s.language()
    s.put(replace(make_request(2, 5, max_new=19), preempted=True))
    assert s.language() == [(1, 1)] and 1 in s.finished
    assert s.language() == [(2, 5)] and s.scheduler.ledger().kv_blocks_held == 6
    s.finish_all()
    assert s.finished[2].num_preemptions == 0


# ---- look-ahead


def test_nobody_gives_way_to_an_arrival_while_a_step_runs() -> None:
    s = Part(D, kv_blocks=9, look_ahead=True)
    s.put(make_request(2, 8, max_new=12), arrival_index=2, external_kv=True)
    arrive(s, 2, 2)
    running = s.plan_language()
    s.put(make_request(3, 12, max_new=4), arrival_index=3, external_kv=True)
    s.offer_kv(3, 3, 1)
    (plan,) = s.pulls()
    s.pulled(plan)
    s.put(make_request(1, 16, max_new=4), arrival_index=1, external_kv=True)
    s.offer_kv(1, 1, 4, end_of(s.requests[1]))
    assert s.plan_language() is None or not s.state(3).num_preemptions
    s.end_language(running)
    s.language()
    assert s.state(3).num_preemptions == 1
    assert s.pull().request_id == 1
