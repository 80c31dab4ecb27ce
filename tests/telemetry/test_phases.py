"""The breakdown by phases: a partition of the latency for any timeline, and the right name for each kind of time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.outputs import StageSpan
from hydra_engine.telemetry.timeline import PHASES, intake_s, phases


def language(stage: str, start: float, end: float, cause: str | None = None) -> StageSpan:
    return StageSpan(stage, start, end, "epd0", "language", cause=cause)


def vision(stage: str, start: float, end: float) -> StageSpan:
    return StageSpan(stage, start, end, "epd0", "vision")


def taken(timeline: list[StageSpan], e2e_s: float, ttft_s: float | None = None) -> dict[str, float]:
    """Phases that took time, in milliseconds."""
    found = phases(timeline, e2e_s, ttft_s=ttft_s)
    assert tuple(found) == PHASES
    assert sum(found.values()) == pytest.approx(e2e_s, abs=1e-12)
    return {name: round(seconds * 1e3, 3) for name, seconds in found.items() if seconds}


WITH_PICTURE = [
    StageSpan("tokenize", 0.001, 0.003),
    StageSpan("fetch", 0.003, 0.020),
    StageSpan("preprocess", 0.022, 0.040),
    vision("encode_wait", 0.041, 0.060),
    language("prefill_wait", 0.041, 0.090, "images"),
    vision("encode", 0.060, 0.090),
    language("prefill_wait", 0.090, 0.100, "queue"),
    language("prefill", 0.100, 0.130),
    language("decode", 0.1304, 0.200),
    language("decode_wait", 0.200, 0.230, "preemption"),
    language("decode", 0.230, 0.300),
]


def test_the_life_of_a_request_with_a_picture() -> None:
    assert taken(WITH_PICTURE, 0.3046) == {
        "preprocess": 41.0,
        "encode_queue": 19.0,
        "encode": 30.0,
        "prefill_queue": 10.0,
        "prefill": 30.0,
        "decode_queue": 35.0,  # a hand-over of 0.4, the wait, and 4.6 until the answer was complete
        "decode": 139.6,
    }
    assert intake_s(WITH_PICTURE) == 0.041


def test_time_behind_the_last_step_that_is_more_than_a_hand_over_is_not_explained() -> None:
    assert taken(WITH_PICTURE, 0.350)["other"] == 50.0


def test_where_spans_overlap_what_is_nearest_to_the_next_token_counts() -> None:
    early = [
        vision("encode", 0.0, 0.010),
        language("prefill", 0.005, 0.030),  # up to the second image
        vision("encode_wait", 0.010, 0.020),
        vision("encode", 0.020, 0.050),
        language("prefill_wait", 0.030, 0.050, "images"),
        language("prefill", 0.050, 0.060),
        language("decode", 0.060, 0.070),
    ]
    assert taken(early, 0.070) == {"encode": 25.0, "prefill": 35.0, "decode": 10.0}
    both = [
        vision("encode_wait", 0.0, 0.010),
        language("prefill_wait", 0.0, 0.005, "kv blocks"),
        language("prefill", 0.010, 0.020),
    ]
    assert taken(both, 0.020) == {"prefill_queue": 5.0, "encode_queue": 5.0, "prefill": 10.0}


def test_moves_between_instances_have_their_names() -> None:
    """Features from encode to prefill, KV from prefill to decode; those that users see in answers and metrics."""
    moved = [
        vision("encode", 0.0, 0.010),
        language("offered_features", 0.010, 0.012),
        language("pull_features", 0.012, 0.020),
        language("prefill", 0.020, 0.030),
        language("offered_kv", 0.030, 0.031),
        language("pull_kv", 0.031, 0.035),
        language("decode", 0.035, 0.040),
    ]
    named = {"encode": 10.0, "ep_migration": 10.0, "prefill": 10.0, "pd_migration": 5.0, "decode": 5.0}
    assert taken(moved, 0.040) == named


def test_hand_overs_belong_to_the_wait_for_the_following_stage() -> None:
    spans = [
        vision("encode", 0.001, 0.010),
        language("cached", 0.0105, 0.0105),
        language("prefill", 0.011, 0.020),
        language("prefill", 0.0205, 0.030),
        language("decode", 0.0309, 0.040),
    ]
    assert taken(spans, 0.040) == {
        "preprocess": 1.0,
        "encode": 9.0,
        "prefill_queue": 1.5,
        "prefill": 18.5,
        "decode_queue": 0.9,
        "decode": 9.1,
    }


def test_waiting_after_the_first_token_is_decode_queue_and_computing_again_is_prefill() -> None:
    spans = [
        language("prefill", 0.0, 0.010),
        language("preempted", 0.010, 0.030, "kv blocks"),
        language("prefill", 0.030, 0.040),
        language("decode", 0.040, 0.060),
    ]
    assert taken(spans, 0.060, ttft_s=0.010) == {"prefill": 20.0, "decode_queue": 20.0, "decode": 20.0}
    # Without the time of the first token it counts as coming with the last prefill.
    assert taken(spans, 0.060) == {"prefill": 20.0, "prefill_queue": 20.0, "decode": 20.0}


def test_requests_that_did_not_get_far() -> None:
    assert taken([], 0.5) == {"other": 500.0}
    assert taken([], 0.0) == {}
    assert taken([StageSpan("fetch", 0.0, 0.1), StageSpan("preprocess", 0.2, 0.3)], 0.4) == {
        "preprocess": 300.0,
        "other": 100.0,
    }
    assert taken([language("prefill_wait", 0.0, 0.1, "kv blocks")], 0.1) == {"prefill_queue": 100.0}
    assert taken([language("prefill", 0.0, 0.1), language("decode", 0.3, 0.4)], 0.2)["prefill"] == 100.0


STAGES = {
    **dict.fromkeys(("fetch", "tokenize", "preprocess"), "front"),
    **dict.fromkeys(("encode_wait", "encode"), "vision"),
    **dict.fromkeys(("prefill_wait", "cached", "prefill", "decode", "decode_wait", "preempted"), "language"),
}
TIMELINES = st.lists(
    st.builds(
        lambda stage, start, length, cause: StageSpan(stage, start, start + length, "i", STAGES[stage], cause=cause),
        st.sampled_from(sorted(STAGES)),
        st.floats(-0.1, 10),
        st.floats(0, 3),
        st.sampled_from([None, "images", "queue"]),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(TIMELINES, st.floats(0, 12), st.none() | st.floats(0, 12))
def test_any_timeline_is_partitioned(timeline: list[StageSpan], e2e_s: float, ttft_s: float | None) -> None:
    found = phases(timeline, e2e_s, ttft_s=ttft_s)
    assert tuple(found) == PHASES and all(seconds >= 0 for seconds in found.values())
    assert sum(found.values()) == pytest.approx(e2e_s, abs=1e-9)
    for stage in ("prefill", "decode", "encode"):
        spans = [(max(s.start_s, 0), min(s.end_s, e2e_s)) for s in timeline if s.stage == stage]
        assert found[stage] <= sum(max(0, end - start) for start, end in spans) + 1e-9
    prefilled = sum(max(0, min(s.end_s, e2e_s) - max(s.start_s, 0)) for s in timeline if s.stage == "prefill")
    assert prefilled == 0 or found["prefill"] > 0
