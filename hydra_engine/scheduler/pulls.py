"""What is fetched from other instances: which image features and which KV, into which blocks, and in which order.

A copy gets its blocks before it begins, by the same rules as an encode or a prefill: images by urgency while there is
room for all that go before, otherwise by age, and KV all at once for what has been admitted (`arrivals.py`). At most
one copy is in flight for a request. What was offered and is not wanted (any more) is named to `outside`, so that it is
let go. Does not know who offers it, nor how bytes are moved.
"""

from __future__ import annotations

from collections.abc import Iterable

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import FeatureKey, RequestId, StepId
from hydra_engine.core.plans import KvEnd, PullPlan
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.arrivals import ArrivalStarter
from hydra_engine.scheduler.book import RequestBook
from hydra_engine.scheduler.events import UnneededEvent
from hydra_engine.scheduler.progress import Progress


class Pulls:
    """Blocks that a copy in flight writes to belong to it: neither they nor their request give way before it ends.

    By age that leaves no cycle of waiting between instances. Features are wanted in the same order (age, then place in
    the prompt) where they are encoded and where they are needed, and on both sides an earlier image takes the room of
    later ones. KV is granted whole before any of it is copied, see `arrivals.py`.
    """

    def __init__(
        self, book: RequestBook, arrivals: ArrivalStarter, progress: Progress, config: SchedulerConfig
    ) -> None:
        self._book = book
        self._arrivals = arrivals
        self._progress = progress
        self._patience_s = config.encode_patience_ms / 1000
        self.in_flight: dict[StepId, PullPlan] = {}

    # ---- what is offered

    def image_offered(self, request_id: RequestId, image_index: int, offer: int) -> None:
        state = self._book.states.get(request_id)
        if state is None or state.ending is not None or not self._book.images.offer(state, image_index, offer):
            self._book.outside.tell(UnneededEvent(offer))

    def kv_offered(self, request_id: RequestId, offer: int, num_blocks: int, end: KvEnd | None) -> None:
        """An offer, or more of it; a later offer takes the place of one before."""
        state = self._book.states.get(request_id)
        arrival = None if state is None else state.arrival
        if state is None or arrival is None or state.ending is not None:
            if arrival is None or arrival.copies != offer:  # else it is kept until the copy has ended
                self._book.outside.tell(UnneededEvent(offer))
            return
        if arrival.offer != offer:
            self._drop_offer(state)
            self._book.kv_offers[offer] = state
        arrival.offer, arrival.num_offered, arrival.end = offer, num_blocks, end
        self._book.place(state)

    def kv_offer_gone(self, offer: int) -> None:
        """Unknown offers are ignored."""
        state = self._book.kv_offers.get(offer)
        if state is not None:
            self._drop_offer(state)

    def _drop_offer(self, state: RequestState) -> None:
        """What was pulled of it is worth nothing, and is let go as soon as no copy is in flight."""
        arrival = state.arrival
        assert arrival is not None, "an offer is known for a request that pulls nothing"
        if arrival.offer is not None:
            del self._book.kv_offers[arrival.offer]
        arrival.offer, arrival.num_offered, arrival.end = None, 0, None
        if arrival.copies is None:
            self._book.put_back(state)

    # ---- what is fetched next

    def plan(self, next_step: int, now: float) -> list[PullPlan]:
        """Copies to begin now, numbered from `next_step` on; they are in flight from here on."""
        if not self._book.kv_offers and not self._book.images.offers:
            return []
        plans: list[PullPlan] = []
        if self._book.kv_offers:
            self._arrivals.start(now)
            self._plan_kv(plans, next_step)
        if self._book.images.offers:
            self._plan_images(plans, next_step, now)
        for plan in plans:
            self.in_flight[plan.step_id] = plan
            self._book.states[plan.request_id].plans_in_flight += 1
        return plans

    def _plan_kv(self, plans: list[PullPlan], next_step: int) -> None:
        book = self._book
        for state in list(book.prefilling):
            arrival = state.arrival
            if arrival is None or arrival.offer is None or arrival.copies is not None:
                continue
            table = book.kv.tables[state.request.id]
            if arrival.end is not None and book.kv.blocks_for(arrival.end.num_tokens) > table.num_blocks:
                book.put_back(state)  # it has become more than it was admitted with
                continue
            stop = min(arrival.num_offered, table.num_blocks)
            if stop <= arrival.num_copied:
                continue
            arrival.copies = arrival.offer
            plans.append(
                PullPlan(
                    step_id=StepId(next_step + len(plans)),
                    offer=arrival.offer,
                    request_id=state.request.id,
                    image_index=None,
                    first_block=arrival.num_copied,
                    block_ids=table.block_ids[arrival.num_copied : stop].copy(),
                    last=arrival.end is not None and stop == arrival.num_offered,
                )
            )

    def _plan_images(self, plans: list[PullPlan], next_step: int, now: float) -> None:
        awaited, before = self._book.awaited, len(plans)
        oldest = awaited.oldest()
        if awaited.is_ranked and oldest is not None and now - oldest.image_wait_since_s < self._patience_s:
            self._fill(awaited.by_urgency(), plans, next_step, now, may_take=False)
        if len(plans) == before:
            self._fill(awaited.by_age(), plans, next_step, now, may_take=True)

    def _fill(
        self, states: Iterable[RequestState], plans: list[PullPlan], next_step: int, now: float, *, may_take: bool
    ) -> None:
        """Room is put aside for every image that goes before and cannot be copied yet."""
        features = self._book.features
        aside: dict[FeatureKey, int] = {}
        for state in states:
            for index in sorted(state.remote_images):
                if state.images[index] != ImageProgress.WAITING:
                    continue
                key = state.image_keys[index]
                num_blocks = features.blocks_for(state.request.images[index].num_tokens)
                reserved = sum(aside.values()) - aside.get(key, 0)
                offered = index in state.image_offers and not state.pulls_image
                if offered and self._make_room(state, index, num_blocks, reserved, now, may_take=may_take):
                    plans.append(self._pull_image(state, index, StepId(next_step + len(plans)), now))
                    aside.pop(key, None)
                    continue
                aside[key] = num_blocks
                if sum(aside.values()) > features.num_free:
                    return

    def _make_room(
        self, state: RequestState, index: int, num_blocks: int, reserved: int, now: float, *, may_take: bool
    ) -> bool:
        """Whether the image can have its blocks, after taking those of later images if it must and may and nothing is
        put aside for an earlier one."""
        features, images = self._book.features, self._book.images
        if features.num_free >= reserved + num_blocks:
            return True
        if reserved or not may_take:
            return False
        missing = num_blocks - features.num_free
        for key in policy.features_to_take(state, index, images.encoded(), missing):
            images.take(key, now)
        return features.num_free >= num_blocks

    def _pull_image(self, state: RequestState, index: int, step_id: StepId, now: float) -> PullPlan:
        book = self._book
        offer = book.images.claim(state, index)
        state.pulls_image = True
        book.images.reserve(state, index, now)
        num_blocks = book.features.blocks_for(state.request.images[index].num_tokens)
        block_ids = book.features.block_ids(state.image_keys[index])[:num_blocks].copy()
        return PullPlan(step_id, offer, state.request.id, index, 0, block_ids, last=True)

    # ---- what has been fetched

    def end(self, step_id: StepId, now: float, *, valid: bool, started_s: float, ended_s: float) -> RequestState:
        """A copy has come back. Returns its request, which may have ended before or now."""
        plan = self.in_flight.pop(step_id)
        state = self._book.states[plan.request_id]
        state.plans_in_flight -= 1
        if plan.image_index is None:
            num_tokens = len(plan.block_ids) * self._book.kv.block_size
            self._book.timelines[plan.request_id].pulled("pull_kv", started_s, ended_s, num_tokens)
            self._end_kv(state, plan, now, valid=valid)
        else:
            state.pulls_image = False
            self._progress.pulled(state, plan.image_index, started_s, ended_s, valid=valid)
        return state

    def _end_kv(self, state: RequestState, plan: PullPlan, now: float, *, valid: bool) -> None:
        book, arrival = self._book, state.arrival
        assert arrival is not None and arrival.copies == plan.offer, "a copy ends that never began"
        arrival.copies = None
        is_current = arrival.offer == plan.offer
        if state.ending is not None:
            if is_current and valid and not plan.last:  # it was kept for this copy
                book.outside.tell(UnneededEvent(plan.offer))
        elif not is_current:
            book.put_back(state)
        elif not valid:
            self._drop_offer(state)
        elif plan.last:
            assert arrival.end is not None, "the last copy begins when the end is known"
            del book.kv_offers[plan.offer]
            book.arrived(state, arrival.end, now)
        else:
            arrival.num_copied = plan.first_block + len(plan.block_ids)
            if arrival.gives_way:
                book.preempt(state, now)
