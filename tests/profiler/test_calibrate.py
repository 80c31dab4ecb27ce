"""The measuring loop on lanes of a virtual clock: it finds what the lanes' steps cost, in time, and leaves nothing."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from hydra_engine.core.cost import CostSurface, Slowdowns
from hydra_engine.errors import BackendError
from hydra_engine.profiler.calibrate import Calibration, Site, calibrate, covered_seconds
from hydra_engine.profiler.fit import fit
from hydra_engine.profiler.grid import Sizes
from tests.profiler.fakes import SIZES, SURFACE, FakeLanes, SquareVision, decodes, prompt


def site(lanes: FakeLanes, *, vision: bool = True, stateful: bool = False, sizes: Sizes = SIZES) -> Site:
    return Site(lanes, lanes.wake, lanes.clock, sizes, 500, SquareVision() if vision else None, stateful)


def measured(lanes: FakeLanes, deadline_s: float = 1e6, **options: bool) -> Calibration:
    return calibrate(site(lanes, **options), lambda done, total: None, deadline_s)


def agree(found: CostSurface, within: float) -> None:
    for load in (decodes(3, 700), decodes(16, 200), prompt(200), prompt(48, 500)):
        assert found.language_s(load) == pytest.approx(SURFACE.language_s(load), rel=within)


def test_what_the_lanes_cost_is_found() -> None:
    lanes = FakeLanes()
    done = measured(lanes)
    found = fit(done.samples)
    agree(found, 0.01)
    assert found.decode_slowdown == pytest.approx(1.5, rel=0.02)
    assert found.prefill_slowdown == pytest.approx(2.0, rel=0.02)
    assert found.vision_slowdown == pytest.approx(1.25, rel=0.02)
    assert done.num_left == 0 and done.submit_s == done.collect_s == 0.0
    assert max(found.language_error, found.vision_error) < 0.01 and found.corun_error < 0.05


def test_slowdowns_on_every_partition_of_a_device_are_found() -> None:
    splits = Slowdowns(3.0, 4.0, 1.2), Slowdowns(1.4, 2.0, 2.5)
    lanes = FakeLanes(replace(SURFACE, splits=splits))
    here = site(lanes, sizes=replace(SIZES, num_partitions=3))
    found = fit(calibrate(here, lambda done, total: None, 1e6).samples)
    assert found.decode_slowdown == pytest.approx(1.5, rel=0.02)
    for split, wanted in zip(found.splits, splits, strict=True):
        assert (split.decode, split.prefill, split.vision) == pytest.approx(astuple(wanted), rel=0.02)
    assert found.corun_error < 0.05


def test_through_noise_and_bursts_too() -> None:
    found = fit(measured(FakeLanes(noise=0.05, burst_every=9)).samples)
    agree(found, 0.1)


def test_nothing_stays_registered_and_every_result_is_collected() -> None:
    lanes = FakeLanes()
    measured(lanes)
    assert not lanes.requests and not lanes.num_in_flight


@pytest.mark.parametrize("deadline_s", [1.0, 3.0, 10.0, 30.0])
def test_the_deadline_holds_and_what_was_measured_by_then_is_enough_for_a_fit(deadline_s: float) -> None:
    lanes = FakeLanes()
    began = lanes.clock.now()
    done = measured(lanes, deadline_s)
    longest = SURFACE.language_s(prompt(256, 1700)) * 4
    assert done.seconds == lanes.clock.now() - began <= deadline_s + longest
    assert 0 <= done.num_left < done.num_points
    found = fit(done.samples)
    if deadline_s >= 10.0:
        agree(found, 0.3)
        assert found.decode_slowdown > 1.2 and found.prefill_slowdown > 1.5


def test_even_no_time_at_all_gives_one_step() -> None:
    done = measured(FakeLanes(), 1e-9)
    assert len(done.samples.language) == 1 and done.num_left > 0
    assert fit(done.samples).language_s(decodes(1, 32)) == pytest.approx(SURFACE.language_s(decodes(1, 32)))


def test_progress_rises_to_its_end() -> None:
    lanes = FakeLanes()
    seen: list[tuple[int, int]] = []
    calibrate(site(lanes), lambda done, total: seen.append((done, total)), 20.0)
    assert seen == sorted(seen) and seen[0][0] == 0 and seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1


def test_points_take_turns() -> None:
    """Points are measured in turn, each once before any again, so that a busy second does not spoil one of them."""
    lanes = FakeLanes()
    measured(lanes, vision=False)
    single = [i for i, plan in enumerate(lanes.language_plans) if plan.num_rows == 1 and not len(plan.decodes)]
    tokens = {len(lanes.language_plans[i].chunks[0].token_ids) for i in single}
    assert len(tokens) >= 5
    smallest = [i for i in single if len(lanes.language_plans[i].chunks[0].token_ids) == 16]
    assert max(smallest) - min(smallest) > len(lanes.language_plans) // 2


def test_a_model_that_cannot_run_a_step_is_an_error_and_leaves_nothing() -> None:
    lanes = FakeLanes(fails=True)
    with pytest.raises(BackendError, match="logits are not finite"):
        measured(lanes)
    assert not lanes.requests


def test_slots_with_states_are_prepared_and_their_steps_counted_as_they_were() -> None:
    lanes = FakeLanes()
    found = fit(measured(lanes, stateful=True, vision=False).samples)
    agree(found, 0.02)


def test_overhead_between_loop_and_lane_is_measured() -> None:
    class Slow(FakeLanes):
        def poll(self):  # type: ignore[no-untyped-def]
            results = super().poll()
            self.clock.advance(0.002)
            return results

    done = measured(Slow(), 30.0)
    assert done.collect_s == pytest.approx(0.002)


def test_only_steps_beside_which_the_other_lane_ran_all_along_count() -> None:
    others = [(0.0, 1.0), (1.01, 2.0)]
    assert covered_seconds([(0.2, 0.9), (1.0, 1.0), (1.005, 1.9), (1.5, 2.5), (3.0, 4.0)], others) == pytest.approx(
        [0.7, 0.895]
    )


def test_a_single_slot_is_enough() -> None:
    lanes = FakeLanes()
    small = replace(SIZES, max_num_seqs=1, token_budget=8, kv_tokens=32, max_model_len=20, num_image_blocks=1)
    done = calibrate(Site(lanes, lanes.wake, lanes.clock, small, 500, SquareVision()), lambda done, total: None, 1e6)
    assert done.num_left == 0 and fit(done.samples).language_s(decodes(1, 10)) > 0
