"""Decodes that are lent to another instance and taken back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.outputs import Departure
from hydra_engine.core.state import RequestPhase
from hydra_engine.scheduler.handover.connector import STEAL_PATIENCE_S
from hydra_engine.scheduler.handover.events import KvEvent
from hydra_engine.transfer.plans import KvEnd
from tests.examples import examples
from tests.scheduler.audit import check
from tests.scheduler.handover.handover import (
    D,
    E,
    P,
    Part,
    end_of,
    lend,
)
from tests.scheduler.sim import Img, expected_tokens, make_request


def test_a_decode_is_handed_over_with_everything_and_a_row_in_flight_is_passed_over() -> None:
    s = Part(P | D, token_budget=64)
    request = s.put(make_request(1, 9, max_new=9))
    s.language(took_s=1.0)
    s.language(took_s=1.0)
    plan = s.plan_language()
    assert s.connector.offers.hand_over(RequestId(1), s.now)
    check(s.scheduler)
    (event,) = s.told()
    tokens = expected_tokens(request)
    assert isinstance(event, KvEvent) and len(event.block_ids) == 3
    assert event.end == KvEnd(10, tokens[1], 2.0, 1.0, earlier_token_ids=(tokens[0],))
    assert not s.connector.offers.hand_over(RequestId(1), s.now), "once"
    assert not s.end_language(plan, took_s=1.0) and s.tokens[1] == tokens[:2]
    assert s.plan_language() is None
    s._collect(s.connector.offers.release_kv(RequestId(1), s.now))
    assert s.finished[1].reason == Departure.MOVED and s.finished[1].num_generated == 2


def test_what_is_fetched_while_a_row_is_in_flight_is_forgotten_behind_it() -> None:
    s = Part(P | D, token_budget=64)
    s.put(make_request(1, 9, max_new=9))
    s.language()
    plan = s.plan_language()
    assert s.connector.offers.hand_over(RequestId(1), s.now)
    assert not s.connector.offers.release_kv(RequestId(1), s.now)
    s.end_language(plan)
    assert s.finished[1].reason == Departure.MOVED and not s.scheduler.has_work


def test_only_a_running_decode_without_penalties_is_handed_over() -> None:
    s = Part(P | D, token_budget=8)
    s.put(make_request(1, 9, max_new=9))
    s.language()
    assert not s.connector.offers.hand_over(RequestId(1), s.now) and not s.connector.offers.hand_over(
        RequestId(9), s.now
    )
    s.put(make_request(2, 3, max_new=9, frequency_penalty=1.0))
    s.language()
    s.language()
    assert s.state(2).phase is RequestPhase.DECODING and not s.connector.offers.hand_over(RequestId(2), s.now)


def test_a_lent_decode_goes_on_behind_tokens_that_its_new_place_was_not_told_of() -> None:
    s = Part(E | D)
    request = make_request(1, 9, max_new=6)
    tokens = expected_tokens(request)
    s.put(replace(request, generated_token_ids=tuple(tokens[:1])), stages=D, external_kv=True)
    end = end_of(request, 4, earlier_token_ids=tuple(tokens[:3]), late_gaps=2)
    s.offer_kv(1, 1, 3, end)
    s.requests[1] = request
    s.pulled(s.pull())
    assert s.scheduler._requests.timelines[1].late_gaps == 2, "they count against what the request may still lose"
    s.tokens[1] = tokens[:4]
    s.finish_all()
    assert s.finished[1].num_generated == 6


@pytest.mark.parametrize(("tpot_slo", "patience_s"), [(None, STEAL_PATIENCE_S), (0.04, 0.02), (3.0, STEAL_PATIENCE_S)])
@settings(max_examples=examples(20), deadline=None)
@given(steps=st.lists(st.tuples(st.floats(0.001, 0.3), st.floats(0.001, 0.3)), min_size=1, max_size=10))
def test_borrowed_decodes_stand_still_for_vision_no_longer_than_the_patience(steps, tpot_slo, patience_s) -> None:
    """Vision steps follow one another, and language steps whenever they may: vision never waits, not even for the
    language step that runs, and decodes get a step at least every patience."""
    s = Part(E | D, tpot_slo=tpot_slo)
    lend(s, 1)
    assert s.scheduler.vision_first
    language_ended_s = 0.0
    for number, (vision_s, language_s) in enumerate(steps, 10):
        s.job(number, Img(4))
        encode, vision_until_s = s.plan_vision(), s.now + vision_s
        assert encode is not None
        while s.now < vision_until_s:
            plan = s.plan_language()
            if plan is None:
                assert s.now <= s.scheduler.language_due_s == language_ended_s + patience_s
                s.now = min(s.scheduler.language_due_s + 1e-9, vision_until_s)
                continue
            assert s.now - language_ended_s <= patience_s + 1e-6
            s.end_language(plan, took_s=language_s)
            language_ended_s = s.now
        s.end_vision(encode)
    assert s.plan_language() is not None, "the lane is free"


@pytest.mark.parametrize("role", [E | D, EPD])
def test_only_where_all_decodes_are_borrowed_does_vision_go_first(role: Role) -> None:
    s = Part(role, look_ahead=True)
    assert s.scheduler.vision_first == (role == E | D)
    lend(s, 1)
    running = s.plan_language()
    s.job(10, Img(4))
    encode = s.plan_vision()
    assert running is not None and encode is not None
    assert s.plan_language() is None and s.scheduler.language_due_s == math.inf, "the result comes first"
    s.end_language(running, took_s=0.01)
    assert s.plan_language() is None and s.scheduler.language_due_s == 0.01 + STEAL_PATIENCE_S
    s.put(make_request(2, 5, max_new=9), stages=D, external_kv=True)
    s.offer_kv(2, 2, 2, end_of(s.requests[2]))
    s.pulled(s.pull())
    assert s.plan_language() is not None, "one of its own"


def test_kv_that_does_not_fit_what_is_known_is_of_no_use() -> None:
    s = Part(D)
    request = s.put(make_request(1, 9, max_new=6), external_kv=True)
    s.offer_kv(1, 1, 3, replace(end_of(request), num_tokens=8))
    s.pulled(s.pull())
    assert s.finished[1].reason == Departure.RETURNED
