"""Pulls from other instances: which image features and which KV are copied, into which blocks, and in which order.

A copy gets its blocks before it begins, by the rules of an encode or a prefill: images by urgency while there are free
blocks for every one ahead, otherwise by age; KV all at once for admitted requests (`remote_kv.py`). A request has one
copy of KV in flight, or several of its images, which may end in any order. Offers that are no longer needed go to
`RemoteEvents`, so that they are released. Does not know which instance offers, nor how bytes are moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hydra_engine.config import ClusterConfig, SchedulerConfig
from hydra_engine.core.ids import FeatureKey, RequestId, StepId
from hydra_engine.core.outputs import Departure
from hydra_engine.core.plans import BlockIds
from hydra_engine.core.state import Ending, ImageProgress, RequestState
from hydra_engine.scheduler.handover.events import RemoteEvents, UnneededEvent
from hydra_engine.scheduler.handover.remote_kv import RemoteKvAdmission
from hydra_engine.scheduler.handover.state import ParkedRequests, find_handover, handover_of, remote_kv_of
from hydra_engine.scheduler.policy import is_stalled
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.transfer.plans import KvEnd, PullPlan

# Copies of one request's images in flight at once, so that one begins as another ends and several encoders are read
# side by side. No more: blocks that are being written cannot be evicted, and KV copies queue behind them.
MAX_IMAGE_PULLS = 4


class RemoteImages:
    """The images that other instances encode for requests here, and the offers of their features. Every such image that
    is WAITING has been asked for (`requested_images`) and is or will be offered, by one instance or several. An offer
    is known (`image_offers`) only while the image is WAITING or ENCODING; an offer that is being copied is not among
    them."""

    def __init__(self, requests: RequestTable, events: RemoteEvents) -> None:
        self.offers: dict[int, tuple[RequestState, int]] = {}  # offer -> (request, image); not being copied
        self._requests = requests
        self._events = events

    def request(self, state: RequestState, index: int) -> None:
        """Asks for the encode of a remote image that is WAITING, unless it has been asked for. If the image has
        features or needs none, refuses its offers, and asks again if it ever waits."""
        progress, handover = state.images[index], handover_of(state)
        if progress == ImageProgress.WAITING and index not in handover.requested_images:
            handover.requested_images.add(index)
            self._events.need(state.request.id, index)
        elif progress > ImageProgress.ENCODING and index in handover.image_offers:
            handover.requested_images.discard(index)
            self._refuse(state, index)

    def on_offer(self, request_id: RequestId, index: int, offer: int) -> None:
        """Records that features of a remote image can be pulled. Refuses them if the image is not remote, has features
        or needs none, or if its request is unknown or has ended. `offer`: the caller's number, as in `PullPlan`.

        Several instances may offer an image, and all but one may be about to withdraw, so no offer is refused before
        the features are here.
        """
        state = self._requests.states.get(request_id)
        handover = None if state is None else find_handover(state)
        if state is None or handover is None or state.ending is not None:
            self._events.add(UnneededEvent(offer))
        elif index not in state.external_images or state.images[index] > ImageProgress.ENCODING:
            handover.requested_images.discard(index)
            self._events.add(UnneededEvent(offer))
        else:
            handover.requested_images.add(index)
            handover.image_offers.setdefault(index, []).append(offer)
            self.offers[offer] = state, index

    def claim(self, state: RequestState, index: int) -> int:
        """Removes and returns the latest offer of an image, to copy or to refuse it."""
        offer = handover_of(state).image_offers[index][-1]
        self.on_offer_gone(offer)
        return offer

    def on_offer_gone(self, offer: int) -> None:
        """Removes a withdrawn offer; a copy in flight still comes back, as not valid. Ignores unknown offers."""
        if offer in self.offers:
            state, index = self.offers.pop(offer)
            image_offers = handover_of(state).image_offers
            image_offers[index].remove(offer)
            if not image_offers[index]:
                del image_offers[index]

    def _refuse(self, state: RequestState, index: int) -> None:
        """Removes all offers of an image and reports them as unneeded."""
        while index in handover_of(state).image_offers:
            self._events.add(UnneededEvent(self.claim(state, index)))

    def forget(self, state: RequestState) -> None:
        """Refuses the image offers for a request that is about to end, and no longer asks for its images."""
        for index in list(handover_of(state).image_offers):
            self._refuse(state, index)
        self._events.forget_needs(state.request.id)


class Pulls:
    """The pulls of one instance. Blocks that a copy in flight writes to belong to the copy: until it ends, features are
    not evicted from them, and a request whose KV is copied is not preempted.

    The order of age leaves no cycle of waiting between instances. Features have the same order (age, then place in the
    prompt) where they are encoded and where they are needed, and on both sides an earlier image evicts later ones. KV
    blocks are all allocated before any of them is copied, see `remote_kv.py`.
    """

    def __init__(
        self,
        requests: RequestTable,
        events: RemoteEvents,
        admission: RemoteKvAdmission,
        parked: ParkedRequests,
        config: SchedulerConfig,
        cluster: ClusterConfig,
    ) -> None:
        self.images = RemoteImages(requests, events)
        self.in_flight: dict[StepId, PullPlan] = {}
        self.kv_offers: dict[int, RequestState] = {}  # by offer number
        self._requests = requests
        self._events = events
        self._admission = admission
        self._unfetched = parked.unfetched
        self._patience_s = config.encode_patience_s
        self._prefetches = cluster.prefetch_features
        self._next_step = 0

    # ---- offers of other instances

    def on_kv_offer(self, request_id: RequestId, offer: int, num_blocks: int, end: KvEnd | None) -> None:
        """Records that the first `num_blocks` blocks of a request's KV can be pulled; called again as there are more,
        the last time with `end`. Another offer replaces the earlier one, as if that was withdrawn. Refuses the offer if
        the request pulls no KV, is unknown or has ended; if a copy is in flight, `_end_kv` does that after it."""
        state = self._requests.states.get(request_id)
        remote_kv = None if state is None else remote_kv_of(state)
        if state is None or remote_kv is None or state.ending is not None:
            if remote_kv is None or remote_kv.copied_offer != offer:  # otherwise kept until the copy has ended
                self._events.add(UnneededEvent(offer))
            return
        if remote_kv.offer != offer:
            self._drop_offer(state)
            self.kv_offers[offer] = state
        remote_kv.offer, remote_kv.num_offered, remote_kv.end = offer, num_blocks, end
        state.keeps_blocks = end is not None
        self._requests.requeue(state)

    def on_kv_offer_gone(self, offer: int) -> None:
        """Removes an offer that was withdrawn. As soon as no copy is in flight, its request frees all its KV blocks and
        waits for another offer. Ignores unknown offers."""
        state = self.kv_offers.get(offer)
        if state is not None:
            self._drop_offer(state)

    def _drop_offer(self, state: RequestState) -> None:
        """Removes the offer of a request's KV, if any. Frees all KV blocks of the request, if a copy is in flight only
        when that has ended (`_end_kv`)."""
        remote_kv = remote_kv_of(state)
        assert remote_kv is not None, "an offer is known for a request that pulls nothing"
        if remote_kv.offer is not None:
            del self.kv_offers[remote_kv.offer]
        remote_kv.offer, remote_kv.num_offered, remote_kv.end = None, 0, None
        state.keeps_blocks = False
        if remote_kv.copied_offer is None:
            self._restart(state)

    # ---- planning

    def plan(self, now: float) -> list[PullPlan]:
        """Admits requests whose KV is offered, and returns the copies to begin now. They write to blocks of this
        instance until `end` is called."""
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
        """Appends to `plans` a copy of the KV offered since the last one, for each admitted request without a copy in
        flight. Frees the blocks of a request that was admitted with too few."""
        requests = self._requests
        for state in list(requests.prefilling):
            remote_kv = remote_kv_of(state)
            if remote_kv is None or remote_kv.offer is None or remote_kv.copied_offer is not None:
                continue
            table = requests.kv.tables[state.request.id]
            if remote_kv.end is not None:
                needed = requests.kv.blocks_for(remote_kv.end.num_tokens) + state.num_state_blocks
                if needed > table.num_blocks:
                    self._restart(state)  # the prompt needs more blocks than it was admitted with
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
        """Plans copies of features: by urgency into free blocks, if urgency and age may differ and the oldest request
        has waited less than `encode_patience_s`; if none result, by age, evicting features of later images."""
        unfetched, before = self._unfetched, len(plans)
        oldest = unfetched.oldest()
        if unfetched.is_ranked and oldest is not None and now - oldest.image_wait_since_s < self._patience_s:
            self._fill(self._of_turn(unfetched.by_urgency()), plans, now, may_evict=False)
        if len(plans) == before:
            self._fill(self._of_turn(unfetched.by_age()), plans, now, may_evict=True)

    def _of_turn(self, states: Iterable[RequestState]) -> Iterator[RequestState]:
        """Filters `states` to those whose features may be fetched. With prefetching, all. Without it, only started
        requests and the next to start (the oldest waiting one, on which progress rests, and the most urgent), and only
        when no older prefill has anything to compute."""
        if self._prefetches:
            yield from states
            return
        requests = self._requests
        computing = next((s.order for s in requests.prefilling if s.num_scheduled or not is_stalled(s)), None)
        queues = requests.waiting, requests.encoding
        oldest = min((s.order for queue in queues if (s := queue.oldest()) is not None), default=None)
        first = min((s.urgency for queue in queues if (s := next(queue.by_urgency(), None)) is not None), default=None)
        for state in states:
            started = state.request.id in requests.kv.tables
            is_next = started or state.order == oldest or state.urgency == first
            if is_next and (computing is None or computing >= state.order):
                yield state

    def _fill(self, states: Iterable[RequestState], plans: list[PullPlan], now: float, *, may_evict: bool) -> None:
        """Appends the copies of images to `plans`, in the given order of requests. Reserves blocks for every earlier
        image that cannot be copied yet; ends when these need more than are free."""
        features = self._requests.features
        aside: dict[FeatureKey, int] = {}
        for state in states:
            for index in sorted(state.external_images):
                if state.images[index] != ImageProgress.WAITING:
                    continue
                key = state.image_keys[index]
                num_blocks = features.blocks_for(state.request.images[index].num_tokens)
                reserved = sum(aside.values()) - aside.get(key, 0)
                handover, images = handover_of(state), self._requests.images
                begins = index in handover.image_offers and len(handover.images_copied) < MAX_IMAGE_PULLS
                block_ids = images.allocate(state, index, reserved, now, may_evict=may_evict) if begins else None
                if block_ids is not None:
                    plans.append(self._pull_image(state, index, block_ids.copy()))
                    aside.pop(key, None)
                    continue
                aside[key] = num_blocks
                if sum(aside.values()) > features.pool.num_free:
                    return

    def _pull_image(self, state: RequestState, index: int, block_ids: BlockIds) -> PullPlan:
        """Claims an offer of the image and returns the plan to copy its features into these blocks."""
        offer = self.images.claim(state, index)
        handover_of(state).images_copied.add(index)
        return PullPlan(self._step_id(), offer, state.request.id, index, 0, block_ids, last=True)

    def _step_id(self) -> StepId:
        """Returns a new step id; pulls are numbered apart from steps."""
        self._next_step += 1
        return StepId(self._next_step)

    # ---- results

    def end(self, step_id: StepId, now: float, *, valid: bool, started_s: float, ended_s: float) -> RequestState:
        """Records the end of a copy. Returns its request, which may have ended before or now. Not `valid`: the copied
        bytes are of no use."""
        plan = self.in_flight.pop(step_id)
        state = self._requests.states[plan.request_id]
        state.plans_in_flight -= 1
        if plan.image_index is None:
            num_tokens = len(plan.block_ids) * self._requests.kv.block_size
            self._requests.timelines[plan.request_id].add_transfer("pull_kv", started_s, ended_s, num_tokens)
            self._end_kv(state, plan, now, valid=valid)
        else:
            handover_of(state).images_copied.remove(plan.image_index)
            self._end_features(state, plan.image_index, started_s, ended_s, valid=valid)
        return state

    def _end_features(self, state: RequestState, index: int, started_s: float, ended_s: float, *, valid: bool) -> None:
        """Marks copied features as ready for all images with the same picture. Not `valid`: these images wait again,
        and this one still counts as asked for. Either way the copy is recorded in the timeline."""
        images, num_tokens = self._requests.images, state.request.images[index].num_tokens
        self._requests.timelines[state.request.id].add_transfer("pull_features", started_s, ended_s, num_tokens)
        if valid:
            handover_of(state).requested_images.discard(index)
        users = images.finish(state.image_keys[index], ended_s, failed=not valid)
        images.end_image_waits(users, (), ended_s)

    def _end_kv(self, state: RequestState, plan: PullPlan, now: float, *, valid: bool) -> None:
        """Counts the copied blocks or, after the last copy, continues the request. If the copy is not `valid` or its
        offer has been replaced or withdrawn, frees all KV blocks: the request waits to start again. If more KV is still
        to come, preempts the request if `may_preempt` has asked for it. If the request has ended, only refuses the
        offer, unless the copy was its last or not `valid`."""
        requests, remote_kv = self._requests, remote_kv_of(state)
        assert remote_kv is not None and remote_kv.copied_offer == plan.offer, "a copy ends that never began"
        remote_kv.copied_offer = None
        is_current = remote_kv.offer == plan.offer
        if state.ending is not None:
            if is_current and valid and not plan.last:  # `forget` kept the offer for this copy
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
        """Continues a request whose KV is all here: only the row of its latest token, which `end` names, is still to be
        computed. Ends it as RETURNED if the KV covers more or fewer tokens than all but that one."""
        requests = self._requests
        handover = handover_of(state)
        handover.remote_kv = None
        state.external_kv = state.keeps_blocks = False
        if end.earlier_token_ids is not None:
            state.generated[:] = end.earlier_token_ids
            handover.is_lent = True
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
        requests.prefixes.publish_later([(state, state.num_computed // requests.kv.block_size)])
        requests.requeue(state)

    def _restart(self, state: RequestState) -> None:
        """Frees the KV blocks and the slot of a request whose pulled KV is of no use; it waits as if it had never
        started. Asserts that no copy is in flight."""
        remote_kv = remote_kv_of(state)
        assert remote_kv is not None and remote_kv.copied_offer is None, "blocks are freed while they are written"
        self._requests.free_blocks(state)

    def forget(self, state: RequestState) -> None:
        """Refuses the offers for a request that is about to end. An offer of KV that is being copied is refused only
        after the copy, unless that is the last or not valid."""
        self.images.forget(state)
        remote_kv = remote_kv_of(state)
        if remote_kv is not None and remote_kv.offer is not None:
            del self.kv_offers[remote_kv.offer]
            if remote_kv.offer != remote_kv.copied_offer:
                self._events.add(UnneededEvent(remote_kv.offer))
