"""What the start-up summary and the line below an answer say about limits."""

from __future__ import annotations

import math

import pytest

from hydra_engine.cli.summary import limit_lines, seconds
from hydra_engine.cli.timeline import timeline_lines
from hydra_engine.core.messages import LimitBudget, LimitSummary
from hydra_engine.core.outputs import SloReport, StageSpan

BUDGETS = (LimitBudget(1, 0.0123, 480, math.inf), LimitBudget(8, 0.0174, 320, 0.0312), LimitBudget(64, 0.0391, 0, 0.0))


def test_no_limits_no_lines() -> None:
    assert limit_lines(LimitSummary()) == []


def test_limits_budgets_and_where_they_come_from() -> None:
    limits = LimitSummary(0.04, 1.0, "measured just now in 9.1 s", BUDGETS)
    assert limit_lines(limits) == [
        "  latency      40 ms between tokens, 1 s to the first token; costs: measured just now in 9.1 s",
        "  budgets      beside 1 decode (12.3 ms alone): 480 prefill tokens, or vision all along",
        "               beside 8 decodes (17.4 ms alone): 320 prefill tokens, or 31.2 ms of vision",
        "               beside 64 decodes (39.1 ms alone): 0 prefill tokens, or 0 ms of vision",
    ]


def test_a_model_without_vision_has_no_vision() -> None:
    lines = limit_lines(LimitSummary(tpot_limit_s=0.04, budgets=(LimitBudget(1, 0.01, 64),)))
    assert lines[-1].endswith("64 prefill tokens")


def test_a_limit_out_of_reach_is_said() -> None:
    limits = LimitSummary(0.01, warnings=("tpot_slo 10 ms cannot be kept here: one request alone takes 12.3 ms",))
    assert limit_lines(limits) == [
        "  latency      10 ms between tokens",
        "  note         tpot_slo 10 ms cannot be kept here: one request alone takes 12.3 ms",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0005, "0.5 ms"), (0.04, "40 ms"), (0.9994, "999 ms"), (0.9996, "0.9996 s"), (1, "1 s"), (3599, "3599 s")],
)
def test_durations_as_people_write_them(value: float, text: str) -> None:
    assert seconds(value) == text


SPANS = (StageSpan("prefill", 0.0, 0.1), StageSpan("decode", 0.1, 0.5))


def test_the_verdict_is_the_last_line() -> None:
    slo = SloReport(1.0, 0.04, True, False, 7, 23, "encode of request 5")
    lines = timeline_lines(SPANS, slo)
    assert [line.split()[0] for line in lines[:-1]] == ["prefill_wait", "prefill", "decode"]
    assert lines[-1] == (
        "limits       first token within 1 s: met · 90 % of gaps within 40 ms: missed (7 of 23 late) · "
        "encode of request 5"
    )


def test_verdicts_name_only_the_limits_there_were() -> None:
    assert not any(line.startswith("limits") for line in timeline_lines(SPANS, SloReport()))
    (line,) = timeline_lines((), SloReport(tpot_limit_s=0.04))
    assert line == "limits       90 % of gaps within 40 ms: not known"
