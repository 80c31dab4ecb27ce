"""EPD (arXiv 2501.05460): requests with several large pictures on eight A100; what memory and parallel encodes give.

Its models are MiniCPM-V 2.6 and two InternVL2 (see `models.py`). Its batches of one request a stage, chosen for
latency, are not set here: ours batch whatever waits. Parallel encodes are turned off in the simulated frontend.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import Role
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.errors import ResourceError
from hydra_planner.papers.deployments import Setup, kind_of
from hydra_planner.papers.models import spec_of
from hydra_planner.papers.results import Cell, Result, Scale, leaders, listed, number_of, table
from hydra_planner.search.settings import Setting
from hydra_planner.simulator.sizing import Sizes, sizes_of

PAPER = "EPD"
A100 = "A100"
MODELS = {"MiniCPM-V 2.6": "minicpm-v-2.6", "InternVL2-8B": "internvl2-8b", "InternVL2-26B": "internvl2-26b"}
SIZES = {"313x234": (313, 234), "787x444": (787, 444), "4032x3024": (4032, 3024)}
LARGEST = (4032, 3024)
# Table 1: seconds to the first token and between tokens, by pictures of a request.
LIMITS = {
    "MiniCPM-V 2.6": {2: (1.4, 0.04), 4: (2.6, 0.04), 6: (3.9, 0.06), 8: (5.1, 0.06)},
    "InternVL2-8B": {2: (1.2, 0.05), 4: (2.4, 0.06), 6: (3.55, 0.09), 8: (5.0, 0.18)},
    "InternVL2-26B": {2: (3.5, 0.07), 4: (7.05, 0.08), 6: (11.0, 0.95), 8: (15.0, 0.15)},
}
TEXT = 22
_MANY = 4096  # pictures: the image cache takes what it may


def limits() -> Result:
    rows = []
    for name, by_count in LIMITS.items():
        surface, vision = kind_of(MODELS[name], A100).costs.surface, spec_of(MODELS[name]).vision
        assert vision is not None
        plan = vision.plan_image(*LARGEST)
        patches = [item.num_patches for item in plan.items]
        for count in by_count:
            tokens = count * plan.num_tokens + TEXT
            encode_s = surface.vision_s(VisionLoad(count * sum(patches), float(count * sum(n * n for n in patches))))
            prefill_s = surface.language_s(LanguageLoad(0, 0, tokens, tokens * (tokens + 1) / 2, 1))
            rows.append((name, count, encode_s + prefill_s, encode_s, surface.language_s(LanguageLoad(1, tokens))))
    share = max(row[2] / LIMITS[row[0]][row[1]][0] for row in rows)
    return Result(
        table(("model", "pictures", "TTFT s", "of it encode s", "TPOT s"), rows, keys=2),
        f"alone on one A100 a request needs at most {share:.0%} of the limit for its first token.",
    )


# ---- memory


@cache
def _sizes(name: str, letters: str, pictures: int) -> Sizes | None:
    """Limits and caches of an instance of the role on an A100; None if the model does not fit. `pictures`: the most of
    a request."""
    config = EngineConfig(dtype="float16")
    config = replace(config, media=replace(config.media, max_images=pictures))
    role = Role.parse(letters)
    try:
        return sizes_of(spec_of(MODELS[name]), config, kind_of(MODELS[name], A100), role, [role])
    except ResourceError:
        return None


def _features(name: str, letters: str, pictures: int = _MANY) -> int:
    sizes = _sizes(name, letters, pictures)
    return 0 if sizes is None else sizes.plan.num_image_blocks * sizes.config.cache.image_block_size


def _kv_tokens(name: str, letters: str, pictures: int) -> int:
    sizes = _sizes(name, letters, pictures)
    return 0 if sizes is None else sizes.plan.num_kv_blocks * sizes.config.cache.block_size


def _tokens(name: str, size: tuple[int, int]) -> tuple[int, int]:
    """Features of one picture, in whole blocks of the image cache, and in the prompt."""
    vision = spec_of(MODELS[name]).vision
    assert vision is not None
    items = vision.plan_image(*size).items
    return sum(-(-item.num_tokens // 64) * 64 for item in items), sum(item.num_tokens for item in items)


def max_pictures() -> Result:
    rows: list[tuple[Cell, ...]] = []
    for name, model in MODELS.items():
        for size, pixels in SIZES.items():
            held, tokens = _tokens(name, pixels)
            context = (spec_of(model).max_model_len - TEXT) // tokens
            together, apart = (min(_features(name, role) // held, context) for role in ("EP", "E"))
            rows.append((name, size, together, apart, context))
    bound = sum(row[3] == row[4] for row in rows)
    return Result(
        table(("model", "picture", "DistServe", "EPD", "context"), rows, keys=2),
        f"the context and not memory binds in {bound} of {len(rows)} rows, for an encode here takes the memory of a "
        f"step "
        "and not of a request.",
    )


def batches() -> Result:
    """Requests of ten pictures that the caches hold."""
    rows: list[tuple[Cell, ...]] = []
    for name, model in MODELS.items():
        vision = spec_of(model).vision
        assert vision is not None
        for size, pixels in SIZES.items():
            held, tokens = _tokens(name, pixels)
            of_features = {role: _features(name, role) // (10 * held) for role in ("EP", "E", "P")}
            of_kv = {role: _kv_tokens(name, role, _MANY) // (10 * tokens + TEXT) for role in ("EP", "P")}
            both = [min(of_features[role], of_kv[role]) for role in ("EP", "P")]
            rows.append((name, size, len(vision.plan_image(*pixels).items), both[0], of_features["E"], both[1]))
    gain = max(row[4] / row[3] for row in rows if isinstance(row[3], int) and isinstance(row[4], int) and row[3])
    return Result(
        table(("model", "picture", "patches", "E, P together", "E", "P"), rows, keys=2),
        f"an encoder alone holds up to {gain:.3g} times the requests of one that prefills too.",
    )


def kv_sizes() -> Result:
    """KV-cache sizes by the memory that weights leave on an A100."""
    rows: list[tuple[Cell, ...]] = []
    for name, model in MODELS.items():
        tokens = _tokens(name, LARGEST)[1]
        for count in (5, 10, 20, 40, 80):
            cells: list[Cell] = []
            for letters in ("EP", "P"):
                sizes = _sizes(name, letters, count)
                if count * tokens + TEXT > spec_of(model).max_model_len:
                    cells.append("context")
                elif sizes is None:
                    cells.append("memory")
                else:
                    left = sizes.config.cache.gpu_memory_utilization * kind_of(model, A100).memory_bytes
                    cells.append(100 * sizes.plan.kv_bytes / (left - sizes.plan.weights_bytes))
            rows.append((name, count, *cells))
    return Result(
        table(("model", "pictures", "DistServe %", "EPD %"), rows, keys=2),
        "no row is out of memory: pictures of one request go through the tower in steps of a fixed size.",
    )


def savings() -> Result:
    """Memory of weights, and of all but free memory, by role on an A100 (section 5.3)."""
    rows: list[tuple[Cell, ...]] = []
    for name in MODELS:
        weights = {letters: _weights(name, letters) for letters in ("EP", "E", "P")}
        saved = [100 * (1 - weights[letters] / weights["EP"]) for letters in ("E", "P")]
        rows.append((name, *(number / GB for number in weights.values()), *saved))
    return Result(
        table(("model", "E and P GB", "E GB", "P GB", "E saves %", "P saves %"), rows),
        f"the weights of an encoder are {min(number_of(row[4]) for row in rows):.1f} to "
        f"{max(number_of(row[4]) for row in rows):.1f} % smaller than those of both stages.",
    )


GB = 1e9


def _weights(name: str, letters: str) -> int:
    sizes = _sizes(name, letters, 8)
    assert sizes is not None
    return sizes.plan.weights_bytes


# ---- serving

# (layout, schedule) by name. DistServe and vLLM are this engine in their topologies, and with their schedules:
# an encode and the prefill behind it one after the other, prompts before decodes.
_DEPLOYMENTS = {
    "EPD": ("5E2P1D", ""),
    "DistServe": ("7EP1D", ""),
    "vLLM": ("8EPD", ""),
    "DistServe, one lane": ("7EP1D", "one lane"),
    "vLLM, prefill first": ("8EPD", "prefill first"),
}


_RATES = {"MiniCPM-V 2.6": (0.8, 1.6), "InternVL2-8B": (0.2, 0.4), "InternVL2-26B": (0.1, 0.2)}  # for each device
_FEWER = (60, 200)  # requests of a load: each is many encodes


def attainment(scale: Scale) -> Result:
    rows: list[tuple[Cell, ...]] = []
    kept = dict.fromkeys(_DEPLOYMENTS, 0)
    for name in scale.some(tuple(MODELS), 2):
        for count in scale.some((2, 8), 1):
            setup = Setup(replace(scale, requests_of_load=_FEWER), MODELS[name], (A100,), f"epd-{count}").with_limits(
                *LIMITS[name][count]
            )
            for rate in _RATES[name]:
                runs = {
                    method: replace(setup, schedule=schedule).at_rate(text, 8 * rate)
                    for method, (text, schedule) in _DEPLOYMENTS.items()
                }
                behind = listed([method for method, one in runs.items() if one.falls_behind])
                rows.append((name, count, rate, *(one.attainment for one in runs.values()), behind))
                for method, one in runs.items():
                    kept[method] += one.keeps_limits
    told = [f"{method} {number}" for method, number in kept.items()]
    return Result(
        table(("model", "pictures", "rate per GPU", *(f"{name} %" for name in _DEPLOYMENTS), "falls behind"), rows, 3),
        f"of {len(rows)} loads both limits are kept, without falling behind, in: {listed(told)}.",
    )


# (layout, share of the load that it gets, parallel encodes, schedule)
_ONE_AT_A_TIME = (
    ("5E2P1D", 1.0, True, ""),
    ("5E2P1D", 1.0, False, ""),
    ("7EP1D", 1.0, True, ""),
    ("7EP1D", 1.0, True, "one lane"),
)


def first_tokens(scale: Scale) -> Result:
    rows: list[tuple[Cell, ...]] = []
    gains: dict[str, float] = {}
    for name, rate in (("MiniCPM-V 2.6", 0.25), ("InternVL2-8B", 0.08), ("InternVL2-26B", 0.08)):
        for count in (2, 8):
            setup = Setup(replace(scale, requests_of_load=(12, 12)), MODELS[name], (A100,), f"epd-{count}")
            setup = setup.with_limits(*LIMITS[name][count])
            medians = [
                replace(setup, parallel_encodes=parallel, schedule=schedule).at_rate(text, rate * share).ttft_ms
                for text, share, parallel, schedule in _ONE_AT_A_TIME
            ]
            less = [100 * (1 - number_of(medians[0]) / number_of(other)) for other in medians]
            rows.append((name, count, *medians, less[1], less[2], less[3]))
            gains[f"{name}, {count} pictures"] = less[1]
    most = max(rows, key=lambda row: number_of(row[7]))
    steepest = max(gains, key=lambda load: gains[load])
    columns = ("model", "pictures", "EPD ms", "not parallel ms", "DistServe ms", "DistServe, one lane ms")
    less_than = ("less than not parallel %", "less than DistServe %", "less than one lane %")
    return Result(
        table((*columns, *less_than), rows, keys=2),
        f"encoders apart take up to {number_of(most[7]):.0f} % off the median time to the first token ({most[0]}, "
        f"{most[1]} pictures), and {max(number_of(row[8]) for row in rows):.0f} % beside one lane; parallel encodes "
        f"alone give at most {gains[steepest]:.0f} % ({steepest}), for a prefill here begins with the first features.",
    )


_OFFLINE = (Setting("scheduler", "max_num_seqs", 128),)


def offline(scale: Scale) -> Result:
    rows: list[tuple[Cell, ...]] = []
    model = MODELS["MiniCPM-V 2.6"]

    def rate_of(load: str, count: int, text: str, *settings: Setting) -> Cell:
        runs = Setup(scale, model, (A100,), load).at_once(text, count, *_OFFLINE, *settings)
        return runs.spread(lambda one: one.requests_per_s)

    layouts = [f"{encoders}E{7 - encoders}P1D" for encoders in scale.some((1, 2, 3, 4, 5), 3)]
    for text in (*layouts, "7EP1D"):
        rows.append(("ratio", text, rate_of("epd-1", 50, text)))
    best = leaders({str(row[1]): row[2] for row in rows})
    for count in scale.some((1, 2, 4, 8), 2):
        for text in ("5E2P1D", "7EP1D"):
            rows.append((f"pictures: {count}", text, rate_of(f"epd-{count}", 10, text)))
    for budget in (1, 2, 8):
        setting = Setting("scheduler", "image_budget", budget * 1024 * 10)
        rows.append((f"encodes of: {budget}", "5E2P1D", rate_of("epd-1", 50, "5E2P1D", setting)))
    return Result(
        table(("part", "deployment", "requests/s"), rows, keys=2),
        f"with one picture a request {listed(best)} {'is' if len(best) == 1 else 'are'} the fastest, "
        f"{max(number_of(row[2]) for row in rows[: len(layouts) + 1]):.3g} requests a second.",
    )
