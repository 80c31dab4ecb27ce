"""The pictures of simulations and of real topologies, from the JSON document alone.

Needs matplotlib (`pip install hydra-engine[bench]`). Does not know how anything was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from bench.serve.drawing import _COLOURS, _GREY, _PHASE_COLOURS, _STYLE
from bench.topology.ratios import EPD, FAMILIES
from bench.topology.simulate import goodput_of

_TTFT, _TPOT = _COLOURS[0], _COLOURS[1]
_FAMILY_COLOURS = dict(zip(FAMILIES, (_GREY, *_COLOURS), strict=False))


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Gives the paths of what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with plt.rc_context(_STYLE):
        for name, make in _FIGURES[document["mode"]].items():
            figure = make(document["result"], document)
            path = folder / f"{name}.png"
            figure.savefig(path)
            plt.close(figure)
            written.append(path)
    return written


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


# ---- simulate


def _at(row: dict[str, Any], rate: float) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in row["points"] if one["rate"] == rate)
    return found


def _ratios(result: dict[str, Any], document: dict[str, Any]) -> Figure:
    """TTFT and TPOT over the ratio, a panel for each family that has one; E+P+D by TPOT as in the paper."""
    rate = result["shown_rate"]
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in result["topologies"]:
        panels.setdefault(row["family"], []).append(row)
    base = panels.pop(EPD, [])
    names = list(panels)
    if "E+P+D" in panels:
        panels["E+P+D"].sort(key=lambda row: _at(row, rate)["tpot_ms"]["p50"] or 0.0)
    rows = -(-len(names) // 2)
    figure, grid = plt.subplots(max(rows, 1), 2, figsize=(12, 3.4 * max(rows, 1) + 0.8), layout="constrained",
                                squeeze=False)  # fmt: skip
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    for axes, name in zip(grid.flat, names, strict=False):
        _ratio_panel(axes, name, panels[name], base, rate)
    limits = result["limits"]
    figure.suptitle(f"Latency over the ratio of roles: {result['devices']} simulated devices, {rate:g} requests/s",
                    x=0.01, ha="left", fontweight="bold")  # fmt: skip
    _caption(
        figure,
        document,
        f"lines: medians; bands: up to the 90th percentile; dashed: {base[0]['topology']} at the same rate"
        if base
        else "lines: medians; bands: up to the 90th percentile",
        f"limits: TTFT {limits['ttft_ms']:.0f} ms, TPOT {limits['tpot_ms']:.3g} ms ({limits['source']}) · real "
        f"scheduler, router and migration on virtual time, costs: {document['costs']['source']}",
    )
    return figure


def _ratio_panel(axes: Any, name: str, rows: list[dict[str, Any]], base: list[dict[str, Any]], rate: float) -> None:
    other = axes.twinx()
    places = range(len(rows))
    for side, key, colour, marker in ((axes, "ttft_ms", _TTFT, "o"), (other, "tpot_ms", _TPOT, "s")):
        middle = [_at(row, rate)[key]["p50"] or 0.0 for row in rows]
        high = [_at(row, rate)[key]["p90"] or 0.0 for row in rows]
        side.fill_between(places, middle, high, color=colour, alpha=0.12, linewidth=0)
        side.plot(places, middle, color=colour, marker=marker, markersize=4.5)
        for row in base:
            side.axhline(_at(row, rate)[key]["p50"] or 0.0, color=colour, linestyle="--", linewidth=1)
        side.set_ylim(0, None)
        side.tick_params(axis="y", colors=colour)
    axes.set_ylabel("TTFT, ms", color=_TTFT)
    other.set_ylabel("TPOT, ms", color=_TPOT)
    other.grid(visible=False)
    other.spines["right"].set_visible(True)
    turned = len(rows) > 8
    axes.set_xticks(places, [row["topology"] for row in rows], rotation=90 if turned else 0, fontsize=8)
    axes.set_title(name + (", by TPOT" if name == "E+P+D" else ""))


def _goodput(result: dict[str, Any], document: dict[str, Any]) -> Figure:
    rows = sorted(result["topologies"], key=goodput_of, reverse=True)
    figure, axes = plt.subplots(figsize=(8.4, 1.6 + 0.23 * len(rows)), layout="constrained")
    signs = {"exact": "", "at_least": "≥ ", "at_most": "< "}
    for place, row in enumerate(rows):
        found, family = row["goodput"], row["family"]
        axes.barh(place, goodput_of(row)[0], color=_FAMILY_COLOURS[family], height=0.7)
        axes.annotate(f" {signs[found['bound']]}{found['rate']:.3g}", (goodput_of(row)[0], place), va="center",
                      fontsize=8)  # fmt: skip
    shown = [family for family in FAMILIES if any(row["family"] == family for row in rows)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=_FAMILY_COLOURS[family]) for family in shown]
    axes.legend(handles, shown, loc="lower right")
    axes.set_yticks(range(len(rows)), [row["topology"] for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set(xlim=(0, 1.15 * max(goodput_of(row)[0] for row in rows) or 1), xlabel="goodput at 90 %, requests/s")
    limits = result["limits"]
    axes.set_title(f"Goodput of {result['devices']} simulated devices")
    _caption(
        figure,
        document,
        f"TTFT ≤ {limits['ttft_ms']:.0f} ms and 90 % of gaps ≤ {limits['tpot_ms']:.3g} ms ({limits['source']}); "
        f"rates {', '.join(f'{rate:g}' for rate in result['rates'])}",
    )
    return figure


# ---- real


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


_FIGURES: dict[str, dict[str, Callable[[dict[str, Any], dict[str, Any]], Figure]]] = {
    "simulate": {"topology-ratios": _ratios, "topology-goodput": _goodput},
    "real": {"topology-phases": _phases},
}
