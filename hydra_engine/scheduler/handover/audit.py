"""What must hold between offers, pulls and the states of requests. Raises AssertionError where it does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hydra_engine.core.plans import PullPlan
from hydra_engine.core.roles import Role
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler.request_table import RequestTable


def check_offers(
    requests: RequestTable, images: Mapping[int, tuple[RequestState, int]], kv: Mapping[int, RequestState]
) -> None:
    """`images` and `kv`: what others offer, by the numbers of the offers."""
    for state in requests.states.values():
        if state.ending is None:
            _check_offers_of(requests, state, kv)
    for offer, (state, index) in images.items():
        assert offer in state.image_offers[index] and state.ending is None, f"offer {offer} is for nobody"
    for offer, state in kv.items():
        assert state.arrival is not None and state.arrival.offer == offer, f"offer {offer} is for nobody"
        assert state.ending is None, f"offer {offer} is for a request that has ended"


def _check_offers_of(requests: RequestTable, state: RequestState, kv: Mapping[int, RequestState]) -> None:
    """What it offers to others, and others to it."""
    request_id, runs = state.request.id, state.request.id in requests.kv.tables
    where = f"request {request_id}"
    if state.is_encode_job:
        encoded = {index for index, progress in enumerate(state.images) if progress == ImageProgress.ENCODED}
        assert state.offered_s.keys() == encoded, f"{where}: what is encoded is offered"
        assert not runs and not state.image_offers, f"{where} is an encode job and nothing else"
    assert state.num_offered * requests.kv.block_size < state.num_prefilled + requests.kv.block_size, (
        f"{where} offers too much"
    )
    assert not state.hands_over or (runs and Role.D not in state.stages), f"{where}: who hands over"
    assert not state.num_offered or Role.D not in state.stages, f"{where} offers KV that it needs"
    for index in state.remote_images:
        progress, asked = state.images[index], index in state.images_asked
        assert progress != ImageProgress.WAITING or asked, f"{where} image {index}: nobody was asked for it"
        known = index in state.image_offers
        assert not known or (asked and progress <= ImageProgress.ENCODING), f"{where} image {index} is offered in vain"
    if (arrival := state.arrival) is not None:
        assert arrival.copies is None or runs, f"{where}: KV is copied to nowhere"
        assert arrival.offer is not None or arrival.copies is not None or not runs, f"{where} holds blocks for nothing"
        assert (arrival.offer is None) == (state not in kv.values()), f"{where}: offer of its KV"


def check_pulls(requests: RequestTable, pulls: Iterable[PullPlan]) -> None:
    for pull in pulls:
        _check_pull(requests, pull)


def _check_pull(requests: RequestTable, pull: PullPlan) -> None:
    """It writes to blocks that are its request's, and nobody finds them before."""
    state = requests.states[pull.request_id]
    stop = pull.first_block + len(pull.block_ids)
    if pull.image_index is None:
        assert state.arrival is not None and state.arrival.copies == pull.offer, "a pull that nobody waits for"
        block_ids = requests.kv.tables[pull.request_id].block_ids
        assert not any(requests.kv.hashes(pull.request_id)[pull.first_block :]), "a block is found before it is filled"
    else:
        assert state.pulls_image, "a pull that nobody waits for"
        block_ids = requests.features.block_ids(state.image_keys[pull.image_index])
    assert (block_ids[pull.first_block : stop] == pull.block_ids).all(), "a pull writes to blocks of others"
