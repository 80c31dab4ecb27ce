"""Which requests are accepted, which goes first and which gives way: pure functions. They change nothing.

A request that can never fit is refused with quota and remedy, a full queue with a time to retry; what is accepted will
be served, for the rules guarantee progress for anything that fits alone. Urgency (priority, then when the first token
is due) says which is considered first. Age decides which may take what others hold: an older request from younger ones,
never the other way round, so the oldest always gets on and by induction every one does. The planners in `language.py`
and `vision.py` apply these rules.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from hydra_engine.core.ids import FeatureKey
from hydra_engine.core.media import ImageItem
from hydra_engine.core.request import Request
from hydra_engine.core.roles import Role
from hydra_engine.core.state import ImageProgress, RequestState, Urgency
from hydra_engine.errors import InvalidRequest, RequestTooLarge, Unavailable, retry_after_s
from hydra_engine.scheduler.queues import ArrivalQueue, UrgencyQueue

MAX_PASSED = 16  # requests without room that a step looks past; bounds the time that planning takes
# Copies of one request's images that are in flight at once: the next one begins where the one before ends, and those of
# several encoders run side by side. No more, for blocks that are written give way to nobody, and KV waits behind them.
MAX_IMAGE_PULLS = 4
# How long borrowed decodes stand still for encodes: a reader notices a longer pause, and a first token that waits for
# an image is late by far more.
STEAL_PATIENCE_S = 0.1


def may_borrow(role: Role) -> bool:
    """Whether an instance takes decodes over from others while it has nothing to encode (HeteroServe, section 5.3)."""
    return Role.E in role and Role.D in role


def yield_patience_s(tpot_slo: float | None) -> float:
    """How long borrowed decodes wait for the vision lane: with a TPOT limit no longer than half of that."""
    return STEAL_PATIENCE_S if tpot_slo is None else min(STEAL_PATIENCE_S, tpot_slo / 2)


def start_urgency(state: RequestState, scheduling_policy: str, num_tokens_left: int) -> Urgency:
    """Who starts first. `num_tokens_left`: to prefill here, for `sjf`. Nobody starves of it: `max_bypass` later
    requests may start before an earlier one, whatever there is to do for either."""
    match scheduling_policy:
        case "fcfs":
            return 0, math.inf, state.order
        case "sjf":
            return state.request.priority, num_tokens_left, state.order
    return state.request.priority, state.due_s, state.order


def encode_urgency(state: RequestState, encode_policy: str) -> Urgency:
    """Whose images are encoded first. With `srpt` that changes with each image that is; the patience of the vision
    planner keeps requests with many patches from starving."""
    match encode_policy:
        case "fcfs":
            return 0, math.inf, state.order
        case "srpt":
            return state.request.priority, state.patches_to_encode, state.order
    return state.request.priority, state.due_s, state.order


def sequence_limit(max_num_seqs: int, token_budget: int) -> int:
    """Requests that may hold KV blocks: no more than a step has tokens, so that a running prefill always gets one."""
    return min(max_num_seqs, token_budget)


def early_limit(max_seqs: int) -> int:
    """How many of these may start before all their images are encoded. The other half is always there for requests
    that wait for no image."""
    return max_seqs // 2


def kv_tokens_to_admit(state: RequestState) -> int:
    """Token positions that must have room before the request may start: all that it has to prefill, and after a
    preemption all that it can ever need here, so that it cannot run short a second time. What is pulled has room for
    the token behind it too."""
    if Role.D not in state.stages:
        return state.num_tokens
    if state.preempted:
        return state.request.max_total_tokens
    if state.remote_kv is None:
        return state.num_tokens
    end = state.remote_kv.end
    return min(max(state.num_tokens, 0 if end is None else end.num_tokens) + 1, state.request.max_total_tokens)


def takes_all_at_once(state: RequestState) -> bool:
    """Whether a request gets all the blocks that it is admitted with when it starts, and not chunk by chunk.

    What cannot decode here waits for another instance when it is computed, and so does what comes from one until it is
    here. Such a request must not stand in need of blocks that others hold at the same time: the order of age would not
    help, for blocks that are offered are not taken back.
    """
    return state.preempted or state.remote_kv is not None or Role.D not in state.stages


def is_stalled(state: RequestState) -> bool:
    """A running prefill that stands before an image without features."""
    return state.num_computable == state.num_planned < state.num_tokens


def may_start_early(state: RequestState, *, head: bool, num_early: int, limit: int) -> bool:
    """Whether a request may start prefill while some of its images have no features yet.

    Anyone may while few do. The `head` (the oldest that waits for images) always may once its first image needs nothing
    more: its images may exceed the image cache together, so that the first must be consumed before the last is encoded.
    """
    return may_insist(state, head=head) or (num_early < limit and not state.preempted)


def may_insist(state: RequestState, *, head: bool) -> bool:
    """Whether a waiting request may take room from younger prefills that stand before an image."""
    return not state.waits_for_images or (head and state.images[0] > ImageProgress.ENCODING)


def candidates(waiting: UrgencyQueue, encoding: UrgencyQueue, limit: int) -> Iterator[RequestState]:
    """Waiting requests, the most urgent first; of those that wait for images only the first few, at most `limit`, and
    the oldest one, perhaps a second time. The queues may change meanwhile."""
    oldest = encoding.oldest()
    early = islice(encoding.by_urgency(), min(limit, MAX_PASSED))
    streams = (waiting.by_urgency(), early, [] if oldest is None else [oldest])
    return heapq.merge(*streams, key=lambda state: state.urgency)


def is_complete(state: RequestState) -> bool:
    """All KV of an arriving request is offered, so it waits for nothing but its copies."""
    return state.remote_kv is not None and state.remote_kv.end is not None


def stalled_younger_than(state: RequestState, prefilling: ArrivalQueue) -> RequestState | None:
    """The youngest prefill that stands still and is younger than `state`."""
    victim = youngest_stalled(prefilling)
    return victim if victim is not None and victim.order > state.order else None


def youngest_stalled(prefilling: ArrivalQueue) -> RequestState | None:
    """The youngest prefill that stands still and is not part of a step: before an image, or because the KV that it
    pulls is still being computed."""
    youngest = None
    for state in prefilling:
        if not state.num_scheduled and is_stalled(state) and not is_complete(state):
            youngest = state
    return youngest


def image_order(state: RequestState, index: int) -> tuple[int, int, int, int]:
    """The smaller one is earlier, on all instances alike: by age of the request, then by place in the prompt. Encode
    jobs of one age are for one request, whose images keep their places in it."""
    age, arrived = state.order
    return age, state.request.images[index].start if state.is_encode_job else 0, arrived, index


def chunk_end(start: int, end: int, images: Sequence[ImageItem]) -> int:
    """Where a chunk that may hold positions [start, end) ends: never inside an image whose rows see each other. Before
    it, or behind it if the chunk would be empty otherwise, even if that is more than the step should hold."""
    for image in images:
        if image.whole and image.start < end < image.end:
            return image.start if image.start > start else image.end
    return end


def part_end(start: int, num_tokens: int, least: int, block_size: int) -> int:
    """Where the next part of a prompt ends whose KV is copied to another instance while the part behind it is computed:
    in the middle of what is left, behind a full block; at the end where a part would have less than `least` tokens.

    Behind the last part only its own copy is waited for. With halves that is short after a few steps, and the copies
    before it are hidden as long as a token is not copied more slowly than it is computed.
    """
    rest = num_tokens - start
    if rest < 2 * least:
        return num_tokens
    middle = start + (rest + 1) // 2
    return min(num_tokens, -(-middle // block_size) * block_size)


def features_to_evict(
    state: RequestState,
    index: int,
    holders: Iterable[tuple[FeatureKey, Sequence[tuple[RequestState, int]], int]],
    num_blocks: int,
) -> list[FeatureKey]:
    """Which encoded features give way so that image `index` of `state` gets `num_blocks` more blocks: the latest first,
    none that an image before it in (age, prompt) order uses, none that a step is reading. Empty if that is not
    enough.

    `holders` are (key, images that use it, blocks) of everything encoded. Features are as old as their oldest user.
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


# ---- which requests are accepted


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of one instance, in blocks and in tokens (KV) or feature rows (images) per block."""

    role: Role
    num_kv_blocks: int
    kv_block_size: int
    num_image_blocks: int
    image_block_size: int


def check_fits(request: Request, limits: Limits, stages: Role | None = None) -> None:
    """Raises InvalidRequest or RequestTooLarge unless these stages of the request (default: all that the role can do),
    alone on this instance, would run to their end."""
    stages = limits.role if stages is None else stages
    if stages & limits.role != stages:
        raise Unavailable(
            f"stages {stages.letters} are asked of an instance that serves {limits.role.letters} now; send the request "
            "again",
            code="wrong_role",
        )
    if stages != Role.E:
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt is empty; send at least one token", param="messages")
        _check_kv(request, limits, request.max_new_tokens if Role.D in stages else len(request.generated_token_ids))
    if stages == Role.E or Role.P in stages:
        _check_images(request, limits)


def _check_images(request: Request, limits: Limits) -> None:
    for index, image in enumerate(request.images):
        blocks = -(-image.num_tokens // limits.image_block_size)
        if blocks > limits.num_image_blocks:
            raise RequestTooLarge(
                f"image {index + 1} needs {blocks} blocks of the image cache for its {image.num_tokens} tokens, this "
                f"deployment has {limits.num_image_blocks}; send a smaller image, or serve with a larger "
                "--image-cache-gib",
                param="messages",
            )


def _check_kv(request: Request, limits: Limits, num_generated: int) -> None:
    blocks = -(-(request.num_prompt + num_generated) // limits.kv_block_size)
    if blocks <= limits.num_kv_blocks:
        return
    room = limits.num_kv_blocks * limits.kv_block_size
    if room > request.num_prompt and num_generated:
        param, remedy = "max_tokens", f"lower max_tokens to at most {room - request.num_prompt}"
    else:
        param, remedy = "messages", "shorten the prompt or send smaller images"
    raise RequestTooLarge(
        f"{request.num_prompt} prompt tokens and up to {num_generated} new ones need {blocks} KV blocks, this "
        f"deployment has {limits.num_kv_blocks} ({room} tokens); {remedy}, or serve with a larger --kv-cache-gib",
        param=param,
    )


def check_queue(num_live: int, max_queue: int, finish_times: Sequence[float]) -> None:
    """Raises Unavailable when `max_queue` requests are accepted and not finished."""
    if num_live >= max_queue:
        raise Unavailable(
            f"{num_live} requests are queued or running, the limit (max_queue) is {max_queue}; try again later",
            code="overloaded",
            retry_after_s=retry_after_s(num_live, finish_times),
        )
