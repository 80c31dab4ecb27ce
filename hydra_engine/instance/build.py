"""Builds one instance and runs it: compute stack (`compute_stack.py`), hooks (`hooks.py`), scheduler and loop."""

from __future__ import annotations

import logging
import threading
import time

import torch

from hydra_engine.backend.select import weights_dtype
from hydra_engine.cache.blocks import CacheManager
from hydra_engine.clock import SharedClock
from hydra_engine.config import EngineConfig
from hydra_engine.core.messages import WIRE_VERSION, Failed, Loading, Ready
from hydra_engine.core.reports import InstanceSummary
from hydra_engine.errors import HydraError
from hydra_engine.instance.compute_stack import THIS_MACHINE, ComputeStack, build_worker
from hydra_engine.instance.hooks import Connect, Hooks, make_gate, make_hooks
from hydra_engine.instance.instance import Instance
from hydra_engine.instance.ports import ALONE, Inbox, InstanceContext, Outbox
from hydra_engine.scheduler.scheduler import StageScheduler
from hydra_engine.transfer.network import BlockNetwork
from hydra_engine.worker.worker import Worker

logger = logging.getLogger(__name__)

_PROGRESS_PERIOD_S = 0.1


def run_instance(
    config: EngineConfig,
    name: str,
    inbox: Inbox,
    outbox: Outbox,
    wake: threading.Event,
    context: InstanceContext = ALONE,
    connect: Connect | None = None,
    scheduler_class: type[StageScheduler] = StageScheduler,
    worker_class: type[Worker] = Worker,
    clock: SharedClock = THIS_MACHINE,
    network: BlockNetwork | None = None,
) -> int:
    """Builds an instance, sends Ready and serves until Shutdown. Returns the process's exit code: 0, or that of the
    error that ended the start.

    A HydraError during the start is sent to the frontend as `Failed`; any other exception propagates. `config` has the
    limits of all instances; `wake`: the event that `inbox` sets; `connect` None: there are no peers; `network`: for
    those on other nodes; `clock`: of all stamps that travel. Benchmarks replace `scheduler_class` and `worker_class` by
    baselines.
    """
    config = config.for_instance(name, context.role)
    began, progress = time.monotonic(), _Progress(outbox).report
    with torch.inference_mode():
        try:
            stack = build_worker(
                config,
                wake,
                progress,
                context,
                worker_class,
                make_gate,
                clock,
                lambda found: outbox.send([found]),
            )
            hooks = make_hooks(stack, wake, progress, connect, network)
            instance = Instance(
                scheduler=_make_scheduler(name, stack, hooks, scheduler_class),
                worker=stack.worker,
                inbox=inbox,
                outbox=outbox,
                wake=wake,
                clock=stack.clock,
                look_ahead=bool(stack.config.scheduler.look_ahead),
                migration=hooks.migration,
                clock_error=lambda: stack.clock.error_s,
            )
            summary = _summary(name, context, stack, hooks, time.monotonic() - began)
        except HydraError as error:
            outbox.send([Failed(error.info(), error.exit_code)])
            return error.exit_code
        outbox.send([Ready(WIRE_VERSION, summary)])
        try:
            instance.run()
        finally:
            stack.worker.close()
    return 0


def _make_scheduler(
    name: str, stack: ComputeStack, hooks: Hooks, scheduler_class: type[StageScheduler]
) -> StageScheduler:
    config, plan = stack.config, stack.plan
    return scheduler_class(
        stack.context.role,
        CacheManager(plan.num_kv_blocks, config.cache.block_size),
        CacheManager(plan.num_image_blocks, config.cache.image_block_size),
        config.scheduler,
        instance=name,
        reuse=config.cache.prefix_caching,
        num_snapshots=plan.num_snapshots if plan.num_state_slots else None,
        num_state_blocks=plan.num_state_blocks,
        budgets=hooks.budgets,
        observer=hooks.observer,
        connector=hooks.connector,
        vision_plans=stack.worker.vision_plans,
    )


def _summary(
    name: str,
    context: InstanceContext,
    stack: ComputeStack,
    hooks: Hooks,
    load_s: float,
) -> InstanceSummary:
    config, backend, model, plan = stack.config, stack.backend, stack.model, stack.plan
    free_bytes, device_bytes = backend.device.memory()
    kept = weights_dtype(backend.dtype, stack.spec.dtype, config.backend, backend.device.name)
    return InstanceSummary(
        name=name,
        role=context.role.letters,
        incarnation=context.incarnation,
        weights_dtype=str(kept).removeprefix("torch."),
        quantization=stack.spec.quantized_as,
        num_parameters=stack.spec.num_parameters,
        vision_weights_bytes=plan.vision_weights_bytes,
        language_weights_bytes=plan.language_weights_bytes,
        state_bytes=plan.state_bytes,
        device_bytes=device_bytes,
        activation_bytes=plan.working.activation_bytes,
        graph_bytes=stack.worker.graph_bytes,
        num_graphs=stack.worker.num_graphs,
        captured_patches=stack.worker.captured_patches,
        captured_tokens=stack.worker.captured_tokens,
        free_bytes=free_bytes,
        model=config.model_name,
        family=stack.spec.family,
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
        token_budget=config.scheduler.max_step_tokens,
        max_num_seqs=config.scheduler.max_running_requests,
        image_budget=config.scheduler.image_budget,
        one_picture=stack.spec.one_picture_because != "",
        load_s=load_s,
        ops=tuple((c.op, c.implementation, c.reason) for c in backend.ops.choices()),
        notes=(*stack.notes, *hooks.notes),
        limits=hooks.limits,
    )


class _Progress:
    """A sender of the start's progress to the frontend: the first and the last message of each phase, and between them
    at most ten a second."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._phase = ""
        self._sent_s = float("-inf")

    def report(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._phase or done >= total or now - self._sent_s >= _PROGRESS_PERIOD_S:
            self._phase, self._sent_s = what, now
            self._outbox.send([Loading(what, done, total)])
