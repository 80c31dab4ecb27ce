"""The Gantt picture: what is shown where, which gaps are named, and what is said where it cannot be drawn."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench import gantt
from bench.gantt import draw_gantt
from hydra_engine.core.outputs import DelayCause, StageSpan
from hydra_engine.errors import ConfigError


def late(at: float, seconds: float, culprit: int) -> StageSpan:
    cause = f"prefill of request {culprit} (9 tokens)"
    return StageSpan(
        "decode_wait",
        at,
        at + seconds,
        "epd0",
        "language",
        cause=cause,
        blame=(DelayCause("prefill", seconds, culprit, 9),),
    )


def request(number: int, *more: StageSpan, instance: str = "epd0") -> tuple[str, float, list[StageSpan]]:
    spans = [
        StageSpan("preprocess", 0.0, 0.05),
        StageSpan("prefill_wait", 0.05, 0.1, instance, "language", cause="images"),
        StageSpan("encode", 0.05, 0.1, instance, "vision", 1, 64),
        StageSpan("prefill", 0.1, 0.2, instance, "language", 1, 64),
        StageSpan("decode", 0.2, 1.0, instance, "language", 2, 40),
    ]
    return f"req-{number}", 100 + 0.1 * number, [*spans, *more]


def has_colour(picture: np.ndarray, colour: str) -> bool:
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return bool((picture == wanted).all(axis=-1).any())


@pytest.mark.slow
def test_the_picture_shows_stages_and_late_gaps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plain, marked = tmp_path / "plain.png", tmp_path / "marked.png"
    draw_gantt([request(0), request(1)], plain)
    draw_gantt([request(0), request(1, late(1.0, 0.3, 7))], marked, title="two requests")
    pictures = [np.asarray(Image.open(path).convert("RGB")) for path in (plain, marked)]
    for name in ("intake", "encode", "prefill", "decode"):
        assert all(has_colour(picture, gantt._STYLES[name][0]) for picture in pictures)
    assert [has_colour(picture, gantt._LATE) for picture in pictures] == [False, True]


def test_of_too_many_requests_the_neighbours_that_lost_most_are_shown() -> None:
    requests = [request(number, *([late(1.0, 0.3, 7)] if number == 150 else [])) for number in range(200)]
    shown = gantt._window(requests)
    assert len(shown) == gantt.MAX_ROWS and "req-150" in {name for name, _, _ in shown}
    assert gantt._window(requests[:5]) == requests[:5]


def test_every_lane_has_a_row_and_several_instances_are_told_apart() -> None:
    assert list(gantt._lanes([request(0), request(1)])) == ["vision lane", "language lane"]
    lanes = gantt._lanes([request(0), request(1, instance="epd1")])
    assert list(lanes) == ["epd0 vision", "epd0 language", "epd1 vision", "epd1 language"]
    assert [span.stage for _, span in lanes["epd0 language"]] == ["prefill", "decode"]


def test_labels_name_the_worst_moments_once_each_in_order_of_time() -> None:
    requests = [
        request(0, late(1.0, 0.3, 7), late(2.0, 0.1, 8)),
        request(1, late(0.95, 0.25, 7)),  # arrived 0.1 later: the same step
        request(2, *(late(3.0 + number, 0.01, 20 + number) for number in range(9))),
    ]
    gaps = gantt._late(requests, 100.0)
    assert [gap.seconds for gap in gaps] == sorted((gap.seconds for gap in gaps), reverse=True)
    labels = gantt._labels(gaps)
    assert len(labels) == gantt._NUM_LABELS
    assert [(gap.name, gap.cause, more) for gap, more in labels][:2] == [
        ("req-0", "prefill of request 7 (9 tokens)", 1),
        ("req-0", "prefill of request 8 (9 tokens)", 0),
    ]
    assert [gap.start_s for gap, _ in labels] == sorted(gap.start_s for gap, _ in labels)


@pytest.mark.slow
def test_what_cannot_be_drawn_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gantt.png"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib"):
        draw_gantt([request(0)], path)
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="at least one request"):
        draw_gantt([("req-0", 1.0, [])], path)
    assert not path.exists()
