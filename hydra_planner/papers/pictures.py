"""Pictures of the main figures, from stored results. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

from hydra_planner.papers.page import DRAWN
from hydra_planner.papers.results import Cell, Spread, Stored, Table, number_of

matplotlib.use("Agg")
from matplotlib import pyplot

_SIZE = (6.4, 3.2)  # inches
_STYLE: Any = {"svg.hashsalt": "papers", "svg.fonttype": "none", "font.size": 9}


def draw(stored: Mapping[str, Stored], folder: Path) -> None:
    """Draws a file for each name in DRAWN that has a result."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in DRAWN:
        if name in stored:
            with matplotlib.rc_context(_STYLE):
                figure, axes = pyplot.subplots(figsize=_SIZE, layout="constrained")
                _DRAWINGS[name](axes, stored[name].result.table)
                axes.spines[["top", "right"]].set_visible(False)
                figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
                pyplot.close(figure)


def _lines(axes: Any, shown: Table, *, x: str, y: str, log: str = "") -> None:
    """The first column across, a line for each other one."""
    across = [_number(row[0]) for row in shown.rows]
    for place, name in enumerate(shown.columns[1:], 1):
        axes.plot(across, [_number(row[place]) for row in shown.rows], marker=".", label=name)
    axes.set(xlabel=x, ylabel=y, xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
    axes.legend(frameon=False, fontsize=8)


def _savings(axes: Any, shown: Table) -> None:
    _lines(axes, shown, x="rho", y="saved %")
    axes.plot(0.63, 31.4, "k*", markersize=10)


def _intensities(axes: Any, shown: Table) -> None:
    _lines(axes, shown, x="tokens", y="FLOP per value", log="xy")


def _batches(axes: Any, shown: Table) -> None:
    """Draws each stage as a share of its highest throughput."""
    for place, name in enumerate(shown.columns[1:], 1):
        values = [_number(row[place]) for row in shown.rows]
        axes.plot(
            [_number(row[0]) for row in shown.rows], [value / max(values) for value in values], marker=".", label=name
        )
    axes.set(xlabel="batch", ylabel="of the highest throughput", xscale="log", ylim=(0, 1.05))
    axes.legend(frameon=False, fontsize=8)


def _offline(axes: Any, shown: Table) -> None:
    rows = [row for row in shown.rows if row[0] == "ratio"]
    axes.bar([str(row[1]) for row in rows], [_number(row[2]) for row in rows], color="tab:blue")
    axes.set(ylabel="requests/s")


def _ratios(axes: Any, shown: Table) -> None:
    """The time to the first token against that between tokens, a dot for each ratio."""
    for family in dict.fromkeys(row[0] for row in shown.rows):
        rows = [row for row in shown.rows if row[0] == family]
        axes.plot([_number(row[5]) for row in rows], [_number(row[4]) for row in rows], "o", label=str(family))
        for row in rows:
            axes.annotate(
                str(row[1]), (_number(row[5]), _number(row[4])), fontsize=6, xytext=(3, 3), textcoords="offset points"
            )
    axes.set(xlabel=shown.columns[5], ylabel=shown.columns[4], yscale="log")
    axes.legend(frameon=False, fontsize=8)


def _shares(axes: Any, shown: Table) -> None:
    names = [str(row[0]) for row in shown.rows]
    below = [0.0] * len(names)
    for place in (2, 3, 4):
        values = [_number(row[place]) for row in shown.rows]
        axes.bar(names, values, bottom=below, label=shown.columns[place].removesuffix(" %"))
        below = [one + other for one, other in zip(below, values, strict=True)]
    axes.set(ylabel="% of a request's time")
    axes.tick_params(axis="x", labelsize=7)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _over_rates(axes: Any, shown: Table) -> None:
    first = [row for row in shown.rows if row[0] == shown.rows[0][0]]
    names = [name.rsplit(" ", 2)[0] for name in shown.columns[2:-1]]  # the last one names what falls behind
    for place, name in enumerate(names, 2):
        axes.plot([_number(row[1]) for row in first], [_number(row[place]) for row in first], marker=".", label=name)
    axes.set(xlabel=f"requests/s for each device ({first[0][0]})", ylabel=" ".join(shown.columns[2].rsplit(" ", 2)[1:]))
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)


def _number(cell: Cell) -> float:
    assert isinstance(cell, int | float | Spread), "a column of numbers"
    return number_of(cell)


_DRAWINGS = {
    "heteroserve-f1": _savings,
    "epd-f6": _offline,
    "hydrainfer-f5": _intensities,
    "hydrainfer-f6": _batches,
    "hydrainfer-f11": _ratios,
    "epd-serve-f2": _shares,
    "epd-serve-f14": _over_rates,
    "epd-serve-f15": _over_rates,
}
