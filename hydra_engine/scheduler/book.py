"""The requests of one instance, the queue that each is in, and the blocks that each holds.

Carries out what the planners and the scheduler decide (place, start, preempt, offer, end, forget) so that queues,
states, seats, decodes and caches never disagree; `audit.py` checks that they do not. Images are in `images.py`. Decides
nothing and knows no budget.
"""

from __future__ import annotations

import heapq
import math

from hydra_engine.cache.features import FeatureCache
from hydra_engine.cache.ledger import Ledger
from hydra_engine.cache.manager import CacheManager
from hydra_engine.cache.slots import SeatPool
from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import FeatureKey, RequestId
from hydra_engine.core.outputs import Departure
from hydra_engine.core.plans import KvEnd
from hydra_engine.core.request import Request
from hydra_engine.core.roles import Role
from hydra_engine.core.state import Ending, ImageProgress, RequestState
from hydra_engine.scheduler.blame import StepLog
from hydra_engine.scheduler.decodes import DecodeTable
from hydra_engine.scheduler.events import KvEvent, KvGoneEvent, UnneededEvent
from hydra_engine.scheduler.images import ImageBook
from hydra_engine.scheduler.outside import Outside
from hydra_engine.scheduler.queues import ArrivalQueue, StartedOrders, UrgencyQueue
from hydra_engine.scheduler.reuse import PrefixReuse
from hydra_engine.scheduler.timeline import Timeline


class RequestBook:
    """A live request is in exactly one of the queues, unless it is ending: then in none.

                       waits for images    has all it needs    one step from a token    computed, to be fetched
        no KV blocks   encoding            waiting             -                        -
        KV blocks      prefilling          prefilling          decoding                 handing_over

    One whose KV comes from another instance is `arriving` until that is offered, then `incoming`, and prefilling
    (though nothing is computed) until all of it is here. Encode jobs are in `jobs`; they hold no KV and are no
    candidates for the language lane. `unencoded` and `awaited` are indices beside the queues: requests with an image
    that waits for an encode here, and for one elsewhere. Whoever holds KV blocks has a seat. `decodes` has the numbers
    of those that decode, and of those whose last chunk is in flight.

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
        self.handing_over = ArrivalQueue()
        self.arriving = ArrivalQueue()
        self.incoming = UrgencyQueue()
        self.jobs = ArrivalQueue()
        self.unencoded = UrgencyQueue()
        self.awaited = UrgencyQueue()
        self.kv_offers: dict[int, RequestState] = {}  # offers of KV that are known, by their number
        self.departed: list[RequestState] = []  # ended while a plan was made, to be forgotten behind it
        self.outside = Outside()
        self.images = ImageBook(self.features, self.states, self.timelines, self.outside, self.place)
        self.num_preemptions = 0
        self._instance = instance
        self._ttft_s = config.ttft_slo
        self._next_order = 0
        self._started = StartedOrders()
        self._due: list[tuple[float, RequestId]] = []  # a heap: first tokens with a limit

    # ---- the life of a request

    @property
    def queues(self) -> tuple[ArrivalQueue, ...]:
        """Without the indices."""
        first = self.encoding, self.waiting, self.prefilling, self.decoding
        return (*first, self.handing_over, self.arriving, self.incoming, self.jobs)

    def add(
        self, request: Request, now: float, *, part: Role, remote_images: frozenset[int], pulls_kv: bool
    ) -> RequestState:
        assert request.id not in self.states, f"request id {request.id} is in use"
        state = RequestState.new(
            request, self._next_order, now, self._ttft_s, part=part, remote_images=remote_images, pulls_kv=pulls_kv
        )
        state.image_keys = self.prefixes.feature_keys(request)
        self._next_order += 1
        self.states[request.id] = state
        looks = bool(request.images) and not state.is_job and not pulls_kv
        self.images.arrive(state, self._cached_tokens(state) if looks else 0, now)
        if state.due_s < math.inf and Role.P in part and not pulls_kv:
            heapq.heappush(self._due, (state.due_s, request.id))
        timeline = Timeline(self._instance, now, state.waits_for_images, prefills=not state.is_job)
        self.timelines[request.id] = timeline
        if pulls_kv:
            timeline.cause = "transfer"
        if not any(p <= ImageProgress.ENCODING for i, p in enumerate(state.images) if i not in state.remote_images):
            timeline.images_found(now)  # encodes elsewhere are in the timelines of their jobs
        self.place(state)
        return state

    def place(self, state: RequestState) -> None:
        """Puts a request where its state and its blocks say that it belongs."""
        request_id = state.request.id
        belongs = self.queue_for(state)
        for queue in self.queues:
            if queue is not belongs:
                queue.discard(state)
        if belongs is not None and request_id not in belongs:
            belongs.push(state)
            if belongs is self.encoding or belongs is self.arriving:
                state.starts_seen = None  # nobody overtakes who waits for images, or for an offer
        state.decodes = state.ending is None and belongs is self.decoding
        if (belongs is self.waiting or belongs is self.incoming) and state.starts_seen is None:
            state.starts_seen = self._started.younger_than(state.order)
        if state.decodes and not self.decodes.is_member(self.seats.of(request_id)):
            self.join_decodes(state, unread=0)
        live = state.ending is None
        _index(self.unencoded, state, belongs=live and state.needs_encode)
        _index(self.awaited, state, belongs=live and bool(state.remote_images) and state.needs_pull)

    def join_decodes(self, state: RequestState, *, unread: int) -> None:
        """`unread` 1: the request's last chunk is about to be in flight, and what follows can be planned."""
        request_id = state.request.id
        seat, table = self.seats.of(request_id), self.kv.tables[request_id]
        self.decodes.join(state, seat, table, self.timelines[request_id], unread=unread)

    def end(self, state: RequestState, ending: Ending) -> None:
        """The request makes no more progress; what it holds stays until `forget`."""
        self._leave_decodes(state)
        state.num_prefilled, state.decodes = state.num_computed, False
        self.images.end(state)
        if ending.reason != Departure.MOVED:
            self.withdraw_kv(state)
        if state.arrival is not None and state.arrival.offer is not None:
            del self.kv_offers[state.arrival.offer]
            if state.arrival.offer != state.arrival.copies:
                self.outside.tell(UnneededEvent(state.arrival.offer))
        state.ending = ending
        self.place(state)

    def in_use(self, state: RequestState) -> bool:
        """Some plan in flight names the request."""
        seat = self.seats.held.get(state.request.id)
        return state.plans_in_flight > 0 or (seat is not None and self.decodes.num_in_flight(seat) > 0)

    def forget(self, state: RequestState) -> None:
        """Frees everything. Only when no plan in flight names the request."""
        assert not self.in_use(state) and state.ending is not None, "a request is forgotten while it is in use"
        request_id = state.request.id
        self.prefixes.settle()
        self.kv.free(request_id)
        self.seats.free(request_id)
        self.images.drop(state)
        del self.states[request_id], self.timelines[request_id]

    def reset_caches(self, *, kv: bool, images: bool) -> None:
        """Forgets content that nobody holds. Requests that counted on it find it gone when they look again, as if it
        had been evicted."""
        if kv:
            self.kv.forget_unheld()
        if images:
            self.features.forget_unused()

    # ---- starting, giving way and moving on

    def recheck(self, state: RequestState, now: float) -> None:
        """Looks again for the KV that a waiting request counts on; images that it no longer covers need features."""
        waited = state.waits_for_images
        self.images.recheck(state, self._cached_tokens(state), now)
        if state.waits_for_images and not waited:
            self.timelines[state.request.id].waits_for("images", now)
        self.place(state)

    def start(self, state: RequestState, num_found: int, now: float) -> None:
        """The request gets its first blocks: the `num_found` that the cache has, and behind them what it grows."""
        waited = state.waits_for_images
        self.seats.take(state.request.id)
        self.prefixes.adopt(state, num_found)
        if state.arrival is not None:
            state.arrival.num_copied = num_found
        if num_found:
            self.timelines[state.request.id].reused(now, state.num_computed)
        if not state.num_preemptions:
            state.cached_tokens = state.num_computed
        state.starts_seen, state.seated = None, False
        oldest = [queue.oldest_but(state) for queue in (self.waiting, self.encoding, self.incoming)]
        self._started.started(state.order, min((other.order for other in oldest if other is not None), default=None))
        self.images.consume(state, now)
        if waited and not state.waits_for_images:
            self.images.settled(state, now)

    def overtaken(self, state: RequestState) -> int:
        """How many younger requests have started since this one began to wait for its start."""
        now = self._started.younger_than(state.order)
        if state.starts_seen is None:  # it waits for images, and could start for the first time
            state.starts_seen = now
        return now - state.starts_seen

    def preempt(self, state: RequestState, now: float) -> bool:
        """Frees the KV of a running request. It keeps its age, its tokens and the features it has not consumed. False
        while KV is being copied into its blocks: then it gives way as soon as that has ended.

        What has got its KV from elsewhere and may not compute it here has departed with that.
        """
        request_id = state.request.id
        if state.arrival is not None and state.arrival.copies is not None:
            state.arrival.gives_way = True
            return False
        computes = state.num_scheduled or self.decodes.num_in_flight(self.seats.of(request_id))
        assert not computes, "a request is preempted while a step computes it"
        self._give_back(state)
        state.num_preemptions += 1
        self.num_preemptions += 1
        self.log.preempted(request_id, now)
        self.timelines[request_id].preempted()
        if state.arrival is None and Role.P not in state.part:
            self.end(state, Ending(Departure.RETURNED))
            self.departed.append(state)
        elif state.arrival is None and state.trusts_cache:
            self.images.recheck(state, self._cached_tokens(state), now)
        self.place(state)
        return True

    def put_back(self, state: RequestState) -> None:
        """What was pulled of a request's KV is worth nothing; it waits as if it had never started. No copy is in
        flight."""
        assert state.arrival is not None and state.arrival.copies is None, "blocks are freed while they are written"
        self._give_back(state)
        self.place(state)

    def _give_back(self, state: RequestState) -> None:
        request_id = state.request.id
        self._leave_decodes(state)
        self.prefixes.settle()
        self.withdraw_kv(state)
        self.kv.free(request_id)
        self.seats.free(request_id)
        state.decodes = False
        state.num_prefilled = state.num_named = 0
        if state.arrival is not None:
            state.arrival.num_copied, state.arrival.gives_way = 0, False
        self.images.lose_kv(state)

    # ---- KV that goes to other instances, or comes from them

    def offer_kv(self, state: RequestState, now: float, end: KvEnd | None = None) -> None:
        """Full blocks that are new since the last time, and with `end` the last one too."""
        table = self.kv.tables[state.request.id]
        stop = state.num_prefilled // self.kv.block_size if end is None else self.kv.blocks_for(state.num_prefilled)
        if end is None and stop <= state.num_offered:
            return
        block_ids = tuple(table.block_ids[state.num_offered : stop].tolist())
        self.outside.tell(KvEvent(state.request.id, block_ids, end))
        state.num_offered = stop
        if end is not None:
            state.hands_over = True
            state.offered_s[-1] = now
            self.place(state)

    def withdraw_kv(self, state: RequestState) -> None:
        if state.num_offered:
            self.outside.tell(KvGoneEvent(state.request.id))
        state.num_offered, state.hands_over = 0, False

    def hand_over(self, state: RequestState, now: float) -> None:
        """A decode goes on elsewhere. A row of it that is in flight is passed over when it comes back."""
        self._leave_decodes(state)
        state.num_prefilled, state.decodes = state.num_computed, False
        state.part &= ~Role.D
        self.offer_kv(state, now, self.end_of_kv(state, tuple(state.generated[:-1])))

    def end_of_kv(self, state: RequestState, earlier: tuple[int, ...] | None = None) -> KvEnd:
        timeline = self.timelines[state.request.id]
        times = timeline.last_token_s, timeline.first_token_s, timeline.late_gaps
        return KvEnd(state.num_prefilled, state.generated[-1], *times, earlier)

    def arrived(self, state: RequestState, end: KvEnd, now: float) -> None:
        """All KV of the request is here; it goes on as a prefill of one token. What does not fit the tokens that are
        known of it is of no use, and the request has departed."""
        state.arrival = None
        if end.earlier_token_ids is not None:
            state.generated[:] = end.earlier_token_ids
            state.borrowed = True
        state.generated.append(end.token_id)
        if end.num_tokens != state.num_tokens - 1:
            self.end(state, Ending(Departure.RETURNED))
            return
        state.num_prefilled = end.num_tokens
        timeline = self.timelines[state.request.id]
        timeline.first_token_s, timeline.last_token_s = end.first_token_s, end.token_s
        timeline.last_s, timeline.late_gaps = now, end.late_gaps
        self.images.consume(state, now)
        self.prefixes.owe(state)
        self.place(state)

    # ---- questions

    @property
    def only_borrowed(self) -> bool:
        """There are decodes that other instances have lent, and nothing else to compute."""
        running = [state for queue in (self.prefilling, self.decoding) for state in queue if state.arrival is None]
        return bool(running) and all(state.borrowed for state in running) and not self.waiting

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
        if state.is_job:
            return self.jobs
        if state.request.id in self.kv.tables:
            if state.hands_over:
                return self.handing_over
            decodes = Role.D in state.part and state.is_decode and state.seated and not state.num_scheduled
            return self.decoding if decodes else self.prefilling
        if state.arrival is not None:
            return self.arriving if state.arrival.offer is None else self.incoming
        return self.encoding if state.waits_for_images else self.waiting


def _index(index: UrgencyQueue, state: RequestState, *, belongs: bool) -> None:
    if not belongs:
        index.discard(state)
    elif state.request.id not in index:
        index.push(state)
