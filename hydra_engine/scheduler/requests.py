"""The requests of one instance, the queue of each, and its blocks.

Carries out what the planners and the scheduler decide (add, start, preempt, end, forget) and keeps queues, states,
slots, decodes and caches consistent. Images are in `images.py`. Decides nothing and knows no budget.
"""

from __future__ import annotations

import heapq
import math

from hydra_engine.cache.blocks import CacheManager, SlotPool
from hydra_engine.cache.features import FeatureCache
from hydra_engine.cache.ledger import Ledger
from hydra_engine.cache.prefix import PrefixCache
from hydra_engine.cache.snapshots import StateSnapshots
from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import FeatureKey, RequestId
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.request import Request
from hydra_engine.core.state import Ending, ImageProgress, RequestPhase, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.checkpoints import Checkpoints
from hydra_engine.scheduler.decodes import DecodeTable
from hydra_engine.scheduler.hooks import Connector, StepObserver
from hydra_engine.scheduler.images import ImageTracker
from hydra_engine.scheduler.queues import ArrivalQueue, StartedOrders, UrgencyQueue
from hydra_engine.scheduler.timeline import Timeline


class RequestTable:
    """The requests of one instance. A live one is in the queue of its phase (`core/state.py`), an ended one in none:

                       waits for images    has all it needs    only its latest token has no KV
        no KV blocks   encoding            waiting             -
        KV blocks      prefilling          prefilling          decoding

    It is in `prefilling` also while its last chunk is in flight, and if it does not decode here. A held request is in
    `held`, one that the connector parks in `parked`. `unencoded` is an index beside the queues: requests with an image
    that waits for an encode here. A request holds a sequence slot exactly while it holds KV blocks. `decodes` has the
    arrays of the requests that decode, and of those whose last chunk is in flight.

    Reuse: the prefix lookup runs when a request with images arrives or is preempted, and images inside the cached KV
    become CACHED: they are not encoded. The lookup holds no blocks, so it takes none from other requests and cannot
    deadlock; but the blocks may be evicted before the request is considered for its start. The lookup is repeated then,
    and an image that is no longer covered needs features after all (`repeat_prefix_lookup`). This happens at most once
    between two starts of a request, since only an arrival or a preemption makes an image CACHED; afterwards the rules
    of age in `policy.py` bring the request to its end like any other. Features that several images share are as old as
    the oldest of these images; sharing them with younger requests does not change which requests may evict them.
    """

    def __init__(
        self,
        kv: CacheManager[RequestId],
        images: CacheManager[FeatureKey],
        instance: str,
        config: SchedulerConfig,
        *,
        reuse: bool,
        num_snapshots: int | None = None,
        observer: StepObserver | None = None,
        connector: Connector | None = None,
    ) -> None:
        """`instance`: its name, for timelines. `reuse`: prefix and image caching. `num_snapshots`: of recurrent
        states, None if the model keeps none. KV is of no use without the state at its end, so with 0 only features are
        reused."""
        self.kv = kv
        self.seq_slots = SlotPool(config.max_running_requests)
        self.decodes = DecodeTable(config.max_running_requests, kv.block_size)
        self.features = FeatureCache(images, keeps=reuse)
        self.has_states = has_states = num_snapshots is not None
        has_snapshots = reuse and bool(num_snapshots)
        snapshots = StateSnapshots(kv, num_snapshots or 0, 2 * config.max_running_requests) if has_snapshots else None
        self.checkpoints = None if snapshots is None else Checkpoints(kv, snapshots)
        enabled = reuse and has_states == has_snapshots
        self.prefixes = PrefixCache(kv, enabled=enabled, shares_features=reuse, snapshots=snapshots)
        self.ledger = Ledger(kv, self.features, self.seq_slots, has_states=has_states, snapshots=snapshots)
        self.connector = connector if connector is not None else Connector()
        self.observer = observer if observer is not None else StepObserver()
        self.states: dict[RequestId, RequestState] = {}
        self.timelines: dict[RequestId, Timeline] = {}
        self.encoding, self.waiting = UrgencyQueue(), UrgencyQueue()
        self.prefilling, self.decoding = ArrivalQueue(), ArrivalQueue()
        self.held, self.parked = ArrivalQueue(), ArrivalQueue()
        self.queues: dict[RequestPhase, ArrivalQueue] = {
            RequestPhase.HELD: self.held,
            RequestPhase.ENCODING: self.encoding,
            RequestPhase.WAITING: self.waiting,
            RequestPhase.PREFILLING: self.prefilling,
            RequestPhase.DECODING: self.decoding,
            RequestPhase.PARKED: self.parked,
        }
        self.unencoded = UrgencyQueue(lambda state: policy.encode_urgency(state, config.encode_policy))
        self.startable = [self.waiting, self.encoding]  # queues in which younger starts bypass a request
        self.images = ImageTracker(self.features, self.states, self.timelines, self.connector, self.requeue)
        self.num_preemptions = 0
        self._instance = instance
        self._scheduling_policy = config.scheduling_policy
        self._max_bypass = config.max_bypass
        self._next_order = 0
        self._started = StartedOrders()
        self.ttft_deadlines: list[tuple[float, RequestId]] = []  # heap of (deadline of the first token, id)

    # ---- the life of a request

    def add(
        self,
        request: Request,
        now: float,
        *,
        stages: Role,
        external_images: frozenset[int],
        external_kv: bool,
        held_for: str = "",
    ) -> RequestState:
        """Adds an accepted request and its timeline: looks up what of it is cached, calls `Connector.on_arrival` and
        queues it. Parameters as in `StageScheduler.add`. Asserts that the id is not in use."""
        assert request.id not in self.states, f"request id {request.id} is in use"
        state = RequestState.new(
            request, self._next_order, now, stages=stages, external_images=external_images, external_kv=external_kv
        )
        state.image_keys, state.held = self.prefixes.feature_keys(request), bool(held_for)
        self._next_order += 1
        self.states[request.id] = state
        if stages != EPD or external_images or external_kv:
            self.connector.on_arrival(state)
        num_cached = state.num_tokens if state.held else self._rank(state)  # held: images are looked up at release
        self.images.arrive(state, num_cached, now)
        tpot_limit_s = math.inf if request.slo.tpot_s is None else request.slo.tpot_s
        timeline = Timeline(
            self._instance, now, state.waits_for_images, prefills=not state.is_encode_job, tpot_limit_s=tpot_limit_s
        )
        self.timelines[request.id] = timeline
        if (before := request.resumed) is not None:
            timeline.first_token_s, timeline.last_token_s = before.first_token_s, before.last_token_s
            timeline.late_gaps = before.late_gaps
            self.observer.on_away(request.id, before.blame, now)
        if external_kv or held_for:
            timeline.cause = "transfer" if external_kv else held_for
        if not any(p <= ImageProgress.ENCODING for i, p in enumerate(state.images) if i not in state.external_images):
            timeline.end_encode_wait(now)
        self.requeue(state)
        return state

    def release_held(self, state: RequestState, now: float) -> None:
        """Lets a held request start as if it had arrived now, but with its age and its deadline unchanged."""
        state.held = False
        num_cached = self._rank(state)
        if not state.external_kv:
            self.images.recheck(state, num_cached, now)
            self.timelines[state.request.id].start_wait("images" if state.waits_for_images else "queue", now)
        self.requeue(state)

    def _rank(self, state: RequestState) -> int:
        """Sets the urgency of a request that may start from now on and, if it is prefilled here, records the deadline
        of its first token. Returns the number of its leading tokens with cached KV; 0, without a lookup, for an encode
        job, for KV that the connector loads, and without images unless the policy is `sjf`."""
        by_work = self._scheduling_policy == "sjf"
        looks = (bool(state.request.images) or by_work) and not state.is_encode_job and not state.external_kv
        num_cached = self._cached_tokens(state) if looks else 0
        num_left = 0 if state.external_kv else state.num_tokens - num_cached
        state.urgency = policy.start_urgency(state, self._scheduling_policy, num_left)
        if state.due_s < math.inf and Role.P in state.stages and not state.external_kv:
            heapq.heappush(self.ttft_deadlines, (state.due_s, state.request.id))
        return num_cached

    def requeue(self, state: RequestState) -> None:
        """Brings a request's phase, its queue (none once it has ended), its place in `unencoded` and its count of
        bypasses up to date with its state and its blocks; adds it to the table of decodes if it decodes; calls
        `Connector.on_requeue`. The caller of anything that may alter the phase calls it afterwards."""
        before, phase = state.phase, self.phase_of(state)
        if phase is not before:
            self.queues[before].discard(state)
            state.phase = phase
        live = phase is not RequestPhase.ENDED
        if live and state not in (queue := self.queues[phase]):
            queue.push(state)
            if phase is RequestPhase.ENCODING:
                state.bypasses_at_wait = None  # bypasses are not counted while it waits for images
            elif phase is RequestPhase.WAITING:
                self.count_bypasses(state)
            elif phase is RequestPhase.DECODING:
                slot, table = self.seq_slots.slot_of[state.request.id], self.kv.tables[state.request.id]
                if not self.decodes.is_member(slot):
                    self.decodes.join(state, slot, table, self.timelines[state.request.id], unread=0)
        if state.images:
            self.unencoded.update(state, belongs=live and state.needs_encode)
        if state.connector_state is not None:
            self.connector.on_requeue(state)

    def count_bypasses(self, state: RequestState) -> None:
        """Begins to count the younger requests that start before this one, unless they are counted already."""
        if state.bypasses_at_wait is None:
            state.bypasses_at_wait = self._started.younger_than(state.order)

    def phase_of(self, state: RequestState) -> RequestPhase:
        """The phase that follows from the state and the blocks of a request."""
        if state.ending is not None:
            return RequestPhase.ENDED
        if state.connector_state is not None and self.connector.parks(state):
            return RequestPhase.PARKED
        if state.request.id in self.kv.tables:
            decodes = Role.D in state.stages and state.is_decode and state.slot_known and not state.num_scheduled
            return RequestPhase.DECODING if decodes else RequestPhase.PREFILLING
        if state.held:
            return RequestPhase.HELD
        return RequestPhase.ENCODING if state.waits_for_images else RequestPhase.WAITING

    def end(self, state: RequestState, ending: Ending) -> None:
        """Ends the request: it makes no more progress and is in no new plan; its blocks, its slot and its features stay
        allocated until `forget`. Calls `Connector.on_end` before its `ending` is set."""
        self.leave_decodes(state)
        state.num_prefilled = state.num_computed
        self.images.end(state)
        if state.connector_state is not None:
            self.connector.on_end(state, ending)
        state.ending = ending
        self.requeue(state)

    def in_use(self, state: RequestState) -> bool:
        """True while a plan in flight, or a job of the connector, names the request."""
        seq_slot = self.seq_slots.slot_of.get(state.request.id)
        return state.plans_in_flight > 0 or (seq_slot is not None and self.decodes.num_in_flight(seq_slot) > 0)

    def forget(self, state: RequestState) -> None:
        """Removes an ended request and frees its blocks, features and slot. Asserts that no plan in flight names it."""
        assert not self.in_use(state) and state.ending is not None, "a request is forgotten while it is in use"
        request_id = state.request.id
        self.prefixes.publish()
        if self.checkpoints is not None:
            self.checkpoints.free(state)
        self.kv.free(request_id)
        self.seq_slots.free(request_id)
        self.images.drop(state)
        del self.states[request_id], self.timelines[request_id]

    # ---- start and preemption

    def repeat_prefix_lookup(self, state: RequestState, now: float) -> None:
        """Repeats the prefix lookup of a request that waits for its start; images no longer covered by cached KV need
        features, so that it may wait for images again."""
        waited = state.waits_for_images
        self.images.recheck(state, self._cached_tokens(state), now)
        if state.waits_for_images and not waited:
            self.timelines[state.request.id].start_wait("images", now)
        self.requeue(state)

    def start(self, state: RequestState, num_found: int, now: float) -> None:
        """Starts a request: allocates its slot, begins its block table with the `num_found` cached blocks that a lookup
        has just found, makes images inside them CONSUMED, releases their features, counts a bypass of older ones that
        wait, and calls `Connector.on_start`. The caller then allocates the blocks behind and calls `requeue`."""
        waited = bool(state.images) and state.waits_for_images
        self.seq_slots.allocate(state.request.id)
        state.num_published, state.num_prefilled = num_found, num_found * self.kv.block_size
        if num_found:
            hashes, capacity = state.block_hashes[:num_found], state.request.max_total_tokens
            self.kv.adopt(state.request.id, hashes, capacity=capacity, extra_blocks=state.num_state_blocks)
            self.timelines[state.request.id].add_cache_hit(now, state.num_computed)
        if self.checkpoints is not None:
            self.checkpoints.start(state, num_found)
        if not state.num_preemptions:
            state.cached_tokens = state.num_computed
        state.bypasses_at_wait, state.slot_known = None, False
        others = (next((other.order for other in queue if other is not state), None) for queue in self.startable)
        self._started.add(state.order, min((order for order in others if order is not None), default=None))
        if state.images:
            self.images.consume(state, now)
        if waited and not state.waits_for_images:
            self.images.end_image_wait(state, now)
        if state.connector_state is not None:
            self.connector.on_start(state)

    def is_overdue(self, state: RequestState) -> bool:
        """True if at least `max_bypass` younger requests have started since this one began to wait for its start. While
        it waits for images, the count begins with the first call."""
        started = self._started.younger_than(state.order)
        if state.bypasses_at_wait is None:  # it waits for images, and is considered for the first time
            state.bypasses_at_wait = started
        return started - state.bypasses_at_wait >= self._max_bypass

    def preempt(self, state: RequestState, now: float) -> bool:
        """Frees the KV of a running request, which keeps its age, its tokens and its unconsumed features; it waits
        again, unless the connector ends it. False, without preempting it, if the connector needs its blocks for now
        (`Connector.may_preempt`). Asserts that no step in flight computes it."""
        request_id = state.request.id
        if state.connector_state is not None and not self.connector.may_preempt(state):
            return False
        computes = state.num_scheduled or self.decodes.num_in_flight(self.seq_slots.slot_of[request_id])
        assert not computes, "a request is preempted while a step computes it"
        self.free_blocks(state)
        state.num_preemptions += 1
        state.preempted = True
        self.num_preemptions += 1
        self.observer.on_away(request_id, "preemption", now)
        self.timelines[request_id].start_preemption()
        if state.connector_state is not None:
            self.connector.on_preempted(state, now)
        if state.ending is None and state.relies_on_prefix_hit:
            self.images.recheck(state, self._cached_tokens(state), now)
            self.requeue(state)
        return True

    def free_blocks(self, state: RequestState) -> None:
        """Frees the KV blocks and slot of a request that has not ended, which keeps its tokens and waits again.
        Computed blocks are published and `Connector.on_blocks_freed` is called first; CONSUMED images become CACHED."""
        request_id = state.request.id
        self.leave_decodes(state)
        self.prefixes.publish()
        if state.connector_state is not None:
            self.connector.on_blocks_freed(state)
        if self.checkpoints is not None:
            self.checkpoints.free(state)
        self.kv.free(request_id)
        self.seq_slots.free(request_id)
        state.num_prefilled = state.num_published = 0
        if Role.D in state.stages and not state.external_kv:
            state.num_state_blocks = 0  # its state came with KV that is gone now
        self.images.on_kv_freed(state)
        self.requeue(state)

    def defer(self, state: RequestState) -> None:
        """Leaves the only token of a deferred chunk to a later step, which computes it as a decode row if the request
        is in the table of decodes, else as a chunk."""
        seq_slot = self.seq_slots.slot_of[state.request.id]
        if self.decodes.is_member(seq_slot):
            self.decodes.defer_chunk(seq_slot)
        self.requeue(state)

    def leave_decodes(self, state: RequestState) -> None:
        """Removes the request from the table of decodes, if it is there; results of its rows in flight are ignored."""
        slot = self.seq_slots.slot_of.get(state.request.id)
        if slot is not None:
            self.decodes.leave(slot)

    # ---- questions

    def youngest_running(self) -> RequestState | None:
        """The youngest request in `prefilling` and `decoding`; None if both are empty."""
        running = [state for queue in (self.prefilling, self.decoding) if (state := queue.youngest()) is not None]
        return max(running, key=lambda state: state.order, default=None)

    def next_due(self, now: float) -> RequestState | None:
        """The request, prefilled here and not held, whose first token is still to come and has the earliest deadline
        after `now`; None if there is none. Forgets the deadlines that have passed."""
        while self.ttft_deadlines:
            due_s, request_id = self.ttft_deadlines[0]
            state = self.states.get(request_id)
            if due_s > now and state is not None and state.ending is None and not state.generated:
                return state
            heapq.heappop(self.ttft_deadlines)
        return None

    def _cached_tokens(self, state: RequestState) -> int:
        """Number of leading tokens of the request whose KV is cached, from a prefix lookup now."""
        return len(self.prefixes.find(state)) * self.kv.block_size
