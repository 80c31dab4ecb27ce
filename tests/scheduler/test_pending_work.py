"""Questions to the budgets and reports to them: pending work against plain sums, budgets that hold, results in
order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.core.reports import BudgetReport, StepSpeeds
from hydra_engine.core.request import Slo
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler.budget import PendingWork, StepBudget
from hydra_engine.scheduler.decodes import ReadyDecodes
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.scheduler.step import MAX_SEEN
from tests.examples import examples
from tests.scheduler.sim import Img, Simulator, config, make_request
from tests.scheduler.stepper import Stepper
from tests.scheduler.test_progress import minimum_pools, workloads


@dataclass
class Scripted:
    """Budgets that follow from nothing, or from the number `fixed`, and remember what they were asked and told."""

    seed: int = 0
    most: int = 16
    patches: int = 24
    asked: list[PendingWork] = field(default_factory=list)
    given: list[StepBudget] = field(default_factory=list)
    told: list[tuple[LanguageLoad, StepBudget, float, float, float]] = field(default_factory=list)
    encodes: list[VisionLoad] = field(default_factory=list)
    fixed: int | None = None
    when_asked: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def with_limits(
        self, pending: PendingWork, requests: RequestTable, ready: ReadyDecodes, due: RequestState | None
    ) -> PendingWork:
        return pending

    def step_budget(self, pending: PendingWork) -> StepBudget:
        tokens = self._random.randint(0, self.most)
        if self.fixed is not None:
            tokens = max(0, self.fixed - pending.num_decodes)
        self.asked.append(pending)
        self.when_asked()
        self.given.append(StepBudget(tokens, self._random.choice((0.0, 0.01, math.inf))))
        return self.given[-1]

    def max_patches(self) -> int:
        return self.patches

    def predict(self, load: LanguageLoad) -> float | None:
        return 0.5 if load.num_decodes == 3 else None

    def speeds(self) -> StepSpeeds:
        return StepSpeeds()

    def on_language(self, load, budget, *, duration_s, gap_s, vision_s) -> None:
        self.told.append((load, budget, duration_s, gap_s, vision_s))

    def on_vision(self, load: VisionLoad) -> None:
        self.encodes.append(load)

    def report(self) -> BudgetReport:
        return BudgetReport(token_budget=self.most)


class Asked(Stepper):
    """A stepper whose budgets are known."""

    budgets_type = Scripted

    def __init__(self, **changes) -> None:
        super().__init__(**changes)
        self.budgets = self.budgets_type(fixed=self.config.max_step_tokens)
        self.scheduler._budgets = self.scheduler._language._budgets = self.scheduler._vision._budgets = self.budgets

    @property
    def pending(self) -> PendingWork:
        return self.budgets.asked[-1]


# ---- what is asked


def test_decodes_prefills_and_images_are_counted() -> None:
    s = Asked(token_budget=8, image_budget=8)
    s.add(1, 6, max_new=9)
    s.language()
    s.add(2, 20, max_new=2)
    s.language()
    s.add(3, 3, Img(6, 10), Img(6, 12), 2)
    s.add(4, 5)
    vision = s.plan_vision()
    s.plan_language()
    d = s.pending
    assert (d.num_decodes, d.decode_context) == (1, 8)  # eight keys, its own included
    assert (d.prefill_tokens, d.num_prefills, d.prefill_context) == (13 + 5, 2, 7)
    assert d.encode_patches == 22, "one in flight and one that waits"
    assert (d.tpot_limit_s, d.stretch_s, d.ttft_due_s, d.due_tokens) == (math.inf, math.inf, math.inf, 0)
    s.end_vision(vision)


def test_deadlines_that_passed_are_forgotten_without_budgets_from_limits() -> None:
    s = Stepper()
    for number in range(3):
        s.submit(replace(make_request(number, 4, max_new=1), slo=Slo(ttft_s=0.5)))
    assert len(s.scheduler._requests.ttft_deadlines) == 3
    s.run(4, 5)
    s.add(5, 4)
    s.language()
    assert not s.scheduler._requests.ttft_deadlines


def test_looking_at_demand_costs_no_more_the_more_requests_wait() -> None:
    s = Asked(token_budget=8)
    for number in range(100):
        s.add(number, 5)
    s.plan_language()
    assert s.pending.num_prefills == MAX_SEEN and s.pending.prefill_tokens == 5 * MAX_SEEN


def test_with_every_slot_taken_waiting_requests_are_no_demand() -> None:
    s = Asked(token_budget=8, max_num_seqs=1)
    s.add(1, 3, max_new=5)
    s.add(2, 5)
    s.language()
    s.language()
    assert (s.pending.num_prefills, s.pending.prefill_tokens) == (0, 0)


# ---- what is reported


def test_a_step_comes_back_with_its_load_its_budget_and_how_long_tokens_lie_apart() -> None:
    s = Asked(token_budget=16)
    s.add(1, 6, max_new=9)
    s.language(took_s=0.1)
    s.now += 1.0
    s.add(2, 5, max_new=2)
    plan = s.plan_language()
    assert plan.vision_s == s.budgets.given[-1].vision_s
    s.end_language(plan, took_s=0.2)
    first, second = s.budgets.told
    assert first[0] == LanguageLoad(prefill_tokens=6, prefill_pairs=21.0, num_chunks=1)
    assert first[2:4] == (pytest.approx(0.1), pytest.approx(0.1)), "nobody waited for a token before"
    assert second[0] == LanguageLoad(1, 7, 5, 15.0, 1)
    assert second[1] is s.budgets.given[1] and second[2:4] == (pytest.approx(0.2), pytest.approx(1.2))
    s.add(3, Img(4, 5), Img(4, 6), 1)
    s.vision()
    assert s.budgets.encodes == [VisionLoad(11, 61.0)]


def test_what_a_step_is_expected_to_take_comes_from_the_budgets_or_from_steps_before() -> None:
    s = Asked(token_budget=64)
    for number in range(3):
        s.add(number, 4, max_new=9)
    plan = s.plan_language()
    assert s.scheduler.expected_s(plan) is None
    s.end_language(plan, took_s=0.25)
    assert s.scheduler.expected_s(s.plan_language()) == 0.5
    s = Asked(token_budget=64)
    s.add(1, 4, max_new=9)
    s.language(took_s=0.25)
    assert s.scheduler.expected_s(s.plan_language()) == 0.25
    assert s.scheduler.status().budget == BudgetReport(token_budget=16)


# ---- budgets hold


@settings(max_examples=examples(30), deadline=None)
@given(workloads(), st.integers(0, 99), st.integers(2, 24), st.booleans(), st.sampled_from([0.0, 0.02]))
def test_no_step_holds_more_than_its_budget_and_every_budget_of_a_plan_comes_back_in_order(
    work, seed, most, look_ahead, late_s
) -> None:
    kv_blocks, image_blocks = minimum_pools(work)
    budgets = Scripted(seed, most=most)
    sim = Simulator(
        config(token_budget=10_000, look_ahead=look_ahead),
        kv_blocks=kv_blocks + 4,
        image_blocks=image_blocks,
        late_s=late_s,
        budgets=budgets,
    )
    for time_s, request in work:
        sim.submit(request, time_s)
    sim.run()
    sim.assert_all_right()
    assert len(budgets.told) == len(sim.language_plans)
    order = [id(budget) for budget in budgets.given]
    places = [order.index(id(budget)) for _, budget, *_ in budgets.told]
    assert places == sorted(places)
    for (load, budget, *_), (_, plan) in zip(budgets.told, sim.language_plans, strict=True):
        assert load.num_decodes == len(plan.decodes) and load.num_rows == plan.num_tokens
        allowed = budget.tokens if load.num_decodes else max(1, budget.tokens)
        whole = max((i.num_tokens for r in sim.requests.values() for i in r.images if i.bidirectional), default=1)
        assert load.prefill_tokens <= allowed + whole - 1
        pending = budgets.asked[order.index(id(budget))]
        alone = sum(row.start + 1 for row in plan.chunks if len(row.token_ids) == 1)  # cost what decodes do
        assert pending.num_decodes == load.num_decodes and pending.decode_context == load.decode_context - alone


@settings(max_examples=examples(20), deadline=None)
@given(workloads(), st.booleans())
def test_the_patches_that_wait_are_those_of_images_without_features(work, look_ahead) -> None:
    kv_blocks, image_blocks = minimum_pools(work)
    budgets = Scripted(fixed=16)
    sim = Simulator(config(look_ahead=look_ahead), kv_blocks=kv_blocks, image_blocks=image_blocks, budgets=budgets)
    requests, truth = sim.scheduler._requests, []

    def patches() -> None:
        waiting = sum(
            image.num_patches
            for state in requests.states.values()
            if state.ending is None
            for image, progress in zip(state.request.images, state.images, strict=True)
            if progress == ImageProgress.WAITING
        )
        truth.append(waiting + sum(plan.num_patches for plan in sim.scheduler._vision_plans))

    budgets.when_asked = patches
    for time_s, request in work:
        sim.submit(request, time_s)
    sim.run()
    sim.assert_all_right()
    assert [pending.encode_patches for pending in budgets.asked] == truth
