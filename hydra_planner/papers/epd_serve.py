"""EPD-Serve (arXiv 2601.11590): deployments on Ascend 910B, instances that share a device, and what is moved early.

Qwen2.5-VL-7B stands for openPangu-7B-VL: EPD-Serve's tables have its 3584 features and its tokens for a picture. Ascend
devices have their datasheet's peaks; how two steps share one is the roofline's estimate and not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_planner import explain
from hydra_planner.papers.deployments import Setup, kind_of, num_devices
from hydra_planner.papers.models import spec_of
from hydra_planner.papers.results import Cell, Result, Scale, table
from hydra_planner.search.measure import Point
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
    first = next((row[0] for row in rows if float(row[5] or 0) > 1), "no size here")
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
    most = max(float(row[3] or 0) / float(row[4] or 1) for row in rows)
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
_RATES = (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0)


def _setup(load: str, requests: int, limits: tuple[float, float]) -> Setup:
    return Setup(MODEL, (ASCEND,), load, requests).with_limits(*limits)


@cache
def _sweep(scale: Scale, apart: str) -> Mapping[tuple[str, str, float], Point]:
    """Points by load, deployment and rate per device."""
    deployments = _ENCODES if apart == "encode" else _DECODES
    return {
        (load, name, rate): _setup(load, scale.requests(48), STRICTER).point(text, rate * num_devices(text))
        for load in _LOADS
        for name, text in deployments.items()
        for rate in scale.some(_RATES, 3)
    }


def _measured(point: Point, measure: str, count: int) -> float:
    """`count`: devices, for each of which the tokens are."""
    match measure:
        case "attainment %":
            return 100 * point.attainment
        case "tokens/s":
            return point.tokens_per_s / count
        case "TTFT ms":
            return 1e3 * point.ttft.p50
        case _:
            return 1e3 * point.tpot.p50


def _shown(scale: Scale, apart: str, measure: str) -> Result:
    points = _sweep(scale, apart)
    deployments = _ENCODES if apart == "encode" else _DECODES
    rows: list[tuple[Cell, ...]] = []
    for load in _LOADS:
        for rate in scale.some(_RATES, 3):
            cells = [
                _measured(points[load, name, rate], measure, num_devices(text)) for name, text in deployments.items()
            ]
            rows.append((load, rate, *cells))
    more = measure in ("attainment %", "tokens/s")
    highest = rows[len(rows) // 2 - 1]
    values = [float(cell or 0) for cell in highest[2:]]
    best = (max if more else min)(values)
    at = f"at {highest[1]:g} requests a second and device of {highest[0]}"
    found = f"{at} {[*deployments][values.index(best)]} is the best ({best:.4g} {measure})."
    return Result(
        table(("load", "rate per device", *(f"{name} {measure}" for name in deployments)), rows, keys=2),
        found if min(values) < max(values) else f"{at} all have {best:.4g} {measure}.",
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
    setup = _setup("sharegpt-4o", scale.requests(60), LIMITS)
    for name, text in _HIGH.items():
        count = num_devices(text)
        cells: list[Cell] = []
        for rate in (10.0, 25.0):
            point = setup.point(text, rate)
            effective = point.tokens_per_s * point.attainment / count
            cells += [1e3 * point.ttft.p50, 1e3 * point.tpot.p50, 100 * point.attainment, effective]
        rows.append((name, count, *cells))
    best = max(rows, key=lambda row: float(row[9] or 0))
    measures = ("TTFT ms", "TPOT ms", "attainment %", "tokens/s per NPU")
    return Result(
        table(("deployment", "NPUs", *measures, *(f"{name} at 25/s" for name in measures)), rows),
        f"at 25 requests a second {best[0]} has the highest effective throughput for a device, {best[9]:.4g} tokens a "
        f"second.",
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
    setup = _setup("sharegpt-4o", scale.requests(60), LIMITS)
    for name, settings in _EARLY.items():
        cells: list[Cell] = []
        for rate in (2.0, 3.0):
            point = setup.point("E-P-D", rate * 3, *settings)
            cells += [1e3 * point.ttft.p50, 1e3 * point.tpot.p50]
        rows.append((name, *cells))
    return Result(
        table(("method", "TTFT ms at 2", "TPOT ms at 2", "TTFT ms at 3", "TPOT ms at 3"), rows),
        "early hand-overs are turned off by --no-prefetch-features and --no-early-kv.",
    )


def distributions(scale: Scale) -> Result:
    rows: list[tuple[Cell, ...]] = []
    for name, rate, point in _of_all(scale):
        rows.append((name, rate, *(1e3 * seconds for seconds in (*point.ttft, *point.tpot))))
    quantiles = [f"{what} {share} ms" for what in ("TTFT", "TPOT") for share in ("p50", "p90", "p99")]
    widest = max(rows, key=lambda row: float(row[4] or 0) / float(row[2] or 1))
    return Result(
        table(("deployment", "rate per device", *quantiles), rows, keys=2),
        f"first tokens spread most with {widest[0]} at {widest[1]:g} requests a second and device.",
    )


def _of_all(scale: Scale) -> list[tuple[str, float, Point]]:
    """Points of every deployment on sharegpt-4o, without repetitions."""
    found = {(name, rate): point for (load, name, rate), point in _sweep(scale, "encode").items() if load == _LOADS[0]}
    found |= {(name, rate): point for (load, name, rate), point in _sweep(scale, "decode").items() if load == _LOADS[0]}
    return [(name, rate, point) for (name, rate), point in found.items()]


def ranks(scale: Scale) -> Result:
    rows: list[tuple[Cell, ...]] = []
    entries = _of_all(scale)
    names = list(dict.fromkeys(name for name, _, _ in entries))
    texts = {**_ENCODES, **_DECODES}
    for rate in scale.some(_RATES, 3):
        points = {name: point for name, at, point in entries if at == rate}
        columns = [
            _ranked(names, [points[name].ttft.p50 for name in names]),
            _ranked(names, [points[name].tpot.p50 for name in names]),
            _ranked(names, [-points[name].tokens_per_s / num_devices(texts[name]) for name in names]),
        ]
        rows += [(rate, name, *(column[name] for column in columns)) for name in names]
    last = rows[-len(names) :]
    best = [next(row[1] for row in last if row[place] == 1) for place in (2, 3, 4)]
    return Result(
        table(("rate per device", "deployment", "TTFT", "TPOT", "throughput"), rows, keys=2),
        f"at the highest rate {best[0]} is the first by TTFT, {best[1]} by TPOT, {best[2]} by throughput.",
    )


def _ranked(names: Sequence[str], values: Sequence[float]) -> dict[str, int]:
    """1 is the least value."""
    order = sorted(range(len(names)), key=lambda place: values[place])
    return {names[place]: rank for rank, place in enumerate(order, 1)}
