"""Working memory of an instance's steps beside weights and caches, from the spec and the configuration.

The largest step of each stage that a role runs, as a scheduler may plan it: one largest picture, or as many as the
image budget holds; a prefill of the token budget at the end of the longest context, with as many rows that are sampled
as may run; a decode of all of them. Captured steps compute in memory of their own, as much as the largest of them
takes: where a device has no room for that, the largest steps with prompts have no graphs. On each partition of a
divided device a lane has another stream, and the allocator gives no stream what it keeps for another: all of it counts
once for every partition. Does not know lanes or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from hydra_engine.backend.cpu.device import usable_cores
from hydra_engine.backend.experts_memory import ExpertsShape, device_bytes, host_bytes
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import Role
from hydra_engine.errors import InvalidImage
from hydra_engine.models.layers.decoder import SCORED_ROWS
from hydra_engine.models.specs.base import ItemPlan, LanguageSpec, ModelSpec, VisionSpec
from hydra_engine.worker.language.graphs import FEW_TOKENS, MAX_TOKENS, MixedSize, mixed_sizes
from hydra_engine.worker.vision.graphs import max_captured

GRAPH_BYTES = 1 << 28  # what captured decode steps take on a partition, besides the memory that they compute in
MIXED_GRAPH_BYTES = 1 << 22  # and each captured step with prompts, of about 360 kernels of a model of 7B
ENCODE_GRAPH_BYTES = 1 << 26  # and captured encodes
DEFAULT_IMAGE_BUDGET = 16384  # patches; only towers with dynamic resolution come near it

# Sizes of pictures that a family may make its most patches of: as large as the largest allowed, of several shapes.
_PICTURES = ((6300, 6300), (8900, 4450), (4450, 8900), (12000, 3000), (3000, 12000))
_VALUES_PER_PATCH = 4  # times the features' width: about what a tower, which is narrower, holds of a patch at once
_HOST_ROWS = 8  # of the hidden size, that a CPU holds of a token at once
_INDEX_BYTES = 64  # of a token: ids, positions, slots
_LOGIT_COPIES = 4  # of the rows that are sampled: logits, probabilities, sorted ones, sums


class FewerGraphs(NamedTuple):
    """A set of graphs: steps with prompts of at most `captured_tokens` (0: none), and the bytes that all graphs
    take."""

    captured_tokens: int
    graph_bytes: int


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """The memory of an instance's steps beside weights and caches, in bytes. An encode and a language step run at the
    same time, each at its largest. `graph_bytes` is kept for captured steps and special rows; steps with prompts of
    at most `captured_tokens` are captured. `fewer`: alternatives with fewer graphs, the largest first."""

    encode_bytes: int = 0
    language_bytes: int = 0
    graph_bytes: int = 0
    captured_tokens: int = MAX_TOKENS
    fewer: tuple[FewerGraphs, ...] = ()

    @property
    def activation_bytes(self) -> int:
        return self.encode_bytes + self.language_bytes

    @property
    def total_bytes(self) -> int:
        return self.activation_bytes + self.graph_bytes

    def times(self, partitions: int) -> WorkingMemory:
        """The same on a device with this number of partitions: everything counts once for each."""
        return replace(
            self,
            encode_bytes=self.encode_bytes * partitions,
            language_bytes=self.language_bytes * partitions,
            graph_bytes=self.graph_bytes * partitions,
            fewer=tuple(less._replace(graph_bytes=less.graph_bytes * partitions) for less in self.fewer),
        )

    def without_graphs(self, spec: ModelSpec, config: EngineConfig) -> WorkingMemory:
        """The same with `enforce_eager`, on an undivided device: special rows alone keep their memory."""
        kept = special_row_bytes(spec, config) if self.language_bytes else 0
        return replace(self, graph_bytes=min(self.graph_bytes, kept), fewer=())

    def with_fewer_graphs(self) -> WorkingMemory | None:
        """The same with the next smaller set of graphs; None if there is none."""
        if not self.fewer:
            return None
        less, *rest = self.fewer
        return replace(self, **less._asdict(), fewer=tuple(rest))


NOT_COUNTED = WorkingMemory()


class LargestEncode(NamedTuple):
    """The largest encode: `num_spans` times `span`, each of a picture of `picture` size (width, height)."""

    picture: tuple[int, int]
    span: ItemPlan
    num_spans: int

    @property
    def num_patches(self) -> int:
        return self.num_spans * self.span.num_patches


def image_budget(config: EngineConfig, vision: VisionSpec) -> int:
    """Maximum patches of a vision step with more than one picture: as configured, or by default two largest pictures,
    at most DEFAULT_IMAGE_BUDGET."""
    given = config.scheduler.image_budget
    return given if given > 0 else min(2 * vision.max_patches_per_image, DEFAULT_IMAGE_BUDGET)


def largest_encode(vision: VisionSpec, budget: int) -> LargestEncode:
    """The encode of the span with the most patches, as often as it takes to reach `budget` patches, so it may exceed
    them by less than a span."""
    spans = [(size, item) for size in _PICTURES for item in _spans_of(vision, size)]
    picture, span = max(spans, key=lambda pair: pair[1].num_patches)
    return LargestEncode(picture, span, max(1, -(-budget // span.num_patches)))


def _spans_of(vision: VisionSpec, size: tuple[int, int]) -> Sequence[ItemPlan]:
    """Spans of a picture of this size; none if the family takes none as long."""
    try:
        return vision.plan_image(*size).items
    except InvalidImage:
        return ()


def counts_of_largest(num_tokens: int, num_rows: int, longest: int) -> list[int]:
    """Tokens of each row of a step of `num_tokens`: one per row, the rest in the last rows, at most `longest` each. No
    more rows than tokens; fewer tokens if the rows cannot hold all."""
    counts, left = [1] * min(num_rows, num_tokens), max(num_tokens - num_rows, 0)
    for row in reversed(range(len(counts))):
        more = min(left, longest - 1)
        counts[row] += more
        left -= more
    return counts


class LargestSteps(Protocol):
    """A source of the bytes that the largest steps take beside weights and caches, measured or estimated."""

    def encode(self, vision: VisionSpec) -> int:
        """Bytes of the largest encode."""
        ...

    def decode(self) -> int:
        """Bytes of a decode of all requests that may run."""
        ...

    def prefill(self) -> int:
        """Bytes of the largest step with prompts, scored ones among them."""
        ...

    def captured_bytes(self, size: MixedSize) -> int:
        """Bytes of a captured step of this size."""
        ...


def working_memory(
    steps: LargestSteps, spec: ModelSpec, role: Role, config: EngineConfig, *, captures: bool, partitions: int
) -> WorkingMemory:
    """Returns the memory of the role's steps. `captures`: the device can replay steps and samples special rows itself;
    with `enforce_eager` no graphs are counted. Everything counts once for each of `partitions`."""
    encode = language = graphs = 0
    of_steps = [FewerGraphs(MAX_TOKENS, 0)]
    if spec.vision is not None and role.needs_vision:
        encode = steps.encode(spec.vision)
        graphs += encode_graph_bytes(spec.vision, config, encode) if captures else 0
    if role.needs_language:
        graphs += special_row_bytes(spec, config) if captures else 0
        decode = steps.decode()
        language = max(decode, steps.prefill() if Role.P in role else 0)
        if captures and not config.enforce_eager:
            of_steps = _step_graphs(steps, role, config, decode)
    most, *fewer = (FewerGraphs(tokens, graphs + num_bytes) for tokens, num_bytes in of_steps)
    return WorkingMemory(encode, language, most.graph_bytes, most.captured_tokens, tuple(fewer)).times(partitions)


def _step_graphs(steps: LargestSteps, role: Role, config: EngineConfig, decode_bytes: int) -> list[FewerGraphs]:
    """Sets of graphs of language steps, the largest first: all; with prompts of at most a half, a quarter and an eighth
    of the tokens, from FEW_TOKENS up; decodes alone. Bytes include the activation memory, which the graphs share.
    Without prefill, steps with prompts have FEW_TOKENS at most."""
    scheduler, most = config.scheduler, MAX_TOKENS if Role.P in role else FEW_TOKENS
    sizes = mixed_sizes(scheduler.max_step_tokens, scheduler.max_running_requests, most)
    largest, found = sizes[-1].tokens, list[FewerGraphs]()
    bytes_of_largest = steps.captured_bytes(sizes[-1])
    for tokens in (largest, *(largest >> halved for halved in range(1, 4) if largest >> halved >= FEW_TOKENS), 0):
        computed_in = max(decode_bytes, -(-bytes_of_largest * tokens // largest))
        number = sum(size.tokens <= tokens for size in sizes)
        found.append(FewerGraphs(tokens, computed_in + GRAPH_BYTES + number * MIXED_GRAPH_BYTES))
    return found


@dataclass(frozen=True, slots=True)
class _Estimates:
    """`LargestSteps` estimated from the spec."""

    spec: ModelSpec
    config: EngineConfig
    dtype_bytes: int
    threads: int | None = None  # of a lane of a CPU; None: a device that captures graphs

    def encode(self, vision: VisionSpec) -> int:
        return estimated_encode(vision, self.config, self.dtype_bytes)

    def decode(self) -> int:
        return self._step(self.config.scheduler.max_running_requests, 0)

    def prefill(self) -> int:
        return self._step(self.config.scheduler.max_step_tokens, SCORED_ROWS)

    def captured_bytes(self, size: MixedSize) -> int:
        return self._step(size.tokens, 0)

    def _step(self, num_tokens: int, num_scored: int) -> int:
        """Bytes of a layer's activations or of the logits, whichever are more. `num_scored`: rows of prompts whose
        logits exist at once."""
        language, num_rows = self.spec.language, self.config.scheduler.max_running_requests
        row_bytes, inner_bytes = (3 * n * self.dtype_bytes for n in (language.hidden_size, language.intermediate_size))
        logits = (_LOGIT_COPIES * num_rows + num_scored) * language.vocab_size * 4
        if self.threads is None:
            layer = num_tokens * row_bytes + max(num_tokens * inner_bytes, self._experts(num_tokens))
            return max(layer, logits)
        # A CPU's allocator keeps what earlier ops of a layer had, and its op for experts keeps its own.
        widest = max(3 * language.intermediate_size, _mixer_width(language))
        values, angles = _HOST_ROWS * language.hidden_size + widest, language.head_dim
        layer = num_tokens * (values * self.dtype_bytes + 4 * angles + _INDEX_BYTES)
        return max(layer, logits) + self._experts(num_tokens)

    def _experts(self, num_tokens: int) -> int:
        """Bytes that the op for experts needs beside its operands and results; 0 without a mixture."""
        spec, mixture = self.spec, self.spec.language.mixture
        if mixture is None:
            return 0
        held = spec.at_load or spec.quantization
        shape = ExpertsShape(
            mixture.num_held,
            mixture.num_active,
            spec.language.hidden_size,
            mixture.num_inner,
            self.dtype_bytes,
            quantized=held is not None and held.stays_quantized,
        )
        return device_bytes(shape, num_tokens) if self.threads is None else host_bytes(shape, num_tokens, self.threads)


def estimate(spec: ModelSpec, role: Role, config: EngineConfig, dtype_bytes: int) -> WorkingMemory:
    """Estimates the working memory before anything is loaded, as of a device that captures graphs: the right order of
    magnitude only."""
    both = spec.vision is not None and role.needs_vision and role.needs_language
    partitions = 1 + len(config.sm_counts) if both else 1
    steps = _Estimates(spec, config, dtype_bytes)
    return working_memory(steps, spec, role, config, captures=True, partitions=partitions)


def _mixer_width(language: LanguageSpec) -> int:
    """Values of a token between the hidden rows that attention, or a delta net, reads and writes."""
    heads, key_values = language.num_heads * language.head_dim, 2 * language.num_kv_heads * language.head_dim
    width = (3 + language.output_gate) * heads + key_values
    if (delta := language.delta) is None:
        return width
    return max(width, delta.num_outputs + 3 * delta.num_channels + 2 * delta.value_width)


def estimate_on_host(spec: ModelSpec, role: Role, config: EngineConfig, dtype_bytes: int) -> WorkingMemory:
    """Estimates the working memory of a mixture's language steps on a CPU, which measures none. Other steps are not
    counted there: they fit what caches leave (MEMORY_SHARE of plan.py)."""
    if spec.language.mixture is None or not role.needs_language:
        return NOT_COUNTED
    steps = _Estimates(spec, config, dtype_bytes, config.threads or usable_cores())
    return WorkingMemory(language_bytes=max(steps.decode(), steps.prefill() if Role.P in role else 0))


def estimated_encode(vision: VisionSpec, config: EngineConfig, dtype_bytes: int) -> int:
    """Estimated bytes of the largest encode; of one largest image if the family's own processor plans its pictures."""
    budget = image_budget(config, vision)
    sized = vision.processor is None
    patches = largest_encode(vision, budget).num_patches if sized else vision.max_patches_per_image
    return patches * _VALUES_PER_PATCH * vision.feature_size * dtype_bytes


def special_row_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Bytes of the token counts and masks by which a device samples special rows (biases, penalties, masks, log
    probabilities; worker/language/sampler.py)."""
    per_slot = 4 * spec.language.vocab_size + 4 * -(-spec.language.vocab_size // 32)
    return (config.scheduler.max_running_requests + 1) * per_slot


def encode_graph_bytes(vision: VisionSpec, config: EngineConfig, encode_bytes: int) -> int:
    """Bytes of captured encodes, which have their own activation memory; 0 if none is captured. `encode_bytes`: of the
    largest encode."""
    if vision.processor is not None:
        return 0
    largest = largest_encode(vision, image_budget(config, vision)).num_patches
    captured = max_captured(config, largest)
    return -(-encode_bytes * captured // largest) + ENCODE_GRAPH_BYTES if captured else 0
