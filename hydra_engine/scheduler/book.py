"""The requests of one instance, the queue that each is in, and the blocks that each holds.

Carries out what the planners and the scheduler decide (place, start, preempt, take features, end, forget) so that
queues, states, seats, decodes and caches never disagree; `audit.py` checks that they do not. Decides nothing and knows
no budget.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from hydra_engine.cache.features import FeatureCache
from hydra_engine.cache.ledger import Ledger
from hydra_engine.cache.manager import CacheManager
from hydra_engine.cache.slots import SeatPool
from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import FeatureKey, RequestId
from hydra_engine.core.request import Request
from hydra_engine.core.state import Ending, ImageProgress, RequestState
from hydra_engine.scheduler.blame import StepLog
from hydra_engine.scheduler.decodes import DecodeTable
from hydra_engine.scheduler.queues import ArrivalQueue, StartedOrders, UrgencyQueue
from hydra_engine.scheduler.reuse import PrefixReuse
from hydra_engine.scheduler.timeline import Timeline


class RequestBook:
    """A live request is in exactly one of the four queues, unless it is ending: then in none.

                       waits for images    has all it needs    one step from a token
        no KV blocks   encoding            waiting             -
        KV blocks      prefilling          prefilling          decoding

    `unencoded` is an index beside them: requests with an image that no vision plan names yet. Whoever holds KV blocks
    has a seat. `decodes` has the numbers of those that decode, and of those whose last chunk is in flight.

    Reuse. KV that the cache has is looked up when a request arrives or is preempted, and images inside it are CACHED:
    nobody encodes them. Nothing is held for that, so it takes no room from anybody and cannot deadlock; the price is
    that the blocks may be gone when the request is considered for its start. It is looked up again then, and an image
    that is not covered any more needs features after all (`recheck`). That happens at most once between two starts of
    a request, for only an arrival or a preemption makes an image CACHED; from there on the request is one like all
    others, and the rules of age in `policy.py` bring it to its end. Features that several images share are as old as
    the oldest of these images: what may be taken from a younger request may still be taken when younger ones share it.
    """

    def __init__(
        self,
        kv: CacheManager[RequestId],
        images: CacheManager[FeatureKey],
        instance: str,
        config: SchedulerConfig,
        *,
        reuse: bool,
        has_states: bool = False,
        log: StepLog | None = None,
    ) -> None:
        """`has_states`: the model keeps recurrent states. KV without the state at its end is worth nothing, so then
        only features are reused."""
        self.kv = kv
        self.seats = SeatPool(config.max_num_seqs)
        self.decodes = DecodeTable(config.max_num_seqs, kv.block_size, config.tpot_slo)
        self.features = FeatureCache(images, keeps=reuse)
        self.prefixes = PrefixReuse(kv, enabled=reuse and not has_states, shares_features=reuse)
        self.ledger = Ledger(kv, self.features, self.seats, has_states=has_states)
        self.log = log if log is not None else StepLog()
        self.states: dict[RequestId, RequestState] = {}
        self.timelines: dict[RequestId, Timeline] = {}
        self.encoding = UrgencyQueue()
        self.waiting = UrgencyQueue()
        self.prefilling = ArrivalQueue()
        self.decoding = ArrivalQueue()
        self.unencoded = UrgencyQueue()
        self.num_preemptions = 0
        self.patches_waiting = 0  # of images that need an encode, once for each request that needs it
        self._instance = instance
        self._ttft_s = config.ttft_slo
        self._next_order = 0
        self._started = StartedOrders()
        self._due: list[tuple[float, RequestId]] = []  # a heap: first tokens with a limit

    # ---- the life of a request

    def add(self, request: Request, now: float) -> None:
        assert request.id not in self.states, f"request id {request.id} is in use"
        state = RequestState.new(request, self._next_order, now, self._ttft_s)
        state.image_keys = self.prefixes.feature_keys(request)
        self._next_order += 1
        self.states[request.id] = state
        self.patches_waiting += sum(image.num_patches for image in request.images)
        cached = self._cached_tokens(state) if request.images else 0
        for index, image in enumerate(request.images):
            self._set_image(state, index, ImageProgress.CACHED if image.end <= cached else self._need(state, index))
        if state.due_s < math.inf:
            heapq.heappush(self._due, (state.due_s, request.id))
        self.timelines[request.id] = Timeline(self._instance, now, state.waits_for_images)
        self.place(state)

    def place(self, state: RequestState) -> None:
        """Puts a request where its state and its blocks say that it belongs."""
        request_id = state.request.id
        belongs = self.queue_for(state)
        for queue in (self.encoding, self.waiting, self.prefilling, self.decoding):
            if queue is not belongs:
                queue.discard(state)
        if belongs is not None and request_id not in belongs:
            belongs.push(state)
            if belongs is self.encoding:
                state.starts_seen = None  # nobody overtakes who waits for images
        state.decodes = state.ending is None and belongs is self.decoding
        if belongs is self.waiting and state.starts_seen is None:
            state.starts_seen = self._started.younger_than(state.order)
        if state.decodes and not self.decodes.is_member(self.seats.of(request_id)):
            self.join_decodes(state, unread=0)
        if state.ending is not None or ImageProgress.WAITING not in state.images:
            self.unencoded.discard(state)
        elif request_id not in self.unencoded:
            self.unencoded.push(state)

    def join_decodes(self, state: RequestState, *, unread: int) -> None:
        """`unread` 1: the request's last chunk is about to be in flight, and what follows can be planned."""
        request_id = state.request.id
        seat, table = self.seats.of(request_id), self.kv.tables[request_id]
        self.decodes.join(state, seat, table, self.timelines[request_id], unread=unread)

    def end(self, state: RequestState, ending: Ending) -> None:
        """The request makes no more progress; what it holds stays until `forget`."""
        self._leave_decodes(state)
        state.num_prefilled, state.decodes = state.num_computed, False
        for image, progress in zip(state.request.images, state.images, strict=True):
            self.patches_waiting -= image.num_patches * (progress == ImageProgress.WAITING)
        state.ending = ending
        self.place(state)

    def in_use(self, state: RequestState) -> bool:
        """Some plan in flight names the request."""
        seat = self.seats.held.get(state.request.id)
        return state.plans_in_flight > 0 or (seat is not None and self.decodes.in_flight[seat] > 0)

    def forget(self, state: RequestState) -> None:
        """Frees everything. Only when no plan in flight names the request."""
        assert not self.in_use(state) and state.ending is not None, "a request is forgotten while it is in use"
        request_id = state.request.id
        self.prefixes.settle()
        self.kv.free(request_id)
        self.seats.free(request_id)
        for index, progress in enumerate(state.images):
            if progress <= ImageProgress.ENCODED:
                self.features.drop((request_id, index), state.image_keys[index])
        del self.states[request_id], self.timelines[request_id]

    # ---- starting, giving way and moving on

    def recheck(self, state: RequestState, now: float) -> None:
        """Looks again for the KV that a waiting request counts on; images that it no longer covers need features."""
        cached = self._cached_tokens(state)
        waited = state.waits_for_images
        for index, image in enumerate(state.request.images):
            if state.images[index] == ImageProgress.CACHED and image.end > cached:
                self._needs_features(state, index, now)
        if state.waits_for_images and not waited:
            self.timelines[state.request.id].waits_for("images", now)
        self.place(state)

    def start(self, state: RequestState, num_found: int, now: float) -> None:
        """The request gets its first blocks: the `num_found` that the cache has, and behind them what it grows."""
        waited = state.waits_for_images
        self.seats.take(state.request.id)
        self.prefixes.adopt(state, num_found)
        if num_found:
            self.timelines[state.request.id].reused(now, state.num_computed)
        if not state.num_preemptions:
            state.cached_tokens = state.num_computed
        state.starts_seen, state.seated = None, False
        oldest = [queue.oldest_but(state) for queue in (self.waiting, self.encoding)]
        self._started.started(state.order, min((other.order for other in oldest if other is not None), default=None))
        self.consume_images(state)
        if waited and not state.waits_for_images:
            self.images_settled(state, now)

    def overtaken(self, state: RequestState) -> int:
        """How many younger requests have started since this one began to wait for its start."""
        now = self._started.younger_than(state.order)
        if state.starts_seen is None:  # it waits for images, and could start for the first time
            state.starts_seen = now
        return now - state.starts_seen

    def preempt(self, state: RequestState, now: float) -> None:
        """Frees the KV of a running request. It keeps its age, its tokens and the features it has not consumed."""
        request_id = state.request.id
        computes = state.num_scheduled or self.decodes.in_flight[self.seats.of(request_id)]
        assert not computes, "a request is preempted while a step computes it"
        self._leave_decodes(state)
        self.prefixes.settle()
        self.kv.free(request_id)
        self.seats.free(request_id)
        state.decodes = False
        state.num_prefilled = state.num_named = 0
        state.num_preemptions += 1
        self.num_preemptions += 1
        self.log.preempted(request_id, now)
        self.timelines[request_id].preempted()
        if ImageProgress.CONSUMED in state.images:
            cached = self._cached_tokens(state)
            for index, image in enumerate(state.request.images):
                if state.images[index] == ImageProgress.CONSUMED:
                    self._set_image(state, index, ImageProgress.CACHED)
                    if image.end > cached:
                        self._needs_features(state, index, now)
        self.place(state)

    def consume_images(self, state: RequestState) -> None:
        """Lets go of the features that are not needed any more, for the KV of the whole span is there."""
        for index, image in enumerate(state.request.images):
            progress = state.images[index]
            if progress != ImageProgress.CONSUMED and image.end <= state.num_computed:
                if progress <= ImageProgress.ENCODED:
                    self.features.drop((state.request.id, index), state.image_keys[index])
                self._set_image(state, index, ImageProgress.CONSUMED)

    # ---- features

    def reserve_features(self, state: RequestState, index: int) -> None:
        """The image gets blocks and will be encoded for this request, and for all others with the same picture."""
        key = state.image_keys[index]
        granted = self.features.reserve(key)
        assert granted, "room was made and is gone"
        state.images_planned.add(index)
        self._follow(key)

    def finish_features(self, key: FeatureKey, *, failed: bool) -> list[RequestState]:
        """An encode has come back. Returns the requests that it was for, as far as they still need it.

        One that failed ends the request that it was planned for, which is not this method's business; those that shared
        it wait again and have the picture encoded for themselves.
        """
        users = self.features.users(key)
        self.features.finish(key, failed=failed)
        if users:
            self._follow(key)
        return [self.states[request_id] for request_id in dict.fromkeys(r for r, _ in users)]

    def images_settled(self, state: RequestState, now: float) -> None:
        """The last image that a request waited for is ready, by somebody else's work."""
        timeline = self.timelines[state.request.id]
        timeline.images_found(now)
        if not state.num_scheduled:
            timeline.images_ready(now)

    def take_features(self, key: FeatureKey, now: float) -> None:
        """Frees the blocks of encoded features; whoever needs them waits for an encode again."""
        self.features.take(key)
        for request_id, index in self.features.users(key):
            self._wait_for_encode(self.states[request_id], index, now)
        self._follow(key)

    def encoded_features(self) -> Iterator[tuple[FeatureKey, list[tuple[RequestState, int]], int]]:
        """(key, images that use it, blocks) of all features that wait in the cache."""
        for key, progress, num_blocks in self.features.held():
            if progress == ImageProgress.ENCODED:
                yield (
                    key,
                    [(self.states[request_id], index) for request_id, index in self.features.users(key)],
                    num_blocks,
                )

    def _need(self, state: RequestState, index: int) -> ImageProgress:
        num_tokens = state.request.images[index].num_tokens
        return self.features.need((state.request.id, index), state.image_keys[index], num_tokens)

    def _needs_features(self, state: RequestState, index: int, now: float) -> None:
        """An image that needed no features does now; they may be there or on their way."""
        progress = self._need(state, index)
        if progress == ImageProgress.WAITING:
            self._wait_for_encode(state, index, now)
        self._set_image(state, index, progress)

    def _wait_for_encode(self, state: RequestState, index: int, now: float) -> None:
        if ImageProgress.WAITING not in state.images:
            state.image_wait_since_s = now
        self.timelines[state.request.id].encode_waits(now)

    def _follow(self, key: FeatureKey) -> None:
        """All images that use these features are as far as the features are."""
        progress = self.features.progress(key)
        for request_id, index in self.features.users(key):
            state = self.states[request_id]
            self._set_image(state, index, progress)
            self.place(state)

    def _set_image(self, state: RequestState, index: int, progress: ImageProgress) -> None:
        if state.ending is None:
            change = (progress == ImageProgress.WAITING) - (state.images[index] == ImageProgress.WAITING)
            self.patches_waiting += change * state.request.images[index].num_patches
        state.images[index] = progress

    # ---- questions

    def youngest_running(self) -> RequestState | None:
        """The youngest request that holds KV blocks and is not ending."""
        running = [state for queue in (self.prefilling, self.decoding) if (state := queue.youngest()) is not None]
        return max(running, key=lambda state: state.order, default=None)

    def next_due(self, now: float) -> RequestState | None:
        """The request without a first token whose limit for it ends next; limits that are over are forgotten."""
        while self._due:
            due_s, request_id = self._due[0]
            state = self.states.get(request_id)
            if due_s > now and state is not None and state.ending is None and not state.generated:
                return state
            heapq.heappop(self._due)
        return None

    def _leave_decodes(self, state: RequestState) -> None:
        seat = self.seats.held.get(state.request.id)
        if seat is not None:
            self.decodes.leave(seat)

    def _cached_tokens(self, state: RequestState) -> int:
        return len(self.prefixes.find(state)) * self.kv.block_size

    def queue_for(self, state: RequestState) -> ArrivalQueue | None:
        if state.ending is not None:
            return None
        if state.request.id in self.kv.tables:
            decodes = state.is_decode and state.seated and not state.num_scheduled
            return self.decoding if decodes else self.prefilling
        return self.encoding if state.waits_for_images else self.waiting
