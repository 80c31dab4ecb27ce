"""Representations of a result: one line, its text, or a picture of its stages that cannot do any harm."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from hydra_engine.core.outputs import FinishReason, RequestMetrics, Result, StageSpan, Usage
from hydra_engine.errors import InvalidImage
from hydra_engine.notebook import COLOURS, MAX_SPANS, WAIT

SPANS = (
    StageSpan("tokenize", 0.0, 0.001, tokens=9),
    StageSpan("preprocess", 0.001, 0.02, tokens=9),
    StageSpan("encode", 0.02, 0.05, "ep0", "vision", batch=2, tokens=9),
    StageSpan("prefill_wait", 0.02, 0.05, "ep0", "language", cause="images"),
    StageSpan("prefill", 0.05, 0.07, "ep0", "language", batch=1, tokens=20),
    StageSpan("pull_kv", 0.07, 0.071, "d0", "transfer"),
    StageSpan("decode", 0.071, 0.2, "d0", "language", batch=3, tokens=9),
)
RESULT = Result(
    "req-1",
    "There is a star.",
    (1, 2, 3),
    FinishReason.STOP,
    Usage(20, 9, num_images=2),
    RequestMetrics(ttft_s=0.07, e2e_s=0.2),
    SPANS,
)
HARM = "<script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'"


def tree_of(result: Result) -> ElementTree.Element:
    return ElementTree.fromstring(result._repr_html_())


def test_printing_prints_the_text_and_a_repr_is_one_short_line() -> None:
    assert str(RESULT) == f"{RESULT}" == "There is a star."
    assert repr(RESULT) == "Result('There is a star.', stop, 20 + 9 tokens, 2 images, first token 70 ms, 200 ms)"
    long = replace(
        RESULT, text="word\n" * 5000, token_ids=tuple(range(5000)), timeline=SPANS * 50, choices=(RESULT,) * 3
    )
    assert len(repr(long)) < 200 and "\n" not in repr(long) and "3 answers" in repr(long) and "…" in repr(long)
    assert len(repr([long] * 3)) < 600
    failed = replace(RESULT, text="", error=InvalidImage("the image cannot be read"))
    assert repr(failed) == "Result(InvalidImage('the image cannot be read'))"


def test_a_notebook_sees_a_bar_for_every_span_in_its_place() -> None:
    svg = tree_of(RESULT).find("svg")
    assert svg is not None
    bars = list(svg.iter("rect"))
    assert len(bars) == len(SPANS)
    left, right = (float(bars[at].attrib["x"]) for at in (0, -1))
    scale = (right - left) / (SPANS[-1].start_s - SPANS[0].start_s)
    for bar, span in zip(bars, sorted(SPANS, key=lambda span: span.start_s), strict=True):
        assert float(bar.attrib["x"]) == pytest.approx(left + span.start_s * scale, abs=0.2)
        assert float(bar.attrib["width"]) == pytest.approx(max((span.end_s - span.start_s) * scale, 1), abs=0.2)
        assert bar.attrib["fill"] == COLOURS.get(span.stage, WAIT)
        assert bar[0].text is not None and bar[0].text.startswith(span.stage)
    names = [text.text for text in svg.iter("text") if text.attrib["x"] == "0"]
    assert names == [
        "tokenize",
        "preprocess",
        "encode ep0",
        "prefill_wait ep0",
        "prefill ep0",
        "pull_kv d0",
        "decode d0",
    ]


def test_nothing_in_it_runs_or_is_fetched() -> None:
    span = StageSpan(HARM, 0.0, 1.0, instance=HARM, lane="language", cause=HARM)
    for result in (
        replace(RESULT, text=HARM, timeline=(span, *SPANS)),
        replace(RESULT, error=InvalidImage(HARM)),
        replace(RESULT, choices=(replace(RESULT, text=HARM), RESULT)),
        replace(RESULT, timeline=()),
    ):
        tags = {element.tag for element in tree_of(result).iter()}
        assert tags <= {"div", "svg", "text", "rect", "title"}
        names = {name for element in tree_of(result).iter() for name in element.attrib}
        assert not [name for name in names if name.startswith("on") or name in ("href", "src", "class", "id")]
        assert "url(" not in result._repr_html_()
    assert HARM in "".join(tree_of(replace(RESULT, text=HARM)).itertext())


def test_it_stays_small_enough_for_a_notebook() -> None:
    many = tuple(StageSpan("decode_wait", n, n + 0.5 + n / 1e5, "d0", "language") for n in range(3000))
    shown = replace(RESULT, text="x" * 10**6, timeline=many)
    html = shown._repr_html_()
    assert len(html) < 250_000 and html.count("<rect") == MAX_SPANS
    assert f"{MAX_SPANS} of 3000 spans" in html


def luminance(colour: str) -> float:
    parts = [int(part, 16) / 255 for part in re.findall("..", colour[1:])]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", sorted({*COLOURS.values(), WAIT}))
def test_colours_show_on_light_and_dark_pages(colour: str) -> None:
    """WCAG's contrast of things that are not text."""
    for page in ("#ffffff", "#1e1e1e", "#000000"):
        brighter, darker = sorted((luminance(colour), luminance(page)), reverse=True)
        assert (brighter + 0.05) / (darker + 0.05) >= 3
