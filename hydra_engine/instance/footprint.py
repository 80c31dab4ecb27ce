"""What the instances of a topology would hold, from the model's JSON files and the configuration alone.

The formulas are those that decide at start (`worker/memory.py`), so the figures are what an instance will take but for
what lies around its tensors; the working memory of steps on a GPU, which is measured at start, is an estimate. Loads no
weights and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hydra_engine.backend.select import create_backend, resolve_device, resolve_dtype
from hydra_engine.config import EngineConfig
from hydra_engine.core.roles import EPD, Role, Topology, check_serves, check_states
from hydra_engine.errors import ResourceError
from hydra_engine.specs.base import ModelSpec
from hydra_engine.specs.registry import load_spec
from hydra_engine.worker.device_share import own_part
from hydra_engine.worker.memory import Filling, WorkingMemory, plan_memory
from hydra_engine.worker.working_memory import estimate


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of one instance, in bytes; tokens and rows that its caches hold."""

    name: str
    role: str
    device: str
    vision_bytes: int  # weights of the tower and the projector; 0 where the role needs none
    language_bytes: int  # of the decoder
    kv_bytes: int
    kv_tokens: int
    image_bytes: int
    image_rows: int
    state_bytes: int
    working: WorkingMemory  # all 0 where it is not counted, in host memory

    @property
    def weights_bytes(self) -> int:
        return self.vision_bytes + self.language_bytes

    @property
    def cache_bytes(self) -> int:
        return self.kv_bytes + self.image_bytes + self.state_bytes

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.working.total_bytes


@dataclass(frozen=True, slots=True)
class Footprints:
    """`wholes`: for each instance, what one that does everything would hold in its place; None: it would not fit."""

    family: str
    dtype: str
    topology: Topology
    instances: tuple[Footprint, ...]
    wholes: tuple[Footprint | None, ...]
    memory: dict[str, int]  # free bytes of each device


def footprints(config: EngineConfig, memory_bytes: int | None = None) -> Footprints:
    """`memory_bytes` of each device; None: what is free there now. Raises ConfigError for a topology that cannot serve
    the model, ResourceError naming an instance that would not fit."""
    spec = load_spec(config.model_path, config.spec_options)
    topology = Topology.parse(config.topology)
    check_serves(topology, spec.vision is not None)
    if spec.language.has_states:
        check_states(topology)
    devices = topology.devices(config.device)
    if "auto" in devices:
        devices = topology.devices(resolve_device("auto", config.backend).name)
    dtype, _ = resolve_dtype(config.dtype, spec.dtype, config.backend, devices[0])
    memory = {
        device: _free_bytes(config, device, dtype) if memory_bytes is None else memory_bytes
        for device in dict.fromkeys(devices)
    }
    roles = [instance.role for instance in topology.instances]
    instances, wholes = [], []
    for index, (name, role, device) in enumerate(zip(topology.names, roles, devices, strict=True)):
        others = [roles[other] for other in range(len(roles)) if devices[other] == device and other != index]
        of = partial(_footprint, spec, config, dtype, memory[device], name, device, others)
        try:
            instances.append(of(role))
        except ResourceError as error:
            raise ResourceError(f"{name} would not fit: {error.message}", param=error.param) from error
        wholes.append(_if_it_fits(partial(of, EPD)))
    name = str(dtype).removeprefix("torch.")
    return Footprints(spec.family, name, topology, tuple(instances), tuple(wholes), memory)


def _if_it_fits(make: partial[Footprint]) -> Footprint | None:
    try:
        return make()
    except ResourceError:
        return None


def _free_bytes(config: EngineConfig, device: str, dtype: torch.dtype) -> int:
    backend = create_backend(device, dtype, backend=config.backend, deterministic=config.deterministic)
    free_bytes, _ = backend.device.memory()
    return free_bytes


def _footprint(
    spec: ModelSpec,
    config: EngineConfig,
    dtype: torch.dtype,
    free_bytes: int,
    name: str,
    device: str,
    others: Sequence[Role],
    role: Role,
) -> Footprint:
    """`free_bytes` of the device, for this instance and `others` together."""
    filling = None
    if device != "cpu":
        whole = {"total_bytes": free_bytes, "free_bytes": free_bytes}
        own_bytes, _ = own_part(spec, role, config, dtype.itemsize, **whole, neighbours=(role, *others))
        filling = Filling(own_bytes, estimate(spec, role, config, dtype.itemsize))
    plan = plan_memory(spec, role, config, dtype, free_bytes // (1 + len(others)), filling=filling)
    has_tower = spec.vision is not None and role.needs_vision
    return Footprint(
        name=name,
        role=role.letters,
        device=device,
        vision_bytes=spec.vision.num_parameters() * dtype.itemsize if spec.vision is not None and has_tower else 0,
        language_bytes=spec.language.num_parameters() * dtype.itemsize if role.needs_language else 0,
        kv_bytes=plan.kv_bytes,
        kv_tokens=plan.num_kv_blocks * config.cache.block_size,
        image_bytes=plan.image_bytes,
        image_rows=plan.num_image_blocks * config.cache.image_block_size,
        state_bytes=plan.state_bytes,
        working=plan.working,
    )
