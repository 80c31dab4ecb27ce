"""Pictures of real topologies beside simulated ones, from the JSON document alone.

Needs matplotlib (`pip install matplotlib`). Does not know how anything was measured.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from bench.serve.drawing import _PHASE_COLOURS, _STYLE


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Gives the paths of what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    validates = document["mode"] == "validate"
    path = folder / ("topology-validate.png" if validates else "topology-phases.png")
    with plt.rc_context(_STYLE):
        figure = (_validation if validates else _phases)(document["result"], document)
        figure.savefig(path)
        plt.close(figure)
    return [path]


def _caption(figure: Figure, document: dict[str, Any], *lines: str) -> None:
    card, load = document["card"], document["load"]
    text = [
        f"{document['model']} · {load['workload']} requests ({load['text_share']:.0%} text alone, scale "
        f"{load['scale']:g}) · {load['arrivals']} arrivals · {load['requests']} requests a load · seed {load['seed']}",
        *lines,
        f"{card['cpu']}, {card['cores']} cores · torch {card['torch']} · commit {card['commit']}",
    ]
    wrapped = "\n".join(fill(line, 150) for line in text)
    figure.supxlabel(wrapped, fontsize=7.5, color="#555555", x=0.01, ha="left")


def _phases(result: dict[str, Any], document: dict[str, Any]) -> Figure:
    """Two bars a topology: measured, and what the simulator says."""
    rows = result["topologies"]
    figure, axes = plt.subplots(figsize=(9.6, 1.9 + 0.72 * len(rows)), layout="constrained")
    means = {(row["topology"], side): row[side]["breakdown"] for row in rows for side in ("measured", "simulated")}
    shown = [p for p in _PHASE_COLOURS if any(one["phases_ms"][p] > 0.005 for one in means.values())]
    ticks, labels = [], []
    for place, row in enumerate(rows):
        for below, side in enumerate(("measured", "simulated")):
            y, left = place + 0.36 * below - 0.18, 0.0
            mean = means[row["topology"], side]
            for phase in shown:
                axes.barh(y, mean["phases_ms"][phase], left=left, height=0.32, color=_PHASE_COLOURS[phase],
                          alpha=0.5 if below else 1.0,
                          label=phase.replace("_", " ") if place == below == 0 else None)  # fmt: skip
                left += mean["phases_ms"][phase]
            note = "simulated" if below else f"{mean['exposed_share']:.1%} exposed migration"
            axes.annotate(f" {note}", (left, y), va="center", fontsize=7, color="#555555")
        ticks.append(place)
        labels.append(row["topology"])
    axes.set_yticks(ticks, labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.16)
    axes.set(xlabel="mean ms of a request")
    axes.set_title(f"Where a request's time goes, at {result['rate']:.3g} requests/s, all on the same cores")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.12), ncols=5, fontsize=8.5)
    _caption(figure, document, f"{result['rounds']} round(s) in turns; all processes pinned to the same cores")
    return figure


def _validation(result: dict[str, Any], document: dict[str, Any]) -> Figure:
    """A point for each topology and rate, predicted over measured; the bands are the goals."""
    points = result["points"]
    figure, panels = plt.subplots(2, 2, figsize=(9.6, 8.2), layout="constrained")
    titles = {"ttft_mean": "mean TTFT", "ttft_p90": "TTFT p90", "tpot_mean": "mean TPOT", "tpot_p90": "TPOT p90"}
    topologies = list(dict.fromkeys(point["topology"] for point in points))
    for axes, (name, title) in zip(panels.flat, titles.items(), strict=True):
        goal = 0.25 if name.endswith("p90") else 0.15
        every = [point[side][name] for point in points for side in ("measured_figures", "predicted_figures")]
        ends = [0.9 * min(every), 1.1 * max(every)]
        axes.plot(ends, ends, color="#555555", linewidth=0.8)
        axes.fill_between(ends, [e * (1 - goal) for e in ends], [e * (1 + goal) for e in ends], color="#dddddd")
        for place, topology in enumerate(topologies):
            pairs = [(p["measured_figures"][name], p["predicted_figures"][name]) for p in points
                     if p["topology"] == topology]  # fmt: skip
            axes.scatter(*zip(*pairs, strict=True), s=22, color=plt.get_cmap("tab10")(place % 10), label=topology)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="predicted, ms")
        axes.set_title(f"{title}, within {goal:.0%} in grey")
    panels[0, 0].legend(fontsize=8)
    _caption(figure, document, f"rank correlation of goodput {result['rank']:.2f}")
    return figure
