"""The stage timeline: every wait has a cause, decodes are one span unless a gap is worth showing, size is bounded."""

from __future__ import annotations

from statistics import median

from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.outputs import StageSpan
from hydra_engine.scheduler.step_stats import StepTimes
from hydra_engine.scheduler.timeline import MAX_SPANS, Timeline, compact
from tests.scheduler.sim import Img
from tests.scheduler.stepper import Stepper


def story(spans: tuple[StageSpan, ...]) -> list[tuple]:
    return [(s.stage, round(s.start_s, 4), round(s.end_s, 4), s.batch, s.tokens, s.cause) for s in spans]


def test_the_life_of_a_request_with_a_picture() -> None:
    s = Stepper(token_budget=16)
    s.now = 10.0
    s.add(1, 3, Img(20), 1, max_new=4)
    s.now = 10.5
    vision = s.plan_vision()
    s.end_vision(vision, took_s=0.25)
    s.now = 11.0
    for _ in range(5):
        s.language(took_s=0.01)
    assert story(s.finished[1].spans) == [
        ("encode_wait", 10.0, 10.5, 0, 0, "queue"),
        ("prefill_wait", 10.0, 10.75, 0, 0, "images"),
        ("encode", 10.5, 10.75, 1, 20, None),
        ("prefill_wait", 10.75, 11.0, 0, 0, "queue"),
        ("prefill", 11.0, 11.01, 1, 16, None),
        ("prefill", 11.01, 11.02, 1, 8, None),
        ("decode", 11.02, 11.05, 1, 3, None),
    ]
    assert {span.instance for span in s.finished[1].spans} == {"test"}
    assert {span.lane for span in s.finished[1].spans if span.stage.startswith("encode")} == {"vision"}


def test_a_wait_for_blocks_and_a_wait_for_budget_say_so() -> None:
    s = Stepper(kv_blocks=6, token_budget=16)
    s.add(1, 16, max_new=8)
    s.add(2, 12, max_new=4)
    while 2 not in s.finished:
        s.language(took_s=0.02)
    causes = {span.cause for span in s.finished[2].spans if span.stage == "prefill_wait"}
    assert causes == {"kv blocks"}
    s = Stepper(token_budget=16)
    s.add(1, 64, max_new=1)
    s.add(2, 4, max_new=1)
    while 2 not in s.finished:
        s.language(took_s=0.02)
    assert [span.cause for span in s.finished[2].spans if span.stage == "prefill_wait"] == ["budget"]


def test_an_aborted_request_shows_what_it_was_waiting_for() -> None:
    s = Stepper()
    s.add(1, Img(4), 1)
    s.now = 2.0
    s.abort(1)
    assert story(s.finished[1].spans) == [
        ("encode_wait", 0.0, 2.0, 0, 0, "queue"),
        ("prefill_wait", 0.0, 2.0, 0, 0, "images"),
    ]


def test_short_hand_overs_are_not_waits() -> None:
    timeline = Timeline("i", 0.0, has_images=False)
    timeline.add_prefill(0.0005, 0.1, batch=1, tokens=4, more=True)
    timeline.add_prefill(0.1004, 0.2, batch=1, tokens=4, more=False)
    assert [span.stage for span in timeline.close(5.0)] == ["prefill", "prefill"]


def test_a_very_long_prefill_with_waits_keeps_few_spans_and_all_its_tokens() -> None:
    timeline = Timeline("i", 0.0, has_images=True)
    now = 0.0
    for step in range(5000):
        timeline.add_prefill(now + 0.01 * (1 + step % 7), now + 0.2, batch=2, tokens=3, more=True)
        if step % 5 == 0:
            timeline.add_encode(now, now + 0.1, batch=1, patches=9, more=True)
        now += 0.2
    spans = timeline.close(now)
    assert len(spans) <= MAX_SPANS
    assert sum(span.tokens for span in spans if span.stage == "prefill") == 15_000
    assert sum(span.tokens for span in spans if span.stage == "encode") == 9000
    assert (spans[0].start_s, spans[-1].end_s) == (0.0, now)


def test_even_a_request_preempted_all_the_time_keeps_few_spans() -> None:
    timeline, now = Timeline("i", 0.0, has_images=False), 0.0
    for _ in range(1000):
        timeline.add_prefill(now, now + 0.1, batch=1, tokens=1, more=False)
        timeline.add_decode(now + 0.1, now + 0.2, tokens=1, batch=1)
        timeline.start_preemption()
        now += 0.2
    assert len(timeline.close(now)) <= MAX_SPANS


SPANS = st.lists(
    st.builds(
        lambda stage, start, length: StageSpan(
            stage, start, start + length, "i", "vision" if "encode" in stage else "language", 1, 1
        ),
        st.sampled_from(["encode", "encode_wait", "prefill", "prefill_wait", "decode", "decode_wait", "preempted"]),
        st.floats(0, 100),
        st.floats(0, 1),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(SPANS)
def test_squeezing_keeps_work_drops_only_waits_and_never_grows(spans: list[StageSpan]) -> None:
    fewer = compact(spans)
    assert len(fewer) <= len(spans)
    for stage in ("encode", "prefill", "decode"):
        assert sum(s.tokens for s in fewer if s.stage == stage) == sum(s.tokens for s in spans if s.stage == stage)
    assert [s.start_s for s in fewer] == sorted(s.start_s for s in fewer)


def test_the_gap_limit_follows_the_typical_step() -> None:
    times = StepTimes()
    assert times.gap_s == 0.05
    for duration_s in (0.1, 0.1, 9.0):
        times.record(duration_s, 1)
    assert times.typical_s == 0.1 and times.gap_s == 0.2


@given(st.lists(st.floats(0, 9), min_size=1, max_size=150))
def test_the_typical_step_is_the_median_of_the_latest(durations: list[float]) -> None:
    times = StepTimes()
    for duration_s in durations:
        times.record(duration_s, 1)
    assert times.typical_s == median(durations[-64:])


def test_a_step_is_expected_to_take_what_steps_of_its_size_took() -> None:
    times = StepTimes()
    assert times.expected_s(8) is None
    for _ in range(40):
        times.record(0.01, 8)
        times.record(0.2, 500)
    assert (times.expected_s(9), times.expected_s(400)) == (0.01, 0.2)
    assert times.expected_s(100) == times.typical_s
