"""Prefill beside running decodes without a TPOT limit is cut by measured step times; no other prefill is."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.plans import LanguageLoad, LanguagePlan
from hydra_engine.scheduler.budget import Budgets, PendingWork, StepBudget
from tests.scheduler.sim import Costs, Simulator, config, expected_tokens, make_request
from tests.scheduler.surface import make_surface

PROMPT = 600


def products(decode_s: float, token_s: float) -> CostSurface:
    """A machine on which a step takes `decode_s` and `token_s` for each token of prefill, beside vision four times as
    long."""
    rows = Curve((1, 1025), (decode_s, decode_s + 1024 * token_s))
    return make_surface(
        rows=rows, per_key_s=0.0, per_pair_s=0.0, per_chunk_s=0.0, decode_slowdown=4.0, prefill_slowdown=4.0
    )


CORE = products(0.01, 0.002)


def teach(budgets: Budgets, surface: CostSurface, *loads: LanguageLoad, vision_s: float = 0.0) -> Budgets:
    for load in loads:
        seconds = surface.corun_s(load, vision_s)
        budgets.on_language(load, StepBudget(0, 0.0), duration_s=seconds, gap_s=seconds, vision_s=vision_s)
    return budgets


def fixed() -> Budgets:
    return Budgets(SchedulerConfig(token_budget=512))


def tokens(budgets: Budgets, waiting: int, *, decodes: int = 1) -> int:
    pending = PendingWork(now=1.0, num_decodes=decodes, prefill_tokens=waiting, num_prefills=1)
    budget = budgets.step_budget(pending)
    assert budget.vision_s == math.inf and budget.more_tokens == (waiting > budget.tokens)
    assert budgets.report().token_budget == budget.tokens
    return budget.tokens


@pytest.mark.parametrize(("decode_s", "most"), [(0.001, 64), (0.01, 64), (0.02, 128), (0.038, 256), (0.2, 511)])
def test_a_chunk_adds_sixteen_decode_steps_at_most_or_is_the_least(decode_s: float, most: int) -> None:
    loads = LanguageLoad(1), LanguageLoad(0, 0, 100), LanguageLoad(1, 0, 200)
    budgets = teach(fixed(), products(decode_s, 0.002), *loads)
    assert tokens(budgets, 1000) == most
    assert tokens(budgets, 60) == 511  # all of it, whatever it takes


def test_prefills_alone_are_as_large_as_configured() -> None:
    budgets = teach(fixed(), CORE, LanguageLoad(1), LanguageLoad(0, 0, 512))
    assert tokens(budgets, 1000, decodes=0) == 512
    assert tokens(budgets, 1000) == 64


def test_a_machine_with_fast_products_cuts_nothing() -> None:
    budgets = teach(fixed(), products(0.01, 1e-4), LanguageLoad(4), LanguageLoad(0, 0, 20), LanguageLoad(4, 0, 300))
    assert tokens(budgets, 5000, decodes=4) == 508


def test_steps_beside_vision_count_where_no_others_are_known() -> None:
    assert tokens(fixed(), 1000) == 511
    loads = LanguageLoad(1), LanguageLoad(1, 0, 64)
    budgets = teach(fixed(), CORE, *loads, vision_s=math.inf)
    assert tokens(budgets, 1000) == 64
    assert tokens(teach(budgets, products(0.02, 0.002), *loads), 1000) == 128


@pytest.mark.parametrize("token_s", [0.002, 2e-5], ids=["slow products", "fast products"])
def test_a_long_prompt_does_not_stop_a_stream_and_all_tokens_stay_the_same(token_s: float) -> None:
    """Sends the prompt twice: beside a stream, and alone after it."""

    def seconds(plan: LanguagePlan) -> float:
        return 0.01 + token_s * sum(len(chunk.token_ids) for chunk in plan.chunks)

    s = Simulator(config=replace(config(), token_budget=512), kv_blocks=600, costs=Costs(language=seconds))
    stream, beside, alone = make_request(1, 40, max_new=60), make_request(2, PROMPT), make_request(3, PROMPT)
    s.submit(stream)
    s.submit(beside, 0.2)
    s.submit(alone, 10.0)
    s.run()
    assert all(s.tokens[request.id] == expected_tokens(request) for request in (stream, beside, alone))
    chunks = {number: [len(c.token_ids) for _, _, plan in s.steps for c in plan.chunks if c.request_id == number]
              for number in (2, 3)}  # fmt: skip
    assert chunks[3] == [512, 88]
    assert chunks[2] == ([64] * 9 + [24] if token_s == 0.002 else [511, 89])
    longest_s = max(after - before for before, after in pairwise(s.token_times[1]))
    assert longest_s <= 0.01 + max(64 * 0.002, 16 * 0.01) + 1e-9
