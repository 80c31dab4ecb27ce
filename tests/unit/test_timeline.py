"""What a timeline says of a request: sums, waits counted once, and the drawing."""

from __future__ import annotations

import json
from pathlib import Path

from hydra_engine.core.outputs import StageSpan
from hydra_engine.observe.timeline import draw, metrics_of, relative
from hydra_engine.observe.trace import TraceRing

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


def test_the_trace_is_what_a_viewer_reads(tmp_path: Path) -> None:
    ring = TraceRing(capacity=2)
    for number in range(3):
        ring.add(f"req-{number}", 10.0 + number, relative(SPANS, 10.0))
    ring.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["tid"] for e in events if e["pid"] == "requests"} == {"req-1", "req-2"}
    assert min(e["ts"] for e in events) == 0
    assert {e["tid"] for e in events if e["pid"] == "epd0"} == {"vision", "language"}
