"""Pictures of sizes beyond this machine, from the JSON document alone.

Needs matplotlib (`pip install matplotlib`). Does not know how anything was measured.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.serve.drawing import _COLOURS, _MARKERS, _STYLE


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Gives the paths of what was written: `scale-NAME.png` for each picture whose parts are there."""
    folder.mkdir(parents=True, exist_ok=True)
    parts, written = document["parts"], []
    with plt.rc_context(_STYLE):
        for name, make, needed in (
            ("quality", _quality, {"simulate"}),
            ("frontend", _frontend, {"simulate", "tokens", "wire"}),
            ("instances", _instances, {"simulate", "routing", "links"}),
        ):
            if needed <= parts.keys():
                figure = make(parts)
                _caption(figure, document, sorted(needed))
                written.append(folder / f"scale-{name}.png")
                figure.savefig(written[-1])
                plt.close(figure)
    return written


def _caption(figure: Figure, document: dict[str, Any], needed: list[str]) -> None:
    cards = [document["cards"][name] for name in needed]
    simulated = document["parts"]["simulate"]
    commits = ", ".join(dict.fromkeys(card["commit"] for card in cards))
    rates = ", ".join(dict.fromkeys(f"{row['rate_per_device']:g}" for row in simulated["rows"]))
    text = (
        f"simulated: {simulated['model']} on {simulated['device']}, {simulated['load']}, {rates} requests a second and "
        f"device · seconds of a core: {cards[0]['cpu']}, Python {cards[0]['python']} · commit {commits}"
    )
    figure.supxlabel(fill(text, 150), fontsize=7.5, color="#555555", x=0.01, ha="left")


def _by_kind(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    kinds = dict.fromkeys(row["topology"] for row in rows)
    return {kind: [row for row in rows if row["topology"] == kind] for kind in kinds}


def _sizes(axes: Axes, sizes: list[int], label: str = "devices") -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(label)


def _quality(parts: dict[str, Any]) -> Figure:
    """Draws what each device does, and how long requests take."""
    simulated = parts["simulate"]
    figure, panels = plt.subplots(1, 3, figsize=(9.6, 3.6), layout="constrained")
    for place, (kind, rows) in enumerate(_by_kind(simulated["rows"]).items()):
        sizes = [row["devices"] for row in rows]
        style: dict[str, Any] = {"color": _COLOURS[place], "marker": _MARKERS[place]}
        panels[0].plot(sizes, [row["goodput_per_device"] for row in rows], label=kind, **style)
        for axes, name in ((panels[1], "ttft_ms"), (panels[2], "tpot_ms")):
            axes.plot(sizes, [row[name]["p90"] for row in rows], label=f"{kind}, p90", **style)
            axes.plot(sizes, [row[name]["p50"] for row in rows], label=f"{kind}, p50", linestyle=":", **style)
    for axes in panels:
        _sizes(axes, sorted({row["devices"] for row in simulated["rows"]}))
    panels[0].set(ylabel="requests/s within both limits")
    panels[1].set(ylabel=f"ms, limit {1e3 * simulated['ttft_limit_s']:g}")
    panels[2].set(ylabel=f"ms, limit {1e3 * simulated['tpot_limit_s']:g}")
    for axes, title in zip(panels, ("Goodput per device", "TTFT", "TPOT"), strict=True):
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.legend(fontsize=8)
    return figure


def _frontend(parts: dict[str, Any]) -> Figure:
    """Draws the cores that the one frontend would need, by what for."""
    kinds = _by_kind(parts["budget"])
    figure, panels = plt.subplots(1, len(kinds), figsize=(9.6, 4.4), layout="constrained", sharey=True, squeeze=False)
    for axes, (kind, rows) in zip(panels[0], kinds.items(), strict=True):
        sizes = [row["devices"] for row in rows]
        for place, what in enumerate(rows[0]["cores"]):
            axes.plot(sizes, [row["cores"][what] for row in rows], color=_COLOURS[place], marker=_MARKERS[place],
                      label=what)  # fmt: skip
        axes.plot(sizes, [row["all"] for row in rows], color="black", linewidth=2, label="all")
        axes.axhline(1.0, color="#888888", linestyle="--", linewidth=1)
        _sizes(axes, sorted({row["devices"] for row in parts["budget"]}))
        axes.set(yscale="log", title=kind)
    panels[0][0].set_ylabel("cores of the frontend; it has one")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8.5)
    return figure


def _instances(parts: dict[str, Any]) -> Figure:
    """Draws a routing decision by the number of instances, and an instance's connections by their number."""
    figure, panels = plt.subplots(1, 3, figsize=(9.6, 3.8), layout="constrained")
    rows = [row for row in parts["routing"]["rows"] if row["topology"].endswith("EPD")]
    sizes = [row["instances"] for row in rows]
    routing, style = panels[0], {"marker": "o", "markersize": 4}
    routing.plot(
        sizes, [row["kept_us"]["route"] for row in rows], color=_COLOURS[0], label="no load has changed", **style
    )
    routing.plot(sizes, [row["anew_us"] for row in rows], color=_COLOURS[1], label="all loads have", **style)
    simulated = _by_kind(parts["simulate"]["rows"]).get("EPD", [])
    routing.plot([row["devices"] for row in simulated], [row["frontend"]["calls"]["route"]["us"] for row in simulated],
                 color=_COLOURS[2], label="in the simulation", **style)  # fmt: skip
    routing.set(yscale="log", ylabel="us of a decision")
    _sizes(routing, sizes, "instances")
    links = parts["links"]
    for axes, name, label in ((panels[1], "us_per_message", "us of a core for a message from a peer"),
                              (panels[2], "idle_core", "share of a core without any message")):  # fmt: skip
        axes.plot([row["links"] for row in links], [row[name] for row in links], color=_COLOURS[0], **style)
        _sizes(axes, [row["links"] for row in links], "peers of an instance")
        axes.set(ylabel=label, ylim=(0, None))
    for axes, title in zip(panels, ("Routing", "A message among peers", "Idle connections"), strict=True):
        axes.set_title(title)
    routing.legend(fontsize=8)
    return figure
