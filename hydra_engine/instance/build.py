"""Assembles one instance from a configuration and runs it: what computes (`parts.py`), what decides, and the loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hydra_engine.cache.manager import CacheManager
from hydra_engine.config import EngineConfig
from hydra_engine.core.messages import WIRE_VERSION, Failed, InstanceSummary, LimitSummary, Loading, Ready
from hydra_engine.core.pools import Exports
from hydra_engine.errors import HydraError
from hydra_engine.instance.instance import Instance
from hydra_engine.instance.limits import limit_summary
from hydra_engine.instance.migration import Migration
from hydra_engine.instance.parts import Parts, build_worker, step_times
from hydra_engine.instance.ports import ALONE, Inbox, Outbox, PeerPort, Place
from hydra_engine.scheduler.blame import StepLog
from hydra_engine.scheduler.latency_budget import LatencyBudgets
from hydra_engine.scheduler.scheduler import StageScheduler
from hydra_engine.worker.worker import Worker

logger = logging.getLogger(__name__)

_PROGRESS_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True)
class Assembled:
    instance: Instance
    worker: Worker
    summary: InstanceSummary


Connect = Callable[[Exports, tuple[int, ...]], PeerPort]  # lets other instances in, which may map what is exported


def run_instance(
    config: EngineConfig,
    name: str,
    inbox: Inbox,
    outbox: Outbox,
    wake: threading.Event,
    place: Place = ALONE,
    connect: Connect | None = None,
) -> int:
    """Builds, announces readiness, serves until told to stop. Returns the exit code; start-up errors are reported to
    the front as data, anything else is a bug and propagates."""
    with torch.inference_mode():
        try:
            assembled = assemble(config, name, inbox, outbox, wake, place, connect)
        except HydraError as error:
            outbox.send([Failed(error.info(), error.exit_code)])
            return error.exit_code
        outbox.send([Ready(WIRE_VERSION, assembled.summary)])
        try:
            assembled.instance.run()
        finally:
            assembled.worker.close()
    return 0


def assemble(
    config: EngineConfig,
    name: str,
    inbox: Inbox,
    outbox: Outbox,
    wake: threading.Event,
    place: Place,
    connect: Connect | None,
) -> Assembled:
    began = time.monotonic()
    progress = _Progress(outbox).report
    parts = build_worker(config, wake, progress, place)
    resolved, plan, notes = parts.config, parts.plan, parts.notes
    budgets, surface, limits = None, None, LimitSummary()
    limited = resolved.scheduler.tpot_slo is not None or resolved.scheduler.ttft_slo is not None
    if limited and place.role.needs_language:
        found = step_times(parts, wake, progress)
        surface, notes = found.surface, (*notes, *found.notes)
        limits = limit_summary(resolved.scheduler, found, parts.spec.vision)
        if resolved.scheduler.schedule == "stage":
            budgets = LatencyBudgets(surface, resolved.scheduler, num_slices=parts.worker.num_slices)
    scheduler = StageScheduler(
        place.role,
        CacheManager(plan.num_kv_blocks, resolved.cache.block_size),
        CacheManager(plan.num_image_blocks, resolved.cache.image_block_size),
        resolved.scheduler,
        instance=name,
        reuse=resolved.cache.prefix_caching,
        has_states=plan.num_state_slots > 0,
        budgets=budgets,
        log=StepLog(surface),
    )
    instance = Instance(
        scheduler=scheduler,
        worker=parts.worker,
        inbox=inbox,
        outbox=outbox,
        wake=wake,
        clock=parts.clock,
        look_ahead=bool(resolved.scheduler.look_ahead),
        migration=None if connect is None else _migration(parts, scheduler, place, connect),
        arm_fault=parts.faults.arm if parts.faults.enabled else None,
    )
    summary = _summary(name, place, parts, limits, notes, time.monotonic() - began)
    return Assembled(instance, parts.worker, summary)


def _migration(parts: Parts, scheduler: StageScheduler, place: Place, connect: Connect) -> Migration:
    exports, descriptors = parts.worker.exports()
    return Migration(
        incarnation=place.incarnation,
        scheduler=scheduler,
        worker=parts.worker,
        peers=connect(exports, descriptors),
        num_slots=exports.num_words,
        config=parts.config.cluster,
        hit=parts.faults.hit,
    )


def _summary(
    name: str, place: Place, parts: Parts, limits: LimitSummary, notes: tuple[str, ...], load_s: float
) -> InstanceSummary:
    config, backend, model, plan = parts.config, parts.backend, parts.model, parts.plan
    free_bytes, device_bytes = backend.device.memory()
    return InstanceSummary(
        name=name,
        role=place.role.letters,
        incarnation=place.incarnation,
        vision_weights_bytes=plan.vision_weights_bytes,
        language_weights_bytes=plan.language_weights_bytes,
        state_bytes=plan.state_bytes,
        device_bytes=device_bytes,
        activation_bytes=plan.working.activation_bytes,
        graph_bytes=parts.worker.graph_bytes,
        captured_patches=parts.worker.captured_patches,
        free_bytes=free_bytes,
        model=config.model_name,
        family=parts.spec.family,
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
        limits=limits,
    )


class _Progress:
    """Sends progress at most ten times a second, and always the last step."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._sent_s = float("-inf")

    def report(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._sent_s >= _PROGRESS_PERIOD_S:
            self._sent_s = now
            self._outbox.send([Loading(what, done, total)])
