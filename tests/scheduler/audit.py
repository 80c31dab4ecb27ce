"""Invariants between the states of requests, queues, slots, the table of decodes, the caches and plans in flight.

`check` raises AssertionError if one is violated. Tests call it after every step; it reads everything, private fields
included, and changes nothing. Those of an instance with peers are in `handover/audit.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain

import numpy as np

from hydra_engine.cache.blocks import BlockTable
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Role
from hydra_engine.core.state import ImageProgress, RequestPhase, RequestState
from hydra_engine.scheduler.decodes import _ABSENT, DecodeTable, DecodeTimes
from hydra_engine.scheduler.hooks import Connector
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.scheduler.scheduler import StageScheduler
from tests.cache.hashes import hashes_of


def check(scheduler: StageScheduler) -> None:
    """Raises AssertionError if requests, queues, blocks and plans in flight disagree."""
    connector, plans = scheduler._requests.connector, {}
    check_requests(scheduler._requests)
    if type(connector) is not Connector:
        from tests.scheduler.handover.audit import check_peers

        plans = check_peers(scheduler._requests, connector)
    check_in_flight(scheduler, plans)


def check_requests(requests: RequestTable) -> None:
    """Checks every request and its queue, blocks, images and decode entry."""
    problems = requests.ledger.problems(requests.states)
    assert not problems, "; ".join(problems)
    users = patches = 0
    members: dict[int, tuple[RequestState, BlockTable, int]] = {}
    for request_id, state in requests.states.items():
        _check_queue(requests, state)
        _check_blocks(requests, state)
        users += _check_images(requests, state)
        if state.ending is None:
            zipped = enumerate(zip(state.request.images, state.images, strict=True))
            local = ((image, progress) for i, (image, progress) in zipped if i not in state.external_images)
            patches += sum(image.num_patches for image, progress in local if progress == ImageProgress.WAITING)
        chunk_in_flight = state.num_scheduled > 0 and state.num_planned == state.num_tokens
        joins = state.ending is None and chunk_in_flight and Role.D in state.stages
        if state.phase is RequestPhase.DECODING or joins:
            members[requests.seq_slots.slot_of[request_id]] = (
                state,
                requests.kv.tables[request_id],
                int(chunk_in_flight),
            )
    for queue in (*requests.queues.values(), requests.unencoded):
        orders = [state.order for state in queue]
        assert orders == sorted(orders), "a queue is out of order"
        assert all(requests.states.get(state.request.id) is state for state in queue), "a queue holds a dead request"
    assert users == sum(len(entry.users) for entry in requests.features._entries.values()), (
        "features are kept for images that do not need them"
    )
    assert patches == requests.images.patches_waiting, "patches that wait are counted wrong"
    check_decodes(requests.decodes, members)


def _check_queue(requests: RequestTable, state: RequestState) -> None:
    where, live = f"request {state.request.id}", state.ending is None
    assert state.phase is requests.phase_of(state), f"{where} is in the wrong phase"
    for phase, queue in requests.queues.items():
        assert (state in queue) == (phase is state.phase), f"{where} is in the wrong queue"
    assert not state.held or state.request.id not in requests.kv.tables, f"{where} is held and has KV"
    assert (state in requests.unencoded) == (live and state.needs_encode), f"{where}: images to encode"


def _check_blocks(requests: RequestTable, state: RequestState) -> None:
    request_id = state.request.id
    table = requests.kv.tables.get(request_id)
    num_slots = 0 if table is None else table.num_blocks * requests.kv.block_size
    assert state.num_planned <= num_slots, f"request {request_id} has KV without blocks"
    assert state.num_planned <= state.num_tokens, f"request {request_id} computes too much"
    assert state.num_published * requests.kv.block_size <= state.num_computed, (
        f"request {request_id} publishes too much"
    )
    hashes = hashes_of(requests.kv, request_id)
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
        looked_for = progress == ImageProgress.CACHED and not state.external_kv
        assert not runs or not looked_for, f"{where} is looked for although it has started"
        if progress <= ImageProgress.ENCODED:
            users += 1
            key = state.image_keys[index]
            assert (request_id, index) in requests.features.users(key), f"{where} needs features and is no user of them"
            assert progress == requests.features.progress(key), f"{where}: features and progress disagree"
    return users


# ---- plans in flight


def check_in_flight(scheduler: StageScheduler, plans: dict[RequestId, int]) -> None:
    """Checks that each request's `plans_in_flight` is the number of plans that name it, and its slot unchanged.
    `plans`: the number of plans of the connector that name it."""
    requests, steps = scheduler._requests, [step.plan for step in scheduler._language_steps.values()]
    for encode in scheduler._vision_plans:
        for request_id in {item.request_id for item in encode.items}:
            plans[request_id] = plans.get(request_id, 0) + 1
    for step in steps:
        for chunk in step.chunks:
            plans[chunk.request_id] = plans.get(chunk.request_id, 0) + 1
        pairs = zip(step.decodes.request_ids.tolist(), step.decodes.seq_slots.tolist(), strict=True)
        for request_id, seq_slot in pairs:
            assert requests.seq_slots.slot_of.get(request_id) == seq_slot, (
                f"request {request_id} has lost its slot in a plan"
            )
    rows = [step.decodes for step in steps if len(step.decodes)]
    assert [step.rows for step in requests.decodes._in_flight] == rows, "decodes in flight"
    for request_id, state in requests.states.items():
        assert state.plans_in_flight == plans.pop(request_id, 0), f"request {request_id}: plans in flight"
        assert state.ending is None or requests.in_use(state), f"request {request_id} has ended and is still here"
    assert not plans, f"plans name requests that are gone: {sorted(plans)}"


# ---- decodes


def check_decodes(table: DecodeTable, members: dict[int, tuple[RequestState, BlockTable, int]]) -> None:
    """Checks that the table agrees with `members`: slot -> (state, blocks, 1 if its last chunk is in flight)."""
    num_members, unread = len(table.states), table._unread()
    seq_slots = table._seq_slots[:num_members].tolist()
    assert set(seq_slots) == members.keys() and len(seq_slots) == len(members), "the wrong requests are decodes"
    assert set(np.flatnonzero(table._index_of != _ABSENT).tolist()) == members.keys(), "an index is lost"
    check_times(table.times, table.states)
    starts = table._starts[:num_members]
    assert table._sum_starts == int(starts.sum()) and table._longest >= int(starts.max(initial=0))
    assert table._stop_ids == Counter(chain.from_iterable(state.stop_ids for state in table.states)), "stop tokens"
    for index, seq_slot in enumerate(seq_slots):
        state, blocks, chunk = members[seq_slot]
        where = f"request {state.request.id}"
        assert table._index_of[seq_slot] == index, f"{where} has another's index"
        assert table.states[index] is state, f"{where} has a wrong slot"
        assert table._request_ids[index] == state.request.id, f"{where} has another's id"
        assert table._generated[index] is state.generated, f"{where}: tokens go elsewhere"
        assert table._chunk_in_flight[index] == chunk, f"{where}: whether its last chunk is in flight"
        start = int(table._starts[index])
        assert start == state.num_tokens - 1 + unread[index], f"{where}: position of its next row"
        assert start - table._offsets[index] == state.num_generated + unread[index], f"{where}: count"
        assert start <= table._last_starts[index] + 1, f"{where} is planned beyond its end"
        assert not table._deferred[index] or unread[index], f"{where} waits for nothing"
        if state.generated and not unread[index]:
            assert table._last_tokens[index] == state.generated[-1], f"{where}: last token"
        num_blocks = int(table._num_visible[index]) // table._block_size
        assert table._block_tables[index] is blocks, f"{where} has another's blocks"
        assert table._num_visible[index] <= blocks.num_blocks * table._block_size, (
            f"{where} shows blocks that it does not have"
        )
        row = table._tables[index]
        assert row[:num_blocks].tolist() == blocks.blocks()[:num_blocks], f"{where}: block table"
        assert not row[num_blocks:].any(), f"{where}: block table behind its blocks"


def check_times(times: DecodeTimes, states: list[RequestState]) -> None:
    """Checks that these are the members, in this order."""
    assert len(states) == len(times._watched), "the times of a decode are lost"
    assert all(watched.state is state for watched, state in zip(times._watched, states, strict=True))
    assert times.num_limited == int((times._tpot_limits_s[: len(states)] < math.inf).sum())
