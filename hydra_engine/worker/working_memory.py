"""What an instance's steps take of a device beside weights and caches: measured where it can be told, else estimated.

The largest step of each stage that a role runs, as a scheduler may plan it: one largest picture, or as many as the
image budget holds; a prefill of the token budget at the end of the longest context, with as many rows that are sampled
as may run; a decode of all of them. Every slot is -1 and every block the first, so caches of one block do. Does not
know lanes or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from hydra_engine.backend.base import Backend, Draws, PagedCache, StateCache, StateRows
from hydra_engine.config import EngineConfig
from hydra_engine.core.roles import Role
from hydra_engine.models.inputs import SCORED_ROWS, LanguageInput, Scored, States, VisionInput
from hydra_engine.specs.base import ItemPlan, ModelSpec, VisionSpec
from hydra_engine.specs.generic import GenericVisionSpec
from hydra_engine.worker.cache_store import allocate_image_cache, allocate_kv_cache, allocate_states
from hydra_engine.worker.memory import CachePlan, WorkingMemory
from hydra_engine.worker.ports import ServedModel

GRAPH_BYTES = 1 << 28  # what captured steps take besides the memory that they compute in
DEFAULT_IMAGE_BUDGET = 16384  # patches; only towers with dynamic resolution come near it

# Sizes of pictures that a family may make its most patches of: as large as the largest allowed, of several shapes.
_PICTURES = ((6300, 6300), (8900, 4450), (4450, 8900), (12000, 3000), (3000, 12000))
_VALUES_PER_PATCH = (
    4  # times the features' width: what a tower has of a patch at once, about, for it is the narrower one
)
_LOGIT_COPIES = 4  # of the rows that are sampled: the logits, their probabilities, sorted, summed up


class LargestEncode(NamedTuple):
    picture: tuple[int, int]
    span: ItemPlan
    num_spans: int

    @property
    def num_patches(self) -> int:
        return self.num_spans * self.span.num_patches


def image_budget(config: EngineConfig, vision: VisionSpec) -> int:
    """Most patches of a vision step that has more than one picture."""
    given = config.scheduler.image_budget
    return given if given > 0 else min(2 * vision.max_patches_per_image, DEFAULT_IMAGE_BUDGET)


def largest_encode(vision: VisionSpec, budget: int) -> LargestEncode:
    spans = [(size, item) for size in _PICTURES for item in vision.plan_image(*size).items]
    picture, span = max(spans, key=lambda found: found[1].num_patches)
    return LargestEncode(picture, span, max(1, -(-budget // span.num_patches)))


def counts_of_largest(num_tokens: int, num_rows: int, longest: int) -> list[int]:
    """Tokens of each row of a step: one of every row, and as many more as its last rows may have."""
    counts, left = [1] * min(num_rows, num_tokens), max(num_tokens - num_rows, 0)
    for row in reversed(range(len(counts))):
        more = min(left, longest - 1)
        counts[row] += more
        left -= more
    return counts


# ---- estimated


def estimate(spec: ModelSpec, role: Role, config: EngineConfig, dtype_bytes: int) -> WorkingMemory:
    """Before anything is loaded: of the right size, not more."""
    encode = language = graphs = 0
    if spec.vision is not None and role.needs_vision:
        encode = _estimated_encode(spec.vision, config, dtype_bytes)
    if role.needs_language:
        rows, tokens = config.scheduler.max_num_seqs, config.scheduler.token_budget
        scored = SCORED_ROWS if Role.P in role else 0
        decode = _estimated_step(spec, rows, rows, 0, dtype_bytes)
        language = max(decode, _estimated_step(spec, tokens, rows, scored, dtype_bytes) if Role.P in role else 0)
        graphs = decode + GRAPH_BYTES if Role.D in role else 0
    return WorkingMemory(encode, language, graphs)


def _estimated_encode(vision: VisionSpec, config: EngineConfig, dtype_bytes: int) -> int:
    budget = image_budget(config, vision)
    generic = isinstance(vision, GenericVisionSpec)
    patches = vision.max_patches_per_image if generic else largest_encode(vision, budget).num_patches
    return patches * _VALUES_PER_PATCH * vision.feature_size * dtype_bytes


def _estimated_step(spec: ModelSpec, num_tokens: int, num_rows: int, num_scored: int, dtype_bytes: int) -> int:
    language = spec.language
    layer = num_tokens * 3 * (language.hidden_size + language.intermediate_size) * dtype_bytes
    return max(layer, (_LOGIT_COPIES * num_rows + num_scored) * language.vocab_size * 4)


# ---- measured


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
        if isinstance(spec.vision, GenericVisionSpec):  # its pictures are made elsewhere
            encode = _estimated_encode(spec.vision, config, backend.dtype.itemsize)
        else:
            largest = largest_encode(spec.vision, image_budget(config, spec.vision))
            encode = _peak(backend, partial(steps.encode, largest))
    if role.needs_language:
        rows, longest = config.scheduler.max_num_seqs, plan.max_model_len
        decode = _peak(backend, partial(steps.forward, [1] * rows, scored=False))
        language = decode
        if Role.P in role:
            counts = counts_of_largest(config.scheduler.token_budget, rows, longest)
            language = max(language, _peak(backend, partial(steps.forward, counts, scored=True)))
        if Role.D in role and backend.device.asynchronous:
            graphs = decode + GRAPH_BYTES
    return WorkingMemory(encode, language, graphs)


def _peak(backend: Backend, job: partial[None]) -> int:
    peak = backend.device.peak_bytes(job)
    assert peak is not None, "the device has told peaks before"
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
        device, span = self.backend.device.torch_device, largest.span
        shape = (span.num_pictures, span.height, span.width, 3)
        pixels = tuple(torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(largest.num_spans))
        slots = torch.full((largest.num_spans * span.num_tokens,), -1, dtype=torch.int64, device=device)
        sources, grids = (largest.picture,) * largest.num_spans, (span.grid,) * largest.num_spans
        self.model.encode(VisionInput(pixels, sources, grids, slots), self.image_cache)

    def forward(self, counts: Sequence[int], *, scored: bool) -> None:
        """Every row at the end of the longest context. `scored`: it is a prefill, with features under all tokens."""
        backend, device = self.backend, self.backend.device.torch_device
        lengths = torch.tensor(counts, dtype=torch.int32)
        ends = lengths.cumsum(0, dtype=torch.int32)
        num_rows, num_tokens = len(counts), int(ends[-1])
        context = torch.full((num_rows,), max(self.max_model_len, *counts), dtype=torch.int32)
        tables = torch.zeros((num_rows, -(-int(context[0]) // self.kv_cache.block_size)), dtype=torch.int32)
        cu_q = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
        every = torch.arange(num_tokens, dtype=torch.int64, device=device)
        zeros = torch.zeros_like(every)
        merged = self.image_cache is not None and scored
        inputs = LanguageInput(
            token_ids=zeros,
            positions=every if self.spec.language.rope_sections is None else every.expand(3, -1),
            slots=zeros - 1,
            attention=backend.ops.plan_attention(cu_q, context, tables),
            logit_rows=ends.to(device=device, dtype=torch.int64) - 1,
            position_end=max(int(context[0]), num_tokens),
            image_rows=every if merged else None,
            image_slots=zeros if merged else None,
            states=None if self.states is None else States(self.states, _state_rows(cu_q)),
            scored=Scored(every, _drop) if scored else None,
        )
        logits = self.model.forward(inputs, self.kv_cache, self.image_cache)
        if backend.device.asynchronous:
            backend.ops.sample(logits, _draws(num_rows, device))


def _drop(logits: torch.Tensor) -> None:
    """What becomes of a prompt's logits happens in host memory."""


def _draws(num_rows: int, device: torch.device) -> Draws:
    """With every filter, which is what takes most."""
    ones = torch.ones(num_rows, dtype=torch.float32, device=device)
    return Draws(
        ones, torch.full((num_rows,), 50, dtype=torch.int32, device=device), ones * 0.9, ones * 0.1, ones * 0.5
    )


def _state_rows(cu_q: torch.Tensor) -> StateRows:
    """Each row in a place of its own, of which every slot has two, with a state before none of them."""
    places = torch.arange(cu_q.shape[0] - 1, dtype=torch.int64)
    return StateRows(cu_q.to(torch.int64), torch.zeros_like(places), places, places)
