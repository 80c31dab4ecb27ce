"""Rules of order and preemption, as pure functions without side effects.

An accepted request (`admission.py`) is always served: the rules guarantee progress for every request that fits alone.
Urgency (priority, then the deadline of the first token) decides which is considered first. Age decides which may take
blocks from another: only an older request from a younger one, so the oldest always progresses, and by induction every
request does. The planners in `step.py` and `vision.py` apply these rules.
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
    """Sort key of requests that wait for their start; the smallest starts first. `num_tokens_left`: tokens to prefill
    here, for `sjf`. No request starves: at most `max_bypass` later requests start before an earlier one."""
    match scheduling_policy:
        case "fcfs":
            return 0, math.inf, state.order
        case "sjf":
            return state.request.priority, num_tokens_left, state.order
    return state.request.priority, state.due_s, state.order


def encode_urgency(state: RequestState, encode_policy: str) -> Urgency:
    """Sort key of requests whose images wait for an encode; the smallest is first. With `srpt` it changes with every
    encoded image; the patience of the vision planner prevents the starvation of requests with many patches."""
    match encode_policy:
        case "fcfs":
            return 0, math.inf, state.order
        case "srpt":
            return state.request.priority, state.patches_to_encode, state.order
    return state.request.priority, state.due_s, state.order


def kv_tokens_to_admit(state: RequestState) -> int:
    """Number of token positions that need free blocks before the request may start: everything it has to prefill; after
    a preemption its maximum here, so that it is not preempted a second time."""
    return state.request.max_total_tokens if state.preempted and Role.D in state.stages else state.num_tokens


def is_stalled(state: RequestState) -> bool:
    """True if a running prefill cannot continue: the next position belongs to an image without features, or the
    connector loads its KV."""
    return state.num_computable == state.num_planned < state.num_tokens


def may_start_early(state: RequestState, *, head: bool, num_early: int, limit: int) -> bool:
    """True if a request may start prefill while some of its images have no features yet.

    Any request may while fewer than `limit` do. The `head` (the oldest that waits for images) always may once its first
    image has features: its images together may exceed the image cache, so the first must be consumed before the last is
    encoded.
    """
    return may_preempt_stalled(state, head=head) or (num_early < limit and not state.preempted)


def may_preempt_stalled(state: RequestState, *, head: bool) -> bool:
    """True if a waiting request may preempt younger prefills that are stalled at an image: if it waits for no image, or
    is the `head` (the oldest that waits for images) and its first image has features."""
    return not state.waits_for_images or (head and state.images[0] > ImageProgress.ENCODING)


def stalled_younger_than(state: RequestState, prefilling: ArrivalQueue) -> RequestState | None:
    """The youngest stalled prefill, if it is younger than `state`."""
    victim = youngest_stalled(prefilling)
    return victim if victim is not None and victim.order > state.order else None


def youngest_stalled(prefilling: ArrivalQueue) -> RequestState | None:
    """The youngest stalled prefill that is not part of a step: stalled at an image, or because its KV is
    loaded and not about to be complete."""
    youngest = None
    for state in prefilling:
        if not state.num_scheduled and is_stalled(state) and not state.keeps_blocks:
            youngest = state
    return youngest


def image_order(state: RequestState, index: int) -> tuple[int, int, int, int]:
    """Sort key of images, the same on all instances: age of the request, then place in the prompt. Encode jobs of one
    age belong to one request, whose images keep their places in the prompt."""
    age, arrived = state.order
    return age, state.request.images[index].start if state.is_encode_job else 0, arrived, index


def chunk_end(start: int, end: int, images: Sequence[ImageItem]) -> int:
    """End of a chunk that may hold positions [start, end): never inside an image with bidirectional attention. The
    chunk ends before such an image or, if it would be empty, behind it, even if that exceeds the budget."""
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
    """Keys of the encoded features to evict so that image `index` of `state` gets `num_blocks` more blocks: the latest
    first in (age, prompt) order, none that an earlier image uses, none that a step is reading. Empty if that does not
    free enough.

    `holders` are (key, images that use it, blocks) of all encoded features. Features are as old as their oldest user.
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
    return state.num_scheduled > 0 and state.request.images[index].start < state.num_planned
