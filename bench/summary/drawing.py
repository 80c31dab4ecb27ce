"""Draws the rows that have a goal as one PNG: how much of the moonshot each has reached, and where par lies.

Needs matplotlib (`pip install matplotlib`). Does not know how anything was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from bench.micro.goals import Row

# Okabe and Ito's colours, which readers with any colour vision can tell apart.
_COLOURS = {"moonshot": "#009E73", "par": "#0072B2", "below par": "#D55E00"}
_MAX_ROWS = 90  # of one picture; beyond it the worst ones of every benchmark
_WIDEST = 1.5  # of the axis, in moonshots
_STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 120}


def draw(rows: Sequence[Row], machine: Sequence[str], path: Path) -> None:
    """`rows` have goals; writes `path`."""
    shown = _worst(rows)
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(10.0, 1.6 + 0.22 * len(shown)), layout="constrained")
        for place, row in enumerate(shown):
            goal, value = row.goal, row.value
            assert goal is not None and value is not None
            share, par = goal.share(value), goal.share(goal.par)
            axes.barh(place, min(share, _WIDEST), height=0.7, color=_COLOURS[row.verdict])
            axes.plot([par, par], [place - 0.45, place + 0.45], color="black", linewidth=1.4)
            text = f" {value:.3g} {goal.unit or 'of floor'}"
            axes.annotate(text, (min(max(share, par), _WIDEST), place), va="center", fontsize=7.5)
        axes.axvline(1.0, color="#666666", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(shown)), [f"{row.bench}: {row.what}" for row in shown], fontsize=7.5)
        axes.set(xlim=(0, _WIDEST + 0.25), ylim=(len(shown) - 0.4, -0.6), xlabel="share of the moonshot (black: par)")
        left_out = f", the worst {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""
        axes.set_title(f"Micro-benchmarks against their goals{left_out}", loc="left", fontweight="bold")
        handles = [Patch(color=colour, label=verdict) for verdict, colour in _COLOURS.items()]
        axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8, frameon=False)
        figure.supxlabel("\n".join(machine), fontsize=7, color="#555555", x=0.01, ha="left")
        figure.savefig(path)
        plt.close(figure)


def _worst(rows: Sequence[Row]) -> list[Row]:
    """The `_MAX_ROWS` rows with the smallest shares of their goals, in their order."""

    def share(row: Row) -> float:
        assert row.goal is not None and row.value is not None
        return row.goal.share(row.value)

    kept = set(sorted(range(len(rows)), key=lambda place: share(rows[place]))[:_MAX_ROWS])
    return [row for place, row in enumerate(rows) if place in kept]
