"""The compute stack of one instance: model, caches and worker.

Replaces "auto" by values, with the reason of each decision in the notes. Loads in this order, so that a wrong setting
is found before gigabytes are read: spec, dtype and backend, cache sizes, weights, caches, warm-up. On a device that
reports peak memory, the largest steps are measured after the weights, and cache sizes are computed again. Does not know
the scheduler or other instances.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from hydra_engine.backend.base import Backend, PagedCache, StateCache
from hydra_engine.backend.cuda.attention_choice import AUTO, FLASHINFER, TRITON, Heads, Shapes, Tower, resolve_attention
from hydra_engine.backend.cuda.lanes import priority_note
from hydra_engine.backend.device import Device
from hydra_engine.backend.devices import ChosenDevice, is_time_sliced
from hydra_engine.backend.select import (
    all_cores,
    create_backend,
    resolve_deterministic,
    resolve_device,
    resolve_dtype,
    resolve_sm_split,
    weights_dtype,
)
from hydra_engine.clock import MonotonicClock, SharedClock
from hydra_engine.config import EngineConfig, SchedulerConfig
from hydra_engine.core.instances import Role
from hydra_engine.core.reports import BlockFormat
from hydra_engine.errors import ConfigError, ResourceError
from hydra_engine.instance.ports import ALONE, InstanceContext
from hydra_engine.models.build import check_layers, load_model
from hydra_engine.models.implementation import LoadedModel
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.registry import FAMILIES, load_spec
from hydra_engine.worker.memory.cache_store import allocate_image_cache, allocate_kv_cache, allocate_states
from hydra_engine.worker.memory.limits import with_limits
from hydra_engine.worker.memory.measure import measure
from hydra_engine.worker.memory.plan import CachePlan, Filling, fewer_bits, own_part, plan_memory
from hydra_engine.worker.memory.working import image_budget
from hydra_engine.worker.ports import NO_GATE, Gate
from hydra_engine.worker.worker import Worker

Progress = Callable[[str, int, int], None]  # what, done, total
THIS_MACHINE = MonotonicClock()
_SMALLER = "lower --gpu-memory-utilization or the caches' sizes, --token-budget, --max-num-seqs or --image-budget"


@dataclass(frozen=True, slots=True)
class ComputeStack:
    """Everything that computes in an instance. `config`: image budget, look-ahead, `max_model_len`, `deterministic`,
    `sm_split` and, on a GPU, token budget and `max_num_seqs` are resolved; what is still "auto" there, such as device
    and dtypes, is resolved in `backend` and `spec`. `image_cache` None: no image is encoded or read here. `notes`:
    reasons of decisions, for the start-up summary."""

    config: EngineConfig
    context: InstanceContext
    spec: ModelSpec
    backend: Backend
    model: LoadedModel
    plan: CachePlan
    kv_cache: PagedCache
    image_cache: PagedCache | None
    worker: Worker
    clock: SharedClock
    notes: tuple[str, ...]


def build_worker(
    config: EngineConfig,
    wake: threading.Event,
    progress: Progress,
    context: InstanceContext = ALONE,
    worker_class: type[Worker] = Worker,
    make_gate: Callable[[Device, SchedulerConfig], Gate] | None = None,
    clock: SharedClock = THIS_MACHINE,
    announce: Callable[[BlockFormat], None] | None = None,
) -> ComputeStack:
    """Loads the model, allocates the caches, warms up and captures graphs. Call it in inference mode; close the worker,
    which sets `wake` at results. `announce`: is called before the weights are read. Raises HydraError: setting,
    checkpoint, memory, a device that cannot run it."""
    spec = load_spec(config.model_path, config.spec_options)
    chosen = resolve_device(config.device, config.backend)
    spec = spec.held_on(chosen.name)
    dtype, dtype_reason = resolve_dtype(config.dtype, spec.dtype, config.backend, chosen.name)
    deterministic, deterministic_note = resolve_deterministic(config.deterministic, chosen.name)
    _check_kv_dtype(config, spec, dtype, chosen.name)
    if announce is not None:
        name, sizes = str(dtype).removeprefix("torch."), config.cache
        announce(BlockFormat(name, sizes.block_size, sizes.image_block_size))
    decided = replace(config, deterministic=deterministic, sm_split=resolve_sm_split(config.sm_split, chosen.num_sms))
    backend, sharing_notes = _backend(decided, spec, context.role, chosen, dtype)
    resolved, plan, model = _load_and_size(decided, spec, backend, context, partial(progress, "weights"))
    kv_cache, image_cache, states = _allocate_caches(resolved, spec, plan, backend, context)
    worker = worker_class(
        model=model,
        backend=backend,
        spec=spec,
        kv_cache=kv_cache,
        image_cache=image_cache,
        config=resolved,
        clock=clock,
        wake=wake.set,
        states=states,
        role=context.role,
        working=plan.working,
        gate=NO_GATE if make_gate is None else make_gate(backend.device, resolved.scheduler),
    )
    worker.warm_up(partial(progress, "warm-up"))
    worker.capture_graphs(partial(progress, "capturing graphs"))
    of_device = (deterministic_note, *sharing_notes, _turns(chosen, context))
    notes = (dtype_reason, *filter(None, of_device), *backend.notes, *model.notes, *worker.notes, *plan.reasons)
    return ComputeStack(resolved, context, spec, backend, model, plan, kv_cache, image_cache, worker, clock, notes)


def _allocate_caches(
    config: EngineConfig, spec: ModelSpec, plan: CachePlan, backend: Backend, context: InstanceContext
) -> tuple[PagedCache, PagedCache | None, StateCache | None]:
    """Returns the caches of KV, of features and of states."""
    share = backend.device.share if context.has_peers else None
    on, dtype = backend.device.torch_device, backend.dtype
    with _memory_for("the caches"):
        kv_cache = allocate_kv_cache(
            spec,
            plan,
            config.cache.block_size,
            dtype,
            quantized=config.cache.kv_cache_dtype == "int8",
            device=on,
            share=share if Role.P in context.role else None,
        )
        image_cache = allocate_image_cache(
            spec,
            plan,
            config.cache.image_block_size,
            dtype,
            device=on,
            share=share if context.role.needs_vision else None,
        )
        return kv_cache, image_cache, allocate_states(spec, plan, dtype, device=on)


def _turns(chosen: ChosenDevice, context: InstanceContext) -> str | None:
    """The note that the instances on this GPU never compute at the same time; None if the instance is alone there, is
    on a CPU, or MPS runs."""
    if context.num_sharing == 1 or chosen.index is None or not is_time_sliced(chosen.name):
        return None
    return (
        f"the {context.num_sharing} instances on {chosen.name} take turns and never compute at the same moment, for "
        "MPS does not run there: one EPD instance with --sm-split shares a GPU better; docs/gpu.md says how to start "
        "MPS"
    )


def _check_kv_dtype(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: str) -> None:
    """Raises ConfigError unless device, model, activation dtype and attention backend support --kv-cache-dtype."""
    name, own = config.cache.kv_cache_dtype, str(dtype).removeprefix("torch.")
    problem = ""
    if name == "int8" and spec.family not in FAMILIES:
        problem = f"{spec.architecture} has attention of its own, which reads no int8; leave it at auto"
    elif name == "int8" and device != "cpu" and config.attention_backend == FLASHINFER:
        problem = "FlashInfer reads no int8; leave --attention-backend at auto"
    elif name not in ("auto", "int8", own):
        problem = f"the KV cache has the type of activations, {own}, or int8; set --dtype {name} or leave it at auto"
    if problem:
        raise ConfigError(f"kv_cache_dtype {name}: {problem}", param="kv_cache_dtype")


def _load_and_size(
    config: EngineConfig,
    spec: ModelSpec,
    backend: Backend,
    context: InstanceContext,
    progress: Callable[[int, int], None],
) -> tuple[EngineConfig, CachePlan, LoadedModel]:
    """Returns the configuration of `ComputeStack`, the cache sizes, and the loaded model. Runs the largest steps before
    the final sizes if the device reports peak memory. Raises ConfigError for a setting that this model or cache cannot
    have, such as `deterministic`, CheckpointError for a bad checkpoint, ResourceError if memory does not suffice."""
    device, role = backend.device, context.role
    free_bytes, total_bytes = device.memory()
    fills = device.peak_bytes(_nothing) is not None
    own_bytes, reasons = own_part(
        spec,
        role,
        config,
        backend.dtype.itemsize,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        neighbours=context.neighbours,
        neighbour_configs=context.neighbour_configs,
    )
    weight_bytes = weights_dtype(backend.dtype, spec.dtype, config.backend, device.name).itemsize
    if device.asynchronous:
        config, limits_reason = with_limits(config, spec, role, backend.dtype.itemsize, own_bytes, weight_bytes)
        reasons += () if limits_reason is None else (limits_reason,)
    plan_of = partial(
        plan_memory,
        spec,
        role,
        config,
        backend.dtype.itemsize,
        free_bytes,
        shares=context.num_sharing,
        weight_bytes=weight_bytes,
        total_bytes=total_bytes,
    )
    plan = _first_plan(partial(plan_of, filling=Filling(own_bytes) if fills else None), config, spec, backend, role)
    resolved = _resolve(config, spec, plan, role, device)
    quantized = " or ".join(fewer_bits(spec, role))
    with _memory_for("the weights", f"give --quantization {quantized}" if quantized else ""), all_cores(backend):
        model = load_model(
            config.model_path,
            spec,
            backend,
            role,
            progress,
            random_weights=config.load_format == "random",
            packed_cache=None if config.packed_cache is None else Path(config.packed_cache).expanduser(),
        )
    if config.deterministic and not model.deterministic:
        raise _not_deterministic(spec)
    if fills:
        with _memory_for("its largest steps"):
            working = measure(model, backend, spec, role, resolved, plan)
        plan = plan_of(filling=Filling(own_bytes, working, model.weights_bytes, reasons))
        resolved = _resolve(config, spec, plan, role, device)
    return resolved, plan, model


def _not_deterministic(spec: ModelSpec) -> ConfigError:
    return ConfigError(
        f"{spec.architecture} computes with operations of its own, whose results may depend on the batch; give "
        "--no-deterministic to run it like that",
        param="deterministic",
    )


def _first_plan(
    make: Callable[[], CachePlan], config: EngineConfig, spec: ModelSpec, backend: Backend, role: Role
) -> CachePlan:
    """Calls `make` for the memory plan before the weights are opened. Raises its ResourceError, which also says if the
    weights cannot be opened, or, if the checkpoint has fewer layers than its config.json, the CheckpointError that says
    so: memory is then not the problem. Random weights have no checkpoint to look at."""
    try:
        return make()
    except ResourceError as error:
        if config.load_format == "random":
            raise
        if (unopened := check_layers(config.model_path, spec, backend, role)) is None:
            raise
        raise error.with_message(f"{error.message}; besides, {unopened.message}") from unopened


def _nothing() -> None:
    """Does nothing: the job that shows whether `Device.peak_bytes` measures here."""


@contextmanager
def _memory_for(what: str, change: str = _SMALLER) -> Iterator[None]:
    """Turns an out-of-memory error of its body into a ResourceError that says that `what` needed the memory, and what
    to change; empty: nothing helps but more room on the device."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(
            f"the device has no memory for {what}; free memory there, {change + ', ' if change else ''}or put fewer "
            "instances on it",
            param="gpu_memory_utilization",
        ) from error


def _backend(
    config: EngineConfig, spec: ModelSpec, role: Role, chosen: ChosenDevice, dtype: torch.dtype
) -> tuple[Backend, tuple[str | None, ...]]:
    """(backend, notes): notes if the vision and language models do not share the device as configured, None where they
    do. Raises ConfigError or BackendError if the device, backend or attention backend asked for cannot be used."""
    language = spec.language
    heads = Heads(language.num_heads, language.num_kv_heads, language.head_dim, config.cache.block_size)
    attention = resolve_attention(
        config.attention_backend,
        on_gpu=chosen.index is not None,
        dtype=dtype,
        heads=heads,
        deterministic=bool(config.deterministic),
    )
    chooses = role.needs_language and config.cache.kv_cache_dtype != "int8"  # Triton alone reads int8
    shapes = Shapes(heads if chooses else None, _tower(spec) if role.needs_vision else None)
    if attention == AUTO and not any(shapes):
        attention = TRITON
    both = role.needs_vision and role.needs_language and spec.vision is not None
    backend = create_backend(
        chosen.name,
        dtype,
        backend=config.backend,
        deterministic=config.deterministic,
        threads=config.threads,
        lane_priority=config.lane_order,
        sm_split=config.sm_counts if both else (),
        attention=attention,
        shapes=shapes,
        profiles=config.profile_folder if attention == AUTO else None,
    )
    undivided = None if both or not config.sm_counts else "sm_split: not divided, this instance runs one model"
    return backend, (undivided, priority_note(config.lane_order, chosen.capability) if both else None)


def _tower(spec: ModelSpec) -> Tower | None:
    """The shape of the vision model's attention; None if there is none, or another package computes it."""
    attention = None if spec.vision is None else spec.vision.attention
    return None if attention is None else Tower(*attention)


def _resolve(config: EngineConfig, spec: ModelSpec, plan: CachePlan, role: Role, device: Device) -> EngineConfig:
    """The configuration with values for look-ahead, `max_model_len` and, with a vision model, image budget. Raises
    ConfigError if the KV cache has fewer than 2 tokens for a role that needs it."""
    if role.needs_language and plan.num_kv_blocks * config.cache.block_size < 2:
        raise ConfigError("the KV cache holds no token; raise --kv-cache-gib", param="kv_cache_gib")
    scheduler = config.scheduler
    if spec.vision is not None:
        scheduler = replace(scheduler, image_budget=image_budget(config, spec.vision))
    if scheduler.look_ahead is None:
        scheduler = replace(scheduler, look_ahead=device.asynchronous)
    return replace(config, scheduler=scheduler, max_model_len=plan.max_model_len)
