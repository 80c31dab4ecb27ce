"""Limits and deadlines of requests in the work that budgets are asked about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hydra_engine.core.request import Slo
from hydra_engine.core.state import RequestState
from hydra_engine.scheduler.budget import PendingWork
from hydra_engine.scheduler.decodes import ReadyDecodes
from hydra_engine.scheduler.latency.pending_limits import with_limits
from hydra_engine.scheduler.requests import RequestTable
from tests.scheduler.sim import Img, make_request
from tests.scheduler.test_pending_work import Asked, Scripted


class ReadsLimits(Scripted):
    def with_limits(
        self, pending: PendingWork, requests: RequestTable, ready: ReadyDecodes, due: RequestState | None
    ) -> PendingWork:
        return with_limits(pending, requests, ready, due)


class Limited(Asked):
    budgets_type = ReadsLimits


def test_the_tightest_limit_of_those_that_decode_counts() -> None:
    s = Limited(tpot_slo=0.05, token_budget=64)
    s.submit(replace(make_request(1, 4, max_new=9), slo=Slo(tpot_s=0.08)))
    s.language(took_s=0.01)
    s.language(took_s=0.01)
    assert s.pending.tpot_limit_s == 0.08
    s.add(2, 4, max_new=9)
    s.language(took_s=0.01)
    assert s.pending.tpot_limit_s == 0.08, "the other one is not in the step yet"
    s.language(took_s=0.01)
    assert s.pending.tpot_limit_s == 0.05


def test_a_decode_with_gaps_to_spare_lets_a_step_be_longer() -> None:
    """Forty gaps of 10 ms under a limit of 30 ms leave 20 ms each, and one late gap is within five percent."""
    s = Limited(tpot_slo=0.03, token_budget=64)
    s.add(1, 4, max_new=60)
    s.language(took_s=0.01)
    for _ in range(40):
        s.language(took_s=0.01)
    s.plan_language()
    assert s.pending.stretch_s == pytest.approx(41 * 0.03 - 40 * 0.01)


def test_the_first_token_that_is_due_next_is_told_with_all_that_goes_before_it() -> None:
    s = Limited(token_budget=4, image_budget=8)
    s.add(1, 12, max_new=1)
    s.language()
    s.submit(replace(make_request(2, 7, max_new=1), slo=Slo(ttft_s=3.0)))
    s.submit(replace(make_request(3, Img(6, 9), 2, max_new=1), slo=Slo(ttft_s=2.0)))
    s.submit(replace(make_request(4, 5, max_new=1), slo=Slo(ttft_s=4.0)))
    s.language()
    d = s.pending
    assert (d.ttft_due_s, d.due_tokens, d.due_patches) == (2.0, 8 + 8, 9)
    s.abort(3)
    s.language()
    d = s.pending
    assert (d.ttft_due_s, d.due_tokens, d.due_patches) == (3.0, 4 + 7, 0)
    s.now = 3.5
    s.language()
    assert s.pending.ttft_due_s == 4.0, "what is late is due at no time"


def test_a_running_request_waits_for_older_ones_only() -> None:
    s = Limited(token_budget=10)
    for number, length in enumerate((14, 9, 30)):
        s.submit(replace(make_request(number, length, max_new=1), slo=Slo(ttft_s=9.0 if number != 1 else 5.0)))
    s.budgets.fixed = 3
    s.language()  # the one that is due first
    s.budgets.fixed = 10
    s.language()
    assert (s.pending.ttft_due_s, s.pending.due_tokens) == (5.0, 6)
