"""Measures what an instance's largest steps take of a device that can tell its peaks, before caches are allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from hydra_engine.backend.base import Backend, PagedCache, StateCache
from hydra_engine.config import EngineConfig
from hydra_engine.core.roles import Role
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.worker.blank_steps import blank_pictures, blank_rows, blank_sampling
from hydra_engine.worker.memory.cache_store import allocate_image_cache, allocate_kv_cache, allocate_states
from hydra_engine.worker.memory.plan import CachePlan
from hydra_engine.worker.memory.working import (
    GRAPH_BYTES,
    LargestEncode,
    WorkingMemory,
    counts_of_largest,
    encode_graph_bytes,
    estimated_encode,
    image_budget,
    largest_encode,
)
from hydra_engine.worker.ports import ServedModel


def measure(
    model: ServedModel,
    backend: Backend,
    spec: ModelSpec,
    role: Role,
    config: EngineConfig,
    plan: CachePlan,
) -> WorkingMemory:
    """Runs the steps in the calling thread. `config` has no "auto" left, `plan` the longest request that there may be.
    For a device that can tell its peaks; what a device cannot compute raises what the device raises."""
    steps = _Steps.of(model, backend, spec, config, plan)
    encode = language = graphs = 0
    if spec.vision is not None and role.needs_vision:
        if spec.processor is not None:  # its pictures are made elsewhere
            encode = estimated_encode(spec.vision, config, backend.dtype.itemsize)
        else:
            largest = largest_encode(spec.vision, image_budget(config, spec.vision))
            encode = _peak(backend, partial(steps.encode, largest))
        if backend.device.asynchronous:
            graphs += encode_graph_bytes(spec.vision, role, config, encode)
    if role.needs_language:
        rows, longest = config.scheduler.max_num_seqs, plan.max_model_len
        decode = _peak(backend, partial(steps.forward, [1] * rows, scored=False))
        language = decode
        if Role.P in role:
            counts = counts_of_largest(config.scheduler.token_budget, rows, longest)
            language = max(language, _peak(backend, partial(steps.forward, counts, scored=True)))
        if Role.D in role and backend.device.asynchronous:
            graphs += decode + GRAPH_BYTES
    return WorkingMemory(encode, language, graphs).times(backend.device.partitions.count)


def _peak(backend: Backend, job: partial[None]) -> int:
    peak = backend.device.peak_bytes(job)
    assert peak is not None, "the device can tell peaks"
    return peak


@dataclass(frozen=True, slots=True)
class _Steps:
    model: ServedModel
    backend: Backend
    spec: ModelSpec
    max_model_len: int
    kv_cache: PagedCache
    image_cache: PagedCache | None
    states: StateCache | None

    @classmethod
    def of(cls, model: ServedModel, backend: Backend, spec: ModelSpec, config: EngineConfig, plan: CachePlan) -> _Steps:
        """With caches of one block each, where the plan has any at all, and a state for every row."""
        small = replace(plan, num_kv_blocks=min(plan.num_kv_blocks, 1), num_image_blocks=min(plan.num_image_blocks, 1))
        dtype, device = backend.dtype, backend.device.torch_device
        return cls(
            model,
            backend,
            spec,
            plan.max_model_len,
            allocate_kv_cache(spec, small, config.cache.block_size, dtype, device=device),
            allocate_image_cache(spec, small, config.cache.image_block_size, dtype, device=device),
            allocate_states(spec, small, dtype, device=device),
        )

    def encode(self, largest: LargestEncode) -> None:
        assert self.image_cache is not None
        device = self.backend.device.torch_device
        self.model.encode(blank_pictures(largest.span, largest.picture, largest.num_spans, device), self.image_cache)

    def forward(self, counts: Sequence[int], *, scored: bool) -> None:
        """Every row at the end of the longest context. `scored`: it is a prefill, with features under all tokens."""
        ops, device = self.backend.ops, self.backend.device.torch_device
        contexts = [max(self.max_model_len, *counts)] * len(counts)
        merged = sum(counts) if scored and self.image_cache is not None else 0
        language, cache, states = self.spec.language, self.kv_cache, self.states
        inputs = blank_rows(ops, language, cache, states, counts, contexts, device, merged=merged, scored=scored)
        logits = self.model.forward(inputs, cache, self.image_cache)
        if self.backend.device.asynchronous:
            ops.sample(logits, blank_sampling(len(counts), device))
