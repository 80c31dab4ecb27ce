"""Draws one PNG for each mode from the JSON document alone, so that a document drawn again gives the same picture.

Needs matplotlib (`pip install matplotlib`). Does not know how anything was measured.
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

from bench.serve.ablation import AGAIN, EVERYTHING, label

# Okabe and Ito's colours, which readers with any colour vision can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#666666")
_MARKERS = "osD^vPX*"
_GREY = "#888888"
_PHASE_COLOURS = {
    "preprocess": "#999999",
    "encode_queue": "#F6C7A8",
    "encode": "#D55E00",
    "ep_migration": "#E69F00",
    "prefill_queue": "#A9D5EF",
    "prefill": "#0072B2",
    "pd_migration": "#56B4E9",
    "decode_queue": "#A8DDC9",
    "decode": "#009E73",
    "lost": "#CC79A7",
    "other": "#000000",
}
_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.dpi": 120,
}


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """`folder/serve-MODE.png` for every mode in the document; gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with plt.rc_context(_STYLE):
        for mode, result in document["results"].items():
            figure = _FIGURES[mode](result, document)
            path = folder / f"serve-{mode}.png"
            figure.savefig(path)
            plt.close(figure)
            written.append(path)
    return written


def _figure(columns: int = 1, width: float = 7.6, height: float = 4.6) -> tuple[Figure, Any]:
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained")


def _caption(figure: Figure, document: dict[str, Any], *lines: str) -> None:
    """Writes below the axes: the model, the `lines`, and the machine with its versions."""
    card = document["card"]
    text = [
        f"{document['model']} · {lines[0]}",
        *lines[1:],
        f"{card['cpu']}, {card['cores']} cores ({card['isa']}) · torch {card['torch']} · commit {card['commit']}",
    ]
    wrapped = "\n".join(fill(line, 118) for line in text)
    figure.supxlabel(wrapped, fontsize=7.5, color="#555555", x=0.01, ha="left")


def _load(document: dict[str, Any]) -> str:
    load = document["load"]
    return (
        f"{load['workload']} requests ({load['text_share']:.0%} text alone, scale {load['scale']:g}) · "
        f"{load['arrivals']} arrivals · {load['requests']} requests a load · {load['rounds']} round(s) · "
        f"seed {load['seed']}"
    )


def _limits(document: dict[str, Any]) -> str:
    limits = document["limits"]
    return f"TTFT ≤ {limits['ttft_ms']:.0f} ms and 90 % of gaps ≤ {limits['tpot_ms']:.3g} ms"


def _curve(result: dict[str, Any], document: dict[str, Any]) -> Figure:
    figure, axes = _figure()
    for index, (name, server) in enumerate(result["servers"].items()):
        colour = _COLOURS[index % len(_COLOURS)]
        rates = [point["rate"] for point in server["points"]]
        shares = [100 * point["attainment"] for point in server["points"]]
        goodput = server["goodput"]
        sign = {"exact": "", "at_least": "≥ ", "at_most": "< "}[goodput["bound"]]
        text = f"{name}: {sign}{goodput['rate']:.3g} requests/s"
        bounds = [_interval(point["attainment"], point["requests"]) for point in server["points"]]
        lows, highs = zip(*bounds, strict=True)
        axes.fill_between(rates, lows, highs, color=colour, alpha=0.1, linewidth=0)
        axes.plot(rates, shares, color=colour, marker=_MARKERS[index % len(_MARKERS)], markersize=5, label=text)
        if goodput["bound"] == "exact":
            axes.vlines(goodput["rate"], 0, 90, color=colour, linestyle=":", linewidth=1.2)
    axes.axhline(90, color=_GREY, linestyle="--", linewidth=1)
    axes.annotate("90 %", (1, 90), xycoords=("axes fraction", "data"), xytext=(-3, 3), textcoords="offset points",
                  ha="right", color=_GREY)  # fmt: skip
    axes.set(xlim=(0, None), ylim=(0, 104), xlabel="request rate, 1/s", ylabel="requests within limits, %")
    axes.set_title(f"SLO attainment: {_limits(document)}")
    axes.legend(title="goodput at 90 %", loc="lower left", alignment="left")
    _caption(figure, document, _load(document) + " · bands: 90 % intervals")
    return figure


def _interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 90 % interval of a share of `count` requests, in percent."""
    z = 1.645
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return 100 * (middle - half), 100 * (middle + half)


def _ablation(result: dict[str, Any], document: dict[str, Any]) -> Figure:
    figure, axes = _figure(height=4.2)
    names = list(result["switches"])
    values = [result["switches"][name]["goodput"] for name in names]
    places = range(len(names))
    colours = [_COLOURS[0] if name in (EVERYTHING, AGAIN) else _COLOURS[5] for name in names]
    axes.barh(places, values, color=colours, height=0.62)
    for place, name in zip(places, names, strict=True):
        switch = result["switches"][name]
        rounds = [each["rate"] for each in switch["rounds"]]
        axes.plot(rounds, [place] * len(rounds), "|", color="black", markersize=9)
        text = f" {switch['goodput']:.3g}" + ("" if place == 0 else f"   on / off {switch['ratio']:.2f}")
        axes.annotate(text, (max(*rounds, switch["goodput"]), place), va="center", xytext=(3, 0),
                      textcoords="offset points")  # fmt: skip
    axes.set_yticks(places, [label(name) for name in names])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlim=(0, max(values) * 1.3), xlabel="goodput at 90 % attainment, requests/s (ticks: single rounds)")
    axes.set_title("Each switch off on its own")
    _caption(figure, document, _load(document), f"Limits: {_limits(document)}")
    return figure


def _tail(result: dict[str, Any], document: dict[str, Any]) -> Figure:
    figure, axes = _figure()
    for index, (name, server) in enumerate(result["servers"].items()):
        colour = _COLOURS[index % len(_COLOURS)]
        for key, style, what in (("alone", "--", "streams alone"), ("with_pictures", "-", "beside pictures")):
            gaps = sorted(server[key]["gaps_ms"])
            if not gaps:
                continue
            shares = [(place + 1) / len(gaps) for place in range(len(gaps))]
            text = f"{name}, {what}: p99 {server[key]['p99']:.1f} ms"
            if key == "with_pictures" and server["ratio_p99"]:
                text += f" ({server['ratio_p99']:.2f}x)"
            axes.step(gaps, [max(1 - share, 1e-5) * 100 for share in shares], style, where="post", color=colour,
                      label=text)  # fmt: skip
    axes.axhline(1, color=_GREY, linestyle=":", linewidth=1)
    axes.annotate("p99", (1, 1), xycoords=("axes fraction", "data"), xytext=(-3, 3), textcoords="offset points",
                  ha="right", color=_GREY, annotation_clip=True, in_layout=False)  # fmt: skip
    most = max(len(server["with_pictures"]["gaps_ms"]) for server in result["servers"].values())
    axes.set_yscale("log")
    axes.set_xscale("log")
    least = min(server["alone"]["p50"] or 1.0 for server in result["servers"].values())
    axes.set(
        xlim=(least / 5, None),
        ylim=(max(50 / max(most, 1), 0.01), 120),
        xlabel="gap between two tokens of a text stream, ms",
    )
    axes.set_ylabel("gaps that are longer, %")
    axes.xaxis.set_major_formatter(_plain)
    axes.xaxis.set_minor_formatter(_plain_at_1_2_5)
    axes.yaxis.set_major_formatter(_plain)
    axes.set_title("Text streams while large pictures arrive in bursts")
    axes.legend(loc="lower left", fontsize=9)
    tail = document["tail"]
    _caption(
        figure,
        document,
        f"{tail['streams']} streams of {tail['stream_tokens']} tokens · {tail['burst']} phone pictures (scale "
        f"{document['load']['scale']:g}) every {tail['burst_every_s']:g} s · {document['load']['rounds']} round(s) · "
        f"TPOT limit {document['limits']['tpot_ms']:.3g} ms",
    )
    return figure


def _breakdown(result: dict[str, Any], document: dict[str, Any]) -> Figure:
    names = list(result["servers"])
    figure, axes = _figure(height=2.9 + 0.9 * len(names))
    rows = [(name, figures) for name in names for figures in ("mean_ms", "p95_ms")]
    shown = [p for p in _PHASE_COLOURS if any(result["servers"][n]["phases"][p]["p95_ms"] > 0 for n in names)]
    for row, (name, figures) in enumerate(rows):
        left = 0.0
        for phase in shown:
            value = result["servers"][name]["phases"][phase][figures]
            axes.barh(row, value, left=left, height=0.62, color=_PHASE_COLOURS[phase],
                      label=phase.replace("_", " ") if row == 0 else None)  # fmt: skip
            left += value
        latency = result["servers"][name]["latency_ms"]["mean" if figures == "mean_ms" else "p95"]
        axes.plot([latency, latency], [row - 0.4, row + 0.4], color="black", linewidth=1.6,
                  label="measured latency" if row == 0 else None)  # fmt: skip
    labels = [f"{name}\n{'mean' if figures == 'mean_ms' else 'p95 of each'}" for name, figures in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="ms")
    unexplained = max(result["servers"][name]["unexplained"]["mean"] for name in names)
    axes.set_title(f"Where a request's time goes, at {result['rate']:.3g} requests/s")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.22), ncols=5, fontsize=9)
    _caption(
        figure, document, _load(document), f"Unexplained by the phases: {unexplained:.2%} of the latency on average"
    )
    return figure


def _budget(result: dict[str, Any], document: dict[str, Any]) -> Figure:
    figure, axes = _figure()
    limit = document["limits"]["tpot_ms"]
    longest = 2.0
    for index, (name, server) in enumerate(result["servers"].items()):
        gaps = sorted(gap / limit for gap in server["gaps_ms"])
        if not gaps:
            continue
        shares = [100 * (place + 1) / len(gaps) for place in range(len(gaps))]
        text = f"{name}: {server['late_gap_share']:.1%} of gaps late"
        if server["late_share"] is not None:
            text += f", {server['late_share']:.2%} of {server['decode_steps']} steps"
        if server["limit_used"] is not None:
            text += f", {server['limit_used']:.2f} of the limit used"
        axes.step(gaps, shares, where="post", color=_COLOURS[index % len(_COLOURS)], label=text)
        longest = max(longest, min(server["gap_of_limit"]["p99"] * 1.2, 10))
    axes.axvline(1, color=_GREY, linestyle="--", linewidth=1)
    axes.annotate("TPOT limit", (1, 2), xytext=(4, 0), textcoords="offset points", color=_GREY)
    axes.set(xlim=(0, longest), ylim=(0, 101), xlabel="gap between two tokens, in TPOT limits", ylabel="gaps, %")
    axes.set_title("Gaps while prefill and pictures always wait")
    axes.legend(loc="lower right", fontsize=9)
    budget = document["budget"]
    _caption(
        figure,
        document,
        f"{budget['concurrency']} requests with a picture each (textvqa, scale {document['load']['scale']:g}) always "
        f"under way, for {budget['seconds']:g} s · {document['load']['rounds']} round(s) · limits: {_limits(document)}",
    )
    return figure


def _plain(value: float, _place: int) -> str:
    return f"{value:g}"


def _plain_at_1_2_5(value: float, _place: int) -> str:
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


_FIGURES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Figure]] = {
    "curve": _curve,
    "ablation": _ablation,
    "tail": _tail,
    "breakdown": _breakdown,
    "budget": _budget,
}
