"""What is fetched from other instances: which image features and which KV, into which blocks, and in which order.

A copy gets its blocks before it begins, by the same rules as an encode or a prefill: images by urgency while there is
room for all that go before, otherwise by age, and KV all at once for what has been admitted (`remote_kv.py`). Of a
request one copy of KV is in flight, or several of its images, which may end in any order. What was offered and is not
wanted (any more) is named to `RemoteEvents`, to be let go. Does not know who offers it, nor how bytes are moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hydra_engine.config import ClusterConfig, SchedulerConfig
from hydra_engine.core.ids import FeatureKey, RequestId, StepId
from hydra_engine.core.outputs import Departure
from hydra_engine.core.plans import KvEnd, PullPlan
from hydra_engine.core.state import Ending, ImageProgress, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.handover.events import RemoteEvents, UnneededEvent, handover_of
from hydra_engine.scheduler.handover.remote_kv import RemoteKvAdmission
from hydra_engine.scheduler.policy import is_stalled
from hydra_engine.scheduler.request_table import RequestTable


class RemoteImages:
    """Remote images that others are asked for and offer. Every one that WAITS has been requested (`requested_images`)
    and is or will be offered, by one instance or several. An offer is known (`image_offers`) only while the image WAITS
    or is ENCODING; one whose copy is in flight is not among them."""

    def __init__(self, requests: RequestTable, events: RemoteEvents) -> None:
        self.offers: dict[int, tuple[RequestState, int]] = {}  # those that are known and not being copied
        self._requests = requests
        self._events = events

    def request(self, state: RequestState, index: int) -> None:
        """Asks for an image that waits; one that is here is needed no more."""
        progress, handover = state.images[index], handover_of(state)
        if progress == ImageProgress.WAITING and index not in handover.requested_images:
            handover.requested_images.add(index)
            self._events.need(state.request.id, index)
        elif progress > ImageProgress.ENCODING and index in handover.image_offers:
            handover.requested_images.discard(index)
            self._refuse(state, index)

    def offered(self, request_id: RequestId, index: int, offer: int) -> None:
        """Features of a remote image can be pulled. `offer` is a number of the caller's, as in the plan of the pull.
        Several instances may offer an image, and all but one may be about to take that back, so none is refused before
        the features are here."""
        state = self._requests.states.get(request_id)
        handover = None if state is None else state.handover
        if state is None or handover is None or state.ending is not None:
            self._events.add(UnneededEvent(offer))
        elif index not in state.remote_images or state.images[index] > ImageProgress.ENCODING:
            handover.requested_images.discard(index)
            self._events.add(UnneededEvent(offer))
        else:
            handover.requested_images.add(index)
            handover.image_offers.setdefault(index, []).append(offer)
            self.offers[offer] = state, index

    def claim(self, state: RequestState, index: int) -> int:
        """The latest offer of an image; it is copied now, or refused, and known no longer."""
        offer = handover_of(state).image_offers[index][-1]
        self.offer_gone(offer)
        return offer

    def offer_gone(self, offer: int) -> None:
        """Features cannot be pulled any more; a copy in flight comes back all the same, as not valid. Unknown offers
        are ignored."""
        if offer in self.offers:
            state, index = self.offers.pop(offer)
            image_offers = handover_of(state).image_offers
            image_offers[index].remove(offer)
            if not image_offers[index]:
                del image_offers[index]

    def _refuse(self, state: RequestState, index: int) -> None:
        while index in handover_of(state).image_offers:
            self._events.add(UnneededEvent(self.claim(state, index)))

    def forget(self, state: RequestState) -> None:
        """The request is about to end: its images are wanted no more."""
        for index in list(handover_of(state).image_offers):
            self._refuse(state, index)
        self._events.forget_needs(state.request.id)


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
        admission: RemoteKvAdmission,
        config: SchedulerConfig,
        cluster: ClusterConfig,
    ) -> None:
        self.images = RemoteImages(requests, events)
        self.in_flight: dict[StepId, PullPlan] = {}
        self.kv_offers: dict[int, RequestState] = {}  # those that are known, by their number
        self._requests = requests
        self._events = events
        self._admission = admission
        self._patience_s = config.encode_patience_s
        self._prefetches = cluster.prefetch_features
        self._next_step = 0

    # ---- what is offered

    def kv_offered(self, request_id: RequestId, offer: int, num_blocks: int, end: KvEnd | None) -> None:
        """`num_blocks` of a request's KV can be pulled, in all: told again whenever there are more, the last time with
        `end`. A later offer takes the place of one before."""
        state = self._requests.states.get(request_id)
        remote_kv = None if state is None else state.remote_kv
        if state is None or remote_kv is None or state.ending is not None:
            if remote_kv is None or remote_kv.copied_offer != offer:  # else it is kept until the copy has ended
                self._events.add(UnneededEvent(offer))
            return
        if remote_kv.offer != offer:
            self._drop_offer(state)
            self.kv_offers[offer] = state
        remote_kv.offer, remote_kv.num_offered, remote_kv.end = offer, num_blocks, end
        self._requests.requeue(state)

    def kv_offer_gone(self, offer: int) -> None:
        """Unknown offers are ignored."""
        state = self.kv_offers.get(offer)
        if state is not None:
            self._drop_offer(state)

    def _drop_offer(self, state: RequestState) -> None:
        """What was pulled of it is worth nothing, and is let go as soon as no copy is in flight."""
        remote_kv = state.remote_kv
        assert remote_kv is not None, "an offer is known for a request that pulls nothing"
        if remote_kv.offer is not None:
            del self.kv_offers[remote_kv.offer]
        remote_kv.offer, remote_kv.num_offered, remote_kv.end = None, 0, None
        if remote_kv.copied_offer is None:
            self._restart(state)

    # ---- what is fetched next

    def plan(self, now: float) -> list[PullPlan]:
        """Copies to begin now. They write to blocks of ours until `end`."""
        if not self.kv_offers and not self.images.offers:
            return []
        plans: list[PullPlan] = []
        if self.kv_offers:
            self._admission.admit(now)
            self._plan_kv(plans)
        if self.images.offers:
            self._plan_images(plans, now)
        for plan in plans:
            self.in_flight[plan.step_id] = plan
            self._requests.states[plan.request_id].plans_in_flight += 1
        return plans

    def _plan_kv(self, plans: list[PullPlan]) -> None:
        requests = self._requests
        for state in list(requests.prefilling):
            remote_kv = state.remote_kv
            if remote_kv is None or remote_kv.offer is None or remote_kv.copied_offer is not None:
                continue
            table = requests.kv.tables[state.request.id]
            if remote_kv.end is not None and requests.kv.blocks_for(remote_kv.end.num_tokens) > table.num_blocks:
                self._restart(state)  # it has become more than it was admitted with
                continue
            stop = min(remote_kv.num_offered, table.num_blocks)
            if stop <= remote_kv.num_copied:
                continue
            remote_kv.copied_offer = remote_kv.offer
            plans.append(
                PullPlan(
                    step_id=self._step_id(),
                    offer=remote_kv.offer,
                    request_id=state.request.id,
                    image_index=None,
                    first_block=remote_kv.num_copied,
                    block_ids=table.block_ids[remote_kv.num_copied : stop].copy(),
                    last=remote_kv.end is not None and stop == remote_kv.num_offered,
                )
            )

    def _plan_images(self, plans: list[PullPlan], now: float) -> None:
        unfetched, before = self._requests.unfetched, len(plans)
        oldest = unfetched.oldest()
        if unfetched.is_ranked and oldest is not None and now - oldest.image_wait_since_s < self._patience_s:
            self._fill(self._of_turn(unfetched.by_urgency()), plans, now, may_evict=False)
        if len(plans) == before:
            self._fill(self._of_turn(unfetched.by_age()), plans, now, may_evict=True)

    def _of_turn(self, states: Iterable[RequestState]) -> Iterator[RequestState]:
        """Those whose features may be fetched. Without prefetching it is the turn of what has started and of what
        starts next (the oldest request that waits, on which progress rests, and the most urgent one), but only once
        no older prefill has anything to compute."""
        if self._prefetches:
            yield from states
            return
        requests = self._requests
        computing = next((s.order for s in requests.prefilling if s.num_scheduled or not is_stalled(s)), None)
        queues = requests.waiting, requests.encoding
        oldest = min((s.order for queue in queues if (s := queue.oldest()) is not None), default=None)
        first = min((s.urgency for queue in queues if (s := queue.most_urgent()) is not None), default=None)
        for state in states:
            started = state.request.id in requests.kv.tables
            is_next = started or state.order == oldest or state.urgency == first
            if is_next and (computing is None or computing >= state.order):
                yield state

    def _fill(self, states: Iterable[RequestState], plans: list[PullPlan], now: float, *, may_evict: bool) -> None:
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
                handover, images = handover_of(state), self._requests.images
                begins = index in handover.image_offers and len(handover.images_copied) < policy.MAX_IMAGE_PULLS
                if begins and images.make_room(state, index, num_blocks, reserved, now, may_evict=may_evict):
                    plans.append(self._pull_image(state, index, now))
                    aside.pop(key, None)
                    continue
                aside[key] = num_blocks
                if sum(aside.values()) > features.num_free:
                    return

    def _pull_image(self, state: RequestState, index: int, now: float) -> PullPlan:
        requests = self._requests
        offer = self.images.claim(state, index)
        handover_of(state).images_copied.add(index)
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
            handover_of(state).images_copied.remove(plan.image_index)
            self._end_features(state, plan.image_index, started_s, ended_s, valid=valid)
        return state

    def _end_features(self, state: RequestState, index: int, started_s: float, ended_s: float, *, valid: bool) -> None:
        images, num_tokens = self._requests.images, state.request.images[index].num_tokens
        self._requests.timelines[state.request.id].pulled("pull_features", started_s, ended_s, num_tokens)
        if valid:
            handover_of(state).requested_images.discard(index)
        users = images.finish(state.image_keys[index], ended_s, failed=not valid)
        images.settle_others(users, (), ended_s)

    def _end_kv(self, state: RequestState, plan: PullPlan, now: float, *, valid: bool) -> None:
        requests, remote_kv = self._requests, state.remote_kv
        assert remote_kv is not None and remote_kv.copied_offer == plan.offer, "a copy ends that never began"
        remote_kv.copied_offer = None
        is_current = remote_kv.offer == plan.offer
        if state.ending is not None:
            if is_current and valid and not plan.last:  # it was kept for this copy
                self._events.add(UnneededEvent(plan.offer))
        elif not is_current:
            self._restart(state)
        elif not valid:
            self._drop_offer(state)
        elif plan.last:
            assert remote_kv.end is not None, "the last copy begins when the end is known"
            del self.kv_offers[plan.offer]
            self._arrived(state, remote_kv.end, now)
        else:
            remote_kv.num_copied = plan.first_block + len(plan.block_ids)
            if remote_kv.preempt_after_copy:
                requests.preempt(state, now)

    def _arrived(self, state: RequestState, end: KvEnd, now: float) -> None:
        """All KV of the request is here; it goes on as a prefill of one token. What does not fit the tokens that are
        known of it is of no use, and the request has departed."""
        requests = self._requests
        handover = handover_of(state)
        handover.remote_kv = None
        if end.earlier_token_ids is not None:
            state.generated[:] = end.earlier_token_ids
            handover.borrowed = True
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

    def _restart(self, state: RequestState) -> None:
        """What was pulled of a request's KV is worth nothing; it waits as if it had never started. No copy is in
        flight."""
        assert state.remote_kv is not None and state.remote_kv.copied_offer is None, (
            "blocks are freed while they are written"
        )
        self._requests.free_blocks(state)

    def forget(self, state: RequestState) -> None:
        """The request is about to end. KV that is being copied is kept for the copy."""
        self.images.forget(state)
        remote_kv = state.remote_kv
        if remote_kv is not None and remote_kv.offer is not None:
            del self.kv_offers[remote_kv.offer]
            if remote_kv.offer != remote_kv.copied_offer:
                self._events.add(UnneededEvent(remote_kv.offer))
