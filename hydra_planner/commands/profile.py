"""`hydra-engine profile MODEL`: measures step times on this machine, saves them for the next start, and prints them.

Assembles an instance in this process without serving. `serve` does the same measurement at start if a TPOT limit is
given and no valid profile is saved. `bench/step_times.py` draws a profile.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from hydra_engine import log
from hydra_engine.cli.options import add_engine_options, add_model_argument
from hydra_engine.cli.sources import read_settings
from hydra_engine.core.plans import LanguageLoad
from hydra_engine.errors import ConfigError
from hydra_engine.preprocess.model_files import find_model_files
from hydra_engine.profiler.other_load import busy_note
from hydra_planner.commands.output import check_output

if TYPE_CHECKING:  # `--help` needs neither
    from hydra_engine.profiler.fit import CorunTimes
    from hydra_engine.profiler.store import Profile

_DECODES = (1, 4, 16, 64)
# As in instances: an idle OpenMP team that spins would take the cores from the other lane.
_OPENMP_IDLE = ("OMP_WAIT_POLICY", "PASSIVE")
_LOAD = {"decodes": "", "context": "tokens", "prompt": "tokens", "behind": "tokens", "chunks": ""}
_TIMES = {"measured": "ms", "predicted": "ms", "error": ""}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the profile to this file, as JSON")
    parser.add_argument(
        "--cached", action="store_true", help="print the saved profile; measure only where there is no valid one"
    )
    parser.add_argument(
        "--seconds", type=float, help="longest time to measure; it ends earlier once every step has enough repeats"
    )
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    config = find_model_files(read_settings(arguments).engine())
    from hydra_engine.profiler.store import save

    log.configure(config.log_level, log_format=config.log_format)
    output: Path | None = arguments.output
    if output is not None:
        check_output(output)
    if arguments.seconds is not None and not 0 < arguments.seconds < 3600:
        raise ConfigError("--seconds must be more than 0 and less than an hour", param="seconds")
    os.environ.setdefault(*_OPENMP_IDLE)
    hooks: Any = import_module("hydra_engine.instance.hooks")  # loads torch
    measured = hooks.profile_instance(config, progress_line(), fresh=not arguments.cached, deadline_s=arguments.seconds)
    lines = [*profile_lines(measured.profile, config.scheduler.tpot_slo), ""]
    sys.stdout.write("\n".join([*lines, f"{measured.source}; {measured.state} {measured.file}", ""]))
    if output is not None:
        try:
            save(measured.profile, output)
        except OSError as error:
            raise ConfigError(f"the profile cannot be written: {error.strerror}", param="output") from error
    return 0


def progress_line() -> Callable[[str, int, int], None]:
    """Returns a callback that draws a counting line on a terminal, and nothing elsewhere."""
    shown = sys.stderr.isatty()

    def report(what: str, done: int, total: int) -> None:
        if shown:
            end = "\r\x1b[K" if done >= total else ""
            sys.stderr.write(f"\r{what} {100 * done // max(total, 1):3d} %{end}")
            sys.stderr.flush()

    return report


# ---- the report


def profile_lines(profile: Profile, tpot_limit_s: float | None = None) -> list[str]:
    """Measured times beside predicted ones; with `tpot_limit_s` also the budgets within that time between two
    tokens, in seconds."""
    samples, surface = profile.samples, profile.surface
    lines = [*_head(profile), "", "language steps alone"]
    language = sorted(samples.language, key=lambda point: _order(point.load))
    lines += _table(
        _LOAD | _TIMES,
        [(*_load_cells(p.load), *_time_cells(p.seconds, surface.language_s(p.load))) for p in language],
    )
    lines += ["", "vision steps alone"]
    vision = sorted(samples.vision, key=lambda point: point.load.num_patches)
    cells = [
        (str(p.load.num_patches), f"{p.load.pairs:.0f}", *_time_cells(p.seconds, surface.vision_s(p.load)))
        for p in vision
    ]
    lines += _table({"patches": "", "pairs": ""} | _TIMES, cells) if cells else ["  none measured"]
    if samples.corun:
        lines += ["", *_corun_lines(profile)]
    if tpot_limit_s is not None:
        busy = busy_note(profile.other_load)
        lines += ["", *(_limit_lines(profile, tpot_limit_s) if busy is None else [f"no limits from this: {busy}"])]
    return lines


def _head(profile: Profile) -> list[str]:
    identity, surface = profile.identity, profile.surface
    left = f"; {profile.num_left} left out for lack of time" if profile.num_left else ""
    return [
        f"measured    {profile.num_points - profile.num_left} kinds of steps in {profile.seconds:.1f} s, "
        f"{profile.measured_at}{left}",
        f"machine     {identity.device}, {identity.processor}, {identity.threads} threads per lane of {identity.cores} "
        f"cores, lane priority {identity.lane_priority}",
        f"computes    {identity.dtype}, ops {identity.backend}",
        f"errors      90th percentile: {surface.language_error:.1%} (language), "
        f"{surface.vision_error:.1%} (vision), {surface.corun_error:.1%} (both at once)",
        f"hand-over   {_ms(profile.submit_s)} ms to a lane, {_ms(profile.collect_s)} ms back",
        *(f"note        {note}" for note in profile.notes),
    ]


def _corun_lines(profile: Profile) -> Iterator[str]:
    surface = profile.surface
    yield (
        f"both lanes at once: decodes take {surface.decode_slowdown:.2f} times as long, prompts "
        f"{surface.prefill_slowdown:.2f}, vision {surface.vision_slowdown:.2f}"
    )
    for number, split in enumerate(surface.splits, start=1):
        yield (
            f"on partition {number} of the device: decodes {split.decode:.2f}, prompts {split.prefill:.2f}, "
            f"vision {split.vision:.2f}"
        )
    points = sorted(profile.samples.corun, key=lambda point: (point.partition, *_order(point.language)))
    columns = _LOAD | _TIMES | {"beside patches": "", "vision measured": "ms"}
    if surface.splits:
        columns |= {"partition": ""}
    yield from _table(columns, [_corun_cells(profile, point) for point in points])


def _corun_cells(profile: Profile, point: CorunTimes) -> tuple[str, ...]:
    language = ("-", "-", "-")
    if point.language_s:
        surface = profile.surface.for_partition(point.partition)
        language = _time_cells(point.language_s, surface.corun_s(point.language, float("inf")))
    vision = _ms(median_low(point.vision_s)) if point.vision_s else "-"
    partition = (str(point.partition),) if profile.surface.splits else ()
    return (*_load_cells(point.language), *language, str(point.vision.num_patches), vision, *partition)


def _limit_lines(profile: Profile, tpot_limit_s: float) -> Iterator[str]:
    from hydra_engine.profiler.fit import TYPICAL_CONTEXT, allowance

    yield f"a limit of {_ms(tpot_limit_s)} ms between tokens leaves, beside decodes of {TYPICAL_CONTEXT} keys each"
    units = {"decodes": "", "alone": "ms", "prompt tokens a step": "tokens", "with vision": "tokens", "vision": "ms"}
    rows = []
    for decodes in sorted({min(number, profile.reach.decodes) for number in _DECODES}):
        most = max(profile.reach.rows - decodes, 0)
        left = allowance(profile.surface, decodes, TYPICAL_CONTEXT, tpot_limit_s, most)
        if left.step_s > tpot_limit_s:
            rows.append((str(decodes), _ms(left.step_s), "over the limit", "", ""))
        else:
            vision = "whole step" if left.vision_s == float("inf") else _ms(left.vision_s)
            rows.append((str(decodes), _ms(left.step_s), str(left.tokens_alone), str(left.tokens_beside), vision))
    yield from _table(units, rows)
    best_s = profile.surface.language_s(LanguageLoad(1, TYPICAL_CONTEXT))
    if best_s > tpot_limit_s:
        yield f"  this machine cannot keep the limit: one request alone takes {_ms(best_s)} ms a token"


def _table(columns: dict[str, str], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yields right-aligned lines; `columns` maps titles to the units below them."""
    lines = [tuple(columns), tuple(columns.values()), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _load_cells(load: LanguageLoad) -> tuple[str, ...]:
    context = load.decode_context // load.num_decodes if load.num_decodes else 0
    numbers = (load.num_decodes, context, load.prefill_tokens, round(mean_start(load)), load.num_chunks)
    return tuple(map(str, numbers))


def mean_start(load: LanguageLoad) -> float:
    """The mean position (tokens) at which a step's chunks start; exact if they have equal lengths."""
    if not load.prefill_tokens:
        return 0.0
    return load.prefill_pairs / load.prefill_tokens - (load.prefill_tokens / load.num_chunks + 1) / 2


def _time_cells(seconds: Sequence[float], predicted: float) -> tuple[str, str, str]:
    """The measured time, the predicted one and their difference; the measured one is the lower median, to which the
    surface is fitted."""
    measured = median_low(seconds)
    return _ms(measured), _ms(predicted), f"{predicted / measured - 1:+.1%}"


def _order(load: LanguageLoad) -> tuple[float, ...]:
    kind = 2 if load.num_decodes and load.prefill_tokens else int(load.prefill_tokens > 0)
    return (kind, load.num_decodes, load.prefill_tokens, load.num_chunks, load.decode_context, load.prefill_pairs)


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
