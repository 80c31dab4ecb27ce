"""Measures the memory of an instance's largest steps before caches are allocated, on a device that reports peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hydra_engine.backend.base import Backend
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import Role
from hydra_engine.models.implementation import ServedModel
from hydra_engine.models.specs.base import ModelSpec, VisionSpec
from hydra_engine.worker.blank_steps import blank_pictures, blank_rows, draw_blank
from hydra_engine.worker.language.graphs import MixedSize
from hydra_engine.worker.memory.cache_store import allocate_image_cache, allocate_kv_cache, allocate_states
from hydra_engine.worker.memory.plan import CachePlan
from hydra_engine.worker.memory.working import (
    LargestEncode,
    WorkingMemory,
    counts_of_largest,
    estimated_encode,
    image_budget,
    largest_encode,
    working_memory,
)


def measure(
    model: ServedModel,
    backend: Backend,
    spec: ModelSpec,
    role: Role,
    config: EngineConfig,
    plan: CachePlan,
) -> WorkingMemory:
    """Runs the largest steps in the calling thread and returns the memory that they take. `config` has no "auto" left;
    `plan` says which caches there are, how many state slots, and the longest request. The device must report peaks; its
    errors are raised unchanged."""
    peaks = _Peaks(model, backend, spec, config, plan)
    if not model.can_be_captured:
        config = replace(config, enforce_eager=True)
    captures, partitions = backend.device.asynchronous, backend.device.partitions.count
    return working_memory(peaks, spec, role, config, captures=captures, partitions=partitions)


class _Peaks:
    """`LargestSteps` measured by running them, with caches of one block each, where the plan has any at all, and a
    state for every row."""

    def __init__(
        self, model: ServedModel, backend: Backend, spec: ModelSpec, config: EngineConfig, plan: CachePlan
    ) -> None:
        self._model = model
        self._backend = backend
        self._spec = spec
        self._config = config
        self._max_model_len = plan.max_model_len
        few = min(plan.num_kv_blocks, 1), min(plan.num_image_blocks, 1)
        small = replace(plan, num_kv_blocks=few[0], num_image_blocks=few[1], num_snapshots=0)
        dtype, device = backend.dtype, backend.device.torch_device
        quantized = config.cache.kv_cache_dtype == "int8"
        self._kv_cache = allocate_kv_cache(
            spec, small, config.cache.block_size, dtype, quantized=quantized, device=device
        )
        self._image_cache = allocate_image_cache(spec, small, config.cache.image_block_size, dtype, device=device)
        self._states = allocate_states(spec, small, dtype, device=device)

    def encode(self, vision: VisionSpec) -> int:
        """Peak bytes of the largest encode; an estimate if the family's own processor plans pictures."""
        if self._spec.processor is not None:  # its pictures are made elsewhere
            return estimated_encode(vision, self._config, self._backend.dtype.itemsize)
        largest = largest_encode(vision, image_budget(self._config, vision))
        return self._peak(partial(self._encode, largest))

    def decode(self) -> int:
        """Peak bytes of a decode of all requests that may run."""
        return self._peak(partial(self._forward, [1] * self._config.scheduler.max_running_requests, scored=False))

    def prefill(self) -> int:
        """Peak bytes of the largest step with prompts: all tokens are scored and, with an image cache, take image
        features."""
        scheduler = self._config.scheduler
        counts = counts_of_largest(scheduler.max_step_tokens, scheduler.max_running_requests, self._max_model_len)
        return self._peak(partial(self._forward, counts, scored=True, merged=True))

    def captured_bytes(self, size: MixedSize) -> int:
        """Peak bytes of a step of this size, whose tokens all take image features if there is an image cache."""
        counts = counts_of_largest(*size, self._max_model_len)
        return self._peak(partial(self._forward, counts, scored=False, merged=True))

    def _peak(self, job: partial[None]) -> int:
        """Peak bytes of additional device memory while the job runs. Asserts that the device reports it."""
        peak = self._backend.device.peak_bytes(job)
        assert peak is not None, "the device can tell peaks"
        return peak

    def _encode(self, largest: LargestEncode) -> None:
        """Encodes pictures of zeros; writes no cache."""
        assert self._image_cache is not None
        device = self._backend.device.torch_device
        self._model.encode(blank_pictures(largest.span, largest.picture, largest.num_spans, device), self._image_cache)

    def _forward(self, counts: Sequence[int], *, scored: bool, merged: bool = False) -> None:
        """Runs a step whose row r has `counts[r]` tokens at the end of the longest context; on an asynchronous device
        also samples. `scored`: the head computes all tokens. `merged`: all tokens take image features, if there is an
        image cache."""
        ops, device = self._backend.ops, self._backend.device.torch_device
        contexts = [max(self._max_model_len, *counts)] * len(counts)
        num_merged = sum(counts) if merged and self._image_cache is not None else 0
        language, cache, states = self._spec.language, self._kv_cache, self._states
        inputs = blank_rows(ops, language, cache, states, counts, contexts, device, merged=num_merged, scored=scored)
        logits = self._model.forward(inputs, cache, self._image_cache)
        if self._backend.device.asynchronous:
            draw_blank(ops, logits)
