"""Budgets of one step: the fixed ones, and those that follow from a limit, against a search of everything."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.scheduler.budget import Budgets, PendingWork, StepBudget
from hydra_engine.scheduler.latency.latency_budget import LatencyBudgets
from hydra_engine.scheduler.latency.pending_limits import stretch
from tests.examples import examples
from tests.scheduler.surface import make_surface

LIMIT = 0.04
NEVER_LATE = 1 + 1e-6  # rounding
MANY_SLICES = 10**12  # vision pauses at once


def make_budgets(surface: CostSurface | None = None, *, num_slices: int = MANY_SLICES, **changes) -> LatencyBudgets:
    config = SchedulerConfig(**({"tpot_slo": LIMIT, "token_budget": 2048, "image_budget": 8192} | changes))
    return LatencyBudgets(surface or make_surface(), config, num_slices=num_slices)


def decoding(count: int = 16, **changes) -> PendingWork:
    values = {"now": 100.0, "num_decodes": count, "decode_context": 500 * count, "tpot_limit_s": LIMIT}
    return PendingWork(
        **(values | {"stretch_s": LIMIT, "num_prefills": 1 if "prefill_tokens" in changes else 0} | changes)
    )


def load_of(pending: PendingWork, tokens: int) -> LanguageLoad:
    pairs = tokens * pending.prefill_context + tokens * (tokens + 1) / 2
    chunks = 1 if tokens else 0
    return LanguageLoad(pending.num_decodes, pending.decode_context, tokens, pairs, chunks)


@st.composite
def surfaces(draw: st.DrawFn) -> CostSurface:
    def curve(knots: tuple[int, ...], low: float, high: float) -> Curve:
        slopes = draw(st.lists(st.floats(0, high), min_size=len(knots) - 1, max_size=len(knots) - 1))
        seconds = [draw(st.floats(low, 10 * low))]
        for slope, first, last in zip(slopes, knots, knots[1:], strict=False):
            seconds.append(seconds[-1] + slope * (last - first))
        return Curve(knots, tuple(seconds))

    return CostSurface(
        rows=curve((1, 8, 64, 256, 2048), 0.002, 3e-4),
        per_key_s=draw(st.floats(0, 1e-6)),
        per_pair_s=draw(st.floats(0, 1e-8)),
        per_chunk_s=draw(st.floats(0, 1e-3)),
        patches=curve((64, 512, 4096), 0.001, 1e-4),
        per_patch_pair_s=0.0,
        decode_slowdown=draw(st.floats(1, 3)),
        prefill_slowdown=draw(st.floats(1, 3)),
        vision_slowdown=draw(st.floats(1, 3)),
    )


@st.composite
def demands(draw: st.DrawFn, *, vision: bool) -> PendingWork:
    count = draw(st.integers(1, 64))
    return decoding(
        count,
        decode_context=count * draw(st.integers(1, 2000)),
        prefill_tokens=draw(st.integers(1, 3000)),
        prefill_context=draw(st.integers(0, 2000)),
        encode_patches=draw(st.integers(1, 20000)) if vision else 0,
    )


class TestFixed:
    def test_decodes_count_into_the_token_budget(self) -> None:
        budgets = Budgets(SchedulerConfig(token_budget=100, image_budget=50))
        assert budgets.step_budget(decoding(30, prefill_tokens=1000))[:2] == (70, math.inf)
        assert budgets.step_budget(decoding(130)).tokens == 0
        assert budgets.max_patches() == 50

    def test_it_reports_what_it_does(self) -> None:
        budgets = Budgets(SchedulerConfig(token_budget=100, image_budget=50))
        for tokens, used in ((1000, 70), (1000, 60), (10, 10)):
            budget = budgets.step_budget(decoding(30, prefill_tokens=tokens))
            budgets.on_language(LanguageLoad(30, 0, used), budget, duration_s=1.0, gap_s=1.0, vision_s=0.0)
        budgets.on_language(LanguageLoad(0, 0, 100), budget, duration_s=1.0, gap_s=1.0, vision_s=0.0)
        budgets.on_vision(VisionLoad(10))
        report = budgets.report()
        assert (report.decode_steps, report.full_steps, report.late_steps) == (3, 1, 0)
        assert (report.token_budget, report.image_budget, report.vision_s, report.tpot_limit_s) == (70, 50, -1.0, 0.0)
        assert budgets.predict(LanguageLoad(1)) is None


class TestPrefillBesideDecodes:
    @given(surfaces(), demands(vision=False))
    def test_it_is_the_most_that_the_limit_allows(self, surface: CostSurface, pending: PendingWork) -> None:
        budget = make_budgets(surface).step_budget(pending)
        want = min(pending.prefill_tokens, 2048 - pending.num_decodes)
        allowed = [t for t in range(want + 1) if surface.language_s(load_of(pending, t)) <= LIMIT / NEVER_LATE]
        possible = [t for t in range(want + 1) if surface.language_s(load_of(pending, t)) <= LIMIT * NEVER_LATE]
        assert max(allowed, default=0) <= budget.tokens <= max(possible, default=0)
        assert budget.more_tokens == (budget.tokens < want)

    def test_answers_do_not_depend_on_what_was_asked_before(self) -> None:
        """The search starts where the latest one ended."""
        used = make_budgets()
        for tokens in (3000, 7, 400, 2500, 900, 1, 1200):
            for count in (60, 1, 30):
                pending = decoding(count, prefill_tokens=tokens, num_prefills=2, encode_patches=4000)
                assert used.step_budget(pending) == make_budgets().step_budget(pending)

    def test_the_configured_budget_is_an_upper_bound(self) -> None:
        budget = make_budgets(token_budget=64).step_budget(decoding(16, prefill_tokens=3000))
        assert budget.tokens == 48
        assert make_budgets(token_budget=64).step_budget(decoding(64, prefill_tokens=3000)).tokens == 0

    def test_many_short_prompts_cost_more_than_a_long_one(self) -> None:
        surface = make_surface(per_chunk_s=0.001)
        one = make_budgets(surface).step_budget(decoding(prefill_tokens=3000))
        many = make_budgets(surface).step_budget(decoding(prefill_tokens=3000, num_prefills=100))
        tokens = many.tokens
        chunks = math.ceil(tokens * 100 / 3000)
        assert tokens < one.tokens - 100
        predicted = surface.language_s(replace(load_of(decoding(prefill_tokens=3000), tokens), num_chunks=chunks))
        assert predicted == pytest.approx(LIMIT, abs=0.001)

    @pytest.mark.parametrize(
        "pending", [PendingWork(now=0.0, prefill_tokens=9999, num_prefills=3, encode_patches=4096)]
    )
    def test_without_decodes_prefill_and_vision_are_free(self, pending: PendingWork) -> None:
        budget = make_budgets().step_budget(pending)
        assert budget[:2] == (2048, math.inf)
        unlimited = pending._replace(num_decodes=8, tpot_limit_s=math.inf)
        assert make_budgets().step_budget(unlimited)[:2] == (2040, math.inf)

    def test_the_tightest_limit_of_a_request_counts(self) -> None:
        loose, tight = (decoding(prefill_tokens=3000, tpot_limit_s=limit) for limit in (0.04, 0.02))
        assert make_budgets().step_budget(tight).tokens < make_budgets().step_budget(loose).tokens / 2


@given(surfaces())
def test_without_a_vision_lane_the_image_budget_is_the_configured_one(surface: CostSurface) -> None:
    """An instance that encodes nothing has no measured vision steps: they take no time."""
    surface = replace(surface, patches=Curve((0.0,), (0.0,)))
    budgets = make_budgets(surface)
    before = budgets.max_patches()
    budgets.on_vision(VisionLoad(100, 10_000.0))
    assert budgets.max_patches() == before > 0


class TestBothLanes:
    @given(surfaces(), demands(vision=True))
    def test_the_step_stays_within_the_limit_and_is_full(self, surface: CostSurface, pending: PendingWork) -> None:
        budget = make_budgets(surface).step_budget(pending)
        work = surface.vision_s(VisionLoad(pending.encode_patches)) * surface.vision_slowdown
        least = min(work, 0.05 * LIMIT)
        took = surface.corun_s(load_of(pending, budget.tokens), budget.vision_s)
        if budget.tokens or budget.vision_s > least:
            assert took <= LIMIT * NEVER_LATE
        assert budget.vision_s >= least
        if budget.more_tokens and budget.vision_s > least:
            one_more = load_of(pending, budget.tokens + 1)
            assert surface.corun_s(one_more, min(budget.vision_s, work)) > LIMIT / NEVER_LATE
        if not budget.more_tokens and budget.more_vision and budget.vision_s > least:
            assert took == pytest.approx(LIMIT, rel=1e-6)

    @given(surfaces(), demands(vision=True))
    def test_the_split_is_that_of_a_search_of_everything(self, surface: CostSurface, pending: PendingWork) -> None:
        budget = make_budgets(surface).step_budget(pending)
        want = min(pending.prefill_tokens, 2048 - pending.num_decodes)
        work = surface.vision_s(VisionLoad(pending.encode_patches)) * surface.vision_slowdown
        base = surface.language_s(load_of(pending, 0))
        backlog = (surface.language_s(load_of(pending, want)) - base) * pending.prefill_tokens / want
        share = min(0.8, max(0.2, backlog / (backlog + work)))

        def best(slack: float) -> int:
            found = [0]
            for tokens in range(want + 1):
                load = load_of(pending, tokens)
                fair = surface.language_s(load) - base <= share * (LIMIT - base) * slack
                if (fair and surface.corun_s(load, min(work, 0.05 * LIMIT)) <= LIMIT * slack) or (
                    surface.corun_s(load, work) <= LIMIT * slack
                ):
                    found.append(tokens)
            return max(found)

        assert best(1 / NEVER_LATE) <= budget.tokens <= best(NEVER_LATE)

    @given(surfaces(), demands(vision=True), st.floats(0.5, 1))
    def test_a_tighter_limit_never_allows_more(
        self, surface: CostSurface, pending: PendingWork, tighter: float
    ) -> None:
        loose = make_budgets(surface).step_budget(pending)
        tight = make_budgets(surface).step_budget(pending._replace(tpot_limit_s=LIMIT * tighter))
        assert tight.tokens <= loose.tokens
        took = [surface.corun_s(load_of(pending, budget.tokens), budget.vision_s) for budget in (tight, loose)]
        assert took[0] <= took[1] * NEVER_LATE

    @given(surfaces(), demands(vision=True), st.floats(0.5, 1))
    def test_without_prefill_a_tighter_limit_never_allows_more_vision(
        self, surface: CostSurface, pending: PendingWork, tighter: float
    ) -> None:
        pending = pending._replace(prefill_tokens=0, num_prefills=0)
        tight = make_budgets(surface).step_budget(pending._replace(tpot_limit_s=LIMIT * tighter))
        assert tight.vision_s <= make_budgets(surface).step_budget(pending).vision_s * NEVER_LATE

    def test_what_fits_is_not_restricted(self) -> None:
        budget = make_budgets().step_budget(decoding(prefill_tokens=50, encode_patches=20000))
        assert budget == StepBudget(50, math.inf, LIMIT, LIMIT)

    def test_what_one_side_cannot_use_goes_to_the_other(self) -> None:
        surface = make_surface()
        small_images = make_budgets(surface).step_budget(decoding(prefill_tokens=9999, encode_patches=64))
        no_images = make_budgets(surface).step_budget(decoding(prefill_tokens=9999))
        assert small_images.tokens > 0.9 * no_images.tokens
        assert small_images.more_tokens
        assert not small_images.more_vision
        few_tokens = make_budgets(surface).step_budget(decoding(200, prefill_tokens=30, encode_patches=10000))
        crowd = make_budgets(surface).step_budget(decoding(200, prefill_tokens=9999, encode_patches=10000))
        assert few_tokens.tokens == 30
        assert few_tokens.vision_s > crowd.vision_s

    def test_a_picture_that_comes_during_a_full_step_waits_for_its_end(self) -> None:
        budget = make_budgets().step_budget(decoding(prefill_tokens=9999))
        assert budget.vision_s < 0.001
        assert make_budgets().step_budget(decoding(prefill_tokens=10)).vision_s == math.inf

    def test_a_vision_lane_that_cannot_pause_is_reckoned_with_all_along(self) -> None:
        surface, pending = make_surface(), decoding(prefill_tokens=9999, encode_patches=99999)
        budget = make_budgets(surface, num_slices=0).step_budget(pending)
        assert budget.vision_s == math.inf
        assert surface.corun_s(load_of(pending, budget.tokens), math.inf) <= LIMIT * NEVER_LATE
        assert surface.corun_s(load_of(pending, budget.tokens + 1), math.inf) > LIMIT


class TestNobodyStarves:
    @given(surfaces(), demands(vision=True), st.floats(0.001, 0.02))
    def test_vision_has_a_twentieth_of_the_limit(
        self, surface: CostSurface, pending: PendingWork, limit: float
    ) -> None:
        work = surface.vision_s(VisionLoad(pending.encode_patches)) * surface.vision_slowdown
        budget = make_budgets(surface).step_budget(pending._replace(tpot_limit_s=limit))
        assert budget.vision_s >= min(work, 0.05 * limit)

    @settings(max_examples=examples(30))
    @given(surfaces(), demands(vision=True), st.floats(0.001, 0.02), st.booleans())
    def test_a_prefill_gets_a_chunk_within_65_steps(
        self, surface: CostSurface, pending: PendingWork, limit: float, at_risk: bool
    ) -> None:
        """Decodes alone may take longer than the limit, and all the slack may go to a picture."""
        budgets = make_budgets(surface)
        due = {"ttft_due_s": pending.now + 0.001, "due_patches": 5000} if at_risk else {}
        pending = pending._replace(tpot_limit_s=limit, stretch_s=limit, **due)
        granted = [budgets.step_budget(pending).tokens for _ in range(65 * 3)]
        for first in range(65):
            assert max(granted[first : first + 65]) >= min(16, pending.prefill_tokens, 2048 - pending.num_decodes)

    def test_that_chunk_takes_half_a_limit(self) -> None:
        surface, pending = make_surface(), decoding(64, tpot_limit_s=0.005, prefill_tokens=3000)
        budgets = make_budgets(surface)
        tokens = [budgets.step_budget(pending).tokens for _ in range(65)]
        assert tokens[:64] == [0] * 64
        more = surface.language_s(load_of(pending, tokens[64])) - surface.language_s(load_of(pending, 0))
        assert more == pytest.approx(0.0025, rel=0.1)


class TestFirstTokenAtRisk:
    def test_prefill_takes_all_the_slack_and_the_step_is_stretched(self) -> None:
        surface = make_surface()
        pending = decoding(prefill_tokens=3000, encode_patches=99999, due_tokens=3000, ttft_due_s=100.2)
        normal = make_budgets(surface).step_budget(pending._replace(ttft_due_s=math.inf))
        unstretched = make_budgets(surface).step_budget(pending)
        stretched = make_budgets(surface).step_budget(pending._replace(stretch_s=0.1))
        assert normal.tokens < unstretched.tokens < stretched.tokens
        budgets, load = make_budgets(surface), LanguageLoad(num_decodes=pending.num_decodes)
        for budget in (unstretched, stretched):
            budgets.on_language(load, budget, duration_s=0.01, gap_s=0.01, vision_s=0.0)
        assert budgets.report().stretched_steps == 1
        assert unstretched.vision_s == pytest.approx(0.05 * LIMIT, rel=0.1)
        assert (unstretched.target_s, stretched.target_s) == (LIMIT, 0.1)
        assert surface.corun_s(load_of(pending, stretched.tokens), stretched.vision_s) == pytest.approx(0.1, rel=0.01)

    def test_vision_takes_all_the_slack_where_the_request_waits_for_a_picture(self) -> None:
        pending = decoding(200, decode_context=400_000, prefill_tokens=3000, encode_patches=30000, due_patches=9000)
        normal = make_budgets().step_budget(pending)
        urgent = make_budgets().step_budget(pending._replace(ttft_due_s=100.2))
        assert normal.tokens > 0
        assert urgent.tokens == 0
        assert urgent.vision_s > 1.2 * normal.vision_s

    def test_a_step_lasts_at_most_four_limits(self) -> None:
        pending = decoding(prefill_tokens=3000, due_tokens=3000, ttft_due_s=100.01, stretch_s=5.0)
        assert make_budgets(token_budget=9999).step_budget(pending).target_s == 4 * LIMIT

    @pytest.mark.parametrize("due", [99.0, 110.0, math.inf], ids=["missed", "in time", "none"])
    def test_no_step_is_stretched_where_it_does_not_help(self, due: float) -> None:
        pending = decoding(prefill_tokens=3000, due_tokens=3000, ttft_due_s=due, stretch_s=1.0)
        assert make_budgets().step_budget(pending).target_s == LIMIT

    @given(demands(vision=True), st.floats(0, 0.3), st.floats(1, 6))
    def test_stretching_never_takes_from_prefill_and_vision_together(
        self, pending: PendingWork, left: float, stretched: float
    ) -> None:
        surface = make_surface()
        due = {"ttft_due_s": pending.now + left, "due_tokens": 500, "due_patches": 500}
        urgent = pending._replace(**due, stretch_s=stretched * LIMIT)
        took = [
            surface.corun_s(load_of(pending, budget.tokens), budget.vision_s)
            for budget in (make_budgets(surface).step_budget(pending), make_budgets(surface).step_budget(urgent))
        ]
        assert took[0] <= took[1] * 1.01 or took[0] <= LIMIT * NEVER_LATE


class TestStretch:
    def test_without_decodes_there_is_no_bound(self) -> None:
        empty = np.zeros(0)
        assert stretch(empty, empty, empty.astype(np.int64), empty.astype(np.int64)) == math.inf

    def test_the_decode_with_the_least_to_spare_decides(self) -> None:
        limits, elapsed = np.array([0.04, 0.04, math.inf]), np.array([40 * 0.03, 99 * 0.01, 5.0])
        counts, late = np.array([40, 99, 1]), np.array([0, 0, 1])
        assert stretch(limits, elapsed, counts, late) == pytest.approx(41 * 0.04 - 1.2)
        assert stretch(limits, elapsed, np.array([10, 99, 1]), late) == 0.04  # one late gap of eleven is too many
        assert stretch(limits, elapsed, counts, np.array([2, 0, 0])) == 0.04  # three of 41 too

    def test_its_arguments_stay_as_they_are(self) -> None:
        arrays = np.array([0.04]), np.array([0.1]), np.array([3]), np.array([0])
        before = [array.copy() for array in arrays]
        stretch(*arrays)
        assert all((a == b).all() for a, b in zip(arrays, before, strict=True))

    @given(st.lists(st.floats(0.01, 0.1), max_size=200), st.floats(0.02, 0.08))
    def test_taking_all_of_it_keeps_the_limit(self, gaps: list[float], limit: float) -> None:
        late = sum(gap > limit for gap in gaps)
        room = stretch(np.array([limit]), np.array([sum(gaps)]), np.array([len(gaps)]), np.array([late]))
        assert room >= limit
        if room > limit:
            assert (late + 1) / (len(gaps) + 1) <= 0.05
            assert (sum(gaps) + room) / (len(gaps) + 1) <= limit * NEVER_LATE


class TestImageBudget:
    @given(surfaces(), st.integers(1, 20000), st.floats(0.001, 1), st.integers(1, 32))
    def test_it_is_the_smallest_batch_that_is_nearly_as_efficient_as_the_best(
        self, surface: CostSurface, highest: int, limit: float, num_slices: int
    ) -> None:
        budgets = make_budgets(surface, num_slices=num_slices, image_budget=highest, tpot_slo=limit)
        seconds = [surface.vision_s(VisionLoad(count)) * surface.vision_slowdown for count in range(highest + 1)]
        best = max(count / seconds[count] for count in range(1, highest + 1))
        efficient = [count for count in range(1, highest + 1) if count >= 0.95 * best * seconds[count]]
        short = [count for count in range(1, highest + 1) if seconds[count] / num_slices <= 0.25 * limit]
        assert budgets.max_patches() == pytest.approx(min(efficient[0], max(short, default=1)), abs=1)

    def test_without_a_limit_it_is_as_configured(self) -> None:
        assert make_budgets(tpot_slo=None).max_patches() == 8192
        assert make_budgets(tpot_slo=None, image_budget=0).max_patches() == 0
        assert make_budgets(image_budget=0).max_patches() == 0

    def test_it_learns_how_large_pictures_are(self) -> None:
        budgets = make_budgets(make_surface(per_patch_pair_s=1e-8), num_slices=4)
        before = budgets.max_patches()
        budgets.on_vision(VisionLoad(4096, 4096**2))
        assert budgets.max_patches() < before / 2


def test_a_prediction_is_what_the_surface_says_until_steps_say_otherwise() -> None:
    budgets, load = make_budgets(), LanguageLoad(8, 4000)
    alone = make_surface().language_s(load)
    assert budgets.predict(load) == pytest.approx(alone)
    budget = budgets.step_budget(decoding(8))
    for _ in range(100):
        budgets.on_language(load, budget, duration_s=1.4 * alone, gap_s=1.4 * alone, vision_s=0.0)
    assert budgets.predict(load) > 1.1 * alone


def test_step_times_by_size_before_any_step_are_what_the_surface_says() -> None:
    surface = make_surface()
    speeds = make_budgets(max_num_seqs=64, token_budget=2048, image_budget=4096).speeds()
    assert speeds.decode[6] == pytest.approx(surface.language_s(LanguageLoad(48, 48 * 512)))
    assert speeds.prefill[10] == pytest.approx(surface.language_s(LanguageLoad(0, 0, 768, 768 * 769 / 2, 1)))
    assert speeds.vision[10] == pytest.approx(surface.vision_s(VisionLoad(768)))
    assert (min(speeds.decode), max(speeds.decode), max(speeds.prefill), max(speeds.vision)) == (1, 7, 12, 13)
    assert make_budgets(num_slices=0).speeds().vision == {}, "no vision lane"
