"""The delay of late tokens: its main cause comes first, causes are positive and sum to what decodes do not take."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import DelayCause
from hydra_engine.core.plans import LanguageLoad
from hydra_engine.scheduler.latency.attribution import MAX_PARTS, StepHistory
from hydra_engine.scheduler.timeline import describe_causes
from tests.examples import examples
from tests.scheduler.stepper import Stepper

# A step of up to 16 rows takes 10 ms, a row more 0.1 ms; beside vision decodes take twice as long, chunks as well.
SURFACE = CostSurface(
    rows=Curve((1, 16, 416), (0.010, 0.010, 0.050)),
    per_key_s=0.0,
    per_pair_s=0.0,
    per_chunk_s=0.0,
    patches=Curve((1, 1000), (0.01, 0.1)),
    per_patch_pair_s=0.0,
    decode_slowdown=2.0,
    prefill_slowdown=2.0,
    vision_slowdown=1.5,
)
DECODES = LanguageLoad(num_decodes=8, decode_context=800)
VICTIM = RequestId(1)


def mixed(tokens: int, chunks: int = 1) -> LanguageLoad:
    return LanguageLoad(8, 800, prefill_tokens=tokens, prefill_pairs=tokens * tokens / 2, num_chunks=chunks)


def work(*pairs: tuple[int, int]) -> list[tuple[RequestId, int]]:
    return [(RequestId(request), amount) for request, amount in pairs]


@pytest.fixture(params=["surface", "measured"])
def log(request: pytest.FixtureRequest) -> StepHistory:
    """Has seen ordinary steps, up to the second 0: decodes of 10 ms, and chunks of 100 tokens that add 9.2 ms."""
    log = StepHistory(SURFACE if request.param == "surface" else None)
    for step in range(-40, 0):
        end = step * 0.05
        if step % 4:
            log.on_language_done(end - 0.010, end, DECODES, (), 0.0)
        else:
            log.on_language_done(end - 0.0192, end, mixed(100), work((90, 100)), 0.0)
    return log


def explain(log: StepHistory, request_id: RequestId, since_s: float, until_s: float) -> tuple[DelayCause, ...]:
    """Explains a late token under a limit that ordinary steps meet."""
    return log.explain(request_id, since_s, until_s, 0.015)


def kinds(blames: tuple[DelayCause, ...]) -> list[tuple[str, int | None]]:
    return [(blame.kind, blame.request) for blame in blames]


def total(blames: tuple[DelayCause, ...]) -> float:
    return sum(blame.seconds for blame in blames)


def test_the_prefill_of_another_request(log: StepHistory) -> None:
    log.on_language_done(0.0, 0.0468, mixed(384), work((12, 384)), 0.0)
    (blame, *rest) = explain(log, VICTIM, 0.0, 0.0468)
    assert (blame.kind, blame.request, blame.amount) == ("prefill", 12, 384)
    assert total((blame, *rest)) == pytest.approx(0.0368)
    assert blame.seconds > 0.035


def test_chunks_of_a_step_share_by_tokens(log: StepHistory) -> None:
    log.on_language_done(0.0, 0.0492, mixed(400, 2), work((12, 100), (13, 300)), 0.0)
    first, second, *_ = explain(log, VICTIM, 0.0, 0.0492)
    assert (first.request, second.request) == (13, 12)
    assert first.seconds == pytest.approx(3 * second.seconds)


def test_an_encode_that_ran_beside(log: StepHistory) -> None:
    log.on_vision_planned(0.0, work((9, 900), (7, 100)))
    log.on_vision_done(0.001, 0.030, work((9, 900), (7, 100)))
    log.on_language_done(0.0, 0.020, DECODES, (), 0.020)
    blames = explain(log, VICTIM, 0.0, 0.020)
    assert kinds(blames)[:2] == [("encode", 9), ("encode", 7)]
    assert blames[0].amount == 900 and blames[0].seconds == pytest.approx(9 * blames[1].seconds)
    assert total(blames) == pytest.approx(0.010)


def test_an_encode_that_still_runs_is_named_and_one_that_waits_its_turn_is_not(log: StepHistory) -> None:
    log.on_vision_planned(0.001, work((9, 900)))
    log.on_vision_planned(0.002, work((10, 500)))
    log.on_language_done(0.0, 0.020, DECODES, (), 0.019)
    assert kinds(explain(log, VICTIM, 0.0, 0.020))[0] == ("encode", 9)
    log.on_vision_done(0.001, 0.025, work((9, 900)))
    log.on_language_done(0.020, 0.030, DECODES, (), 0.0)
    log.on_language_done(0.030, 0.050, DECODES, (), 0.020)
    blames = explain(log, VICTIM, 0.030, 0.050)
    assert blames[0].request == 10 and ("encode", 9) not in kinds(blames)


def test_patches_count_once_though_an_encode_delays_several_steps(log: StepHistory) -> None:
    log.on_vision_planned(0.0, work((9, 900)))
    for step in range(3):
        log.on_language_done(step * 0.02, (step + 1) * 0.02, DECODES, (), 0.02)
    blames = explain(log, VICTIM, 0.0, 0.06)
    assert next(blame for blame in blames if blame.kind == "encode").amount == 900


def test_vision_that_nobody_told_about_is_still_vision(log: StepHistory) -> None:
    log.on_language_done(0.0, 0.020, DECODES, (), 0.020)
    assert kinds(explain(log, VICTIM, 0.0, 0.020))[0] == ("encode", None)


def test_a_pause_between_steps(log: StepHistory) -> None:
    log.on_language_done(0.080, 0.090, DECODES, (), 0.0)
    blames = explain(log, VICTIM, 0.0, 0.090)
    assert kinds(blames) == [("cpu", None)] and blames[0].seconds == pytest.approx(0.080)


def test_a_step_that_nothing_explains(log: StepHistory) -> None:
    log.on_language_done(0.0, 0.100, DECODES, (), 0.0)
    blames = explain(log, VICTIM, 0.0, 0.100)
    assert kinds(blames) == [("step", None)] and blames[0].seconds == pytest.approx(0.090)


@pytest.mark.parametrize("tpot_limit_s", [0.002, 0.0099999999])
def test_a_step_within_its_time_is_blamed_itself_if_the_limit_is_shorter(log: StepHistory, tpot_limit_s: float) -> None:
    log.on_language_done(0.0, 0.010, DECODES, (), 0.0)
    assert log.explain(VICTIM, 0.0, 0.010, tpot_limit_s) == (DelayCause("decode", pytest.approx(0.010)),)
    log.on_language_done(0.010, 0.0202, mixed(1), work((12, 1)), 0.0)
    blames = log.explain(VICTIM, 0.010, 0.0202, tpot_limit_s)
    assert kinds(blames)[0] == ("decode", None) and total(blames) == pytest.approx(0.0102)


def test_a_hand_over_is_blamed_up_to_its_end_and_for_the_chunk_that_it_makes_necessary(log: StepHistory) -> None:
    log.on_language_done(0.0, 0.020, mixed(100), work((12, 100)), 0.0)
    log.on_away(VICTIM, "transfer", 0.030, until_s=0.030)
    log.on_language_done(0.025, 0.045, mixed(108), work((12, 108)), 0.0)
    log.on_language_done(0.045, 0.055, LanguageLoad(8, 800, 1, 50, 1), work((1, 1)), 0.0)
    blames = explain(log, VICTIM, 0.005, 0.055)
    assert kinds(blames)[0] == ("transfer", None) and ("prefill", 12) in kinds(blames)
    assert blames[0].seconds == pytest.approx(0.025, abs=0.001), "nothing of what others did here meanwhile"
    assert VICTIM not in {blame.request for blame in blames}
    assert total(blames) == pytest.approx(0.040, abs=0.0001)


def test_work_of_a_lost_instance_is_done_again_and_blamed_for_that(log: StepHistory) -> None:
    log.on_away(VICTIM, "lost", 2.0)
    log.on_language_done(2.0, 2.020, mixed(108), work((12, 108)), 0.0)
    log.on_language_done(2.020, 2.040, mixed(108), work((1, 108)), 0.0)
    blames = explain(log, VICTIM, 1.0, 2.040)
    assert kinds(blames)[0] == ("lost", None) and total(blames) == pytest.approx(1.030)


def test_a_preempted_request_blames_the_preemption_for_the_wait_and_for_its_own_prefill(log: StepHistory) -> None:
    log.on_away(VICTIM, "preemption", 0.001)
    log.on_language_done(0.001, 0.011, DECODES, (), 0.0)
    log.on_language_done(0.011, 0.031, mixed(108), work((12, 108)), 0.0)
    log.on_language_done(0.035, 0.055, mixed(108), work((1, 108)), 0.0)
    log.on_language_done(0.055, 0.075, mixed(108), work((1, 108)), 0.0)
    blames = explain(log, VICTIM, 0.0, 0.075)
    assert kinds(blames)[0] == ("preemption", None)
    assert VICTIM not in {blame.request for blame in blames}
    assert blames[0].seconds == pytest.approx(0.065, abs=0.001)
    assert total(blames) == pytest.approx(0.065)


def test_an_older_preemption_and_that_of_another_request_do_not_count(log: StepHistory) -> None:
    log.on_away(VICTIM, "preemption", -0.5)
    log.on_away(RequestId(2), "preemption", 0.001)
    log.on_language_done(0.0, 0.100, DECODES, (), 0.0)
    assert kinds(explain(log, VICTIM, 0.0, 0.100)) == [("step", None)]


def test_steps_without_the_request_are_blamed_on_what_they_computed(log: StepHistory) -> None:
    alone = LanguageLoad(0, 0, 400, 80_000, 1)
    log.on_language_done(0.0, 0.0484, alone, work((12, 400)), 0.0)
    log.on_language_done(0.0484, 0.0584, DECODES, (), 0.0)
    blames = explain(log, VICTIM, 0.0, 0.0584)
    assert kinds(blames)[0] == ("prefill", 12)
    assert blames[0].seconds == pytest.approx(0.0484, abs=0.002)
    log.on_language_done(0.0584, 0.0684, DECODES, (), 0.0)
    log.on_language_done(0.0684, 0.0784, DECODES, (), 0.0)
    assert total(explain(log, VICTIM, 0.0584, 0.0784)) == pytest.approx(0.010)


def test_two_causes_are_both_named_the_larger_one_first(log: StepHistory) -> None:
    log.on_vision_planned(0.0, work((9, 1152)))
    log.on_language_done(0.0, 0.0584, mixed(192), work((12, 192)), 0.030)
    blames = explain(log, VICTIM, 0.0, 0.0584)
    by_kind = {blame.kind: blame.seconds for blame in blames}
    assert by_kind["prefill"] == pytest.approx(0.0184, abs=0.001)
    assert by_kind["encode"] >= 0.0149
    words = describe_causes(blames)
    assert "prefill of request 12 (192 tokens)" in words and "encode of request 9 (1152 patches)" in words


def test_the_second_request_of_the_same_late_step_gets_the_same_answer_unless_it_is_a_culprit(log: StepHistory) -> None:
    log.on_vision_planned(0.0, work((9, 1152)))
    log.on_language_done(0.0, 0.0584, mixed(192), work((12, 192)), 0.030)
    first = explain(log, VICTIM, 0.0, 0.0584)
    assert explain(log, RequestId(2), 0.0, 0.0584) is first
    assert ("prefill", 12) not in kinds(explain(log, RequestId(12), 0.0, 0.0584))
    assert ("encode", 9) not in kinds(explain(log, RequestId(9), 0.0, 0.0584))


def test_of_two_requests_that_waited_together_only_the_preempted_one_blames_that(log: StepHistory) -> None:
    log.on_away(RequestId(3), "preemption", 0.02)
    log.on_language_done(0.090, 0.100, DECODES, (), 0.0)
    assert kinds(explain(log, VICTIM, 0.0, 0.100)) == [("cpu", None)]
    assert kinds(explain(log, RequestId(3), 0.0, 0.100)) == [("preemption", None)]
    assert kinds(explain(log, RequestId(2), 0.0, 0.100)) == [("cpu", None)]


def test_a_log_that_knows_nothing_charges_rows() -> None:
    log = StepHistory()
    load = LanguageLoad(num_decodes=10, prefill_tokens=30, num_chunks=1)
    log.on_language_done(0.0, 0.040, load, work((12, 30)), 0.0)
    blames = explain(log, VICTIM, 0.0, 0.040)
    assert kinds(blames) == [("prefill", 12)] and blames[0].seconds == pytest.approx(0.030)
    assert kinds(explain(StepHistory(), VICTIM, 0.0, 1.0)) == [("cpu", None)]


def test_many_culprits_become_few_parts() -> None:
    log = StepHistory(SURFACE)
    log.on_vision_planned(0.0, work(*((100 + i, 10 + i) for i in range(40))))
    chunks = work(*((200 + i, 1 + i) for i in range(20)))
    log.on_language_done(0.1, 0.3, mixed(sum(n for _, n in chunks), 20), chunks, 0.1)
    blames = explain(log, VICTIM, 0.0, 0.3)
    assert len(blames) <= MAX_PARTS
    assert sum(blame.amount for blame in blames if blame.kind == "prefill") == sum(n for _, n in chunks)
    assert sum(blame.amount for blame in blames if blame.kind == "encode") == sum(10 + i for i in range(40))
    assert total(blames) == pytest.approx(0.3 - 0.010)


def test_a_gap_longer_than_the_ring_is_still_told() -> None:
    log = StepHistory(SURFACE, capacity=8)
    for step in range(100):
        log.on_language_done(step * 0.01, (step + 1) * 0.01, DECODES, (), 0.0)
        log.on_vision_done(step * 0.01, step * 0.01 + 0.005, work((9, 10)))
        log.on_away(RequestId(5), "preemption", step * 0.01)
    blames = explain(log, VICTIM, 0.0, 1.0)
    assert kinds(blames) == [("step", None)] and total(blames) == pytest.approx(0.99)


def test_sentences() -> None:
    assert describe_causes([DelayCause("decode", 0.1)]) == "the decode step itself"
    assert describe_causes([DelayCause("cpu", 0.1), DelayCause("transfer", 0.1)]) == "between steps, transfer"
    assert describe_causes(
        [DelayCause("prefill", 0.1, None, 40), DelayCause("step", 0.05), DelayCause("preemption", 0.001)]
    ) == ("prefill of other requests (40 tokens), slow step")


@st.composite
def stories(draw: st.DrawFn) -> tuple[StepHistory, float, float]:
    """A random past of both lanes with a gap that ends with a step; every request is number 1 to 6."""
    random_ = random.Random(draw(st.integers(0, 1 << 30)))
    log = StepHistory(draw(st.sampled_from([None, SURFACE])), capacity=draw(st.sampled_from([4, 512])))
    clock, vision_clock, ends = 0.0, 0.0, [0.0]
    for _ in range(draw(st.integers(1, 20))):
        if random_.random() < 0.5:
            items = work(*((random_.randint(1, 6), random_.randint(1, 999)) for _ in range(random_.randint(1, 3))))
            log.on_vision_planned(vision_clock, items)
            if random_.random() < 0.8:
                start = vision_clock
                vision_clock += random_.uniform(0.0, 0.1)
                log.on_vision_done(start, vision_clock, items)
        if random_.random() < 0.2:
            kind, until_s = random_.choice([("preemption", math.inf), ("lost", math.inf), ("transfer", clock)])
            log.on_away(RequestId(random_.randint(1, 6)), kind, clock, until_s)
        clock += random_.choice([0.0, 0.0, random_.uniform(0, 0.05)])
        chunks = work(*((random_.randint(1, 6), random_.randint(1, 300)) for _ in range(random_.choice([0, 0, 1, 3]))))
        tokens = sum(n for _, n in chunks)
        decodes = random_.randint(0 if chunks else 1, 30)
        load = LanguageLoad(decodes, decodes * 50, tokens, tokens * 10.0, len(chunks))
        duration = random_.choice([0.0, 0.01, random_.uniform(0, 0.2)])
        log.on_language_done(clock, clock + duration, load, chunks, random_.choice([0.0, random_.uniform(0, duration)]))
        clock += duration
        ends.append(clock)
    return log, random_.choice(ends[:-1]), clock


@settings(deadline=None, max_examples=examples(300))
@given(stories(), st.integers(1, 6))
def test_parts_are_positive_ordered_and_sum_to_the_gap_without_its_decodes(
    story: tuple[StepHistory, float, float], number: int
) -> None:
    log, since, until = story
    blames = explain(log, RequestId(number), since, until)
    assert blames or until == since
    assert all((blame.seconds > 0 or until == since) and blame.amount >= 0 for blame in blames)
    assert [b.seconds for b in blames] == sorted((b.seconds for b in blames), reverse=True)
    assert len(blames) <= MAX_PARTS and number not in {blame.request for blame in blames}
    assert total(blames) <= until - since + 1e-9
    steps = log._between(since, until)
    if steps and steps[-1].started_s >= since and all(away.reported_s <= steps[-1].started_s for away in log._away):
        decode_s = log._shares(steps[-1]).decode_s if "decode" not in {blame.kind for blame in blames} else 0.0
        assert total(blames) == pytest.approx(until - since - decode_s, abs=1e-6)
    assert explain(log, RequestId(number), since, until) == blames
    assert describe_causes(blames)


def test_without_an_observer_a_late_token_is_a_slow_step() -> None:
    s = Stepper(observer=None, tpot_slo=0.05)
    s.add(1, 8, max_new=3)
    s.language(took_s=0.01)
    s.language(took_s=0.2)
    s.finish_all()
    (gap,) = [span for span in s.finished[1].spans if span.stage == "decode_wait"]
    assert gap.cause == "slow step" and gap.blame == (DelayCause("step", pytest.approx(0.2)),)
