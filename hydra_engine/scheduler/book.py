"""The requests of one instance, the queue that each is in, and the blocks that each holds.

Carries out what the planners and the scheduler decide (place, preempt, take features, end, forget) so that queues,
states and caches never disagree. Decides nothing and knows no budget.
"""

from __future__ import annotations

from collections.abc import Iterator

from hydra_engine.cache.ledger import ImageKey, Ledger
from hydra_engine.cache.manager import CacheManager
from hydra_engine.core.ids import RequestId
from hydra_engine.core.request import Request
from hydra_engine.core.state import Ending, ImageProgress, RequestState
from hydra_engine.scheduler.queues import ArrivalQueue
from hydra_engine.scheduler.timeline import Timeline


class RequestBook:
    """A live request is in exactly one of the four queues, unless it is ending: then in none.

                       waits for images    has all it needs    one step from a token
        no KV blocks   encoding            waiting             -
        KV blocks      prefilling          prefilling          decoding

    `unencoded` is an index beside them: requests with an image that no vision plan names yet.
    """

    def __init__(self, kv: CacheManager[RequestId], images: CacheManager[ImageKey], instance: str) -> None:
        self.kv = kv
        self.images = images
        self.ledger = Ledger(kv, images)
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
        self._next_order += 1
        self.states[request.id] = state
        self.timelines[request.id] = Timeline(self._instance, now, bool(request.images))
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
        for index in range(len(state.images)):
            self.images.free((request_id, index))
        del self.states[request_id], self.timelines[request_id]

    # ---- giving way and moving on

    def preempt(self, state: RequestState, now: float) -> None:
        """Frees the KV of a running request. It keeps its age, its tokens and the features it has not consumed."""
        assert not state.num_scheduled, "a request is preempted while a step computes it"
        self.kv.free(state.request.id)
        state.num_computed = 0
        state.num_preemptions += 1
        self.num_preemptions += 1
        self.timelines[state.request.id].preempted()
        for index, progress in enumerate(state.images):
            if progress == ImageProgress.CONSUMED:
                self._needs_encode(state, index, now)
        self.place(state)

    def take_features(self, state: RequestState, index: int, now: float) -> None:
        """Frees the blocks of an encoded image; it will be encoded again."""
        assert state.images[index] == ImageProgress.ENCODED, "only encoded images can give way"
        self.images.free((state.request.id, index))
        self._needs_encode(state, index, now)
        self.place(state)

    def _needs_encode(self, state: RequestState, index: int, now: float) -> None:
        if ImageProgress.WAITING not in state.images:
            state.image_wait_since_s = now
        state.images[index] = ImageProgress.WAITING
        self.timelines[state.request.id].encode_waits(now)

    def consume_images(self, state: RequestState) -> None:
        """Frees the features that prefill has passed."""
        for index, image in enumerate(state.request.images):
            if state.images[index] == ImageProgress.ENCODED and image.end <= state.num_computed:
                self.images.free((state.request.id, index))
                state.images[index] = ImageProgress.CONSUMED

    # ---- questions

    def youngest_running(self) -> RequestState | None:
        """The youngest request that holds KV blocks and is not ending."""
        running = [state for queue in (self.prefilling, self.decoding) if (state := queue.youngest()) is not None]
        return max(running, key=lambda state: state.order, default=None)

    def encoded_images(self) -> Iterator[tuple[RequestState, int, int]]:
        """(state, image index, blocks) of every image whose features wait in the cache."""
        for (request_id, index), table in self.images.tables.items():
            state = self.states[request_id]
            if state.ending is None and state.images[index] == ImageProgress.ENCODED:
                yield state, index, table.num_blocks

    def _queue_for(self, state: RequestState) -> ArrivalQueue | None:
        if state.ending is not None:
            return None
        if state.request.id in self.kv.tables:
            return self.decoding if state.is_decode else self.prefilling
        return self.encoding if state.waits_for_images else self.waiting

    def check(self) -> None:
        """Raises AssertionError unless states, queues and caches agree."""
        self.ledger.check(self.states)
        for request_id, state in self.states.items():
            belongs = self._queue_for(state)
            for queue in (self.encoding, self.waiting, self.prefilling, self.decoding):
                assert (request_id in queue) == (queue is belongs), f"request {request_id} is in the wrong queue"
            indexed = state.ending is None and ImageProgress.WAITING in state.images
            assert (request_id in self.unencoded) == indexed, f"request {request_id}: index of images is wrong"
            self._check_blocks(state)
        for queue in (self.encoding, self.waiting, self.prefilling, self.decoding, self.unencoded):
            orders = [state.order for state in queue]
            assert orders == sorted(orders), "a queue is out of order"
            assert all(self.states.get(state.request.id) is state for state in queue), "a queue holds a dead request"

    def _check_blocks(self, state: RequestState) -> None:
        request_id = state.request.id
        table = self.kv.tables.get(request_id)
        known = 0 if table is None else table.num_slots
        assert state.num_computed + state.num_scheduled <= known, f"request {request_id} has KV without blocks"
        assert state.num_computed + state.num_scheduled <= state.num_tokens, f"request {request_id} computes too much"
        for index, progress in enumerate(state.images):
            holds = (request_id, index) in self.images.tables
            expected = progress in (ImageProgress.ENCODING, ImageProgress.ENCODED)
            assert holds == expected, f"request {request_id} image {index}: blocks and progress disagree"
