"""Many requests' timelines as one picture: a row for each, the lanes above them, and the gaps between tokens that came
late, the worst with what delayed them.

Needs matplotlib, which is no dependency of the engine. Does not know where the requests come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_engine.core.outputs import StageSpan
from hydra_engine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Requests = Sequence[tuple[str, float, Sequence[StageSpan]]]

MAX_ROWS = 60
_NUM_LABELS = 6
_LATE = "#d81b26"
_STYLES = {  # name in the legend: colour, stages; later ones are drawn over earlier ones
    "intake": ("#b9b4c7", ("fetch", "tokenize", "preprocess")),
    "decode wait": ("#e6d9d9", ("decode_wait",)),
    "instance lost": ("#8d99a6", ("lost",)),
    "wait for another instance": ("#eeeeee", ("offered_features", "offered_kv")),
    "encode wait": ("#fbe3c0", ("encode_wait",)),
    "prefill wait": ("#d5e4f7", ("prefill_wait",)),
    "preempted": ("#c77fc0", ("preempted",)),
    "decode": ("#8fcf9f", ("decode",)),
    "prefill": ("#2f6fc4", ("prefill",)),
    "encode": ("#f08c1e", ("encode",)),
    "pull features": ("#7a3fa0", ("pull_features",)),
    "pull KV": ("#b0408a", ("pull_kv",)),
}
_LANES = ("vision", "language", "transfer")
_STEP_BLAME = ("prefill", "encode", "step")  # a token that was late for these was late because of a long step
_INK = "#333333"


@dataclass(frozen=True, slots=True)
class _Late:
    row: int
    name: str
    start_s: float
    end_s: float
    seconds: float  # of the delay
    cause: str


def draw_gantt(requests: Requests, path: str | Path, *, title: str = "") -> None:
    """Writes a PNG. `requests` are (id, arrival, spans relative to it), in seconds, arrivals on one clock.

    Of more than `MAX_ROWS` requests those are shown that arrived one after the other and lost most time to late tokens.
    Raises ConfigError if matplotlib is not installed or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a Gantt chart needs matplotlib: pip install matplotlib") from error
    everyone = sorted((request for request in requests if request[2]), key=lambda request: request[1])
    if not everyone:
        raise ConfigError("a Gantt chart needs at least one request with a timeline")
    shown = _window(everyone)
    origin_s = shown[0][1]
    end_s = max(arrival_s + span.end_s for _, arrival_s, spans in shown for span in spans)
    lanes = _lanes(everyone)
    late = _late(shown, origin_s)
    labels = _labels(late)
    height = 1.1 + 0.24 * len(lanes) + 0.155 * len(shown) + 0.17 * len(labels)
    figure = Figure(figsize=(14, height), dpi=130, facecolor="white")
    above, below = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [1.5 * len(lanes), len(shown)], "hspace": 0.02}
    )
    figure.subplots_adjust(left=0.08, right=0.985, top=1 - 0.62 / height, bottom=(0.42 + 0.17 * len(labels)) / height)
    _draw_rows(above, list(lanes.items()), origin_s)
    _draw_rows(below, [(name, [(arrival_s, s) for s in spans]) for name, arrival_s, spans in shown], origin_s)
    above.set_xlim(0, max(end_s - origin_s, 1e-6) * 1.01)
    above.tick_params(bottom=False, labelbottom=False)
    below.set_xlabel("seconds", color=_INK, fontsize=8, labelpad=2)
    _mark_late(below, late, labels)
    _write_around(figure, labels, title, height, any_late=bool(late))
    figure.savefig(path, format="png")


def _window(requests: Requests) -> Requests:
    """The `MAX_ROWS` neighbouring requests with the most blame."""
    lost = [sum(blame.seconds for span in spans for blame in span.blame) for _, _, spans in requests]
    starts = range(max(1, len(requests) - MAX_ROWS + 1))
    first = max(starts, key=lambda start: sum(lost[start : start + MAX_ROWS]))
    return requests[first : first + MAX_ROWS]


def _lanes(requests: Requests) -> dict[str, list[tuple[float, StageSpan]]]:
    """(arrival, span) of every step of each lane, in the order of `_LANES`; instances are named where there are
    several."""
    found: dict[tuple[str, str], list[tuple[float, StageSpan]]] = {}
    for _, arrival_s, spans in requests:
        for span in spans:
            if span.batch or span.lane == "transfer" or (span.blame and span.blame[0].kind in _STEP_BLAME):
                found.setdefault((span.instance, span.lane), []).append((arrival_s, span))
    several = len({instance for instance, _ in found}) > 1
    order = sorted(found, key=lambda key: (key[0], _LANES.index(key[1]) if key[1] in _LANES else len(_LANES)))
    return {f"{instance} {lane}" if several else f"{lane} lane": found[instance, lane] for instance, lane in order}


def _late(requests: Requests, origin_s: float) -> list[_Late]:
    """Worst first."""
    found = []
    for row, (name, arrival_s, spans) in enumerate(requests):
        for span in spans:
            if span.blame:
                seconds = sum(blame.seconds for blame in span.blame)
                start_s = arrival_s + span.start_s - origin_s
                end_s = start_s + span.end_s - span.start_s
                found.append(_Late(row, name, start_s, end_s, seconds, span.cause or span.blame[0].kind))
    return sorted(found, key=lambda late: -late.seconds)


def _labels(late: Iterable[_Late]) -> list[tuple[_Late, int]]:
    """The worst moments in order of time, each with how many more requests it made late for the same reason."""
    worst: list[_Late] = []
    more: list[int] = []
    for gap in late:
        same = (
            i for i, w in enumerate(worst) if w.cause == gap.cause and gap.start_s < w.end_s > w.start_s < gap.end_s
        )
        index = next(same, None)
        if index is not None:
            more[index] += 1
        elif len(worst) < _NUM_LABELS:
            worst.append(gap)
            more.append(0)
    return sorted(zip(worst, more, strict=True), key=lambda pair: pair[0].start_s)


def _draw_rows(axes: Axes, rows: Sequence[tuple[str, Sequence[tuple[float, StageSpan]]]], origin_s: float) -> None:
    for layer, (colour, stages) in enumerate(_STYLES.values()):
        for y, (_, spans) in enumerate(rows):
            bars = [
                (arrival_s + span.start_s - origin_s, span.end_s - span.start_s)
                for arrival_s, span in spans
                if span.stage in stages
            ]
            if bars:
                axes.broken_barh(bars, (y - 0.39, 0.78), facecolors=colour, linewidth=0, zorder=2 + layer)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [name if len(name) <= 16 else f"{name[:15]}…" for name, _ in rows])
    axes.tick_params(axis="both", labelsize=7, length=0, labelcolor=_INK)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")


def _mark_late(axes: Axes, late: Sequence[_Late], labels: Sequence[tuple[_Late, int]]) -> None:
    layer = 3 + len(_STYLES)
    for gap in late:
        axes.broken_barh(
            [(gap.start_s, gap.end_s - gap.start_s)], (gap.row - 0.39, 0.78), facecolors=_LATE, zorder=layer
        )
        axes.vlines(gap.start_s, gap.row - 0.39, gap.row + 0.39, color=_LATE, linewidth=1.0, zorder=layer)
    for number, (gap, _) in enumerate(labels, start=1):
        circle = {"boxstyle": "circle,pad=0.18", "facecolor": "white", "edgecolor": _LATE, "linewidth": 0.9}
        middle = (gap.start_s + gap.end_s) / 2
        text: Any = {"fontsize": 6.5, "fontweight": "bold", "color": _LATE, "ha": "center", "va": "center"}
        axes.text(middle, gap.row, str(number), **text, bbox=circle, zorder=layer + 1)


def _write_around(
    figure: Figure, labels: Sequence[tuple[_Late, int]], title: str, height: float, *, any_late: bool
) -> None:
    from matplotlib.patches import Patch

    figure.text(0.012, 1 - 0.2 / height, title, fontsize=11, fontweight="bold", color=_INK, va="center")
    handles = [Patch(facecolor=colour, label=name) for name, (colour, _) in _STYLES.items()]
    if any_late:
        handles.append(Patch(facecolor=_LATE, label="late token"))
    figure.legend(
        handles=handles,
        loc="center right",
        bbox_to_anchor=(0.99, 1 - 0.44 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=7.5,
        handlelength=1.2,
        handleheight=0.9,
        columnspacing=1.2,
    )
    for number, (gap, more) in enumerate(labels, start=1):
        also = f" ({more} more late at that time)" if more else ""
        line = f"{number}   {gap.name} at {gap.start_s:.2f} s lost {gap.seconds * 1e3:.0f} ms: {gap.cause}{also}"
        y = (0.06 + 0.17 * (len(labels) - number + 0.5)) / height
        figure.text(0.08, y, line, fontsize=7.5, color=_LATE, va="center")
