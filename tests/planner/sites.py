"""Sites and loads for tests of the simulator: made-up devices, small caches, requests of a load's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from bench.topology.loads import rows
from hydra_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.units import GIB
from hydra_engine.models.specs.registry import load_spec
from hydra_planner.records import Record
from hydra_planner.simulator.costs import Costs, DeviceKind, Host
from hydra_planner.simulator.deployment import Deployment
from hydra_planner.simulator.node import Site
from hydra_planner.workload.arrivals import Arrivals
from hydra_planner.workload.file import Picture, WorkloadRequest
from hydra_terminal.load.workload import Workload

SURFACE = CostSurface(
    rows=Curve((1.0, 16.0, 512.0), (0.004, 0.006, 0.08)),
    per_key_s=1e-7,
    per_pair_s=1e-8,
    per_chunk_s=1e-4,
    patches=Curve((4.0, 256.0), (0.01, 0.05)),
    per_patch_pair_s=1e-8,
    decode_slowdown=2.0,
    prefill_slowdown=2.0,
    vision_slowdown=2.0,
)
COSTS = Costs(SURFACE, submit_s=2e-5, collect_s=3e-5, threads=0)
CPU_COSTS = Costs(SURFACE, submit_s=2e-5, collect_s=3e-5, cores=2, threads=2)
DEVICE = DeviceKind("made up", COSTS, GIB)
WORKLOAD = Workload(("textcaps", "pope", "mme"), text_share=0.25, scale=0.25)


def gpus(count: int, kind: DeviceKind = DEVICE) -> dict[str, DeviceKind]:
    return {f"cuda:{index}": kind for index in range(count)}


@cache
def site(num_devices: int = 6, **cache_sizes: int) -> Site:
    """Devices that do not share cores; `num_devices` 0: one processor that all instances share."""
    scheduler = SchedulerConfig(token_budget=128, max_num_seqs=16)
    config = EngineConfig(scheduler=scheduler, cache=CacheConfig(**cache_sizes))
    devices = gpus(num_devices) if num_devices else {"cpu": DeviceKind("cpu", CPU_COSTS)}
    host = Host(cores=8) if num_devices else Host()
    return Site(load_spec(config.model_path, config.spec_options), config, devices, host)


def row(at_s: float, words: int, tokens: int, sizes: Sequence[tuple[int, int]] = (), **rest: Any) -> WorkloadRequest:
    """A request of a workload whose pictures are numbered from 0 on."""
    pictures = tuple(Picture(*size, number) for number, size in enumerate(sizes))
    return WorkloadRequest(at_s=at_s, prompt_tokens=words, output_tokens=tokens, pictures=pictures, **rest)


def load(rate: float, count: int) -> list[WorkloadRequest]:
    return rows(WORKLOAD, Arrivals().times(rate, count, 0).tolist())


def deployed(topology: str, at: Site, requests: Sequence[WorkloadRequest]) -> Deployment:
    deployment = Deployment(topology, at)
    for request in requests:
        deployment.submit(request)
    return deployment


def run(topology: str, rate: float, count: int = 40, at: Site | None = None) -> tuple[Deployment, list[Record]]:
    deployment = deployed(topology, at or site(), load(rate, count))
    return deployment, deployment.run()
