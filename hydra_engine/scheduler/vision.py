"""Fills a vision step: which images are encoded next, and where their features go.

Images go by the urgency of their requests while blocks are free for all of them that go first, otherwise by arrival;
those of one request by their place in the prompt. Language steps take no part in it, so no amount of prefill postpones
an encode: an image waits at most for the images before it in that order and for the running vision step, as long as the
image cache has blocks; blocks come back as older requests are prefilled. Rules of age are in `policy.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import StepId
from hydra_engine.core.plans import EncodeItem, VisionPlan
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.book import RequestBook
from hydra_engine.scheduler.budget import Budgets


class VisionPlanner:
    """Blocks are granted in order, all of an image at once, and never to a later image while an earlier one lacks
    them; by arrival that leaves no cycle of waiting with `policy.features_to_take`, even if the cache has room for one
    image. Urgency takes nothing from anybody, and no more time than the patience from the oldest image that waits."""

    def __init__(self, book: RequestBook, budgets: Budgets, config: SchedulerConfig) -> None:
        self._book = book
        self._budgets = budgets
        self._patience_s = config.encode_patience_ms / 1000

    def plan(self, step_id: StepId, now: float, *, among: int | None = None) -> VisionPlan | None:
        """The next step, or None if nothing can be encoded. `among`: only images of so many requests, the first ones in
        order, are looked at. Its first image may exceed the budget."""
        unencoded = self._book.unencoded
        items: list[EncodeItem] = []
        if unencoded.is_ranked and not self._is_impatient(unencoded.oldest(), now):
            items = self._fill(unencoded.by_urgency(), now, among, may_take=False)
        if not items:
            items = self._fill(unencoded.by_age(), now, among, may_take=True)
        if not items:
            return None
        for request_id in {item.request_id for item in items}:
            self._book.states[request_id].plans_in_flight += 1
        return VisionPlan(step_id, tuple(items))

    def _fill(
        self, states: Iterable[RequestState], now: float, among: int | None, *, may_take: bool
    ) -> list[EncodeItem]:
        """Images for a step. One too large for what is left of the budget is skipped, its blocks are put aside and
        smaller ones fill the step; behind one that has waited longer than the patience nothing is filled in."""
        budget = self._budgets.vision()
        items: list[EncodeItem] = []
        used = reserved = num_skipped = 0
        for state, index in _images(islice(states, among)):
            if state.images[index] != ImageProgress.WAITING:
                continue  # the same picture is in the step already
            image = state.request.images[index]
            num_blocks = self._book.features.blocks_for(image.num_tokens)
            if items and used + image.num_patches > budget:
                num_skipped += 1
                reserved += num_blocks
                if self._is_impatient(state, now) or used >= budget or num_skipped >= policy.MAX_PASSED:
                    break
                continue
            if not self._make_room(state, index, num_blocks, reserved, now, may_take=may_take):
                break
            items.append(self._item(state, index))
            used += image.num_patches
        return items

    def _is_impatient(self, state: RequestState | None, now: float) -> bool:
        return state is not None and now - state.image_wait_since_s >= self._patience_s

    def _make_room(
        self, state: RequestState, index: int, num_blocks: int, reserved: int, now: float, *, may_take: bool
    ) -> bool:
        """Whether the image can have its blocks, after taking those of later images if it must and may and nothing is
        put aside for an earlier one."""
        features = self._book.features
        if features.num_free >= reserved + num_blocks:
            return True
        if reserved or not may_take:
            return False
        missing = num_blocks - features.num_free
        for key in policy.features_to_take(state, index, self._book.encoded_features(), missing):
            self._book.take_features(key, now)
        return features.num_free >= num_blocks

    def _item(self, state: RequestState, index: int) -> EncodeItem:
        request, image = state.request, state.request.images[index]
        self._book.reserve_features(state, index)
        return EncodeItem(
            request_id=request.id,
            image_index=index,
            digest=image.digest,
            num_patches=image.num_patches,
            num_tokens=image.num_tokens,
            block_ids=self._book.features.block_ids(state.image_keys[index]),
        )


def _images(states: Iterable[RequestState]) -> Iterator[tuple[RequestState, int]]:
    """Images that wait for an encode, request by request."""
    for state in states:
        for index, progress in enumerate(state.images):
            if progress == ImageProgress.WAITING:
                yield state, index
