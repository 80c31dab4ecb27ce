"""HydraInfer's deployments under load: ratios, methods under limits, the breakdown of a latency, and what each half of
the design gives. H800 by their roofline, so queues of the paper's rates are shorter than the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hydra_engine.telemetry.timeline import PHASES
from hydra_planner.papers.deployments import SCHEDULES, Setup, num_devices
from hydra_planner.papers.hydrainfer import H800, LLAVA, NEXT
from hydra_planner.papers.results import Cell, Result, Scale, Spread, leaders, listed, number_of, table
from hydra_planner.papers.traces import GAPS, take_gaps, take_phases

_RATE = 8.0  # requests a second for each device (section 5.3)
_ALONE, _LIMITED = (10.0, 1.0), (0.25, 0.04)  # limits that nothing misses, and Table 3's
_TIGHT = (0.5, 0.01)
_OURS = "stages"  # the name of our schedule among others


def _schedules() -> tuple[str, ...]:
    """Names of schedules, ours first, which is ""."""
    return tuple(SCHEDULES)


def stalls(scale: Scale) -> Result:
    """Gaps between tokens of one EPD instance with large pictures in between (Figure 7)."""
    rows: list[tuple[Cell, ...]] = []
    variants = [("", "no limit", (8.0, 1.0)), ("", "40 ms", (8.0, 0.04)), ("", "20 ms", (8.0, 0.02))]
    variants += [(schedule, "none", (8.0, 1.0)) for schedule in _schedules() if schedule]
    for schedule, name, limits in variants:
        setup = Setup(scale, NEXT, (H800,), "textcaps", seconds=_SECONDS, schedule=schedule).with_limits(*limits)
        runs = setup.traced("EPD", _RATE, "gaps", take_gaps)
        rows.append((schedule or _OURS, name, *(runs.more(gap) for gap in GAPS)))
    tight, others = rows[2], {str(row[0]): row[4] for row in rows[3:]}
    shortest = leaders(others, least=True)
    return Result(
        table(("schedule", "budgets for", *GAPS), rows, keys=2),
        f"budgets for 20 ms bring the longest gap from {number_of(rows[0][4]):.0f} to {number_of(tight[4]):.0f} ms; of "
        f"the other schedules {listed(shortest)} has the shortest one, {number_of(others[shortest[0]]):.0f} ms.",
    )


_SECONDS = 8.0


def engines(scale: Scale) -> Result:
    """Goodput of one device by schedule, in place of other engines (Figure 10)."""
    rows: list[tuple[Cell, ...]] = []
    for load, start in (("textcaps", 6.0), ("textvqa", 12.0), ("pope", 12.0)):
        setup = Setup(scale, NEXT, (H800,), load).with_limits(*_TIGHTEST)
        for schedule in _schedules():
            rows.append((load, schedule or _OURS, replace(setup, schedule=schedule).goodput("EPD", start)))
    gains = [number_of(row[2]) / max(number_of(other[2]) for other in _beside(rows, row)) for row in _ours(rows)]
    return Result(
        table(("data set", "schedule", "goodput per device"), rows, keys=2),
        f"stages one by one keep {min(gains):.3g} to {max(gains):.3g} times the rate of the best other schedule.",
    )


_TIGHTEST = (0.5, 0.02)


def _ours(rows: Sequence[tuple[Cell, ...]]) -> list[tuple[Cell, ...]]:
    return [row for row in rows if row[1] == _OURS]


def _beside(rows: Sequence[tuple[Cell, ...]], one: tuple[Cell, ...]) -> list[tuple[Cell, ...]]:
    return [row for row in rows if row[0] == one[0] and row is not one]


# ---- ratios

_RATIOS = (
    *(("EP+D", f"{count}EP{8 - count}D") for count in (1, 2, 3, 4, 6, 7)),
    *(("ED+P", f"{count}ED{8 - count}P") for count in (1, 2, 4, 6, 7)),
    *(("E+P+D", text) for text in ("1E1P6D", "1E3P4D", "2E4P2D", "1E6P1D")),
)


def ratios(scale: Scale) -> Result:
    setup = Setup(scale, LLAVA, (H800,), "textcaps", seconds=4.0).with_limits(*_ALONE)
    if scale.factor > 1:
        setup, chosen = replace(setup, scale=replace(scale, seeds=1)), _RATIOS
    else:
        chosen = tuple(_RATIOS[place] for place in (0, 3, 5, 6, 8, 10, 11, 12, 14))
    rows: list[tuple[Cell, ...]] = []
    for family, text in chosen:
        runs = {rate: setup.at_rate(text, 8 * rate) for rate in (_RATE, 2.5 * _RATE)}
        cells = [cell for one in runs.values() for cell in (one.ttft_ms, one.tpot_ms)]
        rows.append((family, text, *cells, listed([f"{rate:g}" for rate, one in runs.items() if one.falls_behind])))
    columns = ("family", "ratio", "TTFT ms at 8", "TPOT ms at 8", "TTFT ms at 20", "TPOT ms at 20", "falls behind at")
    first = [row for row in rows if row[0] == "EP+D"]
    return Result(
        table(columns, rows, keys=2),
        f"from {first[0][1]} to {first[-1][1]} the time to the first token goes from {number_of(first[0][4]):.0f} to "
        f"{number_of(first[-1][4]):.0f} ms and that between tokens from {number_of(first[0][5]):.1f} to "
        f"{number_of(first[-1][5]):.1f} ms at 20 requests a second and device; "
        f"{sum('20' in str(row[6]) for row in rows)} of {len(rows)} ratios fall behind there.",
    )


# ---- methods under limits

_LAYOUTS = {
    "EP+D": ("1EP+2D", "2EP+1D"),
    "ED+P": ("1ED+2P", "2ED+1P"),
    "E+P+D": ("1E+1P+1D",),
    "EPD": ("3EPD",),
}
_RATES = (1.0, 2.0, 4.0, 6.0, 9.0, 13.0, 19.0, 28.0, 40.0)
_TPOTS = (0.02, 0.04)


def methods(scale: Scale) -> Result:
    rows: list[tuple[Cell, ...]] = []
    ties = 0
    for ttft_s in (0.2, 0.5, 2.0):
        cells = []
        for tpot_s in _TPOTS:
            setup = Setup(scale, NEXT, (H800,), "textvqa").with_limits(ttft_s, tpot_s)
            best = _best({method: max(_highest(setup, text) for text in texts) for method, texts in _LAYOUTS.items()})
            ties += " = " in best
            cells.append(best)
        rows.append((ttft_s, *cells))
    kinds = {name for row in rows for cell in row[1:] for name in str(cell).rsplit(" ", 1)[0].split(" = ")} - {"none"}
    return Result(
        table(("TTFT s", *(f"TPOT {1e3 * tpot_s:g} ms" for tpot_s in _TPOTS)), rows),
        f"the best methods and their goodput for a device: {listed(sorted(kinds))} are best or tied somewhere; "
        f"{ties} of {len(rows) * len(_TPOTS)} cells are ties.",
    )


def _highest(setup: Setup, text: str) -> float:
    """The highest of the rates, for each device, that most seeds keep; 0 if they keep none."""
    low, high = 0, len(_RATES)
    while low < high:
        middle = (low + high) // 2
        if setup.at_rate(text, _RATES[middle] * num_devices(text)).keeps_limits:
            low = middle + 1
        else:
            high = middle
    return _RATES[low - 1] if low else 0.0


def _best(rates: Mapping[str, float]) -> str:
    best = max(rates.values())
    return f"{' = '.join(method for method, rate in rates.items() if rate == best)} {best:g}" if best else "none"


# ---- one deployment


def breakdown(scale: Scale) -> Result:
    setup = Setup(scale, LLAVA, (H800,), "textcaps").with_limits(*_LIMITED)
    runs = setup.traced("1E3P4D", 8 * _RATE, "phases", take_phases)
    spent = {phase: runs.more(phase) for phase in PHASES}
    total = sum(map(number_of, spent.values()))
    rows: list[tuple[Cell, ...]] = [
        (phase, mean, 100 * number_of(mean) / total) for phase, mean in spent.items() if number_of(mean)
    ]
    moved = sum(number_of(spent[phase]) for phase in ("ep_migration", "pd_migration")) / total
    features, kv = (number_of(runs.more(pull)) for pull in ("pull_features", "pull_kv"))
    return Result(
        table(("phase", "mean ms", "%"), rows),
        f"migration takes {moved:.2%} of the latency (the paper: below 1 %); 95 % of the features move within "
        f"{features:.2g} ms and of the KV within {kv:.2g} ms (2 and 8).",
    )


def halves(scale: Scale) -> Result:
    """Goodput with a deployment that is chosen, with EPD alone, and without stages (Figure 14)."""
    limited = Setup(scale, NEXT, (H800,), "textcaps").with_limits(*_TIGHT)
    untold = replace(limited, sets_limits=False)
    parts = [("disaggregated", "2EP+3D", limited), ("EPD alone", "5EPD", limited), ("without budgets", "5EPD", untold)]
    parts += [(name, "5EPD", replace(limited, schedule=name)) for name in _schedules() if name]
    rows: list[tuple[Cell, ...]] = []
    for name, text, setup in parts:
        found = setup.goodput(text, 25.0)
        count = num_devices(text)
        each = Spread(*(rate / count for rate in found)) if isinstance(found, Spread) else found / count
        rows.append((name, text, each))
    rates = [number_of(row[2]) for row in rows]
    first = leaders({str(row[0]): row[2] for row in rows[:2]})
    order = f"{first[0]} is better" if len(first) == 1 else "both cannot be told apart"
    return Result(
        table(("part", "deployment", "goodput per device"), rows),
        f"EPD alone keeps {rates[1] / rates[0]:.0%} of the rate of the disaggregated deployment (the paper: 76 %): "
        f"{order}; without budgets {rates[2] / rates[0]:.0%} are left, with whole prompts first "
        f"{rates[3] / rates[0]:.0%} (54 % without the paper's schedule).",
    )
