"""HydraInfer (arXiv 2505.12658): what follows from the figures of model and device, without a load: operations,
intensities, batches, lanes side by side, and what the limits leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from hydra_engine.core.cost import CostSurface
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_planner.hardware.devices import find_device
from hydra_planner.papers.deployments import kind_of
from hydra_planner.papers.models import spec_of
from hydra_planner.papers.results import Cell, Result, number_of, table
from hydra_planner.search.floors import floor_of
from hydra_planner.work import decode_seconds, prefill_seconds, vision_seconds, works
from hydra_planner.workload.generators import make_load
from hydra_planner.workload.shapes import MIXED, TABLE_3

PAPER = "HydraInfer"
H800 = "H800"
LLAVA, NEXT, QWEN = "llava-1.5-7b", "llava-next-7b", "qwen2-vl-7b"
CONTEXT, PATCHES = 1024, 576
# Table 1, for LLaVA-1.5-7B: hidden size, heads, layers of tower and decoder.
_TOWER, _DECODER = (1024, 16, 24), (4096, 32, 32)
_SATURATED = 0.9  # of the highest throughput


def _surface() -> CostSurface:
    return kind_of(LLAVA, H800).costs.surface


def notations() -> Result:
    language = spec_of(LLAVA).language
    rows = [
        ("S, prompt", None, PATCHES + 16),
        ("T, tokens of a picture", PATCHES, None),
        ("L, layers", _TOWER[2], language.num_layers),
        ("H, hidden size", _TOWER[0], language.hidden_size),
        ("M, heads", _TOWER[1], _DECODER[1]),
    ]
    return Result(
        table(("symbol", "tower", "decoder"), rows), "sizes of LLaVA-1.5-7B, with which the next table is filled."
    )


# ---- operations of one layer (Table 2): FLOP and values moved, of b requests with n rows each

_BATCHES = (1, 8, 64)


def _projections(b: int, n: int, h: int) -> tuple[float, float]:
    return 8.0 * b * n * h * h, 8.0 * b * n * h + 4.0 * h * h


def _ffn(b: int, n: int, h: int) -> tuple[float, float]:
    return 16.0 * b * n * h * h, 4.0 * b * n * h + 8.0 * h * h


def _attention(b: int, n: int, h: int, m: int) -> tuple[float, float]:
    return 4.0 * b * n * n * h, 4.0 * b * n * h + 2.0 * b * n * n * m


def _decode_attention(b: int, n: int, h: int, m: int) -> tuple[float, float]:
    return 4.0 * b * n * h, 4.0 * b * n * m + 2.0 * b * h * (n + 1)


def operations() -> Result:
    rows: list[tuple[Cell, ...]] = []
    for name, formula in (("QKVO", _projections), ("FFN", _ffn)):
        for stage, (h, _, _), count in (
            ("encode", _TOWER, PATCHES),
            ("prefill", _DECODER, CONTEXT),
            ("decode", _DECODER, 1),
        ):
            rows.append((name, stage, *_intensity(formula(batch, count, h) for batch in _BATCHES)))
    for stage, (h, m, _), count in (("encode", _TOWER, PATCHES), ("prefill", _DECODER, CONTEXT)):
        rows.append(("attention", stage, *_intensity(_attention(batch, count, h, m) for batch in _BATCHES)))
    of_decode = (_decode_attention(batch, CONTEXT, *_DECODER[:2]) for batch in _BATCHES)
    rows.append(("attention", "decode", *_intensity(of_decode)))
    device = find_device(H800)
    ridge = 2 * device.flops_per_s / device.memory_bytes_per_s
    return Result(
        table(("operation", "stage", *(f"FLOP per value, B={batch}" for batch in _BATCHES)), rows, keys=2),
        f"an H800 is busy with arithmetic from {ridge:.0f} FLOP for each value of 16 bits: products of prefills and of "
        "batches of pictures are beyond that, decodes of 64 are not.",
    )


def _intensity(pairs: Iterable[tuple[float, float]]) -> list[float]:
    return [flops / values for flops, values in pairs]


def intensities() -> Result:
    """Arithmetic intensities of the products of decoder and tower together (Figure 5)."""
    pictures = (0, 1, 4, 16, 64)
    rows: list[tuple[Cell, ...]] = []
    for tokens in (1, 4, 16, 64, 256, 1024, 4096):
        cells: list[Cell] = []
        for count in pictures:
            flops = moved = 0.0
            for (h, _, layers), n in ((_DECODER, tokens), (_TOWER, count * PATCHES)):
                for formula in (_projections, _ffn) if n else ():
                    work, values = formula(1, n, h)
                    flops, moved = flops + layers * work, moved + layers * values
            cells.append(flops / moved)
        rows.append((tokens, *cells))
    return Result(
        table(("tokens", *(f"{count} pictures" for count in pictures)), rows),
        f"with 16 tokens, 16 pictures raise the intensity {_ratio(rows[2], 4, 1):.3g} times; with 4096 tokens they "
        f"change it "
        f"{_ratio(rows[6], 4, 1):.2g} times.",
    )


def _ratio(row: Sequence[Cell], over: int, under: int) -> float:
    one, other = row[over], row[under]
    assert isinstance(one, float) and isinstance(other, float)
    return one / other


# ---- stages alone


def limits() -> Result:
    rows: list[tuple[Cell, ...]] = []
    for model, by_load in TABLE_3.items():
        surface = kind_of(model, H800).costs.surface
        for load in by_load:
            floors = [floor_of(surface, work) for work in works(spec_of(model), make_load(load, 100, None, 0))]
            ttft = sorted(floor.ttft_s for floor in floors)[90]
            tpot = sorted(floor.decode_s for floor in floors)[90]
            rows.append((model, load, ttft, tpot))
    loosest = max(TABLE_3[str(row[0])][str(row[1])][0] / number_of(row[2]) for row in rows)
    return Result(
        table(("model", "data set", "TTFT s", "TPOT s"), rows, keys=2),
        f"limits for the first token are up to {loosest:.0f} times what a request needs alone.",
    )


def batches() -> Result:
    """Throughput of each stage over its batch (Figure 6), pictures, prompts and tokens a second."""
    sizes = (1, 2, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024)
    rows = [(size, *(throughput(size) for throughput in (_encodes, _prefills, _decodes))) for size in sizes]
    knees = [
        next(row[0] for row in rows if row[place] >= _SATURATED * max(other[place] for other in rows))
        for place in (1, 2, 3)
    ]
    return Result(
        table(("batch", "encodes/s", "prefills/s", "decodes/s"), rows),
        f"{_SATURATED:.0%} of the highest throughput are reached with {knees[0]} pictures, {knees[1]} prompts and "
        f"{knees[2]} decodes (the paper: 6, 1 and 512).",
    )


def _encodes(count: int) -> float:
    return count / _surface().vision_s(VisionLoad(count * PATCHES, float(count * PATCHES**2)))


def _prefills(count: int) -> float:
    load = LanguageLoad(0, 0, count * CONTEXT, count * CONTEXT * (CONTEXT + 1) / 2, count)
    return count / _surface().language_s(load)


def _decodes(count: int) -> float:
    return count / _surface().language_s(LanguageLoad(count, count * CONTEXT))


def side_by_side() -> Result:
    """Pictures and tokens a second of one device: half of the time each, or both lanes at once (Figure 4)."""
    surface = _surface()
    rows: list[tuple[Cell, ...]] = []
    for pictures, decodes in ((1, 16), (4, 64), (8, 128), (16, 256)):
        encodes, tokens = _encodes(pictures), _decodes(decodes)
        rows.append(
            (
                pictures,
                decodes,
                encodes / 2,
                encodes / surface.vision_slowdown,
                tokens / 2,
                tokens / surface.decode_slowdown,
            )
        )
    columns = ("pictures", "decodes", "encodes/s in turn", "side by side", "tokens/s in turn", "side by side ")
    return Result(
        table(columns, rows, keys=2),
        f"side by side a device encodes {2 / surface.vision_slowdown - 1:.0%} and decodes "
        f"{2 / surface.decode_slowdown - 1:.0%} more than in turn, as two streams of an H200 overlapped.",
    )


@cache
def _work_rows() -> tuple[tuple[Cell, ...], ...]:
    rows = []
    surface = kind_of(NEXT, H800).costs.surface
    for load in MIXED:
        asked = list(works(spec_of(NEXT), make_load(load, 200, None, 0)))
        seconds = [
            1e3 * sum(each(surface, work) for work in asked) / len(asked)
            for each in (vision_seconds, prefill_seconds, decode_seconds)
        ]
        prompt, output = (sum(getattr(work, name) for work in asked) / len(asked) for name in ("prompt", "output"))
        rows.append((load, prompt, output, *seconds))
    return tuple(rows)


def workload() -> Result:
    rows = _work_rows()
    heaviest = max(rows, key=lambda row: number_of(row[5]))
    return Result(
        table(("data set", "prompt", "output", "encode ms", "prefill ms", "decode ms"), rows),
        f"{heaviest[0]} has the longest decodes; the mix of stages differs from data set to data set.",
    )
