"""HydraInfer's deployments under load: ratios, methods under limits, the breakdown of a latency, and what each half of
the design gives. H800 by their roofline, so queues of the paper's rates are shorter than the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from hydra_engine.telemetry.timeline import PHASES, phases
from hydra_planner.papers.deployments import Setup, num_devices
from hydra_planner.papers.hydrainfer import H800, LLAVA, NEXT
from hydra_planner.papers.results import Cell, Result, Scale, table
from hydra_planner.records import Record, quantile
from hydra_planner.slo import SHARE, Limits

_RATE = 8.0  # requests a second for each device (section 5.3)
_ALONE, _LIMITED = (10.0, 1.0), (0.25, 0.04)  # limits that nothing misses, and Table 3's
_TIGHT = (
    0.5,
    0.01,
)


def stalls(scale: Scale) -> Result:
    """Gaps between tokens of one EPD instance with large pictures in between (Figure 7)."""
    rows: list[tuple[Cell, ...]] = []
    for name, limits in (("no limit", (8.0, 1.0)), ("40 ms", (8.0, 0.04)), ("20 ms", (8.0, 0.02))):
        setup = Setup(NEXT, (H800,), "textcaps", scale.requests(60)).with_limits(*limits)
        _, records = setup.run("EPD", _RATE)
        gaps = [1e3 * gap for record in records for gap in record.gaps()]
        ttft = quantile([record.ttft_s for record in records if record.ttft_s is not None], 0.9) or 0.0
        rows.append((name, quantile(gaps, 0.5), quantile(gaps, 0.99), max(gaps), 1e3 * ttft))
    return Result(
        table(("budgets for", "gap p50 ms", "p99 ms", "longest ms", "TTFT p90 ms"), rows),
        f"budgets for 20 ms bring the longest gap from {rows[0][3]:.0f} to {rows[2][3]:.0f} ms.",
    )


# ---- ratios

_RATIOS = (
    *(("EP+D", f"{count}EP{8 - count}D") for count in range(1, 8)),
    *(("ED+P", f"{count}ED{8 - count}P") for count in range(1, 8)),
    *(("E+P+D", text) for text in ("1E1P6D", "1E2P5D", "1E3P4D", "2E2P4D", "1E4P3D", "2E4P2D", "1E6P1D", "3E4P1D")),
)


def ratios(scale: Scale) -> Result:
    setup = Setup(LLAVA, (H800,), "textcaps", scale.requests(48)).with_limits(*_ALONE)
    chosen = _RATIOS if scale.factor > 1 else tuple(_RATIOS[place] for place in (0, 3, 6, 7, 10, 13, 14, 16, 20))
    rows: list[tuple[Cell, ...]] = []
    for family, text in chosen:
        cells: list[Cell] = []
        for rate in (_RATE, 2.5 * _RATE):
            point = setup.point(text, 8 * rate)
            cells += [1e3 * point.ttft.p50, 1e3 * point.tpot.p50]
        rows.append((family, text, *cells))
    columns = ("family", "ratio", "TTFT ms at 8", "TPOT ms at 8", "TTFT ms at 20", "TPOT ms at 20")
    first = [row for row in rows if row[0] == "EP+D"]
    return Result(
        table(columns, rows, keys=2),
        f"from {first[0][1]} to {first[-1][1]} the time to the first token falls from {first[0][4]:.0f} to "
        f"{first[-1][4]:.0f} "
        f"ms and that between tokens rises from {first[0][5]:.1f} to {first[-1][5]:.1f} ms at 20 requests a second "
        f"and device.",
    )


# ---- methods under limits


@cache
def _runs(scale: Scale, load: str) -> tuple[tuple[str, float, tuple[Record, ...]], ...]:
    """(method, rate of all devices, records) of each layout and rate."""
    found = []
    setup = Setup(NEXT, (H800,), load, scale.requests(60))
    for method, layouts in _LAYOUTS.items():
        for text in layouts:
            for rate in scale.some((2.0, 4.0, 6.0, 9.0, 13.0, 19.0, 28.0), 4):
                _, records = setup.run(text, rate * num_devices(text))
                found.append((method, rate, tuple(records)))
    return tuple(found)


_LAYOUTS = {
    "EP+D": ("1EP+2D", "2EP+1D"),
    "ED+P": ("1ED+2P", "2ED+1P"),
    "E+P+D": ("1E+1P+1D",),
    "EPD": ("3EPD",),
}


def methods(scale: Scale) -> Result:
    rows: list[tuple[Cell, ...]] = []
    for load in scale.some(("textvqa", "textcaps"), 1):
        runs = _runs(scale, load)
        for ttft_s in (0.1, 0.2, 0.5, 2.0):
            best = [_best(runs, Limits(ttft_s, tpot_s)) for tpot_s in _TPOTS]
            rows.append((load, ttft_s, *best))
    kinds = {str(cell).split()[0] for row in rows for cell in row[2:]} - {"none"}
    return Result(
        table(("data set", "TTFT s", *(f"TPOT {1e3 * tpot_s:g} ms" for tpot_s in _TPOTS)), rows, keys=2),
        f"the best method and its goodput for a device: {len(kinds)} methods are best somewhere "
        f"({', '.join(sorted(kinds))}).",
    )


_TPOTS = (0.008, 0.012, 0.02, 0.04)


def _best(runs: Sequence[tuple[str, float, tuple[Record, ...]]], limits: Limits) -> str:
    kept = [(rate, limits.attainment(records), method) for method, rate, records in runs]
    good = [entry for entry in kept if entry[1] >= SHARE]
    if not good:
        return "none"
    rate, _, method = max(good, key=lambda entry: (entry[0], entry[1]))
    return f"{method} {rate:g}"


# ---- one deployment


def breakdown(scale: Scale) -> Result:
    setup = Setup(LLAVA, (H800,), "textcaps", scale.requests(80)).with_limits(*_LIMITED)
    deployment, _ = setup.run("1E3P4D", 8 * _RATE)
    spent: dict[str, list[float]] = {phase: [] for phase in PHASES}
    pulls: dict[str, list[float]] = {"pull_features": [], "pull_kv": []}
    for result in deployment.results.values():
        for phase, seconds in phases(result.timeline, result.metrics.e2e_s, ttft_s=result.metrics.ttft_s).items():
            spent[phase].append(seconds)
        for span in result.timeline:
            if span.stage in pulls:
                pulls[span.stage].append(1e3 * (span.end_s - span.start_s))
    total = sum(map(sum, spent.values()))
    rows = [
        (p, 1e3 * sum(seconds) / len(seconds), 100 * sum(seconds) / total)
        for p, seconds in spent.items()
        if sum(seconds)
    ]
    moved = sum(sum(spent[phase]) for phase in ("ep_migration", "pd_migration")) / total
    features, kv = (quantile(pulls[stage], 0.95) or 0.0 for stage in ("pull_features", "pull_kv"))
    return Result(
        table(("phase", "mean ms", "%"), rows),
        f"migration takes {moved:.2%} of the latency (the paper: below 1 %); 95 % of the features move within "
        f"{features:.2g} ms and of the KV within {kv:.2g} ms (2 and 8).",
    )


def halves(scale: Scale) -> Result:
    """Goodput with a deployment that is chosen, with EPD alone, and with EPD that knows no limits (Figure 14)."""
    limited = Setup(NEXT, (H800,), "textcaps", scale.requests(60)).with_limits(*_TIGHT)
    rows: list[tuple[Cell, ...]] = []
    for name, text, setup in (
        ("disaggregated", "2EP+3D", limited),
        ("EPD alone", "5EPD", limited),
        ("without budgets", "5EPD", replace(limited, sets_limits=False)),
    ):
        found = setup.goodput(text, 25.0)
        rows.append((name, text, found.rate / num_devices(text), found.bound))
    rates = [float(row[2] or 0) for row in rows]
    return Result(
        table(("part", "deployment", "goodput per device", "bound"), rows),
        f"EPD alone keeps {rates[1] / rates[0]:.0%} of the rate of the disaggregated deployment (the paper: 76 %), "
        f"without "
        f"budgets {rates[2] / rates[0]:.0%} (54 %).",
    )
