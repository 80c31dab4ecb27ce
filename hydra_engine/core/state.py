"""The progress of one request inside the engine: its phase, a few integers, and what follows from them.

The one mutable record of the deciding folders; owned by the scheduler of the instance that holds the request. Keeps the
hashes of what it computes, but does not know blocks, plans or the clock. What changes with every token of a decode is
not here but in the arrays of `scheduler/decodes.py`; only the tokens themselves are appended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto

from hydra_engine.core.ids import BlockHash, FeatureKey
from hydra_engine.core.outputs import Departure, FinishReason
from hydra_engine.core.plans import KvEnd
from hydra_engine.core.request import Request
from hydra_engine.core.roles import EPD, Role
from hydra_engine.errors import ErrorInfo

# (age, number of arrival at this instance): the smaller one is older. Ages hold for all instances, see `Request.age`.
Order = tuple[int, int]

# (priority, when the first token is due or how much there is to do, order): the smaller one is considered first.
Urgency = tuple[int, float, Order]


class RequestPhase(Enum):
    """Where a request is. `RequestTable.phase_of` derives it, `RequestTable.requeue` moves the request into its queue.

    A request of an instance that has no others goes ENCODING (if it has images) -> WAITING -> PREFILLING -> DECODING ->
    ENDED. It may prefill up to the first image without features before all are encoded, so ENCODING -> PREFILLING is
    legal too. Preemption takes its KV: PREFILLING or DECODING -> WAITING, or ENCODING if images are needed once more.

    With other instances: what decodes elsewhere goes PREFILLING -> HANDING_OVER -> ENDED; what is prefilled elsewhere
    goes REMOTE_PREFILL -> KV_OFFERED -> PREFILLING (while its KV is copied) -> DECODING. An ENCODE_JOB stays one until
    its features have been fetched. Every phase may end, by an abort or an error.

    A request may be held until the worker has what its tokens are sampled with. It is HELD before everything else, or,
    if it is prefilled elsewhere, stays REMOTE_PREFILL: it holds nothing that others could use.
    """

    HELD = auto()  # no KV blocks, and no features; nothing is computed for it before it is released

    ENCODING = auto()  # no KV blocks; some image has no features yet
    WAITING = auto()  # no KV blocks; has all it needs to start
    PREFILLING = auto()  # KV blocks; more than one step from its next token, or that step is in flight
    DECODING = auto()  # KV blocks; one step from its next token
    HANDING_OVER = auto()  # KV blocks; computed here, to be fetched by the instance that decodes
    REMOTE_PREFILL = auto()  # no KV blocks; another instance prefills and has offered nothing yet
    KV_OFFERED = auto()  # no KV blocks; another instance offers KV, which can be copied as soon as there are some
    ENCODE_JOB = auto()  # images for another instance, and nothing else
    ENDED = auto()  # to be forgotten as soon as no plan in flight names it


class ImageProgress(IntEnum):
    """Where one image of a request is. Image-cache blocks are held in ENCODING and ENCODED only."""

    WAITING = 0  # has no features, needs them
    ENCODING = 1  # features are being encoded or pulled, for this image or for the same picture elsewhere
    ENCODED = 2  # features are in the image cache
    CACHED = 3  # needs no features if the KV of its whole span is still found when the request starts
    CONSUMED = 4  # the KV of its whole span is in the request's blocks; of an encode job: its target has let go of it


@dataclass(frozen=True, slots=True)
class Ending:
    """Decided, but perhaps not carried out yet: a plan in flight may still name the request."""

    reason: FinishReason | Departure
    stop_token_id: int | None = None
    error: ErrorInfo | None = None


@dataclass(slots=True)
class RemoteKv:
    """KV of a request that another instance computes, as far as it is known and copied. Blocks are counted in the order
    of the request's table; those before `num_copied` are here."""

    offer: int | None = None  # its number here; None: nothing is offered now
    num_offered: int = 0  # blocks
    end: KvEnd | None = None  # with it, nothing more will be offered
    num_copied: int = 0
    copied_offer: int | None = None  # the offer that a copy in flight belongs to
    preempt_after_copy: bool = False  # an older request needs the blocks as soon as no copy is in flight


@dataclass(slots=True, eq=False)
class HandoverState:
    """What is known of a request only because other instances take part in it. `scheduler/handover/` writes it.

    Taken from others: its KV while that is not here (`remote_kv`), and features of `RequestState.remote_images`.
    Offered to others: its first `num_offered` KV blocks, which are all of them with `offers_all`; of an encode job
    every image that is ENCODED.
    """

    remote_kv: RemoteKv | None = None
    requested_images: set[int] = field(default_factory=set)  # remote images that others have been asked for
    image_offers: dict[int, list[int]] = field(
        default_factory=dict
    )  # image -> offers of its features, not being copied
    images_copied: set[int] = field(default_factory=set)  # images whose features are being copied for it
    borrowed: bool = False  # decoded elsewhere before, and that instance goes on with other requests meanwhile
    num_offered: int = 0
    offers_all: bool = False
    offered_s: dict[int, float] = field(default_factory=dict)  # since when: images of a job, or -1 for its KV


@dataclass(slots=True, eq=False)
class RequestState:
    """Token positions, half open:

        [0, num_computed)             KV is in the cache
        [num_computed, num_planned)   being computed by chunks in flight, `num_scheduled` tokens
        [num_planned, num_tokens)     still to compute

    `num_tokens` counts the prompt and what was generated. The last generated token has no KV until the next step, so
    a request that is DECODING has `num_computed == num_tokens - 1`: there it follows from the tokens, and before it is
    `num_prefilled`, which a decoding request no longer keeps up to date. Preemption sets it to zero and forgets nothing
    else. A request that starts on blocks found in the cache starts with `num_prefilled` behind them.

    `plans_in_flight` counts vision plans, chunks and pulls; rows of decodes that are in flight are counted by slot.

    `stages` are those that are done here. With E alone it is an encode job: no prompt and no KV. `handover` is None
    where no other instance takes part.
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
    held: bool = False  # it is not released yet, and has no KV blocks
    slot_known: bool = False  # a chunk has been planned since it started last, so the language lane knows its slot
    num_preemptions: int = 0
    starts_seen: int | None = None  # of younger requests, when it began to wait for its start
    plans_in_flight: int = 0
    image_wait_since_s: float = 0.0
    ending: Ending | None = None
    block_hashes: list[BlockHash] = field(default_factory=list)  # of its first full blocks; grows when asked for
    num_published: int = 0  # blocks that it holds whose content can be found under these hashes
    image_keys: tuple[FeatureKey, ...] = ()
    images_planned: set[int] = field(default_factory=set)  # that were in a vision plan for this request
    cached_tokens: int = 0  # found in the cache when it started first
    stages: Role = EPD
    remote_images: frozenset[int] = frozenset()  # encoded by other instances
    handover: HandoverState | None = None

    @classmethod
    def new(
        cls,
        request: Request,
        arrived: int,
        now: float,
        *,
        stages: Role = EPD,
        remote_images: frozenset[int] = frozenset(),
        pulls_kv: bool = False,
    ) -> RequestState:
        """`arrived` counts arrivals."""
        due_s = math.inf if request.slo.ttft_s is None else request.arrival_s + request.slo.ttft_s
        order = request.age, arrived
        elsewhere = stages != EPD or bool(remote_images) or pulls_kv
        return cls(
            request=request,
            order=order,
            due_s=due_s,
            urgency=(request.priority, due_s, order),
            images=[ImageProgress.WAITING] * len(request.images),
            stop_ids=request.stop_ids,
            generated=list(request.generated_token_ids),
            image_wait_since_s=now,
            stages=stages,
            remote_images=remote_images if Role.E in stages else frozenset(range(len(request.images))),
            handover=HandoverState(RemoteKv() if pulls_kv else None) if elsewhere else None,
        )

    @property
    def is_encode_job(self) -> bool:
        """It encodes images for another instance, and nothing else."""
        return self.stages == Role.E

    @property
    def preempted(self) -> bool:
        """It, or an earlier attempt, has run out of blocks: it starts only with room for all that it can need."""
        return self.num_preemptions > 0 or self.request.preempted

    def ending_with(self, token_id: int) -> Ending | None:
        """What its latest token ends, if it does."""
        reason = self.request.finish_reason(self.num_generated, token_id)
        if reason is None:
            return None
        return Ending(reason, stop_token_id=token_id if reason is FinishReason.STOP else None)

    @property
    def num_computed(self) -> int:
        return self.num_tokens - 1 if self.phase is RequestPhase.DECODING else self.num_prefilled

    @property
    def num_planned(self) -> int:
        """Positions before this one are computed or in a chunk in flight."""
        return self.num_computed + self.num_scheduled

    @property
    def num_generated(self) -> int:
        return len(self.generated)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.generated)

    @property
    def is_decode(self) -> bool:
        """One step away from a new token, with at least one token before."""
        return bool(self.generated) and self.num_computed == self.num_tokens - 1

    @property
    def scores_prompt(self) -> bool:
        """The caller asked how likely each prompt token was, and has not been told of all: that is before the first
        token. Every row of the prompt is computed for that, also where the cache has its KV."""
        return self.request.sampling.prompt_logprobs is not None and not self.generated

    @property
    def lacks_one_token(self) -> bool:
        """It is one step away from a new token and that step is not planned yet: a decode, or a prefill that lacks
        nothing but its last token."""
        return self.is_decode and self.remote_kv is None and not self.num_scheduled

    @property
    def remote_kv(self) -> RemoteKv | None:
        """Its KV as another instance computes it; None once all of it is here, and where it is computed here."""
        return None if self.handover is None else self.handover.remote_kv

    @property
    def waits_for_images(self) -> bool:
        """Some image that prefill has not passed has no features yet."""
        return any(progress <= ImageProgress.ENCODING for progress in self.images)

    @property
    def needs_encode(self) -> bool:
        """Some image waits for an encode here."""
        if not self.remote_images:
            return ImageProgress.WAITING in self.images
        waiting = ImageProgress.WAITING
        return any(p == waiting and i not in self.remote_images for i, p in enumerate(self.images))

    @property
    def patches_to_encode(self) -> int:
        """Of its images that wait for an encode here."""
        images = enumerate(zip(self.request.images, self.images, strict=True))
        waiting = ImageProgress.WAITING
        return sum(image.num_patches for i, (image, p) in images if p == waiting and i not in self.remote_images)

    @property
    def needs_pull(self) -> bool:
        """Some image waits for features that another instance encodes."""
        return any(self.images[index] == ImageProgress.WAITING for index in self.remote_images)

    @property
    def trusts_cache(self) -> bool:
        """Some image has been found in cached KV and is not encoded for that reason."""
        return ImageProgress.CACHED in self.images and self.remote_kv is None

    @property
    def cached_images(self) -> int:
        """Pictures and videos that are done or have features and of which nothing was encoded for this request."""
        spans = list(zip(self.request.images, self.images, strict=True))
        late = {image.source for image, progress in spans if progress <= ImageProgress.ENCODING}
        encoded = {self.request.images[index].source for index in self.images_planned}
        return len({image.source for image, _ in spans} - late - encoded)

    @property
    def num_computable(self) -> int:
        """Positions [num_planned, num_computable) have all they need: up to the first image without features. There are
        none while KV comes from elsewhere."""
        if self.remote_kv is not None:
            return self.num_planned
        for image, progress in zip(self.request.images, self.images, strict=True):
            if progress <= ImageProgress.ENCODING:
                return max(image.start, self.num_planned)
        return self.num_tokens

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Token ids at positions [start, end), from the prompt and from what was generated."""
        prompt = self.request.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        generated = tuple(self.generated[max(0, start - len(prompt)) : end - len(prompt)])
        return prompt[start:] + generated
