"""Steady-state gain of work beside decodes that never end, from the rates of both, and the best possible gain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.micro import colocate
from bench.micro.colocate import Case, Mode, options
from bench.micro.floors import Ceilings, Work, best_gain
from bench.micro.harness import Report, Seconds, parse
from bench.micro.side_by_side import Beside, Together

CEILINGS = Ceilings(1.0, 1.0, 1.0)
ENCODE, DECODE = Work("encode", 0.9, 0.1), Work("layers", 0.2, 4.0)


def constant(seconds: float) -> Seconds:
    return Seconds(seconds, seconds, seconds, 1)


class Duo:
    """An encode of 1 s and a step of 4 s, which take longer beside each other."""

    def __init__(self, found: Beside) -> None:
        self.found = found
        self.asked: list[float] = []

    def in_turn(self, effort: Any) -> Together:
        return Together(constant(5.0), constant(1.0), constant(4.0))

    def beside(self, seconds: float) -> Beside:
        self.asked.append(seconds)
        return self.found


@pytest.mark.parametrize(
    ("found", "first_slowdown", "decode_slowdown"),
    [
        (Beside(constant(5.6), 10.0, 33, 56.0), 56 / 33, 1.4),
        (Beside(constant(4.1), 100.0, 27, 410.0), 410 / 27, 4.1 / 4),  # pictures starve
    ],
)
def test_the_gain_is_what_both_do_without_end(found: Beside, first_slowdown: float, decode_slowdown: float) -> None:
    flags = ["--device", "cpu", "--seconds", "7", "--beside-only"]
    arguments = parse(None, options, flags)
    report, mode = Report("colocate", arguments, CEILINGS), Mode("64 SMs for decodes", 1)
    case = Case("m encode || decode", lambda: None, {mode: lambda: None}, [ENCODE], [DECODE], {"rows": 8})
    duo: Any = Duo(found)
    subject: Any = SimpleNamespace(name="m")
    colocate._beside(arguments, report, subject, case, {mode: duo})
    (row,) = report.document()["rows"]
    assert row["what"] == "m encode || decode, beside, 64 SMs for decodes" and duo.asked == [7.0]
    assert row["first_slowdown"] == pytest.approx(first_slowdown)
    assert row["decode_slowdown"] == pytest.approx(decode_slowdown)
    assert row["gain"] == pytest.approx(1 / first_slowdown + 1 / decode_slowdown)
    best = best_gain([ENCODE], [DECODE], CEILINGS.rates)
    assert row["gain_best"] == best > 1.5
    assert row["share_of_best"] == pytest.approx((1 - 1 / row["gain"]) / (1 - 1 / best))
    if first_slowdown > 10:
        assert row["gain_bound"] < 1.1, "at the proportion in which they ran hardly anything was possible"
        assert row["share_of_best"] < 0.2, "which is no good result"
