"""Fills a vision step: which images are encoded next, and into which blocks of the image cache.

Images are encoded by the urgency of their requests while blocks are free, otherwise by age; the images of one request
by their place in the prompt. Language steps do not delay them, so no amount of prefill postpones an encode: while the
image cache has blocks, an image waits at most for the images before it in that order and for the vision step in flight.
Blocks are freed as older requests are prefilled, or as the features of encode jobs are fetched. The rules of age are in
`policy.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import StepId
from hydra_engine.core.plans import EncodeItem, VisionPlan
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.budget import Budgets
from hydra_engine.scheduler.requests import RequestTable


class VisionPlanner:
    """The planner of vision steps.

    Blocks are granted in order, all of an image at once, and to a later image only if enough stay free for every
    earlier one (an encode job beyond the jobs' quota delays only other jobs). By age, with `policy.features_to_evict`,
    that leaves no cycle of waiting, even if the cache holds only one image. The order by urgency evicts nothing; it is
    not used once the images of the oldest request have waited for `encode_patience_s`.
    """

    def __init__(self, requests: RequestTable, budgets: Budgets, config: SchedulerConfig) -> None:
        self._requests = requests
        self._budgets = budgets
        self._patience_s = config.encode_patience_s

    def plan(self, step_id: StepId, now: float) -> VisionPlan | None:
        """The next step, with blocks allocated for its features; None if nothing can be encoded. Its first image may
        exceed the budget."""
        unencoded = self._requests.unencoded
        self._requests.connector.before_vision()
        items: list[EncodeItem] = []
        if unencoded.is_ranked and not self._is_impatient(unencoded.oldest(), now):
            items = self._fill(unencoded.by_urgency(), now, may_evict=False)
        if not items:
            items = self._fill(unencoded.by_age(), now, may_evict=True)
        if not items:
            return None
        for request_id in {item.request_id for item in items}:
            self._requests.states[request_id].plans_in_flight += 1
        return VisionPlan(step_id, tuple(items))

    def _fill(self, states: Iterable[RequestState], now: float, *, may_evict: bool) -> list[EncodeItem]:
        """Chooses the images of a step and allocates their blocks, until an image finds too few free blocks or the
        budget is used up. An image larger than the rest of the budget is skipped (at most `policy.MAX_SKIPPED` are):
        blocks for it stay free, and smaller images behind it fill the step, unless it has waited for
        `encode_patience_s`. `may_evict`: features of later images may be evicted, if no blocks have to stay free."""
        budget, connector = self._budgets.max_patches(), self._requests.connector
        items: list[EncodeItem] = []
        used = reserved = num_skipped = 0
        jobs_wait = False  # True: the quota of encode jobs is used up, which delays only further jobs
        for state, index in _images(states):
            if state.images[index] != ImageProgress.WAITING:
                continue  # its picture is in the step already, for another request
            if state.is_encode_job and jobs_wait:
                continue
            image = state.request.images[index]
            num_blocks = self._requests.features.blocks_for(image.num_tokens)
            if items and used + image.num_patches > budget:
                num_skipped += 1
                reserved += num_blocks
                if self._is_impatient(state, now) or used >= budget or num_skipped >= policy.MAX_SKIPPED:
                    break
                continue
            if state.is_encode_job and not connector.may_encode(state, index, num_blocks, now, may_evict=may_evict):
                jobs_wait = True
                continue
            block_ids = self._requests.images.allocate(state, index, reserved, now, may_evict=may_evict)
            if block_ids is None:
                break
            item = EncodeItem(state.request.id, index, image.digest, image.num_patches, image.num_tokens, block_ids)
            items.append(item)
            used += image.num_patches
        return items

    def _is_impatient(self, state: RequestState | None, now: float) -> bool:
        """True if there is a request and its images have waited for `encode_patience_s`."""
        return state is not None and now - state.image_wait_since_s >= self._patience_s


def _images(states: Iterable[RequestState]) -> Iterator[tuple[RequestState, int]]:
    """Yields (request, image index) of the images that wait for an encode here, request by request. Adjacent encode
    jobs of one arrival index are parts of one request: their images come in the order of its prompt."""
    for arrival, group in groupby(states, key=lambda state: state.order[0] if state.is_encode_job else None):
        pairs = ((state, index) for state in group for index in range(len(state.images)))
        for state, index in pairs if arrival is None else sorted(pairs, key=lambda pair: policy.image_order(*pair)):
            if state.images[index] == ImageProgress.WAITING and index not in state.external_images:
                yield state, index
