"""A plan as pictures: the goodput of each topology with its confidence interval, and attainment over the rate.

Needs matplotlib, which is not installed with the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from hydra_planner.search.measure import SHARE
from hydra_planner.search.plan import Plan
from hydra_planner.search.rows import Row

_STYLE: Any = {
    "figure.dpi": 110,
    "savefig.bbox": "tight",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}
_BEST, _OTHER, _BOUND = "#1f6f8b", "#9db4c0", "#d9d9d9"
_MAX_ROWS, _MAX_CURVES = 16, 6


def draw(plan: Plan, folder: Path, title: str) -> list[Path]:
    """Gives the paths of what was written, `plan-goodput.png` and, but for offline plans, `plan-attainment.png`.
    `title`: the model, the devices and the workload in a few words."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with plt.rc_context(_STYLE):
        makers = {"plan-goodput": _goodput}
        if plan.objective != "offline":
            makers["plan-attainment"] = _attainment
        for name, make in makers.items():
            figure = make(plan, title)
            path = folder / f"{name}.png"
            figure.savefig(path)
            plt.close(figure)
            written.append(path)
    return written


def _goodput(plan: Plan, title: str) -> Figure:
    """Bars: what was measured; grey behind them: the estimate from the work of each stage."""
    rows = plan.rows[:_MAX_ROWS][::-1]
    figure, axes = plt.subplots(figsize=(7.2, 0.32 * len(rows) + 1.4), layout="constrained")
    places = range(len(rows))
    offline = plan.objective == "offline"
    if not offline:
        axes.barh(places, [row.bound for row in rows], color=_BOUND, height=0.8, label="estimate from work alone")
    values = [_value(row, offline=offline) for row in rows]
    errors = [row.uncertainty or 0.0 for row in rows]
    colours = [_BEST if row is plan.best else _OTHER for row in rows]
    axes.barh(places, values, xerr=errors, color=colours, height=0.5, label="simulated, 95 % interval over seeds")
    axes.set_yticks(places, [_label(row) for row in rows])
    axes.set_xlabel("seconds until the last answer" if offline else f"requests/s with {SHARE:.0%} within both limits")
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(fontsize=7.5, loc="lower right")
    return figure


def _value(row: Row, *, offline: bool) -> float:
    if offline:
        return row.point.span_s if row.point is not None else 0.0
    return row.goodput or 0.0


def _attainment(plan: Plan, title: str) -> Figure:
    """Draws attainment over rate for the topologies that came farthest."""
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    for row in [row for row in plan.rows if len(row.curve) > 1][:_MAX_CURVES]:
        rates = sorted({rate for rate, _ in row.curve})
        means = [_mean([share for rate, share in row.curve if rate == one]) for one in rates]
        axes.plot(rates, means, marker="o", markersize=3, label=_label(row), linewidth=2 if row is plan.best else 1)
    axes.axhline(SHARE, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("requests/s")
    axes.set_ylabel("share within both limits")
    axes.set_ylim(0, 1.03)
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(fontsize=7.5)
    return figure


def _label(row: Row) -> str:
    return " ".join((row.name, *(setting.flags for setting in row.settings)))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
