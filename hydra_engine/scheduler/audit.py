"""What must hold between the states of requests, the queues, the seats, the table of decodes, the caches and plans in
flight.

Raises AssertionError where it does not. Called by tests after every step; reads everything, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from hydra_engine.cache.table import BlockTable
from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import LanguagePlan, PullPlan, VisionPlan
from hydra_engine.core.roles import Role
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler.book import RequestBook


def check_book(book: RequestBook) -> None:
    book.ledger.check(book.states)
    users = patches = 0
    members: dict[int, tuple[RequestState, BlockTable, int]] = {}
    for request_id, state in book.states.items():
        _check_queue(book, state)
        _check_blocks(book, state)
        users += _check_images(book, state)
        if state.ending is None:
            zipped = enumerate(zip(state.request.images, state.images, strict=True))
            local = ((image, progress) for i, (image, progress) in zipped if i not in state.remote_images)
            patches += sum(image.num_patches for image, progress in local if progress == ImageProgress.WAITING)
            _check_offers(book, state)
        chunk_in_flight = state.num_scheduled > 0 and state.num_planned == state.num_tokens
        if state.ending is None and (state.decodes or (chunk_in_flight and Role.D in state.part)):
            members[book.seats.of(request_id)] = state, book.kv.tables[request_id], int(chunk_in_flight)
    for queue in (*book.queues, book.unencoded, book.awaited):
        orders = [state.order for state in queue]
        assert orders == sorted(orders), "a queue is out of order"
        assert all(book.states.get(state.request.id) is state for state in queue), "a queue holds a dead request"
    assert users == book.features.num_users, "features are kept for images that do not need them"
    assert patches == book.images.patches_waiting, "patches that wait are counted wrong"
    for offer, (state, index) in book.images.offers.items():
        assert offer in state.image_offers[index] and state.ending is None, f"offer {offer} is for nobody"
    for offer, state in book.kv_offers.items():
        assert state.arrival is not None and state.arrival.offer == offer, f"offer {offer} is for nobody"
        assert state.ending is None, f"offer {offer} is for a request that has ended"
    assert not book.departed, "a request has departed and is still here"
    book.decodes.check(members)


def _check_queue(book: RequestBook, state: RequestState) -> None:
    request_id, belongs = state.request.id, book.queue_for(state)
    for queue in book.queues:
        assert (request_id in queue) == (queue is belongs), f"request {request_id} is in the wrong queue"
    live = state.ending is None
    assert (request_id in book.unencoded) == (live and state.needs_encode), f"request {request_id}: images to encode"
    assert (request_id in book.awaited) == (live and state.needs_pull), f"request {request_id}: images to fetch"
    assert state.decodes == (request_id in book.decoding), f"request {request_id}: whether it decodes"


def _check_offers(book: RequestBook, state: RequestState) -> None:
    """What it offers to others, and others to it."""
    request_id, runs = state.request.id, state.request.id in book.kv.tables
    where = f"request {request_id}"
    if state.is_job:
        encoded = {index for index, progress in enumerate(state.images) if progress == ImageProgress.ENCODED}
        assert state.offered_s.keys() == encoded, f"{where}: what is encoded is offered"
        assert not runs and not state.image_offers, f"{where} is an encode job and nothing else"
    assert state.num_offered * book.kv.block_size < state.num_prefilled + book.kv.block_size, f"{where} offers too much"
    assert not state.hands_over or (runs and Role.D not in state.part), f"{where}: who hands over"
    assert not state.num_offered or Role.D not in state.part, f"{where} offers KV that it needs"
    for index in state.remote_images:
        progress, asked = state.images[index], index in state.images_asked
        assert progress != ImageProgress.WAITING or asked, f"{where} image {index}: nobody was asked for it"
        known = index in state.image_offers
        assert not known or (asked and progress <= ImageProgress.ENCODING), f"{where} image {index} is offered in vain"
    if (arrival := state.arrival) is not None:
        assert arrival.copies is None or runs, f"{where}: KV is copied to nowhere"
        assert arrival.offer is not None or arrival.copies is not None or not runs, f"{where} holds blocks for nothing"
        assert (arrival.offer is None) == (state not in book.kv_offers.values()), f"{where}: offer of its KV"


def _check_blocks(book: RequestBook, state: RequestState) -> None:
    request_id = state.request.id
    table = book.kv.tables.get(request_id)
    known = 0 if table is None else table.num_slots
    assert state.num_planned <= known, f"request {request_id} has KV without blocks"
    assert state.num_planned <= state.num_tokens, f"request {request_id} computes too much"
    assert state.num_named * book.kv.block_size <= state.num_computed, f"request {request_id} lends too much"
    names = book.kv.names(request_id)
    lent, rest = names[: state.num_named], names[state.num_named :]
    assert not any(rest), f"request {request_id} lends a block that is not full"
    for name, expected in zip(lent, state.block_hashes, strict=False):
        assert name in (None, expected), f"request {request_id} has a block under a wrong name"


def _check_images(book: RequestBook, state: RequestState) -> int:
    """How many of its images use features."""
    request_id, runs = state.request.id, state.request.id in book.kv.tables
    users = 0
    for index, (image, progress) in enumerate(zip(state.request.images, state.images, strict=True)):
        where = f"request {request_id} image {index}"
        consumed = runs and image.end <= state.num_computed
        assert state.is_job or (progress == ImageProgress.CONSUMED) == consumed, f"{where}: KV and progress disagree"
        looked_for = progress == ImageProgress.CACHED and state.arrival is None
        assert not runs or not looked_for, f"{where} is looked for although it has started"
        if progress <= ImageProgress.ENCODED:
            users += 1
            key = state.image_keys[index]
            assert (request_id, index) in book.features.users(key), f"{where} needs features and nobody knows"
            assert progress == book.features.progress(key), f"{where}: features and progress disagree"
    return users


# ---- plans in flight


def check_in_flight(
    book: RequestBook, vision: Iterable[VisionPlan], language: Iterable[LanguagePlan], pulls: Iterable[PullPlan]
) -> None:
    plans: dict[RequestId, int] = {}
    steps = list(language)
    for encode in vision:
        for request_id in {item.request_id for item in encode.items}:
            plans[request_id] = plans.get(request_id, 0) + 1
    for pull in pulls:
        plans[pull.request_id] = plans.get(pull.request_id, 0) + 1
        _check_pull(book, pull)
    for step in steps:
        for chunk in step.chunks:
            plans[chunk.request_id] = plans.get(chunk.request_id, 0) + 1
        pairs = zip(step.decodes.request_ids.tolist(), step.decodes.seats.tolist(), strict=True)
        for request_id, seat in pairs:
            assert book.seats.held.get(request_id) == seat, f"request {request_id} has lost its seat in a plan"
    book.decodes.check_in_flight([step.decodes for step in steps if len(step.decodes)])
    for request_id, state in book.states.items():
        assert state.plans_in_flight == plans.pop(request_id, 0), f"request {request_id}: plans in flight"
        assert state.ending is None or book.in_use(state), f"request {request_id} has ended and is still here"
    assert not plans, f"plans name requests that are gone: {sorted(plans)}"


def _check_pull(book: RequestBook, pull: PullPlan) -> None:
    """It writes to blocks that are its request's, and nobody finds them before."""
    state = book.states[pull.request_id]
    stop = pull.first_block + len(pull.block_ids)
    if pull.image_index is None:
        assert state.arrival is not None and state.arrival.copies == pull.offer, "a pull that nobody waits for"
        block_ids = book.kv.tables[pull.request_id].block_ids
        assert not any(book.kv.names(pull.request_id)[pull.first_block :]), "a block is found before it is filled"
    else:
        assert state.pulls_image, "a pull that nobody waits for"
        block_ids = book.features.block_ids(state.image_keys[pull.image_index])
    assert (block_ids[pull.first_block : stop] == pull.block_ids).all(), "a pull writes to blocks of others"
