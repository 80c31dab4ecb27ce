"""Where the latency of a request went: the phases of HydraInfer (Fig. 13), preprocessing, and what nobody explains.

A partition: every instant between arrival and end belongs to one phase, also where spans of the timeline overlap or
leave out short hand-overs. Does not know where it is shown.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from hydra_engine.core.outputs import StageSpan

# In the order in which a request meets them. Within one instance nothing migrates.
PHASES = (
    *("preprocess", "encode_queue", "encode", "ep_migration", "prefill_queue", "prefill"),
    *("pd_migration", "decode_queue", "decode", "lost", "other"),
)
# Behind the last step, until the answer is complete in another thread: as long as Python may take to switch to it.
HAND_OVER_S = 0.005

# What counts where spans overlap, strongest first: what runs before what waits, and what is nearer to the next token. A
# late token's gap comes last: it lies over whatever else is told of that time.
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
MOVES = {"ep_migration": "features", "pd_migration": "kv"}  # phases in which a request moves, and what moves
_PHASE_OF_WAIT: dict[str | None, str] = {"images": "encode_queue", "transfer": "pd_migration"}
_BEFORE = {"encode": "encode_queue", "prefill": "prefill_queue", "decode": "decode_queue"}
_WAITS = frozenset(_BEFORE.values())


def phases(timeline: Sequence[StageSpan], e2e_s: float, *, ttft_s: float | None = None) -> dict[str, float]:
    """Seconds per phase, with every name of `PHASES`, summing to `e2e_s`.

    `timeline` is relative to the arrival. Waiting after the first token is decode_queue, whatever for; a wait for
    images is encode_queue. Time before the scheduler had the request is preprocess; later, time between two spans
    belongs to the wait for the second one. Moving between instances counts as far as nothing else of the request runs
    or waits meanwhile: what is moved early costs nothing. `other` is time behind the last span beyond `HAND_OVER_S`, or
    all of it without spans. Without `ttft_s` the first token is taken to come with the last prefill before the first
    decode, which is too late for a request that was preempted in between.
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
            if clock_s >= first_token_s and (name in _WAITS or handed_over):
                name = "decode_queue"
            durations[name] += at_s - clock_s
            clock_s = at_s
        if phase is not None:
            active[phase] += change
    return durations


def _edges(spans: Sequence[StageSpan], *marks: float) -> list[tuple[float, int, str | None]]:
    """(time, +1 where a span begins and -1 where it ends, its phase) in order of time, all within the last mark."""
    end_s = marks[-1]
    edges: list[tuple[float, int, str | None]] = [(mark, 0, None) for mark in marks]
    for span in spans:
        phase = _phase_of(span)
        edges.append((max(span.start_s, 0.0), 1, phase))
        edges.append((min(max(span.end_s, 0.0), end_s), -1, phase))
    return sorted(edges, key=lambda edge: edge[0])


def _phase_of(span: StageSpan) -> str:
    if span.stage == "prefill_wait":  # perhaps for work that others do
        return _PHASE_OF_WAIT.get(span.cause, "prefill_queue")
    return PHASE_OF[span.stage]


def _first_token_s(spans: Sequence[StageSpan]) -> float:
    decodes = [span.start_s for span in spans if span.stage in ("decode", "decode_wait")]
    until_s = min(decodes, default=math.inf)
    return max((span.end_s for span in spans if span.stage == "prefill" and span.start_s < until_s), default=math.inf)


def intake_s(spans: Sequence[StageSpan]) -> float:
    """The time at which the scheduler got the request; the end of preprocessing if it never did."""
    intake = [span.end_s for span in spans if _phase_of(span) == "preprocess"]
    scheduled = [span.start_s for span in spans if _phase_of(span) != "preprocess"]
    return min(scheduled) if scheduled else max(intake, default=0.0)


def _gap(spans: Sequence[StageSpan], starts: Sequence[float], until_s: float, started_s: float) -> str:
    """The phase of a time in which the request has no span."""
    if until_s <= started_s:
        return "preprocess"
    following = bisect_left(starts, until_s)
    if following == len(spans):
        return "other"
    phase = _phase_of(spans[following])
    return _BEFORE.get(phase, phase)
