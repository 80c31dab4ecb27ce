"""Invariants between the states of requests, queues, slots, the table of decodes, the caches and plans in flight.

Raises AssertionError if one is violated. Tests call it after every step; it reads everything and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from hydra_engine.cache.blocks import BlockTable
from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import LanguagePlan, PullPlan, VisionPlan
from hydra_engine.core.roles import Role
from hydra_engine.core.state import ImageProgress, RequestPhase, RequestState
from hydra_engine.scheduler.requests import RequestTable


def check_requests(requests: RequestTable) -> None:
    """Checks every request and its queue, blocks, images and decode entry."""
    requests.ledger.check(requests.states)
    users = patches = 0
    members: dict[int, tuple[RequestState, BlockTable, int]] = {}
    for request_id, state in requests.states.items():
        _check_queue(requests, state)
        _check_blocks(requests, state)
        users += _check_images(requests, state)
        if state.ending is None:
            zipped = enumerate(zip(state.request.images, state.images, strict=True))
            local = ((image, progress) for i, (image, progress) in zipped if i not in state.remote_images)
            patches += sum(image.num_patches for image, progress in local if progress == ImageProgress.WAITING)
        chunk_in_flight = state.num_scheduled > 0 and state.num_planned == state.num_tokens
        joins = state.ending is None and chunk_in_flight and Role.D in state.stages
        if state.phase is RequestPhase.DECODING or joins:
            members[requests.seq_slots.slot_of[request_id]] = (
                state,
                requests.kv.tables[request_id],
                int(chunk_in_flight),
            )
    for queue in (*requests.queues.values(), requests.unencoded, requests.unfetched):
        orders = [state.order for state in queue]
        assert orders == sorted(orders), "a queue is out of order"
        assert all(requests.states.get(state.request.id) is state for state in queue), "a queue holds a dead request"
    assert users == requests.features.num_users, "features are kept for images that do not need them"
    assert patches == requests.images.patches_waiting, "patches that wait are counted wrong"
    requests.decodes.check(members)


def _check_queue(requests: RequestTable, state: RequestState) -> None:
    where, live = f"request {state.request.id}", state.ending is None
    assert state.phase is requests.phase_of(state), f"{where} is in the wrong phase"
    for phase, queue in requests.queues.items():
        assert (state in queue) == (phase is state.phase), f"{where} is in the wrong queue"
    assert not state.held or state.request.id not in requests.kv.tables, f"{where} is held and has KV"
    assert (state in requests.unencoded) == (live and state.needs_encode), f"{where}: images to encode"
    assert (state in requests.unfetched) == (live and state.needs_pull), f"{where}: images to fetch"


def _check_blocks(requests: RequestTable, state: RequestState) -> None:
    request_id = state.request.id
    table = requests.kv.tables.get(request_id)
    num_slots = 0 if table is None else table.num_slots
    assert state.num_planned <= num_slots, f"request {request_id} has KV without blocks"
    assert state.num_planned <= state.num_tokens, f"request {request_id} computes too much"
    assert state.num_published * requests.kv.block_size <= state.num_computed, (
        f"request {request_id} publishes too much"
    )
    hashes = requests.kv.hashes(request_id)
    published, rest = hashes[: state.num_published], hashes[state.num_published :]
    assert not any(rest), f"request {request_id} publishes a block that is not full"
    for block_hash, expected in zip(published, state.block_hashes, strict=False):
        assert block_hash in (None, expected), f"request {request_id} has a block under a wrong hash"


def _check_images(requests: RequestTable, state: RequestState) -> int:
    """Checks the images of a request; returns how many of them use features."""
    request_id, runs = state.request.id, state.request.id in requests.kv.tables
    users = 0
    for index, (image, progress) in enumerate(zip(state.request.images, state.images, strict=True)):
        where = f"request {request_id} image {index}"
        consumed = runs and image.end <= state.num_computed
        assert state.is_encode_job or (progress == ImageProgress.CONSUMED) == consumed, (
            f"{where}: KV and progress disagree"
        )
        looked_for = progress == ImageProgress.CACHED and state.remote_kv is None
        assert not runs or not looked_for, f"{where} is looked for although it has started"
        if progress <= ImageProgress.ENCODED:
            users += 1
            key = state.image_keys[index]
            assert (request_id, index) in requests.features.users(key), f"{where} needs features and is no user of them"
            assert progress == requests.features.progress(key), f"{where}: features and progress disagree"
    return users


# ---- plans in flight


def check_in_flight(
    requests: RequestTable, vision: Iterable[VisionPlan], language: Iterable[LanguagePlan], pulls: Iterable[PullPlan]
) -> None:
    """Checks that each request's `plans_in_flight` is the number of plans that name it, and its slot unchanged."""
    plans: dict[RequestId, int] = {}
    steps = list(language)
    for encode in vision:
        for request_id in {item.request_id for item in encode.items}:
            plans[request_id] = plans.get(request_id, 0) + 1
    for pull in pulls:
        plans[pull.request_id] = plans.get(pull.request_id, 0) + 1
    for step in steps:
        for chunk in step.chunks:
            plans[chunk.request_id] = plans.get(chunk.request_id, 0) + 1
        pairs = zip(step.decodes.request_ids.tolist(), step.decodes.seq_slots.tolist(), strict=True)
        for request_id, seq_slot in pairs:
            assert requests.seq_slots.slot_of.get(request_id) == seq_slot, (
                f"request {request_id} has lost its slot in a plan"
            )
    requests.decodes.check_in_flight([step.decodes for step in steps if len(step.decodes)])
    for request_id, state in requests.states.items():
        assert state.plans_in_flight == plans.pop(request_id, 0), f"request {request_id}: plans in flight"
        assert state.ending is None or requests.in_use(state), f"request {request_id} has ended and is still here"
    assert not plans, f"plans name requests that are gone: {sorted(plans)}"
