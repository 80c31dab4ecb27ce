"""What one instance may take of a GPU that it fills, alone there or beside others.

Every instance on the device reckons for itself and finds the same parts, because it reckons from what the model's JSON
files and the configuration say of all of them: each gets what its role needs, and what is left is divided among those
that keep KV. Allocates nothing, asks no device.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.config import EngineConfig
from hydra_engine.core.roles import Role
from hydra_engine.specs.base import ModelSpec
from hydra_engine.worker.memory import GIB, MARGIN_BYTES, usual_cache_bytes, weights_of
from hydra_engine.worker.working_memory import estimate


def own_part(
    spec: ModelSpec,
    role: Role,
    config: EngineConfig,
    dtype_bytes: int,
    *,
    total_bytes: int,
    free_bytes: int,
    neighbours: Sequence[Role] = (),
) -> tuple[int, tuple[str, ...]]:
    """(bytes, why). `neighbours`: roles of all instances on the device, this one's among them. What is free before
    loading says something to one that is alone there only: beside others it depends on how far those have come."""
    utilization = config.cache.gpu_memory_utilization
    budget = int(utilization * total_bytes)
    if len(neighbours) <= 1:
        if free_bytes >= budget:
            return budget, ()
        return free_bytes, (f"{_gib(budget - free_bytes)} of the {_gib(budget)} for the instance are in use already",)
    left = budget - sum(_claim(spec, neighbour, config, dtype_bytes) for neighbour in neighbours)
    filling = [neighbour for neighbour in neighbours if _fills(neighbour, config)] or list(neighbours)
    own = _claim(spec, role, config, dtype_bytes)
    if left < 0 or role in filling:
        own += left // (len(filling) if left >= 0 else len(neighbours))
    return max(own, 0), (f"{len(neighbours)} instances share the device: {_gib(own)} of {_gib(budget)} for this one",)


def _fills(role: Role, config: EngineConfig) -> bool:
    return role.needs_language and config.cache.kv_cache_gib is None and config.cache.num_kv_blocks is None


def _claim(spec: ModelSpec, role: Role, config: EngineConfig, dtype_bytes: int) -> int:
    """Without KV that fills. Working memory counts twice, as it is only estimated."""
    working = estimate(spec, role, config, dtype_bytes)
    needed = sum(weights_of(spec, role, dtype_bytes)) + usual_cache_bytes(spec, role, config, dtype_bytes)
    return needed + 2 * (working.total_bytes + MARGIN_BYTES)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2g} GiB"
