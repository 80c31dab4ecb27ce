"""The computing half of one instance, assembled: model, caches and worker; and its step times, measured or saved.

Turns "auto" into values, each decision with its reason in the notes. Loads in this order, so that a wrong setting is
found before gigabytes are read: spec, dtype and backend, cache sizes, weights, caches, warm-up. Does not know the
scheduler, nor who the instance talks to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.select import create_backend, resolve_dtype
from hydra_engine.clock import MonotonicClock
from hydra_engine.config import EngineConfig, fault_points_enabled
from hydra_engine.core.roles import Role
from hydra_engine.errors import ConfigError
from hydra_engine.instance.ports import ALONE, Place
from hydra_engine.models.registry import load_model
from hydra_engine.models.vlm import VisionLanguageModel
from hydra_engine.planner.start import Found, Subject, surface_for
from hydra_engine.specs.base import ModelSpec
from hydra_engine.specs.registry import load_spec
from hydra_engine.worker.cache_store import allocate_image_cache, allocate_kv_cache, allocate_states
from hydra_engine.worker.faults import FaultPoints
from hydra_engine.worker.memory import CachePlan, plan_memory
from hydra_engine.worker.worker import Worker

if TYPE_CHECKING:
    from hydra_engine.models.generic import GenericModel

DEFAULT_IMAGE_BUDGET = 16384  # patches; only towers with dynamic resolution come near it

Progress = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True, slots=True)
class Parts:
    """`config` has no "auto" left."""

    config: EngineConfig
    place: Place
    spec: ModelSpec
    backend: Backend
    model: VisionLanguageModel | GenericModel
    plan: CachePlan
    kv_cache: PagedCache
    worker: Worker
    clock: MonotonicClock
    faults: FaultPoints
    notes: tuple[str, ...]


def build_worker(config: EngineConfig, wake: threading.Event, progress: Progress, place: Place = ALONE) -> Parts:
    """Loads and warms up. To be called in inference mode; the caller closes the worker."""
    spec = load_spec(config.model_path, config.spec_options)
    dtype, dtype_reason = resolve_dtype(config.dtype, spec.dtype, config.backend)
    backend = create_backend(
        config.device,
        dtype,
        backend=config.backend,
        deterministic=config.deterministic,
        threads=config.threads,
        lane_priority=config.lane_order,
    )
    free_bytes, _ = backend.device.memory()
    plan = plan_memory(spec, place.role, config, dtype, free_bytes, shares=place.shares)
    resolved = _resolve(config, spec, plan, place.role)
    model = load_model(
        config.model_path,
        spec,
        backend,
        place.role,
        partial(progress, "weights"),
        random_weights=config.load_format == "random",
    )
    if config.deterministic and not model.deterministic:
        raise ConfigError(
            f"{spec.architecture} has matrix products of its own, whose results may depend on the batch; set "
            "deterministic to false",
            param="deterministic",
        )
    faults = FaultPoints(enabled=fault_points_enabled())
    share = backend.device.share if place.has_peers else None
    kv_cache = allocate_kv_cache(
        spec, plan, resolved.cache.block_size, dtype, share=share if Role.P in place.role else None
    )
    image_cache = allocate_image_cache(
        spec, plan, resolved.cache.image_block_size, dtype, share=share if place.role.needs_vision else None
    )
    clock = MonotonicClock()
    worker = Worker(
        model=model,
        backend=backend,
        spec=spec,
        kv_cache=kv_cache,
        image_cache=image_cache,
        config=resolved,
        clock=clock,
        wake=wake.set,
        faults=faults,
        states=allocate_states(spec, plan, dtype),
        role=place.role,
        shared=place.has_peers,
    )
    worker.warm_up(partial(progress, "warm-up"))
    notes = (dtype_reason, *plan.reasons)
    return Parts(resolved, place, spec, backend, model, plan, kv_cache, worker, clock, faults, notes)


def step_times(
    parts: Parts, wake: threading.Event, progress: Progress, *, fresh: bool = False, deadline_s: float | None = None
) -> Found:
    """Saved or measured; before the instance serves, in inference mode. See `planner/start.py`. `deadline_s` None: the
    planner's own."""
    language, backend = parts.spec.language, parts.backend
    subject = Subject(
        lanes=parts.worker,
        wake=wake,
        clock=parts.clock,
        spec=parts.spec,
        device=backend.device.name,
        dtype=str(backend.dtype).removeprefix("torch."),
        backend=backend.ops.name,
        threads=backend.threads,
        num_kv_blocks=parts.plan.num_kv_blocks,
        num_image_blocks=parts.plan.num_image_blocks if parts.place.role.needs_vision else 0,
        role=parts.place.role.letters,
        kv_token_bytes=language.kv_bytes_per_token(backend.dtype.itemsize),
        weights_bytes=parts.model.weights_bytes,
        fill_cache=partial(_fill_with_noise, parts.kv_cache),
    )
    return surface_for(parts.config, subject, partial(progress, "step times"), fresh=fresh, deadline_s=deadline_s)


def profile_instance(
    config: EngineConfig, progress: Progress, *, fresh: bool, deadline_s: float | None = None
) -> Found:
    """Assembles an instance that never serves and measures it."""
    wake = threading.Event()
    with torch.inference_mode():
        parts = build_worker(config, wake, progress)
        try:
            return step_times(parts, wake, progress, fresh=fresh, deadline_s=deadline_s)
        finally:
            parts.worker.close()


def _fill_with_noise(cache: PagedCache, num_blocks: int) -> None:
    """The first blocks, each with the same."""
    if num_blocks:
        data = cache.data[:num_blocks]
        data[0].normal_()
        data[1:] = data[0]


def _resolve(config: EngineConfig, spec: ModelSpec, plan: CachePlan, role: Role) -> EngineConfig:
    """The configuration with every "auto" replaced by a value."""
    if role.needs_language and plan.num_kv_blocks * config.cache.block_size < 2:
        raise ConfigError("the KV cache holds no token; raise kv_cache_gib", param="kv_cache_gib")
    image_budget = config.scheduler.image_budget
    if image_budget <= 0 and spec.vision is not None:
        image_budget = min(2 * spec.vision.max_patches_per_image, DEFAULT_IMAGE_BUDGET)
    scheduler = replace(config.scheduler, image_budget=image_budget)
    return replace(config, scheduler=scheduler, max_model_len=plan.max_model_len)
