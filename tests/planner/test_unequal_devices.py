"""Two kinds of devices in one simulated deployment: requests go where they are done soonest."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from hydra_engine.config import EngineConfig, SchedulerConfig
from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.reports import StepSpeeds
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.scheduler.step_stats import SpeedMeter
from hydra_planner.records import Record
from hydra_planner.simulator.costs import Costs, DeviceKind, Host
from hydra_planner.simulator.deployment import Deployment
from hydra_planner.simulator.node import Site
from hydra_planner.workload.file import Picture, WorkloadRequest

FAST = CostSurface(
    rows=Curve((1.0, 16.0, 512.0), (0.004, 0.005, 0.03)),
    per_key_s=1e-7,
    per_pair_s=1e-8,
    per_chunk_s=1e-4,
    patches=Curve((4.0, 256.0), (0.003, 0.02)),
    per_patch_pair_s=1e-8,
)


def slower(surface: CostSurface, factor: float) -> CostSurface:
    def scaled(curve: Curve) -> Curve:
        return Curve(curve.knots, tuple(factor * seconds for seconds in curve.seconds))

    return replace(
        surface,
        rows=scaled(surface.rows),
        per_key_s=factor * surface.per_key_s,
        per_pair_s=factor * surface.per_pair_s,
        per_chunk_s=factor * surface.per_chunk_s,
        patches=scaled(surface.patches),
        per_patch_pair_s=factor * surface.per_patch_pair_s,
    )


def site(factor: float) -> Site:
    config = EngineConfig(scheduler=SchedulerConfig(token_budget=256, max_num_seqs=16))
    kinds = {
        name: DeviceKind(name, Costs(slower(FAST, times), threads=0))
        for name, times in (("cuda:0", 1.0), ("cuda:1", factor))
    }
    return Site(load_spec(config.model_path, config.spec_options), config, kinds, Host(cores=16))


def rows(count: int, rate: float) -> list[WorkloadRequest]:
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    return [
        WorkloadRequest(
            at_s=at_s,
            prompt_tokens=int(rng.integers(40, 200)),
            output_tokens=int(rng.integers(4, 24)),
            pictures=(Picture(64, 64, number),) if number % 2 else (),
        )
        for number, at_s in enumerate(times)
    ]


def served(topology: str, factor: float, rate: float = 20.0) -> tuple[Deployment, list[Record]]:
    deployment = Deployment(topology, site(factor))
    for row in rows(150, rate):
        deployment.submit(row)
    return deployment, deployment.run()


def mean_ttft_s(records: list[Record]) -> float:
    assert all(record.ok for record in records)
    return fmean(record.ttft_s or 0.0 for record in records)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Instances say nothing of their speed, so work is counted in tokens and patches alone."""
    monkeypatch.setattr(SpeedMeter, "report", lambda self: StepSpeeds())
    return monkeypatch


@pytest.mark.slow
def test_first_tokens_come_sooner_than_by_counting_tokens(counting: pytest.MonkeyPatch) -> None:
    by_count = mean_ttft_s(served("2EPD", 3.0)[1])
    counting.undo()
    deployment, records = served("2EPD", 3.0)
    by_time = mean_ttft_s(records)
    assert by_time < 0.9 * by_count
    fast, slow = (instance.pace for instance in deployment.dispatcher.instances.values())
    assert slow.prefill.each_s == pytest.approx(3.0 * fast.prefill.each_s, rel=0.15)
    assert slow.decode.each_s == pytest.approx(3.0 * fast.decode.each_s, rel=0.15)


@pytest.mark.slow
def test_on_equal_devices_first_tokens_come_no_later(counting: pytest.MonkeyPatch) -> None:
    by_count = mean_ttft_s(served("2EPD", 1.0)[1])
    counting.undo()
    assert mean_ttft_s(served("2EPD", 1.0)[1]) <= 1.02 * by_count
