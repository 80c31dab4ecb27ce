"""HeteroServe (arXiv 2603.12707): encodes on cheap devices, tokens on others, and what is handed over between them.

An A100 and an RTX 4090 are at $16,000 and $3,000. Its tensor parallelism has no counterpart here: where the paper joins
devices for one decoder, ours have one each.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_planner import explain
from hydra_planner.hardware.devices import find_device, links_between
from hydra_planner.papers.deployments import Runs, Setup, kind_of, layout
from hydra_planner.papers.measured import GRAPHS
from hydra_planner.papers.models import spec_of
from hydra_planner.papers.results import (
    Cell,
    Experiment,
    Result,
    Scale,
    Table,
    closed_form,
    leaders,
    listed,
    number_of,
    table,
)
from hydra_planner.search.settings import Setting

PAPER = "HeteroServe"
A100, RTX_4090 = "A100", "RTX 4090"
LLAVA, QWEN = "llava-1.5-7b", "qwen2.5-vl-7b"
FEATURES, TEXT = 576, 128
BATCH = 128
NO_STEALING = Setting("cluster", "steal_decodes", value=False)
# Section 5.3: so many at once, and features of all that wait for a prefill; else encoders keep them and are not idle.
BATCHES = (Setting("scheduler", "max_num_seqs", 64), Setting("cache", "num_image_blocks", 9 * 256))
GAMMAS = (0.1, 0.1875, 0.3, 0.5, 0.8)
MIB = 1 << 20


def _moved(model: str = LLAVA) -> tuple[float, float]:
    """MiB of KV and of features of one request."""
    spec = spec_of(model)
    return explain.kv_bytes(spec, FEATURES + TEXT, 2) / MIB, explain.feature_bytes(spec, FEATURES, 2) / MIB


def _pcie_bytes_per_s() -> float:
    return links_between(find_device(RTX_4090), find_device(A100))[0].bytes_per_s


def boundaries() -> Result:
    kv, features = _moved()
    encode_s = kind_of(LLAVA, RTX_4090).costs.surface.vision_s(VisionLoad(FEATURES, float(FEATURES**2)))
    link = _pcie_bytes_per_s()
    rows = [
        (name, boundary, moved, 1e3 * moved * MIB / link, moved * MIB / link / encode_s)
        for name, boundary, moved in (
            ("E+PD", "modality", features),
            ("EP+D", "stage", kv),
            ("E+P+D", "both", features + kv),
        )
    ]
    columns = ("topology", "boundary", "MiB", "PCIe 4 ms", "of an encode")
    return Result(
        table(columns, rows),
        f"over PCIe features take {rows[0][4]:.0%} of the time of the encode that made them, and KV {rows[1][4]:.2g} "
        "times that time.",
    )


def transfer_sizes() -> Result:
    kv, features = _moved()
    rows = [
        ("stage-level (PD)", "KV", kv),
        ("stage-level (EPD)", "KV and features", kv + features),
        ("modality-level", "features", features),
    ]
    return Result(
        table(("partition", "moved", "MiB"), rows),
        f"a request hands over {kv / features:.3g} times less at the boundary of modalities.",
    )


_MODELS = (
    ("LLaVA-7B", "llava-1.5-7b", 576),
    ("LLaVA-13B", "llava-13b", 576),
    ("LLaVA-34B", "llava-34b", 576),
    ("Qwen2.5-VL-7B", QWEN, 1024),
    ("Qwen-VL-72B", "qwen-vl-72b", 576),
)


def ratios() -> Result:
    rows = []
    for name, model, features in _MODELS:
        spec = spec_of(model)
        kv = explain.kv_bytes(spec, features + TEXT, 2) / MIB
        moved = explain.feature_bytes(spec, features, 2) / MIB
        rows.append((name, features, spec.language.num_layers, kv, moved, kv / moved))
    ratio = [row[5] for row in rows]
    return Result(
        table(("model", "features", "layers", "KV MiB", "feature MiB", "ratio"), rows),
        f"by equation 2 the ratios lie between {min(ratio):.3g} and {max(ratio):.3g}.",
    )


def savings() -> Result:
    rows = [
        (rho, *(100 * (1 - explain.cost_share(rho, gamma)) for gamma in GAMMAS))
        for rho in (0.1, 0.25, 0.5, 0.63, 1.0, 2.0, 4.0)
    ]
    columns = ("rho", *(f"% at gamma {gamma:g}" for gamma in GAMMAS))
    return Result(
        table(columns, rows),
        f"equation 8 gives {100 * (1 - explain.cost_share(0.63, 0.1875)):.1f} % at the paper's rho and gamma.",
    )


# ---- cost of tokens


_Cost = tuple[str, float, Cell, Cell]


def _clusters(scale: Scale, model: str, chosen: Sequence[tuple[str, str, tuple[str, ...]]]) -> list[_Cost]:
    """A row of each (name, layout, devices), all requests at once."""
    rows = []
    for name, text, devices in chosen:
        setup = Setup(scale, model, devices, _LOAD)
        rows.append(_cost_row(name, setup.at_once(text, _REQUESTS, seeds=_SEEDS), _price(setup, text)))
    return rows


def _price(setup: Setup, text: str) -> float:
    kinds = setup.question(layout(text)).kinds.values()
    return sum(kind.price or 0.0 for kind in kinds)


def _cost_row(name: str, runs: Runs, dollars: float) -> _Cost:
    per_dollar = runs.spread(lambda one: explain.tokens_per_kilodollar(one.tokens_per_s, dollars))
    return name, dollars / 1000, runs.spread(lambda one: one.tokens_per_s), per_dollar


_SEEDS = 3
_LOAD, _REQUESTS = "coco-describe", 192
_COST_COLUMNS = ("cluster", "k$", "tokens/s", "tokens/s per k$")
_TWO_TIERS = (RTX_4090, RTX_4090, A100)


def llava_cost(scale: Scale) -> Result:
    rows = _clusters(scale, LLAVA, (("4 A100", "4EPD", (A100,)), ("2 RTX 4090 + 2 A100", "2E+2PD", _TWO_TIERS)))
    return Result(
        table(_COST_COLUMNS, rows),
        f"two tiers give {_over(rows[1][2], rows[0][2]):.0%} of the tokens for {rows[1][1] / rows[0][1]:.0%} of the "
        f"price: {_over(rows[1][3], rows[0][3]) - 1:+.0%} for a dollar.",
    )


def _over(one: Cell, other: Cell) -> float:
    return number_of(one) / number_of(other)


def qwen_cost(scale: Scale) -> Result:
    chosen = (
        ("1 RTX 4090 + 2 A100", "E+2PD", (RTX_4090, A100)),
        ("2 RTX 4090 + 2 A100", "2E+2PD", _TWO_TIERS),
        ("2 A100", "2EPD", (A100,)),
        ("4 A100", "4EPD", (A100,)),
    )
    rows = _clusters(scale, QWEN, chosen)
    best = leaders({row[0]: row[3] for row in rows})
    return Result(
        table(_COST_COLUMNS, rows),
        f"{listed(best)} give the most for a dollar, {max(number_of(row[3]) for row in rows):.3g} tokens/s per $1,000.",
    )


def breakdown() -> Result:
    """A batch of 128 through each phase alone."""
    spec, vision, language = spec_of(LLAVA), kind_of(LLAVA, RTX_4090), kind_of(LLAVA, A100)
    prompt = FEATURES + 7
    encode_s = vision.costs.surface.vision_s(VisionLoad(BATCH * FEATURES, float(BATCH * FEATURES**2)))
    moved_s = BATCH * explain.feature_bytes(spec, FEATURES, 2) / _pcie_bytes_per_s()
    surface = language.costs.surface
    pairs = BATCH * prompt * (prompt + 1) / 2
    prefill_s = surface.language_s(LanguageLoad(0, 0, BATCH * prompt, pairs, BATCH))
    decode_s = sum(surface.language_s(LanguageLoad(BATCH, BATCH * (prompt + step))) for step in range(1, TEXT))
    phases = (
        ("encode (RTX 4090)", encode_s),
        ("features (PCIe)", moved_s),
        ("prefill (A100)", prefill_s),
        ("decode (A100)", decode_s),
    )
    total = sum(seconds for _, seconds in phases)
    return Result(
        table(("phase", "s", "%"), [(name, seconds, 100 * seconds / total) for name, seconds in phases]),
        f"by the roofline rho is {encode_s / (prefill_s + decode_s):.2g}; with the paper's seconds it is 0.64.",
    )


def _stealing(scale: Scale) -> dict[str, Runs]:
    setup = Setup(scale, LLAVA, _TWO_TIERS, _LOAD)
    return {
        "2 RTX 4090 + 2 A100": setup.at_once("2ED+2PD", _REQUESTS, *BATCHES, NO_STEALING, seeds=_SEEDS),
        "with stealing": setup.at_once("2ED+2PD", _REQUESTS, *BATCHES, seeds=_SEEDS),
    }


def ablation(scale: Scale) -> Result:
    one_tier, two_tiers = (Setup(scale, LLAVA, devices, _LOAD) for devices in ((A100,), _TWO_TIERS))
    dollars = _price(two_tiers, "2ED+2PD")
    rows = [_cost_row("4 A100", one_tier.at_once("4EPD", _REQUESTS, *BATCHES, seeds=_SEEDS), _price(one_tier, "4EPD"))]
    rows += [_cost_row(name, runs, dollars) for name, runs in _stealing(scale).items()]
    told = "" if len(leaders({row[0]: row[2] for row in rows[1:]})) == 1 else ", which cannot be told from none"
    return Result(
        table(_COST_COLUMNS, rows),
        f"decodes that the RTX 4090s take over change the tokens per second by {_over(rows[2][2], rows[1][2]) - 1:+.1%}"
        f"{told} (the paper: +13 %).",
    )


def sensitivity(scale: Scale) -> Result:
    """Varies what bounds a batch here (section 5.3.4)."""
    setup = Setup(scale, LLAVA, _TWO_TIERS, _LOAD)
    rows: list[tuple[Cell, ...]] = []
    for part, name, values in (
        ("requests at once", "max_num_seqs", (16, 32, 64, 128)),
        ("tokens of a step", "token_budget", (512, 1024, 2048, 4096)),
    ):
        for value in values:
            settings = [setting for setting in BATCHES if setting.field != name]
            runs = setup.at_once("2ED+2PD", _REQUESTS, *settings, Setting("scheduler", name, value))
            first = runs.spread(lambda one: one.ttft[0])
            rows.append((part, value, runs.spread(lambda one: one.tokens_per_s), first))
    best = {part: max((row for row in rows if row[0] == part), key=lambda row: number_of(row[2])) for part, *_ in rows}
    told = [f"{number_of(row[1]):.0f} {part}" for part, row in best.items()]
    return Result(
        table(("part", "value", "tokens/s", "TTFT p50 s"), rows, keys=2),
        f"most tokens a second come with {listed(told)}.",
    )


def timeline(scale: Scale) -> Result:
    rows: list[tuple[Cell, ...]] = []
    for name, runs in _stealing(scale).items():
        for role, device in (("ED", RTX_4090), ("PD", A100)):
            shares = [runs.more(f"{role} {lane}", 100.0) for lane in ("vision", "language")]
            rows.append((name, device, *shares))
    lent = rows[2]
    return Result(
        table(("deployment", "device", "% encode", "% tokens"), rows, keys=2),
        f"with stealing an RTX 4090 encodes for {number_of(lent[2]):.2g} % of the time and decodes for "
        f"{number_of(lent[3]):.2g} %.",
    )


EXPERIMENTS = (
    Experiment(
        "heteroserve-t1",
        PAPER,
        "Where the model is cut, and what crosses the cut",
        "closed form",
        "LLaVA-1.5-7B, 576 features and 128 tokens; every cut is a topology of this engine.",
        closed_form(boundaries),
        Table(
            ("system", "boundary", "moved", "link", "cost model"),
            (
                ("EPD", "stage", "GB", "NVLink", None),
                ("ModServe", "modality", "MB", "NVLink", None),
                ("SpaceServe", "co-located", None, "within a device", None),
                ("Cauchy", "stage", "GB", "NVLink", "heuristic"),
                ("HeteroServe", "modality", "MB", "PCIe", "closed form"),
            ),
        ),
    ),
    Experiment(
        "heteroserve-t2",
        PAPER,
        "Bytes of one request by partition",
        "closed form",
        "LLaVA-1.5-7B, 576 features and 128 tokens.",
        closed_form(transfer_sizes),
        Table(("partition", "MiB"), (("stage-level (PD)", 350), ("stage-level (EPD)", 350), ("modality-level", 4.5))),
        remark="The 128 tokens are output in the table's title and text in equation 1. The EPD row leaves the "
        "features out.",
    ),
    Experiment(
        "heteroserve-t3",
        PAPER,
        "Ratio of KV to features over models",
        "closed form",
        "128 tokens of text; decoders by their published sizes, behind towers with the paper's numbers of features.",
        closed_form(ratios),
        Table(
            ("model", "KV MiB", "feature MiB", "ratio"),
            (
                ("LLaVA-7B", 352, 4.5, 78),
                ("LLaVA-13B", 550, 5.6, 98),
                ("LLaVA-34B", 150, 7.3, 21),
                ("Qwen2.5-VL-7B", 83, 7.0, 12),
                ("Qwen-VL-72B", 215, 9.0, 24),
            ),
        ),
        remark="Equation 1 gives 63 MiB and a ratio of 9 for Qwen2.5-VL-7B, and other sizes for LLaVA-34B and "
        "Qwen-VL-72B; the smallest ratio is said to be 12 in one place and 21 in another.",
    ),
    Experiment(
        "heteroserve-t4",
        PAPER,
        "LLaVA-1.5-7B: tokens per second and dollar",
        "simulated",
        "4EPD on four A100; 2E+2PD with the encoders on RTX 4090; pictures described with 128 tokens, all at once.",
        llava_cost,
        Table(
            _COST_COLUMNS,
            (
                ("4 A100, vLLM 0.3", 64, 3886, 60.7),
                ("4 A100", 64, 5986, 93.5),
                ("2 RTX 4090 + 2 A100", 38, 3156, 83.1),
            ),
        ),
        remark="The 37 % are gained over vLLM on other hardware; over its own runtime on four A100 the two tiers lose "
        "11 %.",
    ),
    Experiment(
        "heteroserve-t5",
        PAPER,
        "Qwen2.5-VL: tokens per second and dollar",
        "simulated",
        "Qwen2.5-VL-7B; instances side by side in place of tensor parallelism, which the engine does not have.",
        qwen_cost,
        Table(
            _COST_COLUMNS,
            (
                ("2 A100, vLLM TP=2", 32, 2768, 0.78),
                ("4 A100, vLLM TP=4", 64, 3619, 0.51),
                ("1 RTX 4090 + 2 A100", 35, 3252, 0.83),
                ("2 RTX 4090 + 2 A100", 38, 3269, 0.78),
                ("2 A100", 32, 3351, 0.94),
                ("4 A100", 64, 4633, 0.64),
            ),
        ),
        remark="The last column is not tokens per second over thousands of dollars, which would be 93 and not 0.83 in "
        "the "
        "third row: it is about 111 times smaller in all rows.",
    ),
    Experiment(
        "heteroserve-t6",
        PAPER,
        "Where the time of a batch of 128 goes",
        "closed form",
        "LLaVA-1.5-7B, each phase alone at the roofline, answers of 128 tokens.",
        closed_form(breakdown),
        Table(
            ("phase", "s", "%"),
            (
                ("encode (RTX 4090)", 6.82, 38.2),
                ("features (PCIe)", 0.45, 2.5),
                ("prefill (A100)", 1.24, 6.9),
                ("decode (A100)", 9.35, 52.4),
            ),
        ),
        remark="53 ms for each encode are a few per cent of the 330 TFLOP/s of which section 2 says 85 % are reached, "
        "and "
        "section 4.1 has 23 ms for the transfer that takes 0.45 s here. A prefill of 128 prompts in 1.24 s is more "
        "than two "
        "A100 can do at their peak.",
    ),
    Experiment(
        "heteroserve-t7",
        PAPER,
        "Which part of the runtime gives how much",
        "on a GPU",
        "Kernels, graphs and packing are not in a simulation. What graphs give was measured for decodes and encodes of "
        "LLaVA-1.5-7B on an H200; prompts are packed always.",
        measured=GRAPHS,
        theirs=Table(
            ("runtime", "tokens/s", "over vLLM %"),
            (
                ("vLLM 0.3", 3886, 0),
                ("+ CUDA graphs", 4980, 28),
                ("+ packed prefill", 5500, 42),
                ("+ aligned batches", 5986, 54),
            ),
        ),
        command="python -m bench.serve ablation --model llava-1.5-7b --server-args='--load-format random'",
    ),
    Experiment(
        "heteroserve-t8",
        PAPER,
        "Two tiers, and decodes taken over by idle encoders",
        "simulated",
        "As heteroserve-t4, but at most 64 requests at once on an instance, features of 256 pictures, and 2ED+2PD: "
        "RTX 4090 hold the decoder too.",
        ablation,
        Table(
            _COST_COLUMNS,
            (
                ("4 A100", 64, 5986, 93.5),
                ("2 RTX 4090 + 2 A100", 38, 3156, 83.1),
                ("with stealing", 38, 3156, 83.1),
            ),
        ),
        remark="Both rows of two tiers have 3,156 tokens/s, where section 6.5 has 2,793 without stealing; 3,156 are "
        "53 % of 5,986, not 83 %.",
        before="one load of 192 requests said -2 %.",
    ),
    Experiment(
        "heteroserve-5.3.4",
        PAPER,
        "How much the size of a batch decides",
        "simulated",
        "2ED+2PD as heteroserve-t8. Batches are not aligned here: requests at once and the tokens of a step bound "
        "them. There is no threshold and no time-out of stealing to vary either: an encode comes first at once, and a "
        "decode that was taken over can be given back.",
        sensitivity,
        Table(
            ("parameter", "chosen", "because"),
            (
                ("aligned batch", 32, "prefills at 85 % and 1.7 s to gather it"),
                ("stealing threshold", 16, "a whole batch of the consumer device"),
                ("collection time-out", "100 ms", "pictures wait at most 212 ms"),
            ),
        ),
        remark="The section has no measurements of other values.",
    ),
    Experiment(
        "heteroserve-f1",
        PAPER,
        "Saving over the ratio of work, for ratios of price",
        "closed form",
        "Equation 8; the ratio over depth of the figure's second half is heteroserve-t3.",
        closed_form(savings),
        Table(("rho", "% at gamma 0.1875"), ((0.63, 31.4),)),
        remark="40.6 % observed are the price of the chosen devices, at a throughput of 81 % of the baseline's; "
        "equation 8 is "
        "about equal throughput.",
    ),
    Experiment(
        "heteroserve-f3",
        PAPER,
        "What the cheap devices do over time",
        "simulated",
        "Shares of the time from the first arrival to the last answer, in the runs of heteroserve-t8.",
        timeline,
        remark="60 to 70 % idle are said of the consumer devices; Table 6 has them encode for 38 % of a cycle.",
    ),
)
