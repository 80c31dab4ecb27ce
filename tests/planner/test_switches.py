"""Gain of early hand-overs on a simulated deployment whose links are slow: without them first tokens and second tokens
wait for bytes."""

from __future__ import annotations

import itertools
from statistics import fmean

import pytest

from hydra_engine.config import ClusterConfig, EngineConfig, SchedulerConfig
from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.models.specs.registry import load_spec
from hydra_planner.records import Record
from hydra_planner.simulator.costs import Costs, DeviceKind, Host
from hydra_planner.simulator.deployment import simulate
from hydra_planner.simulator.node import Site
from hydra_planner.workload.file import Picture, WorkloadRequest

SURFACE = CostSurface(
    rows=Curve((1.0, 16.0, 512.0), (0.004, 0.005, 0.08)),
    per_key_s=1e-7,
    per_pair_s=1e-8,
    per_chunk_s=1e-4,
    patches=Curve((4.0, 256.0), (0.003, 0.02)),
    per_patch_pair_s=1e-8,
)
LINK_BYTES_PER_S = 4e6


def served(rows: list[WorkloadRequest], **switches: bool) -> list[Record]:
    """Records of one instance of each stage, each on a device of its own."""
    config = EngineConfig(scheduler=SchedulerConfig(token_budget=32, max_num_seqs=4), cluster=ClusterConfig(**switches))
    kind = DeviceKind("gpu", Costs(SURFACE, threads=0), link_bytes_per_s=LINK_BYTES_PER_S)
    devices = {f"cuda:{number}": kind for number in range(3)}
    site = Site(load_spec(config.model_path, config.spec_options), config, devices, Host(cores=16))
    records = simulate("E+P+D", site, rows)
    assert all(record.ok and sum(record.counts) == record.wanted_tokens for record in records)
    return records


def text(count: int) -> list[WorkloadRequest]:
    return [WorkloadRequest(at_s=0.3 * n, prompt_tokens=256, output_tokens=4) for n in range(count)]


def pictures(count: int) -> list[WorkloadRequest]:
    """Six at a time, so that all but the first wait while others are prefilled."""
    return [
        WorkloadRequest(
            at_s=1.0 * (n // 6),
            prompt_tokens=160,
            output_tokens=2,
            pictures=(Picture(64, 64, 2 * n), Picture(64, 64, 2 * n + 1)),
        )
        for n in range(count)
    ]


def mean_ttft_s(records: list[Record]) -> float:
    return fmean(record.ttft_s or 0.0 for record in records)


def mean_first_gap_s(records: list[Record]) -> float:
    return fmean(record.gaps()[0] for record in records)


@pytest.mark.slow
def test_kv_that_leaves_behind_each_chunk_is_there_sooner() -> None:
    early, late = served(text(8)), served(text(8), early_kv=False)
    assert mean_first_gap_s(late) > 2 * mean_first_gap_s(early)
    assert mean_ttft_s(late) == pytest.approx(mean_ttft_s(early), rel=0.01)


@pytest.mark.slow
def test_features_that_come_while_a_request_waits_are_not_waited_for() -> None:
    early, late = served(pictures(12)), served(pictures(12), prefetch_features=False)
    assert mean_ttft_s(late) > 1.05 * mean_ttft_s(early)


@pytest.mark.quick("switches7")
@pytest.mark.parametrize("switches", list(itertools.product([True, False], repeat=3)))
def test_every_combination_serves_everything(switches: tuple[bool, ...]) -> None:
    names = ("early_kv", "prefetch_features", "steal_decodes")
    served([*pictures(6), *text(3)], **dict(zip(names, switches, strict=True)))
