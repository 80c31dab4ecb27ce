"""The progress of one request inside the engine: its phase, a few integers, and properties derived from them.

Mutable; owned by the scheduler of the instance that holds the request. Keeps the hashes of its computed blocks, but
does not know block ids, plans or the clock. Numbers that change with every token of a decode are in the arrays of
`scheduler/decodes.py`; only the tokens themselves are appended here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto

from hydra_engine.core.ids import BlockHash, FeatureKey
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.outputs import Departure, FinishReason
from hydra_engine.core.request import Request
from hydra_engine.errors import ErrorInfo

# (`Request.arrival_index`, the same on all instances; arrival number at this one): the smaller one is older.
Order = tuple[int, int]

# (priority, deadline of the first token in seconds or amount of work left, order): the smaller one is considered first.
Urgency = tuple[int, float, Order]


class RequestPhase(Enum):
    """Phases of a request. `RequestTable.phase_of` derives the phase, `RequestTable.requeue` moves the request into its
    queue.

    ENCODING (if it has images) -> WAITING -> PREFILLING -> DECODING -> ENDED. A request may prefill up to its first
    image without features before all are encoded, so ENCODING -> PREFILLING is legal too. Preemption frees its KV:
    PREFILLING or DECODING -> WAITING, or ENCODING if images are needed once more.

    A request is PARKED while the connector waits for what it loads or sends, which may be before, between or after all
    of these. Any phase may change to ENDED by an abort or an error.

    A request whose sampling needs something that the worker does not have yet (a compiled grammar) is HELD on arrival,
    or PARKED if the connector has a part in it. It holds no blocks, so others do not wait for it.
    """

    HELD = auto()  # no KV blocks, and no features; nothing is computed for it before it is released

    ENCODING = auto()  # no KV blocks; some image has no features yet
    WAITING = auto()  # no KV blocks; has all it needs to start
    PREFILLING = auto()  # KV blocks, and not DECODING
    DECODING = auto()  # KV blocks; decodes here: a chunk has come back since its start, only its latest token lacks KV
    PARKED = auto()  # the connector decides what it waits for, and whether it has KV blocks
    ENDED = auto()  # forgotten as soon as no plan in flight names it


class ImageProgress(IntEnum):
    """Progress of one image of a request. Image-cache blocks are held in ENCODING and ENCODED only."""

    WAITING = 0  # has no features, needs them
    ENCODING = 1  # features are being encoded or loaded, for this image or for another one with the same picture
    ENCODED = 2  # features are in the image cache
    CACHED = 3  # needs no features if the KV of its whole span is still found at the start, or is loaded
    CONSUMED = 4  # the KV of its whole span is in the request's blocks; encode job: features were fetched or refused


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason why a request ends, decided at once; the request is forgotten when no plan in flight names it."""

    reason: FinishReason | Departure
    stop_token_id: int | None = None
    error: ErrorInfo | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of one request on one instance. Token positions, half open:

        [0, num_computed)             KV is in the cache
        [num_computed, num_planned)   in chunks in flight, `num_scheduled` tokens
        [num_planned, num_tokens)     still to compute

    `num_tokens` counts the prompt and the generated tokens. The last generated token has no KV until the next step, so
    a request that is DECODING has `num_computed == num_tokens - 1`, derived from its tokens. In other phases
    `num_computed` is `num_prefilled`, which a decoding request does not keep up to date. Preemption sets that
    and `num_published` to 0 and frees blocks and slot; tokens and hashes stay. A request that starts on cached blocks
    starts with `num_prefilled` behind them.

    `plans_in_flight` counts vision plans, chunks and jobs of the connector; decode rows in flight are counted by slot
    (`DecodeTable.num_in_flight`).

    `stages`: the stages that run here. E alone is an encode job: no prompt and no KV. `connector_state` belongs to the
    connector; None if it has no part in the request.
    """

    request: Request
    order: Order
    due_s: float  # when its first token is due; infinite without a limit
    urgency: Urgency
    images: list[ImageProgress]
    stop_ids: frozenset[int]
    generated: list[int]
    phase: RequestPhase = RequestPhase.WAITING
    num_prefilled: int = 0
    num_scheduled: int = 0
    held: bool = False  # not released yet: it has no KV blocks
    slot_known: bool = False  # a chunk has been planned since it started last, so the language lane knows its slot
    num_preemptions: int = 0
    preempted: bool = False  # here or in an earlier attempt: it starts only with free blocks for all it can need
    bypasses_at_wait: int | None = None  # `StartedOrders.younger_than` when its wait for a start began
    plans_in_flight: int = 0
    image_wait_since_s: float = 0.0  # since when some image waits for features
    ending: Ending | None = None
    block_hashes: list[BlockHash] = field(default_factory=list)  # of its first full blocks; extended on demand
    num_published: int = 0  # number of its blocks that the prefix cache can find by these hashes
    image_keys: tuple[FeatureKey, ...] = ()
    images_planned: set[int] = field(default_factory=set)  # images encoded or loaded for this request itself
    cached_tokens: int = 0  # prefix cache hit at its first start
    stages: Role = EPD
    external_images: frozenset[int] = frozenset()  # not encoded here: the connector loads their features
    external_kv: bool = False  # nothing is computed: the connector loads the KV, not all of it is here
    keeps_blocks: bool = False  # not preempted for a start, though nothing is computed: its KV is about to be here
    num_state_blocks: int = 0  # KV blocks behind those of its tokens, in which its state moves between instances
    connector_state: object | None = None

    @classmethod
    def new(
        cls,
        request: Request,
        arrival_number: int,
        now: float,
        *,
        stages: Role = EPD,
        external_images: frozenset[int] = frozenset(),
        external_kv: bool = False,
    ) -> RequestState:
        """Returns the state of a request that arrives at time `now`, as number `arrival_number` of its instance. If E
        is not among its `stages`, all images are external."""
        due_s = math.inf if request.slo.ttft_s is None else request.arrival_s + request.slo.ttft_s
        order = request.arrival_index, arrival_number
        return cls(
            request=request,
            order=order,
            due_s=due_s,
            urgency=(request.priority, due_s, order),
            images=[ImageProgress.WAITING] * len(request.images),
            stop_ids=request.stop_ids,
            generated=list(request.generated_token_ids),
            preempted=request.preempted,
            image_wait_since_s=now,
            stages=stages,
            external_images=external_images if Role.E in stages else frozenset(range(len(request.images))),
            external_kv=external_kv,
        )

    @property
    def is_encode_job(self) -> bool:
        """True if only its images are encoded here: no prompt is computed and no KV is held."""
        return self.stages == Role.E

    def ending_with(self, token_id: int) -> Ending | None:
        """Returns the Ending if `token_id`, already the last one in `generated`, ends the request, else None."""
        reason = self.request.finish_reason(self.num_generated, token_id)
        if reason is None:
            return None
        return Ending(reason, stop_token_id=token_id if reason is FinishReason.STOP else None)

    @property
    def num_computed(self) -> int:
        """Number of leading positions with KV in the cache, by the results read so far."""
        return self.num_tokens - 1 if self.phase is RequestPhase.DECODING else self.num_prefilled

    @property
    def num_planned(self) -> int:
        """Number of positions that are computed or in a chunk in flight."""
        return self.num_computed + self.num_scheduled

    @property
    def num_generated(self) -> int:
        """Number of generated tokens in all attempts."""
        return len(self.generated)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and generated so far."""
        return len(self.request.prompt_token_ids) + len(self.generated)

    @property
    def is_decode(self) -> bool:
        """True if it has generated a token, and only the latest token has no KV by the results read so far. A prompt
        of which one token has no KV is a prefill."""
        return bool(self.generated) and self.num_computed == self.num_tokens - 1

    @property
    def scores_prompt(self) -> bool:
        """True while log probabilities of the prompt are wanted and not complete, which is until the first token. All
        positions of the prompt are computed for them, even if the cache has their KV; with `external_kv` by the
        instance that prefills."""
        return self.request.sampling.prompt_logprobs is not None and not self.generated

    @property
    def is_one_token_short(self) -> bool:
        """True if only its latest token, a generated one, has no KV, and this instance computes it but has no chunk of
        the request in flight: a decode, or one whose earlier KV was prefilled again, found or loaded."""
        return self.is_decode and not self.external_kv and not self.num_scheduled

    @property
    def waits_for_images(self) -> bool:
        """True if some image has no features yet and its KV is not computed or cached."""
        return min(self.images, default=ImageProgress.CONSUMED) <= ImageProgress.ENCODING

    @property
    def needs_encode(self) -> bool:
        """True if some image waits for an encode on this instance."""
        if not self.external_images:
            return ImageProgress.WAITING in self.images
        waiting = ImageProgress.WAITING
        return any(p == waiting and i not in self.external_images for i, p in enumerate(self.images))

    @property
    def patches_to_encode(self) -> int:
        """Number of patches of its images that wait for an encode on this instance."""
        images = enumerate(zip(self.request.images, self.images, strict=True))
        waiting = ImageProgress.WAITING
        return sum(image.num_patches for i, (image, p) in images if p == waiting and i not in self.external_images)

    @property
    def needs_load(self) -> bool:
        """True if some image waits for features that the connector loads."""
        return any(self.images[index] == ImageProgress.WAITING for index in self.external_images)

    @property
    def relies_on_prefix_hit(self) -> bool:
        """True if some image needs no features only as long as the prefix cache has its KV, which the next lookup has
        to confirm."""
        return ImageProgress.CACHED in self.images and not self.external_kv

    @property
    def cached_images(self) -> int:
        """Number of pictures and videos that are ready, and of which nothing was encoded or loaded for this request
        itself: from the image cache, the KV cache or an encode for another request."""
        spans = list(zip(self.request.images, self.images, strict=True))
        late = {image.source for image, progress in spans if progress <= ImageProgress.ENCODING}
        encoded = {self.request.images[index].source for index in self.images_planned}
        return len({image.source for image, _ in spans} - late - encoded)

    @property
    def num_computable(self) -> int:
        """Number of leading positions that are computed, in flight or can be planned now: up to the first image without
        features. Equals `num_planned` while the connector loads KV."""
        if self.external_kv:
            return self.num_planned
        for image, progress in zip(self.request.images, self.images, strict=True):
            if progress <= ImageProgress.ENCODING:
                return max(image.start, self.num_planned)
        return self.num_tokens

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Token ids at positions [start, end) of the prompt followed by the generated tokens."""
        prompt = self.request.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        generated = tuple(self.generated[max(0, start - len(prompt)) : end - len(prompt)])
        return prompt[start:] + generated
