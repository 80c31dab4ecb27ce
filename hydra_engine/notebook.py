"""A result as HTML for a notebook: its texts, its numbers, and its stages as bars over time.

HTML with inline SVG, without scripts and external styles; all text from a model or a user is escaped. Text has the
page's colour; bars have colours that are visible on light and dark pages. Imports nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Protocol

MAX_SPANS = 500  # only the longest are drawn
MAX_TEXT = 20_000  # characters of one answer

# After Okabe and Ito; each has a contrast of at least 3 with white and with black.
COLOURS = {
    **dict.fromkeys(("fetch", "tokenize", "preprocess"), "#3f8fc4"),
    "encode": "#c67600",
    "prefill": "#2f7fd0",
    "decode": "#17936f",
    "cached": "#8f8a1c",
    "preempted": "#d9541e",
    **dict.fromkeys(("pull_features", "pull_kv"), "#b95a98"),
}
WAIT = "#7f8a96"
_WIDTH, _LEFT, _RIGHT, _ROW = 760, 150, 90, 18


class Span(Protocol):
    """A span of a timeline, `core.outputs.StageSpan`."""

    @property
    def stage(self) -> str: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def instance(self) -> str: ...
    @property
    def lane(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def cause(self) -> str | None: ...


def result_html(texts: Sequence[str], facts: Sequence[str], spans: Sequence[Span]) -> str:
    """`texts`: of each answer, shortened here to MAX_TEXT. `facts`: short phrases for one line."""
    answers = "".join(
        f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{escape(_shortened(text))}</div>' for text in texts
    )
    return (
        f'<div style="font-family:system-ui,sans-serif;font-size:14px;max-width:{_WIDTH}px">{answers}'
        f'<div style="opacity:.7;margin:4px 0">{escape(" · ".join(facts))}</div>{_timeline(spans)}</div>'
    )


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _timeline(spans: Sequence[Span]) -> str:
    if not spans:
        return ""
    end_s = max(max(span.end_s for span in spans), 1e-9)
    drawn = sorted(sorted(spans, key=lambda span: span.start_s - span.end_s)[:MAX_SPANS], key=lambda span: span.start_s)
    several = len({span.instance for span in spans if span.lane != "front"}) > 1
    rows: dict[str, list[Span]] = {}
    for span in drawn:
        name = f"{span.stage} {span.instance}" if several and span.lane != "front" else span.stage
        rows.setdefault(name, []).append(span)
    height = _ROW * (len(rows) + 1)
    body = "".join(_row(name, of_row, _ROW * index, end_s) for index, (name, of_row) in enumerate(rows.items()))
    left_out = f", {MAX_SPANS} of {len(spans)} spans" if len(spans) > MAX_SPANS else ""
    axis = (
        f'<text x="{_LEFT}" y="{height - 4}" opacity=".7">0</text><text x="{_WIDTH - _RIGHT}" y="{height - 4}" '
        f'text-anchor="end" opacity=".7">{end_s * 1e3:.0f} ms{left_out}</text>'
    )
    return (
        f'<svg role="img" aria-label="stages of the request over time" viewBox="0 0 {_WIDTH} {height}" width="100%" '
        f'style="max-width:{_WIDTH}px" font-size="12" fill="currentColor">{body}{axis}</svg>'
    )


def _row(name: str, spans: Sequence[Span], top: int, end_s: float) -> str:
    scale = (_WIDTH - _LEFT - _RIGHT) / end_s
    bars = "".join(_bar(span, top, scale) for span in spans)
    total_ms = 1e3 * sum(span.end_s - span.start_s for span in spans)
    base = top + _ROW - 5
    return (
        f'<text x="0" y="{base}">{escape(name)}</text>{bars}'
        f'<text x="{_WIDTH}" y="{base}" text-anchor="end">{total_ms:.1f} ms</text>'
    )


def _bar(span: Span, top: int, scale: float) -> str:
    """A bar of the timeline, thin if the request waited."""
    colour = COLOURS.get(span.stage)
    y, height = (top + 3, 12) if colour else (top + 7, 4)
    x, width = _LEFT + span.start_s * scale, max((span.end_s - span.start_s) * scale, 1.0)
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="2" fill="{colour or WAIT}">'
        f"<title>{escape(_tip(span))}</title></rect>"
    )


def _tip(span: Span) -> str:
    ms = 1e3 * (span.end_s - span.start_s)
    parts = [f"{span.stage} {ms:.1f} ms, from {1e3 * span.start_s:.1f} ms", span.instance]
    if span.tokens:
        parts.append(f"{span.tokens} {'patches' if span.lane == 'vision' else 'tokens'}")
    if span.batch > 1:
        parts.append(f"with {span.batch - 1} others in the step")
    if span.cause:
        parts.append(span.cause)
    return " · ".join(parts)
