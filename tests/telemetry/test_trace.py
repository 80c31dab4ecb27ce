"""The trace file: what viewers demand of it, steps with their batch, and the blame of late tokens."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.core.outputs import DelayCause, StageSpan
from hydra_engine.telemetry.trace import TraceRing

SPANS = [
    StageSpan("tokenize", 0.0, 0.1, tokens=12),
    StageSpan("encode_wait", 0.1, 0.2, "epd0", "vision", cause="queue"),
    StageSpan("prefill_wait", 0.1, 0.4, "epd0", "language", cause="images"),
    StageSpan("encode", 0.2, 0.4, "epd0", "vision", 3, 576),
    StageSpan("prefill", 0.4, 0.6, "epd0", "language", 1, 600),
    StageSpan("decode", 0.6, 1.0, "epd0", "language", 2, 9),
]

Events = list[dict[str, Any]]


def rows_of(events: Events) -> dict[tuple[str, str], Events]:
    """Complete events by the names of their process and row."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[str, str], Events] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[processes[event["pid"]], rows[event["pid"], event["tid"]]].append(event)
    return found


def test_the_file_has_the_shape_that_viewers_read(tmp_path: Path) -> None:
    ring = TraceRing(capacity=2)
    for number in range(3):
        ring.add(f"req-{number}", 10.0 + number, SPANS)
    ring.write(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["displayTimeUnit"] == "ms"
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M") and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert isinstance(event["tid"], int) and event["ts"] >= 0 and event["dur"] >= 0 and event["name"]
    rows = rows_of(document["traceEvents"])
    assert {row for process, row in rows if process == "requests"} == {
        *("req-1", "req-1 images", "req-2", "req-2 images")
    }
    assert {row for process, row in rows if process == "epd0"} == {"vision", "language", "language decode"}
    assert min(event["ts"] for row in rows.values() for event in row) == 0
    assert rows["requests", "req-2"][0]["ts"] == 1_000_000 and rows["requests", "req-2"][0]["dur"] == 100_000
    assert TraceRing().events() == []


def test_a_step_is_one_event_with_all_its_requests() -> None:
    ring = TraceRing()
    ring.add("a", 10.0, SPANS)
    ring.add("b", 10.1, [StageSpan("encode", 0.1, 0.3, "epd0", "vision", 3, 100)])
    steps = rows_of(ring.events())["epd0", "vision"]
    assert [step["args"] for step in steps] == [{"requests": ["a", "b"], "batch": 3, "tokens": 676}]


def test_late_tokens_carry_their_blame() -> None:
    blame = (DelayCause("prefill", 0.031, 12, 384), DelayCause("cpu", 0.002))
    late = StageSpan("decode_wait", 0.6, 0.64, "epd0", "language", cause="prefill of request 12", blame=blame)
    ring = TraceRing()
    ring.add("a", 0.0, [*SPANS[:1], late])
    events = rows_of(ring.events())["requests", "a"]
    assert "blame" not in events[0]["args"]
    assert events[1]["args"]["blame"] == [
        {"kind": "prefill", "ms": 31.0, "request": 12, "amount": 384},
        {"kind": "cpu", "ms": 2.0, "request": None, "amount": 0},
    ]


STEPS = st.lists(
    st.builds(
        lambda stage, start, length: StageSpan(
            stage, start, start + length, "epd0", "vision" if stage == "encode" else "language", 2, 1
        ),
        st.sampled_from(["encode", "prefill", "decode"]),
        st.floats(0, 3),
        st.floats(0, 1),
    ),
    max_size=4,
)


@given(st.lists(st.tuples(st.floats(0, 3), STEPS), max_size=8))
def test_steps_in_one_row_never_overlap(requests: list[tuple[float, list[StageSpan]]]) -> None:
    ring = TraceRing()
    for number, (arrival_s, spans) in enumerate(requests):
        ring.add(str(number), arrival_s, spans)
    seen = 0
    for (process, _), events in rows_of(ring.events()).items():
        if process == "epd0":
            seen += sum(len(event["args"]["requests"]) for event in events)
            events.sort(key=lambda event: (event["ts"], event["dur"]))
            assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(events))
    assert seen == sum(len(spans) for _, spans in requests)


def test_a_late_gap_and_what_is_told_of_its_time_are_in_rows_of_their_own() -> None:
    ring = TraceRing()
    gap = StageSpan("decode_wait", 0.5, 0.95, "d0", "language", cause="transfer", blame=(DelayCause("transfer", 0.4),))
    waits = [StageSpan("prefill_wait", 0.0, 0.9, "d0", "language", cause="transfer"), gap]
    ring.add("r", 0.0, [*waits, StageSpan("prefill", 0.9, 1.0, "d0", "language", 1, 1)])
    rows = rows_of(ring.events())
    names = {row: [event["name"] for event in events] for (process, row), events in rows.items() if process != "d0"}
    assert names == {"r": ["prefill_wait", "prefill"], "r 2": ["decode_wait"]}


def test_only_what_ended_lately() -> None:
    ring = TraceRing()
    ring.add("old", 10.0, SPANS)  # ends at 11
    ring.add("new", 10.5, SPANS)
    rows = rows_of(ring.events(since_s=11.05))
    assert [event["name"] for event in rows["requests", "new"]] == ["prefill", "decode"]
    assert not any("old" in row for _, row in rows)
    assert rows["requests", "new"][0]["ts"] == 400_000, "times count from the oldest request that is still in it"
    assert ring.events(since_s=11.6) == [] and rows_of(ring.events(since_s=0.0)) == rows_of(ring.events())
