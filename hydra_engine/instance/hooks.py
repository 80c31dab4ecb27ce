"""Creates the optional parts of an instance: a gate between its lanes, budgets for latency limits from step times, an
observer that explains late tokens, and for an instance with peers a connector, a transfer lane and the migration over
both.

The only module that imports the profiler and the optional packages of scheduler, worker and instance; an instance
without any of them serves too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.device import Device
from hydra_engine.backend.devices import gpu_name
from hydra_engine.clock import MonotonicClock
from hydra_engine.config import EngineConfig, SchedulerConfig
from hydra_engine.core.plans import VisionLoad
from hydra_engine.core.pools import Exports, PoolKind
from hydra_engine.core.reports import LimitBudget, LimitSummary
from hydra_engine.instance.compute_stack import ComputeStack, Progress, build_worker
from hydra_engine.instance.instance import MigrationPort
from hydra_engine.instance.migration import Migration
from hydra_engine.instance.ports import PeerPort
from hydra_engine.models.specs.base import VisionSpec
from hydra_engine.profiler.fit import TYPICAL_CONTEXT, allowance
from hydra_engine.profiler.start import StepCosts, Subject, surface_for
from hydra_engine.scheduler.budget import Budgets
from hydra_engine.scheduler.handover.connector import PeerConnector
from hydra_engine.scheduler.hooks import Connector, StepObserver
from hydra_engine.scheduler.latency.attribution import StepHistory
from hydra_engine.scheduler.latency.latency_budget import LatencyBudgets
from hydra_engine.scheduler.latency.limit_check import check_limits
from hydra_engine.transfer.network import BlockNetwork
from hydra_engine.worker.memory.plan import kv_token_bytes
from hydra_engine.worker.ports import Gate
from hydra_engine.worker.transfer import Exchange
from hydra_engine.worker.vision.gate import DeviceGate, LaneGate

_DECODES = (1, 8)  # numbers of decodes in the summary, besides the maximum

Connect = Callable[[Exports, tuple[int, ...]], PeerPort]  # (exported memory, descriptors) -> connections to peers


@dataclass(frozen=True, slots=True)
class Hooks:
    """The optional parts of an instance: None, or a `MigrationPort` that does nothing, for those that it does not have.
    `limits`, `notes`: their lines in the start-up summary."""

    budgets: Budgets | None
    observer: StepObserver | None
    connector: Connector | None
    migration: MigrationPort
    limits: LimitSummary
    notes: tuple[str, ...]


def make_gate(device: Device, config: SchedulerConfig) -> Gate:
    """The gate that limits the seconds of vision beside a language step. On an asynchronous device it counts device
    time, and makes encodes wait only if there is a TPOT limit; elsewhere it counts wall time."""
    if device.asynchronous:
        return DeviceGate(MonotonicClock(), device.mark, paced=config.tpot_slo is not None)
    return LaneGate(MonotonicClock())


def make_hooks(
    stack: ComputeStack,
    wake: threading.Event,
    progress: Progress,
    connect: Connect | None,
    network: BlockNetwork | None = None,
) -> Hooks:
    """Creates the optional parts. If a latency limit is set and the role runs language steps, first reads step times
    from a saved profile or measures them, which takes seconds. `connect` None: no connector and no migration.
    `network`: for peers on other nodes, closed with the worker."""
    config = stack.config.scheduler
    budgets, surface, limits = None, None, LimitSummary()
    notes: tuple[str, ...] = ()
    if (config.tpot_slo is not None or config.ttft_slo is not None) and stack.context.role.needs_language:
        measured = step_times(stack, wake, progress)
        surface, notes = measured.surface, measured.notes
        limits = limit_summary(config, measured, stack.spec.vision)
        budgets = LatencyBudgets(surface, config, num_slices=stack.worker.num_slices)
    connector, migration = None, MigrationPort()
    if connect is not None:
        connector = PeerConnector(config, stack.config.cluster)
        migration = _migration(stack, connector, connect, network)
    return Hooks(budgets, StepHistory(surface), connector, migration, limits, notes)


def _migration(
    stack: ComputeStack, connector: PeerConnector, connect: Connect, network: BlockNetwork | None
) -> Migration:
    """Creates the transfer lane, which the worker closes, connects to the peers and returns the migration over both."""
    worker, caches = stack.worker, {PoolKind.FEATURES: stack.image_cache, PoolKind.KV: stack.kv_cache}
    through_host = stack.config.cluster.transport == "host"
    exchange = Exchange(
        stack.backend,
        caches,
        stack.clock,
        worker.deliver,
        worker.run_job,
        through_host=through_host,
        network=network,
    )
    worker.on_close(exchange.close)
    exports, descriptors = exchange.exports()
    return Migration(
        incarnation=stack.context.incarnation,
        connector=connector,
        transfer=exchange,
        peers=connect(exports, descriptors),
        num_slots=exports.num_words,
        config=stack.config.cluster,
        cache=stack.config.cache,
    )


# ---- step times, for latency limits


def step_times(
    stack: ComputeStack,
    wake: threading.Event,
    progress: Progress,
    *,
    fresh: bool = False,
    deadline_s: float | None = None,
) -> StepCosts:
    """Step costs of the instance, saved or measured, see `profiler/start.py`. Must be called in inference mode before
    it serves; measuring overwrites the caches. Raises BackendError and ConfigError as `surface_for`. `fresh`: measures
    even if a profile is saved. `deadline_s`: seconds to measure, None: the profiler's default."""
    backend = stack.backend
    gpu = gpu_name(backend.device.name)
    kernels = {choice.op: choice.implementation for choice in backend.ops.choices()}
    subject = Subject(
        lanes=stack.worker,
        wake=wake,
        clock=stack.clock,
        spec=stack.spec,
        device=backend.device.name,
        dtype=str(backend.dtype).removeprefix("torch."),
        backend=backend.ops.name,
        threads=backend.threads,
        num_kv_blocks=stack.plan.num_kv_blocks,
        num_image_blocks=stack.plan.num_image_blocks if stack.context.role.needs_vision else 0,
        role=stack.context.role.letters,
        kv_token_bytes=kv_token_bytes(stack.spec, stack.config, backend.dtype.itemsize),
        kv_cache_dtype="int8" if stack.kv_cache.scales is not None else "",
        weights_bytes=stack.model.weights_bytes,
        fill_cache=partial(_fill_with_noise, stack.kv_cache),
        gpu=gpu,
        attention=kernels["attention_paged"] if gpu else "",
        sm_split=stack.config.sm_counts if backend.device.partitions.count > 1 else (),
        graph_sizes=stack.worker.graph_sizes,
        captured_patches=stack.worker.captured_patches,
        captured_tokens=stack.worker.captured_tokens,
    )
    return surface_for(stack.config, subject, partial(progress, "step times"), fresh=fresh, deadline_s=deadline_s)


def _fill_with_noise(cache: PagedCache, num_blocks: int) -> None:
    """Fills the first `num_blocks` KV blocks, all with the same noise, so that measured steps read usual numbers."""
    if num_blocks:
        data = cache.data[:num_blocks]
        if cache.scales is None:
            data[0].normal_()
        else:
            data[0].random_(-127, 128)
            cache.scales[:num_blocks] = 1 / 64
        data[1:] = data[0]


def profile_instance(
    config: EngineConfig, progress: Progress, *, fresh: bool, deadline_s: float | None = None
) -> StepCosts:
    """Loads the model as an instance does, returns its step costs and closes it again. `fresh`: measures even if costs
    are saved. `deadline_s`: seconds to measure, None: the profiler's default."""
    wake = threading.Event()
    with torch.inference_mode():
        stack = build_worker(config, wake, progress, make_gate=make_gate)
        try:
            return step_times(stack, wake, progress, fresh=fresh, deadline_s=deadline_s)
        finally:
            stack.worker.close()


# ---- latency limits in the start-up summary


def limit_summary(config: SchedulerConfig, step_times: StepCosts, vision: VisionSpec | None) -> LimitSummary:
    """The summary of the latency limits: the budgets that the TPOT limit leaves beside 1, 8 and `max_running_requests`
    decodes, and warnings about limits that cannot be kept. `config.look_ahead` is resolved; `vision` None: the model
    reads no pictures."""
    picture, picture_tokens = None, 0
    if vision is not None:
        patches, picture_tokens = vision.max_patches_per_image, vision.max_tokens_per_image
        picture = VisionLoad(patches, float(patches) ** 2)
    pause_s = step_times.profile.submit_s + step_times.profile.collect_s
    warnings = check_limits(
        step_times.surface,
        config,
        picture=picture,
        picture_tokens=picture_tokens,
        pause_s=0.0 if config.look_ahead else pause_s,
    )
    budgets: tuple[LimitBudget, ...] = ()
    if config.tpot_slo is not None:
        counts = sorted({min(count, config.max_running_requests) for count in (*_DECODES, config.max_running_requests)})
        budgets = tuple(_budget(config, step_times, count, has_vision=vision is not None) for count in counts)
    return LimitSummary(
        tpot_limit_s=config.tpot_slo or 0.0,
        ttft_limit_s=config.ttft_slo or 0.0,
        source=step_times.source,
        budgets=budgets,
        warnings=tuple(warnings),
    )


def _budget(config: SchedulerConfig, step_times: StepCosts, num_decodes: int, *, has_vision: bool) -> LimitBudget:
    """The work that the TPOT limit leaves beside `num_decodes` decodes of a typical context. Asserts that there is a
    limit."""
    assert config.tpot_slo is not None
    most = max(config.max_step_tokens - num_decodes, 0)
    left = allowance(step_times.surface, num_decodes, TYPICAL_CONTEXT, config.tpot_slo, most)
    return LimitBudget(num_decodes, left.step_s, left.tokens_alone, left.vision_s if has_vision else None)
