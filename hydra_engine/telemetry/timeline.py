"""The stage timeline of one request: spans relative to its arrival, figures derived from them, and a drawing.

Spans come from the preprocessor (fetch, preprocess, tokenize) and from the instance (waits and runs of the stages), all
stamped on one monotonic clock. Derived are the phases of HydraInfer (Fig. 13) that the latency went to, sums, and the
verdict on latency limits with the cause of a missed one. Does not know where they are shown.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hydra_engine.core.outputs import RequestMetrics, Result, SloReport, StageSpan
from hydra_engine.core.request import Slo

# In the order in which a request goes through them. Migrations are between instances only.
PHASES = (
    *("preprocess", "encode_queue", "encode", "ep_migration", "prefill_queue", "prefill"),
    *("pd_migration", "decode_queue", "decode", "lost", "other"),
)
# After the last step, until another thread has completed the answer: as long as Python may take to switch to it.
HAND_OVER_S = 0.005

# The phase that counts where spans overlap, strongest first: running before waiting, then what is nearer to the next
# token. A late token's gap (decode_wait) is last: it covers all other spans of that time.
_STRENGTH = (
    *("prefill", "decode", "encode", "preprocess", "prefill_queue", "encode_queue"),
    *("ep_migration", "pd_migration", "lost", "decode_queue"),
)
PHASE_OF = {
    **dict.fromkeys(("fetch", "tokenize", "preprocess"), "preprocess"),
    "encode_wait": "encode_queue",
    "encode": "encode",
    **dict.fromkeys(("prefill_wait", "preempted", "cached"), "prefill_queue"),
    "prefill": "prefill",
    "decode_wait": "decode_queue",
    "decode": "decode",
    **dict.fromkeys(("offered_features", "pull_features"), "ep_migration"),
    **dict.fromkeys(("offered_kv", "pull_kv"), "pd_migration"),
    "lost": "lost",
}
MOVES = {"ep_migration": "features", "pd_migration": "kv"}  # phases of a transfer, and what it transfers
_PHASE_OF_WAIT: dict[str | None, str] = {"images": "encode_queue", "transfer": "pd_migration"}
_BEFORE = {"encode": "encode_queue", "prefill": "prefill_queue", "decode": "decode_queue"}
_QUEUE_PHASES = frozenset(_BEFORE.values())

# Stages in the order in which a request goes through them. The waits in `_ALWAYS` are drawn even if they took no time.
_ORDER = (
    *("fetch", "tokenize", "preprocess", "encode_wait", "encode", "pull_features", "prefill_wait", "cached", "prefill"),
    *("offered_features", "offered_kv", "pull_kv", "preempted", "lost", "decode_wait", "decode"),
)
_ALWAYS = {"encode": "encode_wait", "prefill": "prefill_wait"}
_QUEUES = frozenset({"encode_wait", "prefill_wait", "preempted", "decode_wait"})
_WAITS = _QUEUES | {"offered_features", "offered_kv", "lost"}
_ELSEWHERE = ("images", "transfer")  # causes of a wait during which another lane or instance works on the request
_MAX_LATE_SHARE = 0.1  # of the gaps between tokens (HydraInfer, section 5.1)
_MAX_LATE_LINES = 3
_MAX_DESCRIPTION = 600  # characters in a header
_HAS_SPANS = frozenset({"transfer", "preemption", "lost"})  # kinds of blame whose time other spans show too
_BLAME = {"step": "slow steps", "cpu": "time between steps", "decode": "decode steps alone", "lost": "a lost instance"}
_UNITS = {"prefill": "tokens", "encode": "patches"}


# ---- phases


def phases(timeline: Sequence[StageSpan], e2e_s: float, *, ttft_s: float | None = None) -> dict[str, float]:
    """Returns seconds per phase for every name of `PHASES`; they sum to `e2e_s`.

    `timeline` is relative to the arrival. Any wait after the first token is decode_queue; a wait for images is
    encode_queue. Time before the scheduler had the request is preprocess; a later gap between two spans counts as a
    wait for the second one. A move between instances counts only while nothing else of the request runs or waits: an
    early move costs nothing. `other` is time after the last span beyond `HAND_OVER_S`, or all of it if there are no
    spans. If `ttft_s` is None, the first token is assumed to come with the last prefill before the first decode, which
    is too late for a request that was preempted in between.
    """
    durations = dict.fromkeys(PHASES, 0.0)
    spans = sorted((span for span in timeline if span.start_s <= e2e_s), key=lambda span: span.start_s)
    if not spans:
        return durations | {"other": e2e_s}
    first_token_s = _first_token_s(spans) if ttft_s is None else ttft_s
    starts = [span.start_s for span in spans]
    started_s = intake_s(spans)
    active = dict.fromkeys(_STRENGTH, 0)
    clock_s = 0.0
    for at_s, change, phase in _edges(spans, min(first_token_s, e2e_s), e2e_s):
        if at_s > clock_s:
            name = next((phase for phase in _STRENGTH if active[phase]), None)
            if name is None:
                name = _gap(spans, starts, at_s, started_s)
            handed_over = name == "other" and at_s - clock_s <= HAND_OVER_S
            if clock_s >= first_token_s and (name in _QUEUE_PHASES or handed_over):
                name = "decode_queue"
            durations[name] += at_s - clock_s
            clock_s = at_s
        if phase is not None:
            active[phase] += change
    return durations


def _edges(spans: Sequence[StageSpan], *marks: float) -> list[tuple[float, int, str | None]]:
    """(time, +1 at a span's start or -1 at its end, its phase) in order of time, with (mark, 0, None) for each mark.
    Spans end at the last mark at the latest."""
    end_s = marks[-1]
    edges: list[tuple[float, int, str | None]] = [(mark, 0, None) for mark in marks]
    for span in spans:
        phase = _phase_of(span)
        edges.append((max(span.start_s, 0.0), 1, phase))
        edges.append((min(max(span.end_s, 0.0), end_s), -1, phase))
    return sorted(edges, key=lambda edge: edge[0])


def _phase_of(span: StageSpan) -> str:
    if span.stage == "prefill_wait":  # may wait for another lane or instance
        return _PHASE_OF_WAIT.get(span.cause, "prefill_queue")
    return PHASE_OF[span.stage]


def _first_token_s(spans: Sequence[StageSpan]) -> float:
    decodes = [span.start_s for span in spans if span.stage in ("decode", "decode_wait")]
    until_s = min(decodes, default=math.inf)
    return max((span.end_s for span in spans if span.stage == "prefill" and span.start_s < until_s), default=math.inf)


def intake_s(spans: Sequence[StageSpan]) -> float:
    """The time at which the scheduler received the request; the end of preprocessing if it never did."""
    intake = [span.end_s for span in spans if _phase_of(span) == "preprocess"]
    scheduled = [span.start_s for span in spans if _phase_of(span) != "preprocess"]
    return min(scheduled) if scheduled else max(intake, default=0.0)


def _gap(spans: Sequence[StageSpan], starts: Sequence[float], until_s: float, started_s: float) -> str:
    """The phase of a gap between spans that ends at `until_s`."""
    if until_s <= started_s:
        return "preprocess"
    following = bisect_left(starts, until_s)
    if following == len(spans):
        return "other"
    phase = _phase_of(spans[following])
    return _BEFORE.get(phase, phase)


# ---- sums and limits


def relative(spans: Iterable[StageSpan], arrival_s: float) -> tuple[StageSpan, ...]:
    """Returns the absolute spans in seconds since arrival, in order of start."""
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
    """Sums per stage; `timeline` is relative, the stamps are absolute. A prefill's wait for images is not queueing,
    since the images are encoded meanwhile."""

    def total(stages: frozenset[str]) -> float:
        return sum(s.end_s - s.start_s for s in timeline if s.stage in stages)

    tpot_s = None
    if first_token_s is not None and last_token_s is not None and num_tokens > 1:
        tpot_s = (last_token_s - first_token_s) / (num_tokens - 1)
    return RequestMetrics(
        ttft_s=None if first_token_s is None else first_token_s - arrival_s,
        tpot_s=tpot_s,
        e2e_s=finished_s - arrival_s,
        queue_s=sum(s.end_s - s.start_s for s in timeline if _is_queueing(s)),
        encode_s=total(frozenset({"encode"})),
        prefill_s=total(frozenset({"prefill"})),
        decode_s=total(frozenset({"decode"})),
        num_preemptions=num_preemptions,
    )


def _is_queueing(span: StageSpan) -> bool:
    beside = span.stage == "decode_wait" and any(blame.kind in _HAS_SPANS for blame in span.blame)
    return span.stage in _QUEUES and span.cause not in _ELSEWHERE and not beside


def slo_report(
    limits: Slo, *, ttft_s: float | None, late_by: Mapping[str, int], num_gaps: int, timeline: Sequence[StageSpan]
) -> SloReport:
    """Returns which limits a request met, as `SloReport` defines it, and what a missed one was lost to.

    `limits` are the ones in force, the request's own or the engine's; `late_by` counts the late ones of `num_gaps` gaps
    between its tokens by the kind of their blame; `timeline` is relative to the arrival.
    """
    late_gaps = sum(late_by.values())
    ttft_met = tpot_met = None
    reasons = []
    if limits.ttft_s is not None and ttft_s is not None:
        ttft_met = ttft_s <= limits.ttft_s
        if not ttft_met:
            took = f"first token after {_ms(ttft_s)}, limit {_ms(limits.ttft_s)}"
            reasons.append(took + _lost_before_first_token(timeline, ttft_s))
    if limits.tpot_s is not None and num_gaps:
        tpot_met = late_gaps <= _MAX_LATE_SHARE * num_gaps
        if not tpot_met:
            reasons.append(f"{late_gaps} of {num_gaps} gaps over {_ms(limits.tpot_s)}" + _lost_between_tokens(timeline))
    return SloReport(
        ttft_limit_s=limits.ttft_s,
        tpot_limit_s=limits.tpot_s,
        ttft_met=ttft_met,
        tpot_met=tpot_met,
        late_gaps=late_gaps,
        num_gaps=num_gaps,
        reason="; ".join(reasons) or None,
        late_by=dict(late_by),
    )


def _lost_before_first_token(timeline: Sequence[StageSpan], ttft_s: float) -> str:
    """Describes the longest wait or stage, with its cause. A wait for images counts as the waits and encodes of the
    images."""
    if not timeline:
        return ""
    seconds: dict[tuple[str, str | None], float] = defaultdict(float)
    seconds["intake", None] = min(intake_s(timeline), ttft_s)
    encodes = any(span.stage in ("encode", "encode_wait") for span in timeline)
    for span in timeline:
        if span.lane != "front" and not (encodes and (span.stage, span.cause) == ("prefill_wait", "images")):
            seconds[span.stage, span.cause] += max(0.0, min(span.end_s, ttft_s) - span.start_s)
    stage, cause = max(seconds, key=lambda key: seconds[key])
    return f": {stage} {_ms(seconds[stage, cause])}" + (f" ({cause})" if cause else "")


def _lost_between_tokens(timeline: Sequence[StageSpan]) -> str:
    """Describes the kind of blame with the largest sum, and the request with the largest share of it."""
    kinds: dict[str, float] = defaultdict(float)
    culprits: dict[tuple[str, int], tuple[float, int]] = {}
    for blame in (blame for span in timeline for blame in span.blame):
        kinds[blame.kind] += blame.seconds
        if blame.request is not None:
            seconds, amount = culprits.get((blame.kind, blame.request), (0.0, 0))
            culprits[blame.kind, blame.request] = seconds + blame.seconds, amount + blame.amount
    if not kinds:
        return ""
    kind = max(kinds, key=lambda kind: kinds[kind])
    lost = f"{_BLAME.get(kind, kind)} {_ms(kinds[kind])}"
    of_kind = [(seconds, amount, who) for (other, who), (seconds, amount) in culprits.items() if other == kind]
    if not of_kind:
        return f": {lost}"
    _, amount, who = max(of_kind)
    return f": {lost}, most of it for request {who} ({amount} {_UNITS[kind]})"


def server_timing(result: Result) -> str:
    """Returns the value of a `Server-Timing` header: phases that took time, the total, and `late` with the reason if a
    limit was missed. Durations in milliseconds; ASCII, at most about 1 KB."""
    metrics = result.metrics
    durations = phases(result.timeline, metrics.e2e_s, ttft_s=metrics.ttft_s)
    entries = [f"{name};dur={seconds * 1e3:.1f}" for name, seconds in durations.items() if seconds > 0]
    entries.append(f"total;dur={metrics.e2e_s * 1e3:.1f}")
    if metrics.slo.met is False:
        reason = "".join(
            c if c.isascii() and c.isprintable() and c not in '"\\' else "?" for c in metrics.slo.reason or ""
        )
        entries.append(f'late;desc="{reason[:_MAX_DESCRIPTION]}"')
    return ", ".join(entries)


# ---- a drawing


def draw(timeline: Sequence[StageSpan], *, width: int = 48, clock_error_s: float = 0.0) -> list[str]:
    """Returns the timeline as lines of text, one per stage with bars to scale, then the costliest gaps between tokens
    and their causes: what `demo` and `generate --timeline` print. `clock_error_s`: as in the request's metrics."""
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
    if clock_error_s:
        lines.append(f"times of other nodes are right within {clock_error_s * 1e3:.2f} ms")
    return lines + _late_lines(timeline)


def _late_lines(timeline: Sequence[StageSpan]) -> list[str]:
    late = [(sum(blame.seconds for blame in span.blame), span) for span in timeline if span.blame]
    late.sort(key=lambda pair: -pair[0])
    lines = [f"late: {span.cause} {_ms(seconds)}" for seconds, span in late[:_MAX_LATE_LINES]]
    if rest := late[_MAX_LATE_LINES:]:
        lines.append(f"late: {len(rest)} more, {_ms(sum(seconds for seconds, _ in rest))}")
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
    causes = [s.cause for s in spans if s.cause and not s.blame]
    if causes:
        parts.append("for " + ", ".join(dict.fromkeys(causes)))
    return " · ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
