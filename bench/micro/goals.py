"""The goals of the micro-benchmarks, as data: which rows of which one, what is looked at, what is wanted.

Two steps each: `par` is what is good enough to ship, `moonshot` what would be the best known. Does not know how
anything is measured; `bench/summary/` holds rows against it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

# In the order in which they run: what the others are held against first, what needs no device last.
BENCHES = (
    "ceilings",
    "ring",
    "decode",
    "prefill",
    "encode",
    "profile",
    "layer",
    "attn_decode",
    "attn_prefill",
    "cache_write",
    "quantized",
    "products",
    "colocate",
    "migrate",
    "sched",
    "step_parts",
    "preprocess",
    "frontend",
    "cpu_decode",
)


class Goal(NamedTuple):
    """`what`: a regular expression, found in a row's `what`. `measure`: a path in the row, "seconds.median" or
    "over_peers.torch". `devices`: on which kinds of device it is asked for. Less is better where `moonshot` is below
    `par`."""

    bench: str
    what: str
    measure: str
    par: float
    moonshot: float
    unit: str = ""
    devices: tuple[str, ...] = ("cuda",)

    @property
    def less_is_better(self) -> bool:
        return self.moonshot < self.par

    def met(self, value: float, bound: float) -> bool:
        return value <= bound if self.less_is_better else value >= bound

    def share(self, value: float) -> float:
        """The value as a share of the moonshot: 1 is the moonshot, and more is better for every measure."""
        if value <= 0:
            return 0.0
        return self.moonshot / value if self.less_is_better else value / self.moonshot


class Row(NamedTuple):
    """A row of a document and its goal. `value` is what the goal looks at."""

    bench: str
    what: str
    seconds: float | None
    floor_s: float | None
    sustained_floor_s: float | None
    goal: Goal | None
    value: float | None
    peers: Mapping[str, float]
    made: Mapping[str, Any]  # the document's row

    @property
    def verdict(self) -> str:
        if self.goal is None or self.value is None:
            return ""
        if self.goal.met(self.value, self.goal.moonshot):
            return "moonshot"
        return "par" if self.goal.met(self.value, self.goal.par) else "below par"


ANYWHERE = ("cuda", "cpu")
OF_FLOOR = "of_floor"

# The first goal that fits a row is its goal.
GOALS = (
    Goal("encode", r"^qwen2\.5.* b=[12]$", OF_FLOOR, 1 / 1.8, 1 / 1.12),
    Goal("encode", r"^qwen2-.* b=[12]$", OF_FLOOR, 1 / 1.8, 1 / 1.2),
    Goal("encode", r" b=[1-4]$", OF_FLOOR, 1 / 1.8, 1 / 1.35),
    Goal("encode", r"^qwen2\.5", OF_FLOOR, 1 / 1.3, 1 / 1.12),
    Goal("encode", r"^qwen2-", OF_FLOOR, 1 / 1.3, 1 / 1.2),
    Goal("encode", r"", OF_FLOOR, 1 / 1.3, 1 / 1.13),
    Goal("prefill", r" s of rest$", OF_FLOOR, 0.80, 0.88),  # at the burst clock
    Goal("prefill", r"", "of_sustained_floor", 0.90, 0.97),  # turns without rest come to the power cap
    Goal("decode", r" graph B=1 ", OF_FLOOR, 0.85, 0.93),
    Goal("decode", r"^qwen.* graph B=512 ", OF_FLOOR, 0.85, 1.15),
    Goal("decode", r" graph ", OF_FLOOR, 0.85, 0.90),
    Goal("attn_decode", r" B=(?!1 |2 |4 )", OF_FLOOR, 0.85, 0.92),  # fewer rows do not fill a device
    Goal("cache_write", r" N=\d{4,}$|^image write ", OF_FLOOR, 1 / 1.3, 1 / 1.1),  # fewer tokens are one launch
    Goal("quantized", r" int8 T=(\d|1[0-6])$", OF_FLOOR, 0.75, 0.9),
    Goal("quantized", r" int4 T=(\d|1[0-6])$", OF_FLOOR, 0.6, 0.85),
    Goal("quantized", r" int[48] T=\d{4}$", "over_peers.bfloat16", 0.6, 0.9, "x"),
    Goal("colocate", r", beside, ", "share_of_best", 0.5, 0.75),
    Goal("migrate", r"^map", "p95_us", 1000.0, 150.0, "us", ANYWHERE),
    Goal("migrate", r"^(copy|pull)", OF_FLOOR, 0.8, 0.9, devices=ANYWHERE),
    Goal("migrate", r"^through host memory", OF_FLOOR, 0.6, 0.8),
    Goal("sched", r"^256 running, 64 waiting$", "us", 300.0, 100.0, "us", ANYWHERE),
    Goal("preprocess", r"^640 x 480, CLIP", "ms", 2.0, 1.5, "ms", ANYWHERE),
    Goal("preprocess", r"^640 x 480, Qwen", "ms", 4.0, 1.5, "ms", ANYWHERE),
    Goal("frontend", r"^front$", "us", 31.0, 12.0, "us", ANYWHERE),
    Goal("cpu_decode", r"\bB=1\b", OF_FLOOR, 0.6, 0.9, devices=ANYWHERE),
    Goal("cpu_decode", r"\bB=[248]\b", "over_peers.torch", 1.0, 2.0, "x", devices=ANYWHERE),
)


def goal_of(bench: str, row: Mapping[str, Any], device: str) -> Goal | None:
    """The goal of a row measured on `device` ("cpu", "cuda:0"), None if nothing is asked of it."""
    kind = device.split(":")[0]
    for goal in GOALS:
        if goal.bench == bench and kind in goal.devices and re.search(goal.what, row["what"]):
            return goal if value_of(row, goal.measure) is not None else None
    return None


def value_of(row: Mapping[str, Any], path: str) -> float | None:
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) else None
