"""The progress of one request inside the engine: a few integers, and what follows from them.

The one mutable record of the deciding rooms; owned by the scheduler of the instance that holds the request. Keeps the
names of what it computes, but does not know blocks, plans or the clock. What changes with every token of a decode is
not here but in the arrays of `scheduler/decodes.py`; only the tokens themselves are appended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

from hydra_engine.core.ids import BlockHash, FeatureKey
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.request import Request
from hydra_engine.core.stages import Stage
from hydra_engine.errors import ErrorInfo

# (priority, when the first token is due, order of arrival): the smaller one is considered first.
Urgency = tuple[int, float, int]


class ImageProgress(IntEnum):
    """Where one image of a request is. Image-cache blocks are held in ENCODING and ENCODED only."""

    WAITING = 0  # has no features, needs them
    ENCODING = 1  # named by a vision plan in flight, this one or the same picture elsewhere
    ENCODED = 2  # features are in the image cache
    CACHED = 3  # needs no features if the KV of its whole span is still found when the request starts
    CONSUMED = 4  # the KV of its whole span is in the request's blocks


@dataclass(frozen=True, slots=True)
class Ending:
    """Decided, but perhaps not carried out yet: a plan in flight may still name the request."""

    reason: FinishReason
    stop_token_id: int | None = None
    error: ErrorInfo | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """Token positions, half open:

        [0, num_computed)             KV is in the cache
        [num_computed, num_planned)   being computed by chunks in flight, `num_scheduled` tokens
        [num_planned, num_tokens)     still to compute

    `num_tokens` counts the prompt and what was generated. The last generated token has no KV until the next step, so
    a request that `decodes` has `num_computed == num_tokens - 1`: there it follows from the tokens, and before it is
    `num_prefilled`, which a decoding request no longer keeps up to date. Preemption sets it to zero and forgets nothing
    else. A request that starts on blocks found in the cache starts with `num_prefilled` behind them.

    `plans_in_flight` counts vision plans and chunks; rows of decodes that are in flight are counted by seat.
    """

    request: Request
    order: int  # of arrival at this instance; the smaller one is older
    images: list[ImageProgress]
    stop_ids: frozenset[int]
    generated: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    num_scheduled: int = 0
    decodes: bool = False  # it is in the queue of decodes
    seated: bool = False  # a chunk has been planned since it started last, so the language lane knows its seat
    num_preemptions: int = 0
    starts_seen: int | None = None  # of younger requests, when it began to wait for its start
    plans_in_flight: int = 0
    urgency: Urgency = (0, math.inf, 0)
    image_wait_since_s: float = 0.0
    ending: Ending | None = None
    block_hashes: list[BlockHash] = field(default_factory=list)  # of its first full blocks; grows when asked for
    num_named: int = 0  # blocks that it holds whose content can be found under these hashes
    image_keys: tuple[FeatureKey, ...] = ()
    images_planned: set[int] = field(default_factory=set)  # that were in a vision plan for this request
    cached_tokens: int = 0  # found in the cache when it started first

    @classmethod
    def new(cls, request: Request, order: int, now: float, ttft_s: float | None = None) -> RequestState:
        """`ttft_s` is the limit of requests that bring none."""
        ignored = () if request.sampling.ignore_eos else request.eos_token_ids
        limit_s = request.slo.ttft_s if request.slo.ttft_s is not None else ttft_s
        due_s = math.inf if limit_s is None else request.arrival_s + limit_s
        return cls(
            request=request,
            order=order,
            images=[ImageProgress.WAITING] * len(request.images),
            stop_ids=frozenset((*ignored, *request.sampling.stop_token_ids)),
            image_wait_since_s=now,
            urgency=(request.priority, due_s, order),
        )

    @property
    def due_s(self) -> float:
        """When its first token is due; infinite without a limit."""
        return self.urgency[1]

    @property
    def num_computed(self) -> int:
        return self.num_tokens - 1 if self.decodes else self.num_prefilled

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
    def max_tokens(self) -> int:
        """The full demand: prompt and every token it may generate."""
        return len(self.request.prompt_token_ids) + self.request.max_new_tokens

    @property
    def is_decode(self) -> bool:
        """One step away from a new token, with at least one token before."""
        return bool(self.generated) and self.num_computed == self.num_tokens - 1

    @property
    def waits_for_images(self) -> bool:
        """Some image that prefill has not passed has no features yet."""
        return any(progress <= ImageProgress.ENCODING for progress in self.images)

    @property
    def trusts_cache(self) -> bool:
        """Some image has been found in cached KV and is not encoded for that reason."""
        return ImageProgress.CACHED in self.images

    @property
    def cached_images(self) -> int:
        """Pictures and videos that are done or have features and of which nothing was encoded for this request."""
        spans = list(zip(self.request.images, self.images, strict=True))
        late = {image.source for image, progress in spans if progress <= ImageProgress.ENCODING}
        encoded = {self.request.images[index].source for index in self.images_planned}
        return len({image.source for image, _ in spans} - late - encoded)

    @property
    def stage(self) -> Stage:
        if self.ending is not None:
            return Stage.FINISHED
        if self.waits_for_images:
            return Stage.ENCODE
        return Stage.DECODE if self.is_decode else Stage.PREFILL

    @property
    def num_computable(self) -> int:
        """Positions [num_planned, num_computable) have all they need: up to the first image without features."""
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
