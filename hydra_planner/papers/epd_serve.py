"""EPD-Serve (arXiv 2601.11590): deployments on Ascend 910B, instances that share a device, and what is moved early.

Qwen2.5-VL-7B stands for openPangu-7B-VL: EPD-Serve's tables have its 3584 features and its tokens for a picture.
openPangu-VL-7B, which the engine serves, was published later and is not used here. Ascend devices have their
datasheet's peaks; how two steps share one is the roofline's estimate and not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_planner import explain
from hydra_planner.papers.deployments import Runs, Setup, kind_of, num_devices
from hydra_planner.papers.models import spec_of
from hydra_planner.papers.results import Cell, Result, Scale, leaders, listed, number_of, table
from hydra_planner.search.settings import Setting
from hydra_planner.work import decode_seconds, prefill_seconds, vision_seconds, works
from hydra_planner.workload.file import Picture, WorkloadRequest

PAPER = "EPD-Serve"
ASCEND = "Ascend 910B"
MODEL = "qwen2.5-vl-7b"
LIMITS = (2.0, 0.05)  # where decodes are apart
STRICTER = (0.8, 0.03)  # of section 4.4
MIB = 1 << 20
_OUTPUT = 64


def parameters() -> Result:
    rows = []
    for name, model in (("openPangu-7B-VL", MODEL), ("InternVL3-78B", "internvl3-78b")):
        spec = spec_of(model)
        assert spec.vision is not None
        rows.append((name, model, spec.vision.num_parameters() / 1e9, spec.language_bytes(2, 2) / 2e9))
    return Result(
        table(("model", "ours", "tower G", "decoder G"), rows),
        f"the tower is {rows[0][2] / rows[0][3]:.0%} and {rows[1][2] / rows[1][3]:.0%} of the decoder.",
    )


def _one_picture(width: int, height: int) -> WorkloadRequest:
    return WorkloadRequest(at_s=0.0, prompt_tokens=10, output_tokens=_OUTPUT, pictures=(Picture(width, height, 0),))


def encode_share() -> Result:
    rows: list[tuple[Cell, ...]] = []
    surface = kind_of(MODEL, ASCEND).costs.surface
    for side in (280, 560, 840, 1120, 1680, 2240, 3360):
        work = next(works(spec_of(MODEL), [_one_picture(side, side)]))
        encode, prefill = vision_seconds(surface, work), prefill_seconds(surface, work)
        decode = decode_seconds(surface, work)
        total = encode + prefill + decode
        rows.append(
            (
                f"{side}x{side}",
                work.features,
                *(100 * part / total for part in (encode, prefill, decode)),
                encode / prefill,
            )
        )
    first = next((row[0] for row in rows if number_of(row[5]) > 1), "no size here")
    return Result(
        table(("picture", "features", "encode %", "prefill %", "decode %", "encode over prefill"), rows),
        f"an encode is longer than its prefill from {first} on.",
    )


_PICTURES = ((280, 280), (560, 560), (640, 960), (720, 1280), (1080, 1920), (4096, 3112))


def transmissions() -> Result:
    kind, spec = kind_of(MODEL, ASCEND), spec_of(MODEL)
    rows: list[tuple[Cell, ...]] = []
    for height, width in _PICTURES:
        work = next(works(spec, [_one_picture(width, height)]))
        moved = explain.feature_bytes(spec, work.features, 2)
        encode = kind.costs.surface.vision_s(VisionLoad(sum(work.encoded), float(sum(n * n for n in work.encoded))))
        rows.append(
            (f"{height}x{width}", work.features, moved / MIB, 1e3 * moved / kind.link_bytes_per_s, 1e3 * encode)
        )
    most = max(number_of(row[3]) / number_of(row[4]) for row in rows)
    return Result(
        table(("picture", "features", "MiB", "moved ms", "encode ms"), rows),
        f"features move in {most:.1%} of their encode's time at most.",
    )


def kv_transmissions() -> Result:
    """A batch of 16 prompts, prefilled in steps of 2048 tokens: a step's KV moves while the next one runs."""
    kind, spec = kind_of(MODEL, ASCEND), spec_of(MODEL)
    rows: list[tuple[Cell, ...]] = []
    for length in (1024, 2048):
        steps = 16 * length // 2048
        count = 2048 // length
        step_s = kind.costs.surface.language_s(LanguageLoad(0, 0, 2048, count * length * (length + 1) / 2, count))
        moved_s = explain.kv_bytes(spec, 16 * length, 2) / kind.link_bytes_per_s
        exposed_s = max(moved_s - (steps - 1) * step_s, moved_s / steps)
        prefill_s = steps * step_s
        rows.append((length, 1e3 * moved_s, 1e3 * exposed_s, 1e3 * prefill_s, 100 * (1 - exposed_s / moved_s)))
    return Result(
        table(("prompt", "KV ms", "exposed ms", "prefill ms", "overlap %"), rows),
        f"step by step, {rows[0][4]:.3g} % of the transmission of prompts of 1024 tokens overlaps with prefills.",
    )


def sharing() -> Result:
    """Slowdowns of pairs of steps on one device."""
    surface = kind_of(MODEL, ASCEND).costs.surface
    pairs = (("encode", "decode", surface.decode_slowdown), ("encode", "prefill", surface.prefill_slowdown))
    alike = kind_of(MODEL, ASCEND).costs.alike
    rows = [*pairs, ("prefill", "decode", alike), ("encode", "encode", alike)]
    return Result(
        table(("step", "beside", "times as long"), rows, keys=2),
        f"an encode disturbs a decode least ({pairs[0][2]:.2f}) and a prefill more ({pairs[1][2]:.2f}); what is alike "
        f"takes "
        "turns.",
    )


# ---- deployments under rates

_LOADS = ("sharegpt-4o", "visualwebinstruct")
_ENCODES = {"TP1": "EPD", "(E-PD)": "(E-PD)", "E-PD": "E-PD"}
_DECODES = {"TP1": "EPD", "EP-D": "EP-D", "(E-P)-D": "(E-P)-D", "(E-D)-P": "(E-D)-P"}
_RATES = (2.0, 4.0, 8.0, 12.0, 16.0, 24.0)


def _setup(scale: Scale, load: str, limits: tuple[float, float]) -> Setup:
    return Setup(scale, MODEL, (ASCEND,), load).with_limits(*limits)


def _at(scale: Scale, load: str, text: str, rate: float) -> Runs:
    """Runs of a layout; `rate`: requests a second for each device."""
    return _setup(scale, load, STRICTER).at_rate(text, rate * num_devices(text))


def _tokens(runs: Runs, text: str, *, effective: bool = False) -> Cell:
    """Tokens a second of a device; `effective`: of requests within the limits."""
    count = num_devices(text)
    return runs.spread(lambda one: one.tokens_per_s * (one.attainment if effective else 1.0) / count)


def _cell(runs: Runs, measure: str, text: str) -> Cell:
    match measure:
        case "attainment %":
            return runs.attainment
        case "tokens/s":
            return _tokens(runs, text)
        case "TTFT ms":
            return runs.ttft_ms
        case _:
            return runs.tpot_ms


def _shown(scale: Scale, apart: str, measure: str) -> Result:
    deployments = _ENCODES if apart == "encode" else _DECODES
    rows: list[tuple[Cell, ...]] = []
    first: list[str] = []
    for load in _LOADS:
        for rate in scale.some(_RATES, 3):
            runs = {name: _at(scale, load, text, rate) for name, text in deployments.items()}
            cells = {name: _cell(one, measure, deployments[name]) for name, one in runs.items()}
            behind = [name for name, one in runs.items() if one.falls_behind]
            rows.append((load, rate, *cells.values(), listed(behind)))
            if load == _LOADS[0] and len(behind) < len(runs):
                best = leaders(cells, least=measure not in ("attainment %", "tokens/s"))
                values = f"{number_of(cells[best[0]]):.4g} {measure}"
                first = [f"at {rate:g} requests a second and device of {load}", listed(best), values]
                if len(best) == len(cells):
                    first[1] = "none, for all are alike"
    where, best_names, values = first
    return Result(
        table(
            ("load", "rate per device", *(f"{name} {measure}" for name in deployments), "falls behind"), rows, keys=2
        ),
        f"{where}, the highest rate at which not all fall behind, the best is {best_names} ({values}).",
    )


def encode_attainment(scale: Scale) -> Result:
    return _shown(scale, "encode", "attainment %")


def encode_throughput(scale: Scale) -> Result:
    return _shown(scale, "encode", "tokens/s")


def encode_ttft(scale: Scale) -> Result:
    return _shown(scale, "encode", "TTFT ms")


def encode_tpot(scale: Scale) -> Result:
    return _shown(scale, "encode", "TPOT ms")


def decode_attainment(scale: Scale) -> Result:
    return _shown(scale, "decode", "attainment %")


def decode_throughput(scale: Scale) -> Result:
    return _shown(scale, "decode", "tokens/s")


def decode_ttft(scale: Scale) -> Result:
    return _shown(scale, "decode", "TTFT ms")


def decode_tpot(scale: Scale) -> Result:
    return _shown(scale, "decode", "TPOT ms")


_HIGH = {
    "TP1x2": "2EPD",
    "(E-PD)x2": "2(E-PD)",
    "EP-D": "EP-D",
    "(E-P)-D": "(E-P)-D",
    "(E-D)-P": "(E-D)-P",
    "E-P-D": "E-P-D",
}


def high_load(scale: Scale) -> Result:
    rows: list[tuple[Cell, ...]] = []
    setup = _setup(scale, "sharegpt-4o", LIMITS)
    kept = []
    for name, text in _HIGH.items():
        cells: list[Cell] = []
        behind = []
        for rate in (10.0, 25.0):
            runs = setup.at_rate(text, rate)
            cells += [runs.ttft_ms, runs.tpot_ms, runs.attainment, _tokens(runs, text, effective=True)]
            behind += [f"{rate:g}"] if runs.falls_behind else []
        kept += [name] if runs.keeps_limits else []
        rows.append((name, num_devices(text), *cells, listed(behind)))
    best = leaders({str(row[0]): row[9] for row in rows})
    attained = {str(row[0]): row[8] for row in rows}
    holds = number_of(attained["E-P-D"]) > number_of(attained["EP-D"])
    measures = ("TTFT ms", "TPOT ms", "attainment %", "tokens/s per NPU")
    return Result(
        table(("deployment", "NPUs", *measures, *(f"{name} at 25/s" for name in measures), "falls behind at"), rows),
        f"at 25 requests a second {listed(best)} {_has(best)} the highest effective throughput for a device and "
        f"{listed(kept) or 'none'} {_has(kept)} the limits kept. That E-P-D attains more than EP-D, as in the paper, "
        f"{'is' if holds else 'is not'} seen here ({number_of(attained['E-P-D']):.3g} against "
        f"{number_of(attained['EP-D']):.3g} %).",
    )


def _has(names: Sequence[str]) -> str:
    return "have" if len(names) > 1 else "has"


def strict(scale: Scale) -> Result:
    """Section 4.4's stricter limits at its rate for each device, and at rates where a roofline queues."""
    rows: list[tuple[Cell, ...]] = []
    for rate in (4.0, 8.0, 12.0):
        for text in ("EP-D", "(E-P)-D"):
            runs = _at(scale, _LOADS[0], text, rate)
            rows.append(
                (rate, text, runs.attainment, _tokens(runs, text, effective=True), "yes" if runs.falls_behind else "")
            )
    pairs = [(one, other) for one, other in zip(rows[::2], rows[1::2], strict=True)]
    told = [f"{number_of(other[2]) - number_of(one[2]):+.3g} at {number_of(one[0]):g}" for one, other in pairs]
    return Result(
        table(("rate per device", "deployment", "attainment %", "tokens/s per NPU", "falls behind"), rows, keys=2),
        f"(E-P)-D attains so many more points than EP-D: {listed(told)} requests a second and device (the paper: +25.4 "
        "at 4).",
    )


_LATE_FEATURES = Setting("cluster", "prefetch_features", value=False)
_LATE_KV = Setting("cluster", "early_kv", value=False)
# Variants of Table 2 by what is moved early; both are where no setting says otherwise.
_EARLY: dict[str, tuple[Setting, ...]] = {
    "neither": (_LATE_FEATURES, _LATE_KV),
    "features": (_LATE_KV,),
    "KV": (_LATE_FEATURES,),
    "EPD-Serve": (),
}


def early(scale: Scale) -> Result:
    rows: list[tuple[Cell, ...]] = []
    setup = _setup(scale, "sharegpt-4o", LIMITS)
    for name, settings in _EARLY.items():
        cells: list[Cell] = []
        for rate in (2.0, 3.0):
            runs = setup.at_rate("E-P-D", rate * 3, *settings)
            cells += [runs.ttft_ms, runs.tpot_ms]
        rows.append((name, *cells))
    less = [100 * (1 - number_of(row[3]) / number_of(rows[0][3])) for row in rows]
    return Result(
        table(("method", "TTFT ms at 2", "TPOT ms at 2", "TTFT ms at 3", "TPOT ms at 3"), rows),
        f"at 3 requests a second and device, features alone take {less[1]:.0f} % off the time to the first token, KV "
        f"alone {less[2]:.0f} % and both {less[3]:.0f} % (the paper: 22, 12 and 26 %). --no-prefetch-features and "
        f"--no-early-kv turn them off.",
    )


def distributions(scale: Scale) -> Result:
    rows: list[tuple[Cell, ...]] = []
    texts = {**_ENCODES, **_DECODES}
    for name, text in texts.items():
        for rate in scale.some(_RATES, 3):
            runs = _at(scale, _LOADS[0], text, rate)
            quantiles = [runs.ttft_at(place) for place in range(3)]
            quantiles += [runs.tpot_at(place) for place in range(3)]
            rows.append((name, rate, *quantiles, "yes" if runs.falls_behind else ""))
    titles = [f"{what} {share} ms" for what in ("TTFT", "TPOT") for share in ("p50", "p90", "p99")]
    steady = [row for row in rows if not row[-1] and number_of(row[2])]  # a load that ended early has no first tokens
    widest = max(steady, key=lambda row: number_of(row[4]) / number_of(row[2]))
    return Result(
        table(("deployment", "rate per device", *titles, "falls behind"), rows, keys=2),
        f"of what does not fall behind, first tokens spread most with {widest[0]} at {widest[1]:g} requests a second "
        "and device.",
    )


def ranks(scale: Scale) -> Result:
    """Ranks by medians over seeds; those that cannot be told apart share one."""
    rows: list[tuple[Cell, ...]] = []
    texts = {**_ENCODES, **_DECODES}
    firsts: list[str] = []
    for rate in scale.some(_RATES, 3):
        runs = {name: _at(scale, _LOADS[0], text, rate) for name, text in texts.items()}
        columns = [
            _ranked({name: one.ttft_ms for name, one in runs.items()}, least=True),
            _ranked({name: one.tpot_ms for name, one in runs.items()}, least=True),
            _ranked({name: _tokens(one, texts[name]) for name, one in runs.items()}, least=False),
        ]
        rows += [
            (rate, name, *(column[name] for column in columns), "yes" if runs[name].falls_behind else "")
            for name in texts
        ]
        firsts = [listed([name for name in texts if column[name] == 1]) for column in columns]
    return Result(
        table(("rate per device", "deployment", "TTFT", "TPOT", "throughput", "falls behind"), rows, keys=2),
        f"at the highest rate the first by TTFT is {firsts[0]}, by TPOT {firsts[1]}, by throughput {firsts[2]}.",
    )


def _ranked(cells: Mapping[str, Cell], *, least: bool) -> dict[str, int]:
    """1 is the best; whatever cannot be told from the best of the rest shares its rank."""
    ranked: dict[str, int] = {}
    while rest := {name: cell for name, cell in cells.items() if name not in ranked}:
        ranked |= dict.fromkeys(leaders(rest, least=least), len(ranked) + 1)
    return ranked
