"""What an instance's steps take of a device beside weights and caches: measured where it can be told, else estimated.

The largest step of each stage that a role runs, as a scheduler may plan it: one largest picture, or as many as the
image budget holds; a prefill of the token budget at the end of the longest context, with as many rows that are sampled
as may run; a decode of all of them. At each place of a divided device a lane has another stream, and the allocator
gives no stream what it keeps for another: all of it counts once for every place. Does not know lanes or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from hydra_engine.backend.base import Backend, PagedCache, StateCache
from hydra_engine.config import EngineConfig
from hydra_engine.core.roles import Role
from hydra_engine.models.inputs import SCORED_ROWS
from hydra_engine.specs.base import ItemPlan, ModelSpec, VisionSpec
from hydra_engine.specs.generic import GenericVisionSpec
from hydra_engine.worker.blank_steps import blank_draws, blank_pictures, blank_rows
from hydra_engine.worker.cache_store import allocate_image_cache, allocate_kv_cache, allocate_states
from hydra_engine.worker.encode_graphs import most_captured
from hydra_engine.worker.memory import CachePlan, WorkingMemory
from hydra_engine.worker.ports import ServedModel

GRAPH_BYTES = 1 << 28  # what captured decode steps take at a place, besides the memory that they compute in
ENCODE_GRAPH_BYTES = 1 << 26  # and captured encodes
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
        graphs += _of_encode_graphs(spec.vision, role, config, encode)
    if role.needs_language:
        rows, tokens = config.scheduler.max_num_seqs, config.scheduler.token_budget
        scored = SCORED_ROWS if Role.P in role else 0
        decode = _estimated_step(spec, rows, rows, 0, dtype_bytes)
        language = max(decode, _estimated_step(spec, tokens, rows, scored, dtype_bytes) if Role.P in role else 0)
        graphs += decode + GRAPH_BYTES if Role.D in role else 0
    both = spec.vision is not None and role.needs_vision and role.needs_language
    return WorkingMemory(encode, language, graphs).times(1 + len(config.sm_counts) if both else 1)


def _estimated_encode(vision: VisionSpec, config: EngineConfig, dtype_bytes: int) -> int:
    budget = image_budget(config, vision)
    generic = isinstance(vision, GenericVisionSpec)
    patches = vision.max_patches_per_image if generic else largest_encode(vision, budget).num_patches
    return patches * _VALUES_PER_PATCH * vision.feature_size * dtype_bytes


def _of_encode_graphs(vision: VisionSpec, role: Role, config: EngineConfig, encode_bytes: int) -> int:
    """Of captured encodes, which do not compute where others do; `encode_bytes`: what the largest encode takes."""
    pauses = config.scheduler.slices_layers and role.needs_language
    if isinstance(vision, GenericVisionSpec) or pauses:
        return 0
    largest = largest_encode(vision, image_budget(config, vision)).num_patches
    captured = most_captured(config, largest)
    return -(-encode_bytes * captured // largest) + ENCODE_GRAPH_BYTES if captured else 0


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
        if backend.device.asynchronous:
            graphs += _of_encode_graphs(spec.vision, role, config, encode)
    if role.needs_language:
        rows, longest = config.scheduler.max_num_seqs, plan.max_model_len
        decode = _peak(backend, partial(steps.forward, [1] * rows, scored=False))
        language = decode
        if Role.P in role:
            counts = counts_of_largest(config.scheduler.token_budget, rows, longest)
            language = max(language, _peak(backend, partial(steps.forward, counts, scored=True)))
        if Role.D in role and backend.device.asynchronous:
            graphs += decode + GRAPH_BYTES
    return WorkingMemory(encode, language, graphs).times(backend.device.num_places)


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
            ops.sample(logits, blank_draws(len(counts), device))
