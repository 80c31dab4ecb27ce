"""Invariants between offers, pulls and the states of requests. Raises AssertionError if one is violated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler.handover.connector import PeerConnector
from hydra_engine.scheduler.handover.pulls import MAX_IMAGE_PULLS
from hydra_engine.scheduler.handover.state import (
    ParkedRequests,
    find_handover,
    handover_of,
    offers_all_kv,
    remote_kv_of,
)
from hydra_engine.scheduler.hooks import Connector
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.transfer.plans import PullPlan
from tests.cache.hashes import hashes_of


def check_peers(requests: RequestTable, connector: Connector) -> dict[RequestId, int]:
    """Checks offers and pulls; returns the number of pulls in flight of each request."""
    assert isinstance(connector, PeerConnector)
    departed = [state for state in requests.states.values() if state.ending is not None and not requests.in_use(state)]
    assert not departed, "a request has departed and is still here"
    pulls = connector.pulls.in_flight.values()
    check_parked(requests, connector._parked)
    check_offers(requests, connector.pulls.images.offers, connector.pulls.kv_offers)
    check_pulls(requests, pulls)
    return Counter(pull.request_id for pull in pulls)


def check_parked(requests: RequestTable, parked: ParkedRequests) -> None:
    """Checks that each parked request is in the queue of what it waits for, and in no other."""
    for state in requests.states.values():
        where, live, handover = f"request {state.request.id}", state.ending is None, find_handover(state)
        parking = parked.parking_of(state) if live and handover is not None else None
        assert handover is None or handover.parking is parking, f"{where} is parked wrong"
        for other, queue in parked.queues.items():
            assert (state in queue) == (other is parking), f"{where} is in the wrong queue"
        assert (state in parked.unfetched) == (live and state.needs_load), f"{where}: images to fetch"
        assert state.external_kv == (remote_kv_of(state) is not None), f"{where}: KV of others"
        assert state.keeps_blocks == offers_all_kv(state), f"{where}: blocks that it keeps"
    for queue in (*parked.queues.values(), parked.unfetched):
        orders = [state.order for state in queue]
        assert orders == sorted(orders), "a queue is out of order"
        assert all(requests.states.get(state.request.id) is state for state in queue), "a queue holds a dead request"


def check_offers(
    requests: RequestTable, images: Mapping[int, tuple[RequestState, int]], kv: Mapping[int, RequestState]
) -> None:
    """Checks the offers of this instance and of others. `images`, `kv`: offers of other instances by number."""
    for state in requests.states.values():
        if state.ending is None:
            _check_offers_of(requests, state, kv)
    for offer, (state, index) in images.items():
        assert offer in handover_of(state).image_offers[index], f"offer {offer} is for another request"
        assert state.ending is None, f"offer {offer} is for a request that has ended"
    for offer, state in kv.items():
        assert (remote_kv := remote_kv_of(state)) is not None and remote_kv.offer == offer, (
            f"offer {offer} is for another request"
        )
        assert state.ending is None, f"offer {offer} is for a request that has ended"


def _check_offers_of(requests: RequestTable, state: RequestState, kv: Mapping[int, RequestState]) -> None:
    """Checks what the request offers to other instances and what they offer to it."""
    request_id, runs, block_size = state.request.id, state.request.id in requests.kv.tables, requests.kv.block_size
    where, handover = f"request {request_id}", find_handover(state)
    if handover is None:
        assert state.stages == EPD and not state.external_images, f"{where} needs other instances"
        return
    if state.is_encode_job:
        encoded = {index for index, progress in enumerate(state.images) if progress == ImageProgress.ENCODED}
        assert handover.offered_s.keys() == encoded, f"{where}: what is encoded is offered"
        assert not runs and not handover.image_offers, f"{where} is an encode job and nothing else"
    num_offered = handover.num_offered - state.num_state_blocks * handover.offers_all
    assert num_offered * block_size < state.num_prefilled + block_size, f"{where} offers too much"
    assert not handover.offers_all or (runs and Role.D not in state.stages), f"{where} hands over what it needs"
    assert not handover.num_offered or Role.D not in state.stages, f"{where} offers KV that it needs"
    for index in state.external_images:
        progress, asked = state.images[index], index in handover.requested_images
        assert progress != ImageProgress.WAITING or asked, f"{where} image {index} was not asked for"
        known = index in handover.image_offers
        assert not known or (asked and progress <= ImageProgress.ENCODING), f"{where} image {index} is offered in vain"
    if (remote_kv := handover.remote_kv) is not None:
        copies = remote_kv.copied_offer is not None
        assert not copies or runs, f"{where}: KV is copied to nowhere"
        assert remote_kv.offer is not None or copies or not runs, f"{where} holds blocks for nothing"
        assert (remote_kv.offer is None) == (state not in kv.values()), f"{where}: offer of its KV"


def check_pulls(requests: RequestTable, pulls: Iterable[PullPlan]) -> None:
    """Checks that pulls in flight write only to blocks of their requests, which no prefix lookup can find yet."""
    copied: dict[RequestId, set[int]] = {}
    for pull in pulls:
        state = requests.states[pull.request_id]
        stop = pull.first_block + len(pull.block_ids)
        if pull.image_index is None:
            remote_kv = remote_kv_of(state)
            waits = remote_kv is not None and remote_kv.copied_offer == pull.offer
            block_ids = requests.kv.tables[pull.request_id].block_ids
            hashes = hashes_of(requests.kv, pull.request_id)
            assert not any(hashes[pull.first_block :]), "a block is found before it is filled"
        else:
            of_request = copied.setdefault(pull.request_id, set())
            waits = pull.image_index in handover_of(state).images_copied - of_request
            of_request.add(pull.image_index)
            block_ids = requests.features.block_ids(state.image_keys[pull.image_index])
        assert waits, "a pull for a request that does not wait for it"
        assert (block_ids[pull.first_block : stop] == pull.block_ids).all(), "a pull writes to blocks of others"
    for state in requests.states.values():
        handover = find_handover(state)
        known = set() if handover is None else handover.images_copied
        assert known == copied.get(state.request.id, set()), f"request {state.request.id}: its images in flight"
        assert len(known) <= MAX_IMAGE_PULLS
