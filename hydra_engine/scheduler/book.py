"""The requests of one instance, the queue that each is in, and the blocks that each holds.

Carries out what the planners and the scheduler decide (place, start, preempt, take features, end, forget) so that
queues, states and caches never disagree. Decides nothing and knows no budget.
"""

from __future__ import annotations

from collections.abc import Iterator

from hydra_engine.cache.features import FeatureCache
from hydra_engine.cache.ledger import Ledger
from hydra_engine.cache.manager import CacheManager
from hydra_engine.cache.slots import SlotPool
from hydra_engine.core.ids import FeatureKey, RequestId
from hydra_engine.core.request import Request
from hydra_engine.core.state import Ending, ImageProgress, RequestState
from hydra_engine.scheduler.queues import ArrivalQueue
from hydra_engine.scheduler.reuse import PrefixReuse
from hydra_engine.scheduler.timeline import Timeline


class RequestBook:
    """A live request is in exactly one of the four queues, unless it is ending: then in none.

                       waits for images    has all it needs    one step from a token
        no KV blocks   encoding            waiting             -
        KV blocks      prefilling          prefilling          decoding

    `unencoded` is an index beside them: requests with an image that no vision plan names yet.

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
        *,
        reuse: bool,
        num_state_slots: int = 0,
    ) -> None:
        """KV without the state at its end is worth nothing, so with states only features are reused."""
        self.kv = kv
        self.slots = SlotPool(num_state_slots)
        self.features = FeatureCache(images, keeps=reuse)
        self.prefixes = PrefixReuse(kv, enabled=reuse and not num_state_slots, shares_features=reuse)
        self.ledger = Ledger(kv, self.features, self.slots)
        self.states: dict[RequestId, RequestState] = {}
        self.timelines: dict[RequestId, Timeline] = {}
        self.encoding = ArrivalQueue()
        self.waiting = ArrivalQueue()
        self.prefilling = ArrivalQueue()
        self.decoding = ArrivalQueue()
        self.unencoded = ArrivalQueue()
        self.num_preemptions = 0
        self._instance = instance
        self._next_order = 0

    # ---- the life of a request

    def add(self, request: Request, now: float) -> None:
        assert request.id not in self.states, f"request id {request.id} is in use"
        state = RequestState.new(request, self._next_order, now)
        state.image_keys = self.prefixes.feature_keys(request)
        self._next_order += 1
        self.states[request.id] = state
        cached = self._cached_tokens(state) if request.images else 0
        for index, image in enumerate(request.images):
            state.images[index] = ImageProgress.CACHED if image.end <= cached else self._need(state, index)
        self.timelines[request.id] = Timeline(self._instance, now, state.waits_for_images)
        self.place(state)

    def place(self, state: RequestState) -> None:
        """Puts a request where its state and its blocks say that it belongs."""
        request_id = state.request.id
        belongs = self._queue_for(state)
        for queue in (self.encoding, self.waiting, self.prefilling, self.decoding):
            if queue is not belongs:
                queue.discard(request_id)
        if belongs is not None and request_id not in belongs:
            belongs.push(state)
        if state.ending is not None or ImageProgress.WAITING not in state.images:
            self.unencoded.discard(request_id)
        elif request_id not in self.unencoded:
            self.unencoded.push(state)

    def end(self, state: RequestState, ending: Ending) -> None:
        """The request makes no more progress; what it holds stays until `forget`."""
        state.ending = ending
        self.place(state)

    def forget(self, state: RequestState) -> None:
        """Frees everything. Only when no plan in flight names the request."""
        assert not state.plans_in_flight and state.ending is not None, "a request is forgotten while it is in use"
        request_id = state.request.id
        self.kv.free(request_id)
        self.slots.free(request_id)
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
        self.slots.take(state.request.id)
        self.prefixes.adopt(state, num_found)
        if num_found:
            self.timelines[state.request.id].reused(now, state.num_computed)
        if not state.num_preemptions:
            state.cached_tokens = state.num_computed
        state.num_bypassed = 0
        self.consume_images(state)
        if waited and not state.waits_for_images:
            self.images_settled(state, now)

    def preempt(self, state: RequestState, now: float) -> None:
        """Frees the KV of a running request. It keeps its age, its tokens and the features it has not consumed."""
        assert not state.num_scheduled, "a request is preempted while a step computes it"
        self.kv.free(state.request.id)
        self.slots.free(state.request.id)
        state.num_computed = state.num_named = 0
        state.num_preemptions += 1
        self.num_preemptions += 1
        self.timelines[state.request.id].preempted()
        if ImageProgress.CONSUMED in state.images:
            cached = self._cached_tokens(state)
            for index, image in enumerate(state.request.images):
                if state.images[index] == ImageProgress.CONSUMED:
                    state.images[index] = ImageProgress.CACHED
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
                state.images[index] = ImageProgress.CONSUMED

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
        state.images[index] = progress

    def _wait_for_encode(self, state: RequestState, index: int, now: float) -> None:
        if ImageProgress.WAITING not in state.images:
            state.image_wait_since_s = now
        self.timelines[state.request.id].encode_waits(now)

    def _follow(self, key: FeatureKey) -> None:
        """All images that use these features are as far as the features are."""
        progress = self.features.progress(key)
        for request_id, index in self.features.users(key):
            state = self.states[request_id]
            state.images[index] = progress
            self.place(state)

    # ---- questions

    def youngest_running(self) -> RequestState | None:
        """The youngest request that holds KV blocks and is not ending."""
        running = [state for queue in (self.prefilling, self.decoding) if (state := queue.youngest()) is not None]
        return max(running, key=lambda state: state.order, default=None)

    def _cached_tokens(self, state: RequestState) -> int:
        return len(self.prefixes.find(state)) * self.kv.block_size

    def _queue_for(self, state: RequestState) -> ArrivalQueue | None:
        if state.ending is not None:
            return None
        if state.request.id in self.kv.tables:
            return self.decoding if state.is_decode else self.prefilling
        return self.encoding if state.waits_for_images else self.waiting

    # ---- checks

    def check(self) -> None:
        """Raises AssertionError unless states, queues and caches agree."""
        self.ledger.check(self.states)
        users = 0
        for request_id, state in self.states.items():
            belongs = self._queue_for(state)
            for queue in (self.encoding, self.waiting, self.prefilling, self.decoding):
                assert (request_id in queue) == (queue is belongs), f"request {request_id} is in the wrong queue"
            indexed = state.ending is None and ImageProgress.WAITING in state.images
            assert (request_id in self.unencoded) == indexed, f"request {request_id}: index of images is wrong"
            self._check_blocks(state)
            users += self._check_images(state)
        for queue in (self.encoding, self.waiting, self.prefilling, self.decoding, self.unencoded):
            orders = [state.order for state in queue]
            assert orders == sorted(orders), "a queue is out of order"
            assert all(self.states.get(state.request.id) is state for state in queue), "a queue holds a dead request"
        assert users == self.features.num_users, "features are kept for images that do not need them"

    def _check_blocks(self, state: RequestState) -> None:
        request_id = state.request.id
        table = self.kv.tables.get(request_id)
        known = 0 if table is None else table.num_slots
        assert state.num_computed + state.num_scheduled <= known, f"request {request_id} has KV without blocks"
        assert state.num_computed + state.num_scheduled <= state.num_tokens, f"request {request_id} computes too much"
        assert state.num_named * self.kv.block_size <= state.num_computed, f"request {request_id} lends too much"
        names = self.kv.names(request_id)
        lent, rest = names[: state.num_named], names[state.num_named :]
        assert not any(rest), f"request {request_id} lends a block that is not full"
        for name, expected in zip(lent, state.block_hashes, strict=False):
            assert name in (None, expected), f"request {request_id} has a block under a wrong name"

    def _check_images(self, state: RequestState) -> int:
        """How many of its images use features."""
        request_id, runs = state.request.id, state.request.id in self.kv.tables
        users = 0
        for index, (image, progress) in enumerate(zip(state.request.images, state.images, strict=True)):
            where = f"request {request_id} image {index}"
            consumed = runs and image.end <= state.num_computed
            assert (progress == ImageProgress.CONSUMED) == consumed, f"{where}: KV and progress disagree"
            assert not runs or progress != ImageProgress.CACHED, f"{where} is looked for although it has started"
            if progress <= ImageProgress.ENCODED:
                users += 1
                key = state.image_keys[index]
                assert (request_id, index) in self.features.users(key), f"{where} needs features and nobody knows"
                assert progress == self.features.progress(key), f"{where}: features and progress disagree"
        return users
