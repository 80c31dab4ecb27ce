"""A profile as lines of text: what was measured beside what the surface says, and what a limit between tokens leaves.

Numbers in, text out. `bench/step_times.py` draws it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low

from hydra_engine.core.cost import CostSurface, LanguageLoad
from hydra_engine.planner.samples import CorunTimes
from hydra_engine.planner.store import Profile

DECODES = (1, 4, 16, 64)
TYPICAL_CONTEXT = 512  # keys of each decode, where a table needs one number
_UNITS = {"context": "tokens", "prompt": "tokens", "behind": "tokens", "measured": "ms", "predicted": "ms"}


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one language step may take on beside its decodes and stay within a limit."""

    step_s: float  # the decodes alone
    tokens_alone: int  # prefill tokens, the vision lane idle
    tokens_beside: int  # prefill tokens, the vision lane busy all along
    vision_s: float  # of the vision lane beside the decodes; infinite: all along


def allowance(surface: CostSurface, num_decodes: int, context: int, limit_s: float, most_tokens: int) -> Allowance:
    """`context` keys for each decode; prompts of no more than `most_tokens` in one chunk from position 0."""

    def load(tokens: int) -> LanguageLoad:
        pairs = tokens * (tokens + 1) / 2
        return LanguageLoad(num_decodes, num_decodes * context, tokens, pairs, int(tokens > 0))

    def most(vision_s: float) -> int:
        return bisect_right(range(1, most_tokens + 1), limit_s, key=lambda n: surface.corun_s(load(n), vision_s))

    alone, factor = surface.language_s(load(0)), surface.slowdown(load(0))
    if alone * factor <= limit_s:
        vision_s = float("inf")
    else:  # the step ends within the limit exactly, see `CostSurface.corun_s`
        vision_s = (limit_s - alone) / (1 - 1 / factor) if alone < limit_s else 0.0
    return Allowance(alone, most(0.0), most(float("inf")), vision_s)


def profile_lines(profile: Profile, limit_s: float | None = None) -> list[str]:
    """The whole report. `limit_s`: what a limit between two tokens leaves is said too."""
    lines = [*_head(profile), "", *_language_lines(profile), "", *_vision_lines(profile)]
    if profile.samples.corun:
        lines += ["", *_corun_lines(profile)]
    if limit_s is not None:
        lines += ["", *_limit_lines(profile, limit_s)]
    return lines


def _head(profile: Profile) -> list[str]:
    identity, surface = profile.identity, profile.surface
    left = f"; {profile.num_left} left out for want of time" if profile.num_left else ""
    return [
        f"measured    {profile.num_points - profile.num_left} kinds of steps in {profile.seconds:.1f} s, "
        f"{profile.measured_at}{left}",
        f"machine     {identity.device}, {identity.processor}, {identity.threads} threads per lane of {identity.cores} "
        f"cores, lane priority {identity.lane_priority}",
        f"computes    {identity.dtype}, ops {identity.backend}",
        f"errors      9 of 10 steps within {surface.language_error:.1%} (language), "
        f"{surface.vision_error:.1%} (vision), {surface.corun_error:.1%} (both at once)",
        f"hand-over   {_ms(profile.submit_s)} ms to a lane, {_ms(profile.collect_s)} ms back",
        *(f"note        {note}" for note in profile.notes),
    ]


def _language_lines(profile: Profile) -> Iterator[str]:
    """One line per measured load; a prompt's start is the mean over its chunks."""
    yield "language steps alone"
    yield from _titles("  decodes  context   prompt   behind  chunks   measured  predicted   error", _UNITS)
    ordered = sorted(profile.samples.language, key=lambda point: _order(point.load))
    for point in ordered:
        yield f"  {_load_cells(point.load)}  {_time_cells(point.seconds, profile.surface.language_s(point.load))}"


def _vision_lines(profile: Profile) -> Iterator[str]:
    yield "vision steps alone"
    if not profile.samples.vision:
        yield "  none measured"
        return
    yield from _titles("  patches         pairs                              measured  predicted   error", _UNITS)
    for point in sorted(profile.samples.vision, key=lambda point: point.load.num_patches):
        cells = _time_cells(point.seconds, profile.surface.vision_s(point.load))
        yield f"  {point.load.num_patches:7d}  {point.load.pairs:12.0f}{'':27}{cells}"


def _corun_lines(profile: Profile) -> Iterator[str]:
    surface = profile.surface
    yield (
        f"both lanes at once: decodes take {surface.decode_slowdown:.2f} times as long, prompts "
        f"{surface.prefill_slowdown:.2f}, vision {surface.vision_slowdown:.2f}"
    )
    titles = "  decodes  context   prompt   behind  chunks   measured  predicted   error   beside patches: measured"
    yield from _titles(titles, _UNITS | {": measured": "ms"})
    for point in sorted(profile.samples.corun, key=lambda point: _order(point.language)):
        yield f"  {_load_cells(point.language)}  {_corun_cells(surface, point)}"


def _corun_cells(surface: CostSurface, point: CorunTimes) -> str:
    language = "         -          -       -"
    if point.language_s:
        language = _time_cells(point.language_s, surface.corun_s(point.language, float("inf")))
    vision = _ms(median_low(point.vision_s)) if point.vision_s else "-"
    return f"{language}   {point.vision.num_patches:14d}: {vision:>8}"


def _limit_lines(profile: Profile, limit_s: float) -> Iterator[str]:
    yield f"a limit of {_ms(limit_s)} ms between tokens leaves, beside decodes of {TYPICAL_CONTEXT} keys each"
    titles = "  decodes      alone   prompt tokens a step   with vision beside   vision a step"
    yield from _titles(titles, {"alone": "ms", "tokens a step": "tokens", "beside": "tokens", "vision a step": "ms"})
    best = profile.surface.language_s(LanguageLoad(1, TYPICAL_CONTEXT))
    for decodes in sorted({min(number, profile.reach.decodes) for number in DECODES}):
        most = max(profile.reach.rows - decodes, 0)
        left = allowance(profile.surface, decodes, TYPICAL_CONTEXT, limit_s, most)
        if left.step_s > limit_s:
            yield f"  {decodes:7d}  {_ms(left.step_s):>9}   over the limit by themselves"
            continue
        vision = "all along" if left.vision_s == float("inf") else _ms(left.vision_s)
        yield (
            f"  {decodes:7d}  {_ms(left.step_s):>9}   {left.tokens_alone:20d}   {left.tokens_beside:18d}   {vision:>13}"
        )
    if best > limit_s:
        yield f"  this machine cannot keep the limit: one request alone takes {_ms(best)} ms a token"


def _titles(titles: str, units: dict[str, str]) -> Iterator[str]:
    """The line and one below it that has each column's unit, its end below that of the title."""
    below = [" "] * len(titles)
    for title, unit in units.items():
        if (at := titles.find(title)) >= 0:
            end = at + len(title)
            below[end - len(unit) : end] = unit
    yield titles
    yield "".join(below).rstrip()


def _load_cells(load: LanguageLoad) -> str:
    context = load.decode_context // load.num_decodes if load.num_decodes else 0
    start = mean_start(load)
    return f"{load.num_decodes:7d}  {context:7d}  {load.prefill_tokens:7d}  {start:7.0f}  {load.num_chunks:6d}"


def mean_start(load: LanguageLoad) -> float:
    """Of a step's chunks of one length: the position they begin at."""
    if not load.prefill_tokens:
        return 0.0
    return load.prefill_pairs / load.prefill_tokens - (load.prefill_tokens / load.num_chunks + 1) / 2


def _time_cells(seconds: Sequence[float], predicted: float) -> str:
    """The lower median is what the surface is fitted to."""
    measured = median_low(seconds)
    return f"{_ms(measured):>9}  {_ms(predicted):>9}  {predicted / measured - 1:+6.1%}"


def _order(load: LanguageLoad) -> tuple[float, ...]:
    kind = 2 if load.num_decodes and load.prefill_tokens else int(load.prefill_tokens > 0)
    return (kind, load.num_decodes, load.prefill_tokens, load.num_chunks, load.decode_context, load.prefill_pairs)


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
