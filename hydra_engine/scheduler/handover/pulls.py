"""What is fetched from other instances: which image features and which KV, into which blocks, and in which order.

A copy gets its blocks before it begins, by the same rules as an encode or a prefill: images by urgency while there is
room for all that go before, otherwise by age, and KV all at once for what has been admitted (`remote_kv.py`). At most
one copy is in flight for a request. What was offered and is not wanted (any more) is named to `RemoteEvents`, to be
let go. Does not know who offers it, nor how bytes are moved.
"""

from __future__ import annotations

from collections.abc import Iterable

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import FeatureKey, RequestId, StepId
from hydra_engine.core.outputs import Departure
from hydra_engine.core.plans import KvEnd, PullPlan
from hydra_engine.core.state import Ending, ImageProgress, RequestState
from hydra_engine.scheduler.handover.events import UnneededEvent
from hydra_engine.scheduler.handover.remote_events import RemoteEvents
from hydra_engine.scheduler.handover.remote_features import RemoteFeatures
from hydra_engine.scheduler.handover.remote_kv import RemoteKvAdmission
from hydra_engine.scheduler.request_table import RequestTable


class Pulls:
    """Blocks that a copy in flight writes to belong to it: neither they nor their request give way before it ends.

    By age that leaves no cycle of waiting between instances. Features are wanted in the same order (age, then place in
    the prompt) where they are encoded and where they are needed, and on both sides an earlier image takes the room of
    later ones. KV is granted whole before any of it is copied, see `remote_kv.py`.
    """

    def __init__(
        self,
        requests: RequestTable,
        events: RemoteEvents,
        images: RemoteFeatures,
        admission: RemoteKvAdmission,
        config: SchedulerConfig,
    ) -> None:
        self.in_flight: dict[StepId, PullPlan] = {}
        self.kv_offers: dict[int, RequestState] = {}  # those that are known, by their number
        self._requests = requests
        self._events = events
        self._images = images
        self._admission = admission
        self._patience_s = config.encode_patience_s
        self._next_step = 0

    # ---- what is offered

    def kv_offered(self, request_id: RequestId, offer: int, num_blocks: int, end: KvEnd | None) -> None:
        """An offer, or more of it; a later offer takes the place of one before."""
        state = self._requests.states.get(request_id)
        arrival = None if state is None else state.arrival
        if state is None or arrival is None or state.ending is not None:
            if arrival is None or arrival.copies != offer:  # else it is kept until the copy has ended
                self._events.tell(UnneededEvent(offer))
            return
        if arrival.offer != offer:
            self._drop_offer(state)
            self.kv_offers[offer] = state
        arrival.offer, arrival.num_offered, arrival.end = offer, num_blocks, end
        self._requests.requeue(state)

    def kv_offer_gone(self, offer: int) -> None:
        """Unknown offers are ignored."""
        state = self.kv_offers.get(offer)
        if state is not None:
            self._drop_offer(state)

    def _drop_offer(self, state: RequestState) -> None:
        """What was pulled of it is worth nothing, and is let go as soon as no copy is in flight."""
        arrival = state.arrival
        assert arrival is not None, "an offer is known for a request that pulls nothing"
        if arrival.offer is not None:
            del self.kv_offers[arrival.offer]
        arrival.offer, arrival.num_offered, arrival.end = None, 0, None
        if arrival.copies is None:
            self._put_back(state)

    # ---- what is fetched next

    def plan(self, now: float) -> list[PullPlan]:
        """Copies to begin now; they are in flight from here on."""
        if not self.kv_offers and not self._images.offers:
            return []
        plans: list[PullPlan] = []
        if self.kv_offers:
            self._admission.admit(now)
            self._plan_kv(plans)
        if self._images.offers:
            self._plan_images(plans, now)
        for plan in plans:
            self.in_flight[plan.step_id] = plan
            self._requests.states[plan.request_id].plans_in_flight += 1
        return plans

    def _plan_kv(self, plans: list[PullPlan]) -> None:
        requests = self._requests
        for state in list(requests.prefilling):
            arrival = state.arrival
            if arrival is None or arrival.offer is None or arrival.copies is not None:
                continue
            table = requests.kv.tables[state.request.id]
            if arrival.end is not None and requests.kv.blocks_for(arrival.end.num_tokens) > table.num_blocks:
                self._put_back(state)  # it has become more than it was admitted with
                continue
            stop = min(arrival.num_offered, table.num_blocks)
            if stop <= arrival.num_copied:
                continue
            arrival.copies = arrival.offer
            plans.append(
                PullPlan(
                    step_id=self._step_id(),
                    offer=arrival.offer,
                    request_id=state.request.id,
                    image_index=None,
                    first_block=arrival.num_copied,
                    block_ids=table.block_ids[arrival.num_copied : stop].copy(),
                    last=arrival.end is not None and stop == arrival.num_offered,
                )
            )

    def _plan_images(self, plans: list[PullPlan], now: float) -> None:
        awaited, before = self._requests.awaited, len(plans)
        oldest = awaited.oldest()
        if awaited.is_ranked and oldest is not None and now - oldest.image_wait_since_s < self._patience_s:
            self._fill(awaited.by_urgency(), plans, now, may_take=False)
        if len(plans) == before:
            self._fill(awaited.by_age(), plans, now, may_take=True)

    def _fill(self, states: Iterable[RequestState], plans: list[PullPlan], now: float, *, may_take: bool) -> None:
        """Room is put aside for every image that goes before and cannot be copied yet."""
        features = self._requests.features
        aside: dict[FeatureKey, int] = {}
        for state in states:
            for index in sorted(state.remote_images):
                if state.images[index] != ImageProgress.WAITING:
                    continue
                key = state.image_keys[index]
                num_blocks = features.blocks_for(state.request.images[index].num_tokens)
                reserved = sum(aside.values()) - aside.get(key, 0)
                offered = index in state.image_offers and not state.pulls_image
                if offered and self._requests.images.make_room(
                    state, index, num_blocks, reserved, now, may_take=may_take
                ):
                    plans.append(self._pull_image(state, index, now))
                    aside.pop(key, None)
                    continue
                aside[key] = num_blocks
                if sum(aside.values()) > features.num_free:
                    return

    def _pull_image(self, state: RequestState, index: int, now: float) -> PullPlan:
        requests = self._requests
        offer = self._images.claim(state, index)
        state.pulls_image = True
        requests.images.reserve(state, index, now)
        num_blocks = requests.features.blocks_for(state.request.images[index].num_tokens)
        block_ids = requests.features.block_ids(state.image_keys[index])[:num_blocks].copy()
        return PullPlan(self._step_id(), offer, state.request.id, index, 0, block_ids, last=True)

    def _step_id(self) -> StepId:
        self._next_step += 1
        return StepId(self._next_step)

    # ---- what has been fetched

    def end(self, step_id: StepId, now: float, *, valid: bool, started_s: float, ended_s: float) -> RequestState:
        """A copy has come back. Returns its request, which may have ended before or now."""
        plan = self.in_flight.pop(step_id)
        state = self._requests.states[plan.request_id]
        state.plans_in_flight -= 1
        if plan.image_index is None:
            num_tokens = len(plan.block_ids) * self._requests.kv.block_size
            self._requests.timelines[plan.request_id].pulled("pull_kv", started_s, ended_s, num_tokens)
            self._end_kv(state, plan, now, valid=valid)
        else:
            state.pulls_image = False
            self._end_features(state, plan.image_index, started_s, ended_s, valid=valid)
        return state

    def _end_features(self, state: RequestState, index: int, started_s: float, ended_s: float, *, valid: bool) -> None:
        images, num_tokens = self._requests.images, state.request.images[index].num_tokens
        self._requests.timelines[state.request.id].pulled("pull_features", started_s, ended_s, num_tokens)
        if valid:
            state.images_asked.discard(index)
        users = images.finish(state.image_keys[index], ended_s, failed=not valid)
        images.settle_others(users, (), ended_s)

    def _end_kv(self, state: RequestState, plan: PullPlan, now: float, *, valid: bool) -> None:
        requests, arrival = self._requests, state.arrival
        assert arrival is not None and arrival.copies == plan.offer, "a copy ends that never began"
        arrival.copies = None
        is_current = arrival.offer == plan.offer
        if state.ending is not None:
            if is_current and valid and not plan.last:  # it was kept for this copy
                self._events.tell(UnneededEvent(plan.offer))
        elif not is_current:
            self._put_back(state)
        elif not valid:
            self._drop_offer(state)
        elif plan.last:
            assert arrival.end is not None, "the last copy begins when the end is known"
            del self.kv_offers[plan.offer]
            self._arrived(state, arrival.end, now)
        else:
            arrival.num_copied = plan.first_block + len(plan.block_ids)
            if arrival.preempt_after_copy:
                requests.preempt(state, now)

    def _arrived(self, state: RequestState, end: KvEnd, now: float) -> None:
        """All KV of the request is here; it goes on as a prefill of one token. What does not fit the tokens that are
        known of it is of no use, and the request has departed."""
        requests = self._requests
        state.arrival = None
        if end.earlier_token_ids is not None:
            state.generated[:] = end.earlier_token_ids
            state.borrowed = True
        state.generated.append(end.token_id)
        if end.num_tokens != state.num_tokens - 1:
            requests.end(state, Ending(Departure.RETURNED))
            return
        state.num_prefilled = end.num_tokens
        timeline = requests.timelines[state.request.id]
        timeline.first_token_s, timeline.last_token_s = end.first_token_s, end.token_s
        timeline.last_s, timeline.late_gaps = now, end.late_gaps
        requests.observer.on_away(state.request.id, "transfer", now, until_s=now)
        requests.images.consume(state, now)
        requests.prefixes.publish_later(state)
        requests.requeue(state)

    def _put_back(self, state: RequestState) -> None:
        """What was pulled of a request's KV is worth nothing; it waits as if it had never started. No copy is in
        flight."""
        assert state.arrival is not None and state.arrival.copies is None, "blocks are freed while they are written"
        self._requests.free_blocks(state)
        self._requests.requeue(state)

    # ---- who gives way, and who ends

    def may_preempt(self, state: RequestState) -> bool:
        """Not while KV is being copied into its blocks; it gives way as soon as that has ended."""
        arrival = state.arrival
        if arrival is None or arrival.copies is None:
            return True
        arrival.preempt_after_copy = True
        return False

    def end_offer(self, state: RequestState) -> None:
        """The request is about to end. KV that is being copied is kept for the copy."""
        arrival = state.arrival
        if arrival is not None and arrival.offer is not None:
            del self.kv_offers[arrival.offer]
            if arrival.offer != arrival.copies:
                self._events.tell(UnneededEvent(arrival.offer))
