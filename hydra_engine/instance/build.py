"""Assembles one instance from a configuration and runs it: the only file here that imports torch.

Turns "auto" into values, each decision with its reason in the summary. Loads in this order, so that a wrong setting is
found before gigabytes are read: spec, dtype and backend, cache sizes, weights, caches, warm-up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend, resolve_dtype
from hydra_engine.cache.manager import CacheManager
from hydra_engine.clock import MonotonicClock
from hydra_engine.config import EngineConfig, fault_points_enabled
from hydra_engine.core.messages import WIRE_VERSION, Failed, InstanceSummary, Loading, Ready
from hydra_engine.core.roles import EPD
from hydra_engine.errors import ConfigError, HydraError
from hydra_engine.instance.instance import Instance
from hydra_engine.instance.ports import Inbox, Outbox
from hydra_engine.models.registry import load_model
from hydra_engine.models.vlm import VisionLanguageModel
from hydra_engine.scheduler.scheduler import StageScheduler
from hydra_engine.specs.base import ModelSpec
from hydra_engine.specs.registry import load_spec
from hydra_engine.worker.cache_store import allocate_image_cache, allocate_kv_cache, allocate_states
from hydra_engine.worker.faults import FaultPoints
from hydra_engine.worker.memory import CachePlan, plan_memory
from hydra_engine.worker.worker import Worker

if TYPE_CHECKING:
    from hydra_engine.models.generic import GenericModel

logger = logging.getLogger(__name__)

_PROGRESS_PERIOD_S = 0.1
DEFAULT_IMAGE_BUDGET = 16384  # patches; only towers with dynamic resolution come near it


@dataclass(frozen=True, slots=True)
class Assembled:
    instance: Instance
    worker: Worker
    summary: InstanceSummary


def run_instance(config: EngineConfig, name: str, inbox: Inbox, outbox: Outbox, wake: threading.Event) -> int:
    """Builds, announces readiness, serves until told to stop. Returns the exit code; start-up errors are reported to
    the front as data, anything else is a bug and propagates."""
    with torch.inference_mode():
        try:
            assembled = assemble(config, name, inbox, outbox, wake)
        except HydraError as error:
            outbox.send([Failed(error.info(), error.exit_code)])
            return error.exit_code
        outbox.send([Ready(WIRE_VERSION, assembled.summary)])
        try:
            assembled.instance.run()
        finally:
            assembled.worker.close()
    return 0


def assemble(config: EngineConfig, name: str, inbox: Inbox, outbox: Outbox, wake: threading.Event) -> Assembled:
    began = time.monotonic()
    progress = _Progress(outbox)
    spec = load_spec(config.model_path, config.spec_options)
    dtype, dtype_reason = resolve_dtype(config.dtype, spec.dtype, config.backend)
    backend = create_backend(
        config.device,
        dtype,
        backend=config.backend,
        deterministic=config.deterministic,
        threads=config.threads,
        lane_priority=config.lane_priority,
    )
    free_bytes, _ = backend.device.memory()
    plan = plan_memory(spec, EPD, config, dtype, free_bytes)
    resolved = _resolve(config, spec, plan)
    random = config.load_format == "random"
    model = load_model(config.model_path, spec, backend, EPD, progress.callback("weights"), random_weights=random)
    if config.deterministic and not model.deterministic:
        raise ConfigError(
            f"{spec.architecture} has matrix products of its own, whose results may depend on the batch; set "
            "deterministic to false",
            param="deterministic",
        )
    faults = FaultPoints(enabled=fault_points_enabled())
    kv_cache = allocate_kv_cache(spec, plan, resolved.cache.block_size, dtype)
    image_cache = allocate_image_cache(spec, plan, resolved.cache.image_block_size, dtype)
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
    )
    worker.warm_up(progress.callback("warm-up"))
    scheduler = StageScheduler(
        EPD,
        CacheManager(plan.num_kv_blocks, resolved.cache.block_size),
        CacheManager(plan.num_image_blocks, resolved.cache.image_block_size),
        resolved.scheduler,
        instance=name,
        reuse=resolved.cache.prefix_caching,
        has_states=plan.num_state_slots > 0,
    )
    instance = Instance(
        scheduler=scheduler,
        worker=worker,
        inbox=inbox,
        outbox=outbox,
        wake=wake,
        clock=clock,
        look_ahead=resolved.scheduler.look_ahead,
        arm_fault=faults.arm if faults.enabled else None,
    )
    notes = (dtype_reason, *plan.reasons)
    summary = _summary(name, resolved, spec, backend, model, plan, notes, time.monotonic() - began)
    return Assembled(instance, worker, summary)


def _summary(
    name: str,
    config: EngineConfig,
    spec: ModelSpec,
    backend: Backend,
    model: VisionLanguageModel | GenericModel,
    plan: CachePlan,
    notes: tuple[str, ...],
    load_s: float,
) -> InstanceSummary:
    return InstanceSummary(
        name=name,
        role=EPD.letters,
        model=config.model_name,
        family=spec.family,
        device=backend.device.name,
        dtype=str(backend.dtype).removeprefix("torch."),
        backend=backend.ops.name,
        deterministic=backend.ops.deterministic and model.deterministic,
        threads=backend.threads,
        weights_bytes=model.weights_bytes,
        kv_cache_bytes=plan.kv_bytes,
        image_cache_bytes=plan.image_bytes,
        num_kv_blocks=plan.num_kv_blocks,
        num_image_blocks=plan.num_image_blocks,
        kv_block_size=config.cache.block_size,
        image_block_size=config.cache.image_block_size,
        max_model_len=plan.max_model_len,
        token_budget=config.scheduler.token_budget,
        image_budget=config.scheduler.image_budget,
        load_s=load_s,
        ops=tuple((c.op, c.implementation, c.reason) for c in backend.ops.choices()),
        notes=notes,
    )


def _resolve(config: EngineConfig, spec: ModelSpec, plan: CachePlan) -> EngineConfig:
    """The configuration with every "auto" replaced by a value."""
    if plan.num_kv_blocks * config.cache.block_size < 2:
        raise ConfigError("the KV cache holds no token; raise kv_cache_gib", param="kv_cache_gib")
    image_budget = config.scheduler.image_budget
    if image_budget <= 0 and spec.vision is not None:
        image_budget = min(2 * spec.vision.max_patches_per_image, DEFAULT_IMAGE_BUDGET)
    scheduler = replace(config.scheduler, image_budget=image_budget)
    return replace(config, scheduler=scheduler, max_model_len=plan.max_model_len)


class _Progress:
    """Sends progress at most ten times a second, and always the last step."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._sent_s = float("-inf")

    def callback(self, what: str) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            now = time.monotonic()
            if done >= total or now - self._sent_s >= _PROGRESS_PERIOD_S:
                self._sent_s = now
                self._outbox.send([Loading(what, done, total)])

        return report
