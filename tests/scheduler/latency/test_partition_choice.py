"""Budgets on a device that is divided: the partition of a step follows from what there is to do, and more gets done
than on any partition that is kept, within the limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.cost import CostSurface, Slowdowns
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.scheduler.budget import PendingWork
from hydra_engine.scheduler.latency.latency_budget import GAIN, LOOK, LatencyBudgets, PartitionChoice
from tests.scheduler.latency.machine import SimulatedMachine, Step, Traffic
from tests.scheduler.surface import make_surface

LIMIT = 0.04
LEARNING = 20  # steps
SHARES = (0.25, 0.5, 0.75)  # of the multiprocessors for tokens
SATURATED = 0.4  # from this share on they read as fast as the memory can


def divided_surface(splits: tuple[Slowdowns, ...] | None = None) -> CostSurface:
    """A GPU: decodes read, prompts and pictures multiply."""
    splits = splits or tuple(Slowdowns(1.1 * max(1, SATURATED / share), 1 / share, 1 / (1 - share)) for share in SHARES)
    whole = {"decode_slowdown": 2.2, "prefill_slowdown": 1.9, "vision_slowdown": 1.9}
    return make_surface(splits=splits, language_error=0.03, corun_error=0.05, **whole)


class Kept(PartitionChoice):
    """A partition that is never left, as a mask that is set before serving."""

    def __init__(self, partition: int) -> None:
        super().__init__(1 + len(SHARES))
        self.partition = partition

    def choose(self, rate: Callable[[int], float]) -> int:
        rate(self.partition)
        return self.partition


@dataclass(frozen=True)
class Phase:
    """Decodes that run all through it, and what arrives a second beside them."""

    decodes: int
    context: int
    images_per_s: float
    requests_per_s: float


FEW_DECODES = Phase(8, 500, 300.0, 2.0)
MANY_DECODES = Phase(150, 2000, 300.0, 2.0)
PROMPTS = Phase(32, 800, 10.0, 60.0)
PHASES = {"few decodes": FEW_DECODES, "many decodes": MANY_DECODES, "prompts": PROMPTS}
PHASE_S = 3.0


class Served(NamedTuple):
    work: float  # done of prompts and pictures in a second, in seconds that it takes alone
    late: float  # share of the steps with decodes
    moves: int
    partitions: set[int]  # of the steps beside which pictures waited


def serve(partition: int | None, *phases: Phase) -> Served:
    """Serves the load with partitions by policy (None) or on one partition."""
    surface = divided_surface()
    config = SchedulerConfig(tpot_slo=LIMIT, token_budget=2048, image_budget=8192)
    budgets = LatencyBudgets(surface, config, num_slices=32)
    if partition is not None:
        budgets._choice = Kept(partition)
    traffic = Traffic(SimulatedMachine(surface, noise=0.02, seed=5), budgets, LIMIT, seed=5)
    steps: list[Step] = []
    for number, phase in enumerate(phases, start=1):
        for waiting in (traffic.prompts, traffic.contexts, traffic.left, traffic.gaps):
            waiting.clear()
        traffic.images = 0
        traffic.decode(phase.decodes, phase.context, 10**6)
        traffic.images_per_s, traffic.requests_per_s = phase.images_per_s, phase.requests_per_s
        while traffic.now < number * PHASE_S:
            steps += traffic.run(1)
    pictures_s = traffic.images_done * surface.vision_s(VisionLoad(traffic.patches, traffic.patches**2))
    prompts_s = sum(s.load.prefill_tokens for s in steps) * surface.language_s(LanguageLoad(0, 0, 512)) / 512
    late = [step.late for step in steps[LEARNING:] if step.load.num_decodes]
    used = [step.budget.partition for step in steps if step.pending.encode_patches]
    moves = sum(a != b for a, b in pairwise(used))
    return Served((pictures_s + prompts_s) / traffic.now, sum(late) / len(late), moves, set(used))


def best_kept(*phases: Phase) -> float:
    """Work on the best partition that keeps the limit all through."""
    kept = [serve(partition, *phases) for partition in range(1 + len(SHARES))]
    return max(served.work for served in kept if served.late <= 0.02)


@pytest.mark.quick("few decodes")
@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)
def test_a_phase_gets_what_its_best_partition_would_get(phase: Phase) -> None:
    served = serve(None, phase)
    assert served.late <= 0.02 and served.work >= 0.97 * best_kept(phase)


@pytest.mark.slow
def test_phases_in_turns_get_more_than_on_any_partition_that_is_kept() -> None:
    phases = FEW_DECODES, MANY_DECODES, FEW_DECODES, MANY_DECODES
    served = serve(None, *phases)
    assert served.late <= 0.02 and served.work >= 1.07 * best_kept(*phases)
    assert served.partitions == {1, 2} and served.moves <= 2 * len(phases)


def test_a_device_that_is_not_divided_has_no_partitions() -> None:
    config = SchedulerConfig(tpot_slo=LIMIT, token_budget=2048, image_budget=8192)
    budgets = LatencyBudgets(make_surface(), config, num_slices=8)
    assert budgets.step_budget(PendingWork(now=0.0, num_decodes=4, encode_patches=4096)).partition == 0


def test_a_limit_that_only_the_whole_device_keeps_makes_vision_wait() -> None:
    """The step's decodes alone take three quarters of the limit."""
    config = SchedulerConfig(tpot_slo=LIMIT, token_budget=2048, image_budget=8192)
    surface = divided_surface((Slowdowns(2.0, 4.0, 1.2),) * 3)
    budgets = LatencyBudgets(surface, config, num_slices=8)
    pending = PendingWork(
        now=0.0, num_decodes=64, decode_context=575_000, tpot_limit_s=LIMIT, stretch_s=LIMIT, encode_patches=4096
    )
    assert surface.language_s(LanguageLoad(64, 575_000)) == pytest.approx(0.03)
    budget = budgets.step_budget(pending)
    assert budget.partition == 0 and 0 < budget.vision_s < LIMIT


@given(st.lists(st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4), min_size=1, max_size=60))
def test_a_partition_is_left_for_a_clearly_better_one_only(rates: list[list[float]]) -> None:
    choice = PartitionChoice(4)
    looked = 0
    for number, row in enumerate(rates):
        before = choice.partition
        chosen = choice.choose(row.__getitem__)
        if not row[before]:
            assert row[chosen] == max(row)
        elif chosen != before:
            assert row[chosen] == max(row) > GAIN * row[before]
            assert number == 0 or number - looked >= LOOK
        if chosen != before or not row[before]:
            looked = number


def test_small_differences_do_not_move_a_step() -> None:
    choice = PartitionChoice(2)
    seen = {choice.choose(lambda p, n=number: 1.0 + 0.04 * (p == n % 2)) for number in range(100)}
    assert seen == {0}
