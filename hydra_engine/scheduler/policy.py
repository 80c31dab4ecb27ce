"""Rules of order and preemption, as pure functions without side effects.

An accepted request (`admission.py`) is always served: the rules guarantee progress for every request that fits alone.
Urgency (priority, then the deadline of the first token) decides which is considered first. Age decides which may take
blocks from another: only an older request from a younger one, so the oldest always progresses, and by induction every
request does. The only exception: a request whose KV the connector loads may preempt older prefills that are stalled.
The planners in `step.py` and `vision.py` apply these rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hydra_engine.core.ids import FeatureKey
from hydra_engine.core.instances import Role
from hydra_engine.core.request import ImageItem
from hydra_engine.core.state import ImageProgress, RequestState, Urgency
from hydra_engine.scheduler.queues import ArrivalQueue

MAX_SKIPPED = 16  # requests without free blocks that planning skips in a step; bounds its time


def start_urgency(state: RequestState, scheduling_policy: str, num_tokens_left: int) -> Urgency:
    """Sort key of requests that wait for their start; the smallest starts first. `fcfs`: by age alone; `sjf`: by
    priority, then `num_tokens_left`, the tokens to prefill here; otherwise by priority, then the deadline of the first
    token. No request starves: once `max_bypass` younger ones have started before it, it goes first."""
    match scheduling_policy:
        case "fcfs":
            return 0, math.inf, state.order
        case "sjf":
            return state.request.priority, num_tokens_left, state.order
    return state.request.priority, state.due_s, state.order


def encode_urgency(state: RequestState, encode_policy: str) -> Urgency:
    """Sort key of requests whose images wait for an encode; the smallest is first. `fcfs`: by age alone; `srpt`: by
    priority, then the patches left to encode, which change with every encoded image; otherwise by priority, then the
    deadline of the first token. No request starves: after `encode_patience_s` the oldest goes first."""
    match encode_policy:
        case "fcfs":
            return 0, math.inf, state.order
        case "srpt":
            return state.request.priority, state.patches_to_encode, state.order
    return state.request.priority, state.due_s, state.order


def kv_tokens_to_admit(state: RequestState) -> int:
    """Number of token positions that need free blocks before the request may start: all its tokens so far or, if it was
    preempted before and decodes here, all up to `max_total_tokens`, so that it is not preempted twice."""
    return state.request.max_total_tokens if state.preempted and Role.D in state.stages else state.num_tokens


def is_stalled(state: RequestState) -> bool:
    """True if a running prefill has positions left and cannot continue: the next one belongs to an image without
    features, or the connector loads its KV."""
    return state.num_computable == state.num_planned < state.num_tokens


def may_preempt_stalled(oldest_encoding: RequestState) -> bool:
    """True if the oldest request that waits for images may start, and preempt younger stalled prefills for that: once
    its first image has features or needs none. Its images together may exceed the image cache, so the first must be
    consumed before the last is encoded."""
    return oldest_encoding.images[0] > ImageProgress.ENCODING


def youngest_stalled(prefilling: ArrivalQueue) -> RequestState | None:
    """The youngest stalled prefill that may be preempted for a start: it has no chunk in flight, and its KV is not
    about to be here (`keeps_blocks`). None if there is none."""
    youngest = None
    for state in prefilling:
        if not state.num_scheduled and is_stalled(state) and not state.keeps_blocks:
            youngest = state
    return youngest


def image_order(state: RequestState, index: int) -> tuple[int, int, int, int]:
    """Sort key of images: arrival index of the request, then place in its prompt, so that all instances order them
    alike. The encode jobs of one request have its index, and their images the places that they have in its prompt."""
    arrival_index, arrived = state.order
    return arrival_index, state.request.images[index].start if state.is_encode_job else 0, arrived, index


def chunk_end(start: int, end: int, images: Sequence[ImageItem]) -> int:
    """End of a chunk that may hold positions [start, end), moved out of an image with bidirectional attention: to the
    start of the image or, if the chunk would then be empty, to its end, even if that exceeds the budget."""
    for image in images:
        if image.bidirectional and image.start < end < image.end:
            return image.start if image.start > start else image.end
    return end


def features_to_evict(
    state: RequestState,
    index: int,
    holders: Iterable[tuple[FeatureKey, Sequence[tuple[RequestState, int]], int]],
    num_blocks: int,
) -> list[FeatureKey]:
    """Keys of the encoded features to evict so that image `index` of `state` gets `num_blocks` more blocks: the last in
    `image_order` first, none that an image before this one uses, none that a step in flight reads. Empty if that does
    not free enough.

    `holders`: (key, images that use it, number of blocks) of the encoded features to choose from, in any order. Each
    counts as the first of its images in `image_order`.
    """
    asking = image_order(state, index)
    later = []
    for key, users, blocks in holders:
        age = min(image_order(other, i) for other, i in users)
        if age > asking and not any(_is_being_read(other, i) for other, i in users):
            later.append((age, blocks, key))
    later.sort(reverse=True)
    taken, found = 0, []
    for _, blocks, key in later:
        if taken >= num_blocks:
            break
        taken += blocks
        found.append(key)
    return found if taken >= num_blocks else []


def _is_being_read(state: RequestState, index: int) -> bool:
    """True if a chunk in flight may read the features of this image."""
    return state.num_scheduled > 0 and state.request.images[index].start < state.num_planned
