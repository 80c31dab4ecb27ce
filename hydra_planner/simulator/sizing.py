"""Limits of a step and blocks of the caches of an instance on a device, by its role, with the rules and
estimates that a start uses (`instance/compute_stack.py`), without a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import Role
from hydra_engine.models.specs.base import DTYPE_BYTES, ModelSpec
from hydra_engine.worker.memory.limits import with_limits
from hydra_engine.worker.memory.plan import CachePlan, Filling, own_part, plan_memory
from hydra_engine.worker.memory.working import estimate, image_budget
from hydra_planner.simulator.costs import DeviceKind


@dataclass(frozen=True, slots=True)
class Sizes:
    """`config` has no "auto" left that a simulation reads."""

    config: EngineConfig
    plan: CachePlan


def sizes_of(
    spec: ModelSpec,
    config: EngineConfig,
    kind: DeviceKind,
    role: Role,
    neighbours: Sequence[Role],
    neighbour_configs: Sequence[EngineConfig] = (),
) -> Sizes:
    """`neighbours`: roles of all instances on the device, this one's among them; `neighbour_configs`: of each, () where
    all have this one's. Raises ResourceError where the model does not fit, saying what is missing."""
    dtype_bytes = DTYPE_BYTES[kind.costs.dtype]
    if kind.on_processor:
        plan = plan_memory(spec, role, config, dtype_bytes, kind.memory_bytes, shares=len(neighbours))
    else:
        own_bytes, reasons = own_part(
            spec,
            role,
            config,
            dtype_bytes,
            total_bytes=kind.memory_bytes,
            free_bytes=kind.memory_bytes,
            neighbours=neighbours,
            neighbour_configs=neighbour_configs,
        )
        config, _ = with_limits(config, spec, role, dtype_bytes, own_bytes, None)
        working = estimate(spec, role, config, dtype_bytes)
        plan = plan_memory(
            spec,
            role,
            config,
            dtype_bytes,
            kind.memory_bytes,
            shares=len(neighbours),
            filling=Filling(own_bytes, working, reasons=reasons),
        )
    scheduler = config.scheduler
    if spec.vision is not None:
        scheduler = replace(scheduler, image_budget=image_budget(config, spec.vision))
    if scheduler.look_ahead is None:
        scheduler = replace(scheduler, look_ahead=not kind.on_processor)
    return Sizes(replace(config, scheduler=scheduler, max_model_len=plan.max_model_len), plan)
