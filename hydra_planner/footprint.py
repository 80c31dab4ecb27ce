"""The memory that the instances of a topology would need, from the model's JSON files and the configuration alone.

Uses the formulas that decide at start (`worker/memory/plan.py`), so sizes of tensors are exact; the working memory of
steps on a GPU, which is measured at start, is an estimate. Loads no weights and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hydra_engine.backend.select import create_backend, resolve_device, resolve_dtype, weights_dtype
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import EPD, Role, Topology, check_serves
from hydra_engine.core.units import GIB
from hydra_engine.errors import ResourceError
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.worker.memory.limits import with_limits
from hydra_engine.worker.memory.plan import CachePlan, Filling, own_part, plan_memory
from hydra_engine.worker.memory.working import estimate


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of one instance. `plan`: as at start, but on a GPU with an estimate of `working`. In host memory that
    is 0 but for mixtures of experts."""

    name: str
    role: str
    device: str
    plan: CachePlan
    kv_tokens: int
    image_rows: int


@dataclass(frozen=True, slots=True)
class Footprints:
    """The memory of all instances of a topology. `wholes`: for each instance, the footprint of an EPD instance in its
    place; None if that would not fit."""

    family: str
    dtype: str
    topology: Topology
    instances: tuple[Footprint, ...]
    wholes: tuple[Footprint | None, ...]
    memory: dict[str, int]  # device -> free bytes


def footprints(config: EngineConfig, memory_bytes: int | None = None) -> Footprints:
    """The memory that each instance of the configured topology would need. `memory_bytes`: size of each device; None:
    its free memory now. Raises ConfigError for a topology that cannot serve the model, ResourceError naming an instance
    that would not fit."""
    spec = load_spec(config.model_path, config.spec_options)
    topology = config.parsed_topology
    check_serves(topology, spec.vision is not None)
    devices = topology.devices(config.device)
    if "auto" in devices:
        devices = topology.devices(resolve_device("auto", config.backend).name)
    dtype, _ = resolve_dtype(config.dtype, spec.dtype, config.backend, devices[0])
    memory = {
        device: _free_bytes(config, device, dtype) if memory_bytes is None else memory_bytes
        for device in dict.fromkeys(devices)
    }
    places = list(zip(topology.names, (spec.role for spec in topology.instances), devices, strict=True))
    instances, wholes = [], []
    for name, role, device in places:
        others = [(r, config.for_instance(n, r)) for n, r, there in places if there == device and n != name]
        own = config.for_instance(name, role)
        of = partial(_footprint, spec.held_on(device), own, dtype, memory[device], name, device, others)
        try:
            instances.append(of(role))
        except ResourceError as error:
            where = "" if memory_bytes is None else f" into --memory {memory_bytes / GIB:g}"
            raise ResourceError(f"{name} would not fit{where}: {error.message}", param=error.param) from error
        wholes.append(_if_it_fits(partial(of, EPD)))
    name = str(dtype).removeprefix("torch.")
    return Footprints(spec.family, name, topology, tuple(instances), tuple(wholes), memory)


def _if_it_fits(make: partial[Footprint]) -> Footprint | None:
    """The footprint, or None if it does not fit."""
    try:
        return make()
    except ResourceError:
        return None


def _free_bytes(config: EngineConfig, device: str, dtype: Any) -> int:
    backend = create_backend(device, dtype, backend=config.backend, deterministic=config.deterministic)
    free_bytes, _ = backend.device.memory()
    return free_bytes


def _footprint(
    spec: ModelSpec,
    config: EngineConfig,
    dtype: Any,
    free_bytes: int,
    name: str,
    device: str,
    others: Sequence[tuple[Role, EngineConfig]],
    role: Role,
) -> Footprint:
    """The footprint of one instance. `free_bytes`: memory of the device for this instance and `others` together."""
    filling = None
    weight_bytes = weights_dtype(dtype, spec.dtype, config.backend, device).itemsize
    if device != "cpu":
        whole = {"total_bytes": free_bytes, "free_bytes": free_bytes}
        all_there = [(role, config), *others]
        roles, configs = [role for role, _ in all_there], [config for _, config in all_there]
        own_bytes, _ = own_part(
            spec, role, config, dtype.itemsize, **whole, neighbours=roles, neighbour_configs=configs
        )
        config, _ = with_limits(config, spec, role, dtype.itemsize, own_bytes, weight_bytes)
        filling = Filling(own_bytes, estimate(spec, role, config, dtype.itemsize))
    plan = plan_memory(
        spec,
        role,
        config,
        dtype.itemsize,
        free_bytes,
        shares=1 + len(others),
        filling=filling,
        weight_bytes=weight_bytes,
    )
    cache = config.cache
    kv_tokens, image_rows = plan.num_kv_blocks * cache.block_size, plan.num_image_blocks * cache.image_block_size
    return Footprint(name, role.letters, device, plan, kv_tokens, image_rows)
