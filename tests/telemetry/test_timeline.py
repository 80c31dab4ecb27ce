"""Timelines of requests: sums, waits counted once, verdicts on limits, the header and the drawing."""

from __future__ import annotations

from hydra_engine.core.outputs import DelayCause, FinishReason, RequestMetrics, Result, SloReport, StageSpan, Usage
from hydra_engine.core.request import Slo
from hydra_engine.telemetry.timeline import draw, metrics_of, relative, server_timing, slo_report

SPANS = [
    StageSpan("decode", 10.6, 11.0, "epd0", "language", 2, 9),
    StageSpan("tokenize", 10.0, 10.1, tokens=12),
    StageSpan("encode_wait", 10.1, 10.2, "epd0", "vision", cause="queue"),
    StageSpan("encode", 10.2, 10.4, "epd0", "vision", 3, 576),
    StageSpan("prefill_wait", 10.1, 10.4, "epd0", "language", cause="images"),
    StageSpan("prefill", 10.4, 10.6, "epd0", "language", 1, 600),
]


def test_spans_become_relative_and_ordered() -> None:
    timeline = relative(SPANS, 10.0)
    assert [s.stage for s in timeline][:2] == ["tokenize", "encode_wait"]
    assert timeline[0].start_s == 0.0 and abs(timeline[-1].end_s - 1.0) < 1e-9


def test_a_wait_for_images_is_not_counted_twice() -> None:
    metrics = metrics_of(
        relative(SPANS, 10.0),
        arrival_s=10.0,
        first_token_s=10.6,
        last_token_s=11.0,
        finished_s=11.0,
        num_tokens=5,
        num_preemptions=1,
    )
    assert abs(metrics.queue_s - 0.1) < 1e-9
    assert abs((metrics.tpot_s or 0) - 0.1) < 1e-9
    assert abs((metrics.ttft_s or 0) - 0.6) < 1e-9
    assert metrics.num_preemptions == 1


def test_one_token_has_no_time_per_token() -> None:
    metrics = metrics_of(
        (), arrival_s=0, first_token_s=1, last_token_s=1, finished_s=1, num_tokens=1, num_preemptions=0
    )
    assert metrics.tpot_s is None


def test_the_drawing_has_every_stage_in_order_and_to_scale() -> None:
    lines = draw(relative(SPANS, 10.0), width=10)
    assert [line.split()[0] for line in lines] == [
        *("tokenize", "encode_wait", "encode", "prefill_wait", "prefill", "decode")
    ]
    assert "|  ██      |" in lines[2] and "200.0 ms" in lines[2] and "batch 3" in lines[2]
    assert draw(()) == []


def test_a_wait_that_took_no_time_is_shown_as_such() -> None:
    lines = draw([StageSpan("prefill", 0.0, 0.1, "epd0", "language", 1, 4)])
    assert lines[0].startswith("prefill_wait") and "0.0 ms" in lines[0]


LATE = [
    StageSpan("prefill", 0.0, 0.2, "epd0", "language", 1, 30),
    StageSpan("decode", 0.2, 0.5, "epd0", "language", 4, 10),
    *(
        StageSpan(
            "decode_wait",
            0.5 + 0.1 * number,
            0.55 + 0.1 * number,
            "epd0",
            "language",
            cause=f"prefill of request {12 + number} (384 tokens)",
            blame=(DelayCause("prefill", 0.031 + 0.001 * number, 12 + number, 384), DelayCause("step", 0.002)),
        )
        for number in range(5)
    ),
]


def test_the_drawing_ends_with_the_worst_late_gaps_and_their_culprits() -> None:
    lines = draw(LATE, width=10)
    assert [line for line in lines if line.startswith("late")] == [
        "late: prefill of request 16 (384 tokens) 37 ms",
        "late: prefill of request 15 (384 tokens) 36 ms",
        "late: prefill of request 14 (384 tokens) 35 ms",
        "late: 2 more, 67 ms",
    ]
    wait = next(line for line in lines if line.startswith("decode_wait"))
    assert "for" not in wait and "5 spans" in wait


def report(limits: Slo, timeline: list[StageSpan] = LATE, *, ttft_s: float | None = 0.2, late: int = 5) -> SloReport:
    return slo_report(limits, ttft_s=ttft_s, late_by={"prefill": late}, num_gaps=20 if late else 0, timeline=timeline)


def test_without_limits_there_is_no_verdict() -> None:
    assert report(Slo()) == SloReport(late_gaps=5, num_gaps=20, late_by={"prefill": 5}) and report(Slo()).met is None


def test_limits_that_are_kept() -> None:
    kept = report(Slo(0.2, 0.04), late=2)
    assert (kept.ttft_met, kept.tpot_met, kept.met, kept.reason) == (True, True, True, None)
    assert (kept.ttft_limit_s, kept.tpot_limit_s, kept.late_gaps, kept.num_gaps) == (0.2, 0.04, 2, 20)
    assert report(Slo(tpot_s=0.04), late=3).met is False  # nine of ten gaps must be in time


def test_what_a_request_did_not_get_to_is_not_judged() -> None:
    assert report(Slo(0.2, 0.04), ttft_s=None, late=0).met is None


def test_a_late_first_token_names_the_longest_wait_and_its_cause() -> None:
    timeline = list(relative(SPANS, 10.0))
    assert report(Slo(ttft_s=0.5), timeline, ttft_s=0.6).reason == (
        "first token after 600 ms, limit 500 ms: encode 200 ms"
    )
    waits = [
        StageSpan("tokenize", 0.0, 0.1),
        StageSpan("prefill_wait", 0.15, 0.4, "epd0", "language", cause="kv blocks"),
        StageSpan("prefill", 0.4, 0.6, "epd0", "language", 1, 600),
        StageSpan("preempted", 0.6, 9.0, "epd0", "language", cause="kv blocks"),
    ]
    assert report(Slo(ttft_s=0.5), waits, ttft_s=0.6).reason == (
        "first token after 600 ms, limit 500 ms: prefill_wait 250 ms (kv blocks)"
    )
    slow_intake = [StageSpan("preprocess", 0.0, 0.5), StageSpan("prefill", 0.52, 0.6, "epd0", "language", 1, 600)]
    assert report(Slo(ttft_s=0.5), slow_intake, ttft_s=0.6).reason == (
        "first token after 600 ms, limit 500 ms: intake 520 ms"
    )


def test_late_tokens_name_the_kind_that_cost_most_and_the_worst_request() -> None:
    assert report(Slo(tpot_s=0.04)).reason == (
        "5 of 20 gaps over 40 ms: prefill 165 ms, most of it for request 16 (384 tokens)"
    )
    pause = [StageSpan("decode_wait", 0.2, 0.3, cause="between steps", blame=(DelayCause("cpu", 0.1),))]
    assert report(Slo(tpot_s=0.04), pause).reason == "5 of 20 gaps over 40 ms: time between steps 100 ms"
    away = StageSpan("preempted", 0.5, 0.9, cause="kv blocks")
    preempted = [away, StageSpan("decode_wait", 0.5, 0.91, cause="preemption", blame=(DelayCause("preemption", 0.4),))]
    assert report(Slo(tpot_s=0.04), [*preempted, *LATE]).reason == "5 of 20 gaps over 40 ms: preemption 400 ms"
    assert report(Slo(tpot_s=0.04), []).reason == "5 of 20 gaps over 40 ms"
    assert (report(Slo(0.1, 0.04)).reason or "").count("; ") == 1


def result_of(timeline: list[StageSpan], e2e_s: float, slo: SloReport) -> Result:
    metrics = RequestMetrics(ttft_s=0.2, e2e_s=e2e_s, slo=slo)
    return Result("r", "", (), FinishReason.LENGTH, Usage(30, 20), metrics, timeline=tuple(timeline))


def test_the_header_has_the_phases_the_total_and_why_it_was_late() -> None:
    header = server_timing(result_of(LATE, 1.0, report(Slo(tpot_s=0.04))))
    assert header == (
        "prefill;dur=200.0, decode_queue;dur=450.0, decode;dur=300.0, other;dur=50.0, total;dur=1000.0, "
        'late;desc="5 of 20 gaps over 40 ms: prefill 165 ms, most of it for request 16 (384 tokens)"'
    )
    assert "late" not in server_timing(result_of(LATE, 1.0, SloReport(ttft_met=True)))
    assert server_timing(result_of([], 0.0, SloReport())) == "total;dur=0.0"


def test_the_header_is_short_printable_ascii_whatever_the_reason() -> None:
    header = server_timing(result_of(LATE, 1.0, SloReport(ttft_met=False, reason='a"b\\c\r\nπ' + 5000 * "x")))
    assert 'late;desc="a?b?c???x' in header
    assert len(header) <= 1024 and header.isascii() and header.isprintable()
