"""Budgets serving random traffic on machines that are not quite what was measured: steps over the limit, use of the
limit, drift, stalls, and that everybody gets on."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.cost import CostSurface
from hydra_engine.core.plans import LanguageLoad
from hydra_engine.scheduler.budget import Budgets
from hydra_engine.scheduler.latency.latency_budget import LatencyBudgets
from tests.examples import examples
from tests.scheduler.latency.machine import Prompt, SimulatedMachine, Step, Traffic
from tests.scheduler.surface import make_surface

LIMIT = 0.04
ROUNDING = 1 + 1e-9
LEARNING = 100  # steps


def make_traffic(
    machine: SimulatedMachine, fitted: CostSurface | None = None, *, num_slices: int = 8, limit: float = LIMIT, **rates
) -> Traffic:
    config = SchedulerConfig(tpot_slo=limit, token_budget=2048, image_budget=8192)
    fitted = fitted or make_surface(language_error=0.05, corun_error=0.08)
    return Traffic(machine, LatencyBudgets(fitted, config, num_slices=num_slices), limit, **rates)


def share_late(steps: list[Step]) -> float:
    decoding = [step for step in steps if step.load.num_decodes]
    return sum(step.gap_s > step.pending.tpot_limit_s * ROUNDING for step in decoding) / len(decoding)


BUSY = {"requests_per_s": 20.0, "images_per_s": 20.0}


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 40), st.floats(0, 40), st.sampled_from([0.015, 0.04, 0.1]))
def test_a_machine_as_measured_keeps_the_limit_and_full_steps_use_it(
    seed: int, requests: float, images: float, limit: float
) -> None:
    exact = make_surface()
    traffic = make_traffic(
        SimulatedMachine(exact), exact, num_slices=10**12, limit=limit, seed=seed, requests_per_s=requests + 1,
        images_per_s=images,
    )  # fmt: skip
    steps = traffic.run(LEARNING + 600)
    report = traffic.budgets.report()
    assert share_late(steps[LEARNING:]) <= 0.02
    if report.full_steps > 20:
        assert report.limit_used >= 0.9


@pytest.mark.quick("2 percent noise-1")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("noise", "used"), [(0.0, 0.98), (0.02, 0.94), (0.05, 0.87)], ids=["exact", "2 percent noise", "5 percent noise"]
)
def test_a_busy_machine_is_used_up_to_its_noise(noise: float, used: float, seed: int) -> None:
    traffic = make_traffic(SimulatedMachine(make_surface(), noise=noise, seed=seed), seed=seed, **BUSY)
    steps = traffic.run(1500)
    report = traffic.budgets.report()
    assert share_late(steps[LEARNING:]) <= 0.02
    assert report.limit_used >= used
    assert report.full_steps > 1000
    assert report.late_steps == pytest.approx(sum(step.late for step in steps))
    assert traffic.images_done > 500


WRONG = {
    "steps are slower": {"per_pair_s": 0.0, "per_key_s": 1e-8, "per_chunk_s": 0.0},
    "lanes slow each other more": {"decode_slowdown": 1.1, "prefill_slowdown": 1.2},
    "lanes slow each other less": {"decode_slowdown": 2.0, "prefill_slowdown": 2.0},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_surface_is_corrected(wrong: dict[str, float]) -> None:
    fitted = make_surface(**wrong, language_error=0.05, corun_error=0.08)
    traffic = make_traffic(SimulatedMachine(make_surface(), noise=0.05, seed=3), fitted, **BUSY)
    steps = traffic.run(1500)
    assert share_late(steps[LEARNING:]) <= 0.02
    assert traffic.budgets.report().limit_used >= 0.8


@pytest.mark.parametrize("place", ["pause", "slices"])
def test_pauses_between_steps_and_slices_of_vision_are_learnt(place: str) -> None:
    """The machine has a pause of 3 ms, or slices of the vision model that are longer than reckoned."""
    hidden = {"pause_s": 0.003} if place == "pause" else {"slice_s": 0.006}
    traffic = make_traffic(SimulatedMachine(make_surface(), noise=0.03, seed=4, **hidden), num_slices=64, **BUSY)
    steps = traffic.run(1500)
    assert share_late(steps[LEARNING:]) <= 0.02
    assert traffic.budgets.report().limit_used >= 0.85


def test_stalls_do_not_shrink_the_budgets() -> None:
    """Stalls are counted but do not shrink budgets: no budget prevents a step that takes ten times as long."""
    calm, stalling = (
        make_traffic(SimulatedMachine(make_surface(), noise=0.05, seed=5, stalls=stalls), **BUSY)
        for stalls in (0.0, 0.01)
    )
    calm.run(1500)
    late = [step for step in stalling.run(1500) if step.late]
    assert len([step for step in late if step.gap_s < 5 * LIMIT]) <= 30
    assert stalling.budgets.report().correction == pytest.approx(calm.budgets.report().correction, rel=0.06)


def test_a_machine_that_becomes_slower_is_followed_within_the_window() -> None:
    machine = SimulatedMachine(make_surface(), noise=0.05, seed=6)
    traffic = make_traffic(machine, **BUSY)
    traffic.run(500)
    machine.speed = 1.5
    steps = traffic.run(600)
    assert share_late(steps[:200]) <= 0.1
    assert share_late(steps[200:]) <= 0.02
    assert traffic.budgets.report().correction > 1.5
    machine.speed = 1.0
    traffic.run(300)
    assert traffic.budgets.report().limit_used >= 0.75


def test_decodes_that_alone_exceed_the_limit_end_neither_vision_nor_prefill() -> None:
    limit = 0.007
    traffic = make_traffic(SimulatedMachine(make_surface(), noise=0.05, seed=7), limit=limit, images_per_s=100.0)
    traffic.decode(64, 1000, 10**9)
    traffic.prompts.append(Prompt(400, 5))
    steps = traffic.run(600)
    assert all(step.late for step in steps)
    assert traffic.images_done >= 600 * 0.05 * limit / 0.02 / 2
    waiting = [step for step in steps if step.pending.prefill_tokens]
    chunks = [index for index, step in enumerate(waiting) if step.load.prefill_tokens >= 16]
    assert chunks
    assert max(b - a for a, b in zip([0, *chunks], chunks, strict=False)) <= 65
    assert traffic.budgets.report().correction < 1.3  # the surface was right all along


def test_without_a_limit_every_step_is_that_of_an_engine_without_limits() -> None:
    traffic = make_traffic(SimulatedMachine(make_surface()), **BUSY)
    traffic.tpot_limit_s = math.inf
    steps = traffic.run(300)
    fixed = Traffic(
        SimulatedMachine(make_surface()),
        Budgets(SchedulerConfig(token_budget=2048, image_budget=8192)),
        math.inf,
        **BUSY,
    )
    assert [step.load for step in steps] == [step.load for step in fixed.run(300)]
    report = traffic.budgets.report()
    assert (report.vision_s, report.late_steps, report.full_steps, report.limit_used) == (-1.0, 0, 0, 0.0)


def test_the_report_says_what_could_be_held_now() -> None:
    traffic = make_traffic(SimulatedMachine(make_surface()), make_surface(), num_slices=10**12)
    assert traffic.budgets.report().token_budget == 2048
    traffic.decode(32, 1000, 100)
    (step,) = traffic.run(1)
    report = traffic.budgets.report()
    longest = LanguageLoad(32, 32000, report.token_budget, report.token_budget * (report.token_budget + 1) / 2, 1)
    assert step.budget.tokens == 0
    assert make_surface().language_s(longest) <= LIMIT < make_surface().language_s(replace_tokens(longest))
    assert (report.tpot_limit_s, report.decode_steps, report.late_steps) == (LIMIT, 1, 0)


def replace_tokens(load: LanguageLoad) -> LanguageLoad:
    """Adds a token."""
    return replace(load, prefill_tokens=load.prefill_tokens + 1)
