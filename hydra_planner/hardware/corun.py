"""Slowdowns of two steps beside each other on one GPU: measured on one, and scaled to other devices and models.

`corun.json` has steady-state rows of `hydra-engine bench colocate`: encodes or prompts without end beside decodes
without end, on two streams of one process on an H200. What both gain, 1 / slowdown of one + 1 / slowdown of the other,
was 1.03 to 1.10 of taking turns. Tokens went first in these runs, so encodes bore most of it; today both streams have
the same priority there, so both steps of a pair get the factor 2 / gain.

What carries over to other devices and models is the share of the time that the roofline says could be saved, and that
was: (2 - factor) / (2 - bound). Short encodes save more of it than long ones, which fill the device with programs that
stay; short and long are meant beside the step, by the ratio of their seconds. Encodes beside prompts were not measured:
they get the share of long encodes. Pairs of a kind have a bound of nearly 2 and take turns.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import mean

import msgspec

LONG_RATIO = 0.4  # between the ratios that were measured: 0.25 and 0.57 to 0.58


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured pair, seconds alone and slowdowns. `first`: the encode of `pictures`, or the prefill of a `prompt`.
    `bound`: the least factor for these steps by the roofline of the device."""

    file: str
    row: str
    decodes: int
    context: int
    pictures: int
    prompt: int
    first_s: float
    decode_s: float
    first_slowdown: float
    decode_slowdown: float
    bound: float

    @property
    def ratio(self) -> float:
        return self.first_s / self.decode_s

    @property
    def gain(self) -> float:
        return 1 / self.first_slowdown + 1 / self.decode_slowdown

    @property
    def share(self) -> float:
        return (2 - 2 / self.gain) / (2 - self.bound)


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    device: str
    rows: tuple[Row, ...]


class Shares(msgspec.Struct, frozen=True):
    """Shares of what the roofline allows. `ratios`: of the seconds of the encode and the step that stand for short and
    long encodes."""

    ratios: tuple[float, float]
    short_encodes: float
    long_encodes: float
    prompts: float


@cache
def measured() -> Measured:
    return msgspec.json.decode(Path(__file__).with_name("corun.json").read_bytes(), type=Measured)


@cache
def shares() -> Shares:
    rows = measured().rows
    short = [row for row in rows if row.pictures and row.ratio < LONG_RATIO]
    long = [row for row in rows if row.pictures and row.ratio >= LONG_RATIO]
    return Shares(
        (mean(row.ratio for row in short), mean(row.ratio for row in long)),
        mean(row.share for row in short),
        mean(row.share for row in long),
        mean(row.share for row in rows if row.prompt),
    )
