"""The stage timeline of one request: spans relative to its arrival, the metrics that follow from them, and a drawing.

Spans come from intake (fetch, preprocess, tokenize) and from the instance (waits and runs of the stages), all stamped
on one monotonic clock. Does not know where they are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hydra_engine.core.outputs import RequestMetrics, StageSpan

# The order in which a request meets them; a wait is drawn even when it took no time.
_ORDER = (
    *("fetch", "tokenize", "preprocess", "encode_wait", "encode", "prefill_wait", "cached", "prefill"),
    *("preempted", "decode_wait", "decode"),
)
_ALWAYS = {"encode": "encode_wait", "prefill": "prefill_wait"}
_WAITS = frozenset({"encode_wait", "prefill_wait", "preempted", "decode_wait"})


def relative(spans: Iterable[StageSpan], arrival_s: float) -> tuple[StageSpan, ...]:
    """Absolute spans -> seconds since arrival, in order of start."""
    moved = [replace(s, start_s=s.start_s - arrival_s, end_s=s.end_s - arrival_s) for s in spans]
    return tuple(sorted(moved, key=lambda s: (s.start_s, s.end_s)))


def metrics_of(
    timeline: Sequence[StageSpan],
    *,
    arrival_s: float,
    first_token_s: float | None,
    last_token_s: float | None,
    finished_s: float,
    num_tokens: int,
    num_preemptions: int,
) -> RequestMetrics:
    """Sums per stage; `timeline` is relative, the stamps absolute. A prefill that waits for images runs beside its
    encode, so that wait is not queueing."""

    def total(stages: frozenset[str]) -> float:
        return sum(s.end_s - s.start_s for s in timeline if s.stage in stages)

    tpot_s = None
    if first_token_s is not None and last_token_s is not None and num_tokens > 1:
        tpot_s = (last_token_s - first_token_s) / (num_tokens - 1)
    return RequestMetrics(
        ttft_s=None if first_token_s is None else first_token_s - arrival_s,
        tpot_s=tpot_s,
        e2e_s=finished_s - arrival_s,
        queue_s=sum(s.end_s - s.start_s for s in timeline if s.stage in _WAITS and s.cause != "images"),
        encode_s=total(frozenset({"encode"})),
        prefill_s=total(frozenset({"prefill"})),
        decode_s=total(frozenset({"decode"})),
        num_preemptions=num_preemptions,
    )


def draw(timeline: Sequence[StageSpan], *, width: int = 48) -> list[str]:
    """The timeline as lines of text, one per stage, bars to scale: what `demo` and `generate --timeline` print."""
    if not timeline:
        return []
    end = max(max(s.end_s for s in timeline), 1e-9)
    lines = []
    present = {s.stage for s in timeline}
    shown = present | {wait for run, wait in _ALWAYS.items() if run in present}
    for stage in (stage for stage in _ORDER if stage in shown):
        spans = [s for s in timeline if s.stage == stage]
        cells = [" "] * width
        for span in spans:
            first = min(round(span.start_s / end * width), width - 1)
            last = min(max(round(span.end_s / end * width), first + 1), width)
            cells[first:last] = ("░" if stage in _WAITS else "█") * (last - first)
        total_ms = sum(s.end_s - s.start_s for s in spans) * 1e3
        lines.append(f"{stage:12} |{''.join(cells)}| {total_ms:8.1f} ms  {_detail(spans)}".rstrip())
    return lines


def _detail(spans: Sequence[StageSpan]) -> str:
    if not spans:
        return ""
    parts = [spans[0].lane] if spans[0].lane != "front" else []
    tokens = sum(s.tokens for s in spans)
    if tokens:
        unit = "patches" if spans[0].lane == "vision" else "tokens"
        parts.append(f"{tokens} {unit}")
    if len(spans) > 1:
        parts.append(f"{len(spans)} spans")
    batch = max(s.batch for s in spans)
    if batch > 1:
        parts.append(f"batch {batch}")
    causes = [s.cause for s in spans if s.cause]
    if causes:
        parts.append("for " + ", ".join(dict.fromkeys(causes)))
    return " · ".join(parts)
