"""Step times of a profile as one picture: language steps over rows, vision steps over patches, and both at once.

    hydra-engine profile MODEL --output profile.json
    python -m bench.step_times profile.json -o steps.png --tpot-slo 40ms

Needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np

from hydra_engine.config import parse_seconds
from hydra_engine.core.cost import CostSurface
from hydra_engine.core.plans import LanguageLoad
from hydra_engine.profiler.fit import TYPICAL_CONTEXT, LanguageTimes, Samples, VisionTimes
from hydra_engine.profiler.store import Profile
from hydra_planner.simulator.costs import read_profile

_COLOURS = ("#0072b2", "#009e73", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by everyone
_GREY = "#555555"
_STEPS = 240  # of a drawn line
_DECODES = 8  # beside which the map on the right is drawn
_DPI = 130
_MAX_TICKS = 8
_WIDE = 5.0  # beyond it a scale is logarithmic
_SPAN = 6.0  # from the fastest step of decodes, where no limit is given


def draw(profile: Profile, file: Path, title: str, limit_s: float | None = None) -> None:
    """Writes a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 5.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _language(left, profile.surface, profile.samples)
    _vision(middle, profile.surface, profile.samples)
    _map(figure, right, profile, limit_s)
    identity = profile.identity
    figure.suptitle(
        f"{title}: {identity.dtype} on {identity.processor or identity.device}, {identity.threads} threads per lane",
        fontsize=12,
    )
    figure.savefig(file, dpi=_DPI, format="png")


def _language(axes: Any, surface: CostSurface, samples: Samples) -> None:
    """Lines: predicted; dots: measured. One colour per context of decodes, black for prompts."""
    decodes = [point for point in samples.language if not point.load.prefill_tokens]
    prompts = [point for point in samples.language if not point.load.num_decodes]
    most = max((point.load.num_decodes for point in decodes), default=1)
    rows = np.unique(np.geomspace(1, most, _STEPS).astype(int))
    for colour, context in zip(_COLOURS, _contexts(decodes), strict=False):
        chosen = [p for p in decodes if _context(p.load) == context]
        drawn = rows[rows <= max(p.load.num_decodes for p in chosen)]
        line = [surface.language_s(_decodes(n, context)) * 1e3 for n in drawn]
        axes.plot(drawn, line, color=colour, label=f"decodes, {context} keys each")
        _dots(axes, [p.load.num_decodes for p in chosen], [p.seconds for p in chosen], colour)
    plain = [p for p in prompts if p.load.num_chunks == 1 and p.load.prefill_pairs == _pairs(p.load.prefill_tokens)]
    if plain:
        amounts = [p.load.num_rows for p in plain]
        tokens = np.unique(np.geomspace(min(amounts), max(amounts), _STEPS).astype(int))
        line = [surface.language_s(LanguageLoad(0, 0, int(n), _pairs(n), 1)) * 1e3 for n in tokens]
        axes.plot(tokens, line, color="black", label="a prompt from its beginning")
        _dots(axes, amounts, [p.seconds for p in plain], "black")
    axes.set(xscale="log", yscale="log", xlabel="rows (decodes or prompt tokens)", ylabel="ms")
    axes.set_title(f"language steps alone (9 of 10 within {surface.language_error:.0%})", fontsize=10)
    _finish(axes)


def _vision(axes: Any, surface: CostSurface, samples: Samples) -> None:
    axes.set_title(f"vision steps alone (9 of 10 within {surface.vision_error:.0%})", fontsize=10)
    axes.set(xlabel="patches", ylabel="ms")
    points = sorted(samples.vision, key=lambda point: point.load.num_patches)
    if not points:
        axes.text(0.5, 0.5, "none measured", ha="center", va="center", transform=axes.transAxes, color=_GREY)
        return
    for kind, colour, label in ((False, _COLOURS[0], "one picture"), (True, _COLOURS[2], "several of one size")):
        chosen = [p for p in points if _several(p) == kind]
        if chosen:
            patches = [p.load.num_patches for p in chosen]
            _dots(axes, patches, [p.seconds for p in chosen], colour, label=f"measured, {label}")
    amounts = [p.load.num_patches for p in points]
    predicted = [surface.vision_s(p.load) * 1e3 for p in points]
    axes.plot(amounts, predicted, color=_GREY, zorder=1, label="predicted for these steps")
    if max(predicted) > _WIDE * min(predicted):
        axes.set(yscale="log")
    _finish(axes)
    ticks = sorted(set(amounts))
    axes.set_xticks(ticks[:: -(-len(ticks) // _MAX_TICKS)])
    axes.tick_params(axis="x", which="minor", bottom=False)


def _map(figure: Any, axes: Any, profile: Profile, limit_s: float | None) -> None:
    """Draws how long a step of decodes takes with prompt tokens (across) and seconds of vision (up) beside it."""
    surface = profile.surface
    decodes = min(_DECODES, profile.reach.decodes)
    tokens = np.linspace(0, max(profile.reach.rows - decodes, 1), 160)
    alone_s = surface.language_s(_decodes(decodes, TYPICAL_CONTEXT))
    top_s = limit_s if limit_s is not None else _SPAN * alone_s
    vision = np.linspace(0, 1.5 * top_s, 120)
    steps = np.array([[surface.corun_s(_with_prompt(decodes, int(t)), v) * 1e3 for t in tokens] for v in vision])
    shown = axes.pcolormesh(tokens, vision * 1e3, steps, cmap="viridis_r", shading="auto", rasterized=True)
    figure.colorbar(shown, ax=axes, label="language step, ms")
    what = f"{decodes} decodes of {TYPICAL_CONTEXT} keys"
    if limit_s is None:
        axes.set_title(f"a step of {what}", fontsize=10)
    else:
        axes.set_title(f"a step of {what}; left of the line: within {limit_s * 1e3:.4g} ms", fontsize=10)
        if steps.min() < limit_s * 1e3 < steps.max():
            axes.contour(tokens, vision * 1e3, steps, levels=[limit_s * 1e3], colors="#d55e00", linewidths=2.5)
        else:
            word = "all within the limit" if steps.max() <= limit_s * 1e3 else "all over the limit"
            axes.text(0.5, 0.5, word, ha="center", va="center", transform=axes.transAxes, color="#d55e00", fontsize=13)
    axes.set(xlabel="prompt tokens in the step", ylabel="vision beside it, ms")


def _dots(
    axes: Any, amounts: Sequence[float], seconds: Sequence[Sequence[float]], colour: str, label: str | None = None
) -> None:
    """The lower median, and a bar over the middle half of the repeats."""
    middles = np.array([median_low(times) for times in seconds])
    quarters = np.array([np.quantile(times, (0.25, 0.75)) for times in seconds])
    bars = np.maximum([middles - quarters[:, 0], quarters[:, 1] - middles], 0.0)
    style = {"fmt": "o", "ms": 4, "color": colour, "elinewidth": 1, "alpha": 0.8, "label": label}
    axes.errorbar(amounts, middles * 1e3, yerr=bars * 1e3, **style)


def _finish(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if axes.get_yscale() == "log":
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        axes.tick_params(axis="y", which="minor", labelsize=8)
    axes.grid(True, which="major", alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def _contexts(decodes: list[LanguageTimes]) -> list[int]:
    """The shortest, a middle and the longest that were measured for several numbers of rows."""
    contexts = sorted({_context(point.load) for point in decodes})
    return sorted({contexts[0], contexts[len(contexts) // 2], contexts[-1]}) if contexts else []


def _context(load: LanguageLoad) -> int:
    return load.decode_context // load.num_decodes


def _decodes(count: float, context: int) -> LanguageLoad:
    return LanguageLoad(int(count), int(count) * context)


def _with_prompt(decodes: int, tokens: int) -> LanguageLoad:
    return LanguageLoad(decodes, decodes * TYPICAL_CONTEXT, tokens, _pairs(tokens), int(tokens > 0))


def _pairs(tokens: float) -> float:
    return int(tokens) * (int(tokens) + 1) / 2


def _several(point: VisionTimes) -> bool:
    """Pairs are the square of the patches for one span, less for several."""
    return point.load.pairs < point.load.num_patches**2


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the step times of a profile.")
    parser.add_argument("profile", type=Path, metavar="FILE", help="what `hydra-engine profile --output FILE` wrote")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the PNG")
    parser.add_argument("--tpot-slo", metavar="TIME", help="limit for the time between two tokens, such as 40ms")
    arguments = parser.parse_args()
    limit_s = None if arguments.tpot_slo is None else parse_seconds(arguments.tpot_slo, "--tpot-slo")
    draw(read_profile(arguments.profile), arguments.output, arguments.profile.stem, limit_s)


if __name__ == "__main__":
    main()
