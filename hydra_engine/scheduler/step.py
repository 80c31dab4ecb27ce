"""Fills a language step: every running decode, then chunks of running prefills by age, then waiting requests.

Allocates blocks, preempts and marks what is scheduled; the scheduler handles results. Text never waits for images: a
request that waits for an encode is skipped. The rules of order and preemption are in `policy.py`, the arrays of decodes
in `decodes.py`.

A request starts if blocks are free for its whole prompt; it gets a sequence slot, the blocks of its first chunk and the
rest of the step's budget. Nothing is marked as scheduled before the step is complete, since planning may be given up.
Requests start by urgency; a request that was bypassed too often is never bypassed again. The oldest request may preempt
younger prefills that are stalled even if it is not next by urgency: this guarantees progress, see `policy.py`. The cost
does not grow with the number of waiting requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter

import numpy as np

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import StepId
from hydra_engine.core.instances import Role
from hydra_engine.core.plans import ChunkRow, ImageSlice, LanguageLoad, LanguagePlan
from hydra_engine.core.state import Order, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.budget import Budgets, PendingWork, StepBudget
from hydra_engine.scheduler.decodes import ReadyDecodes
from hydra_engine.scheduler.requests import RequestTable

MAX_SEEN = 16  # requests of a queue that `pending_work` counts


class NeedsResult(Exception):
    """Raised when planning ahead would have to preempt a request: the step in flight must end first."""


@dataclass(slots=True, eq=False)
class StepBuilder:
    """A language step while it is filled. `ahead`: the step before it is in flight, so no request is preempted."""

    requests: RequestTable
    now: float
    ahead: bool
    chunks: list[tuple[RequestState, int]] = field(default_factory=list)  # (request, tokens)
    tokens_left: int = 0  # of the budget

    def next_chunk_tokens(self, state: RequestState) -> int:
        """Number of tokens of a prefill's next chunk, 0 if it is stalled or no budget is left: at most the budget left,
        unless an image that must not be split needs more; the connector may ask for fewer. A request that has generated
        a token, and misses only that token's KV, counts as a decode and gets its token without budget: all decodes and
        these fit a step, since there are no more slots than a step has tokens."""
        start, end = state.num_planned, state.num_computable
        if state.is_one_token_short:
            return 1
        if state.connector_state is not None:
            end = min(end, self.requests.connector.chunk_end(state))
        end = min(end, start + self.tokens_left)
        if self.requests.checkpoints is not None:
            end = self.requests.checkpoints.chunk_end(state, start, end)
        return (policy.chunk_end(start, end, state.request.images) if state.images else end) - start

    def __contains__(self, state: RequestState) -> bool:
        return any(other is state for other, _ in self.chunks)

    def add(self, state: RequestState, chunk: int) -> None:
        """Adds a chunk of this many tokens, at the cost of the budget left; nothing for 0."""
        if chunk:
            self.chunks.append((state, chunk))
            self.tokens_left = max(0, self.tokens_left - chunk)

    def preempt(self, victim: RequestState) -> bool:
        """Preempts a request; False if the connector needs its blocks for now. Raises NeedsResult if `ahead`."""
        if self.ahead:
            raise NeedsResult
        return self.requests.preempt(victim, self.now)


class BlockSearch:
    """The search for a slot and blocks for a request that is to start. It leaves a free block to every running decode,
    without which the start would only cause a preemption."""

    def __init__(self, requests: RequestTable, config: SchedulerConfig) -> None:
        self._requests = requests
        self._kv = requests.kv
        # Requests with KV blocks: at most the tokens of a step, so that a running prefill always gets one.
        self._max_seqs = min(config.max_running_requests, config.max_step_tokens)

    @property
    def is_full(self) -> bool:
        """True if the maximum of requests hold KV blocks, so that none can start."""
        return len(self._kv.tables) >= self._max_seqs

    def find_blocks(self, state: RequestState, num_tokens: int, preempt_next: Callable[[], bool]) -> list[int] | None:
        """Returns the request's cached blocks, possibly [], if a slot and enough blocks for `num_tokens` positions, and
        for its state, are free, else None. Allocates nothing. While they are not free it calls `preempt_next`, which
        preempts a request, or returns False if none may be preempted; earlier victims stay preempted."""
        pool, reserve = self._kv.pool, len(self._requests.decoding)
        cached: list[int] | None = None
        while True:
            if not self.is_full:
                if cached is None:
                    cached = self._requests.prefixes.find(state)
                num_shared = sum(pool.refcount(block) > 0 for block in cached)  # the other cached blocks count as free
                num_blocks = self._kv.blocks_for(num_tokens) + state.num_state_blocks
                if pool.num_free - reserve >= num_blocks - num_shared:
                    return cached
            if not preempt_next():
                return None


class PrefillStarter(BlockSearch):
    """Starts waiting requests in a language step."""

    def __init__(self, requests: RequestTable, config: SchedulerConfig) -> None:
        super().__init__(requests, config)
        self._early_limit = self._max_seqs // 2  # starts before all images are encoded; the other half is for others

    def start(self, step: StepBuilder, blocked: RequestState | None) -> None:
        """Starts waiting requests by urgency while budget, slots and blocks last, up to the first one younger than
        `blocked`: the running prefill for whose chunk too few blocks are free, None without one.

        A request without free blocks is skipped, at most `policy.MAX_SKIPPED` in a step, until `max_bypass` younger
        ones have started before it; then no other one starts, and freed blocks are kept for it. Last comes the oldest
        request that may preempt, if it is older than `blocked` and was not tried yet.
        """
        requests = self._requests
        if not requests.waiting and not requests.encoding:
            return
        if not requests.prefilling and (self.is_full or self._kv.pool.num_free <= len(requests.decoding)):
            if first := next(requests.waiting.by_urgency(), None):
                requests.timelines[first.request.id].cause = "kv blocks"
            return  # a start takes at least one block, and there is no victim
        seen: set[Order] = set()
        skipped: list[RequestState] = []
        num_early = sum(state.waits_for_images for state in requests.prefilling if state.images)
        for state in self._candidates(seen):
            if not step.tokens_left or (blocked is not None and state.order > blocked.order):
                requests.timelines[state.request.id].cause = "budget" if not step.tokens_left else "kv blocks"
                break
            seen.add(state.order)
            started = self._try_start(state, step, num_early)
            if started is None:
                continue
            if started:
                num_early += bool(state.images) and state.waits_for_images
            else:
                skipped.append(state)
                if len(skipped) >= policy.MAX_SKIPPED or self.is_full:
                    break
            if any(map(requests.is_overdue, skipped)):
                break
        encoding, oldest = requests.encoding.oldest(), requests.waiting.oldest()
        if encoding is not None and policy.may_preempt_stalled(encoding):
            oldest = encoding if oldest is None or encoding.order < oldest.order else oldest
        if oldest is None or oldest.order in seen or not step.tokens_left:
            return
        if blocked is None or oldest.order < blocked.order:  # it may preempt: this is what progress rests on
            self._try_start(oldest, step, num_early=0)

    def _try_start(self, state: RequestState, step: StepBuilder, num_early: int) -> bool | None:
        """Starts a request if it can, and adds its first chunk to the step: it adopts its cached blocks and gets blocks
        for the chunk, or `policy.kv_tokens_to_admit` if it was preempted or does not decode here. True: started. False:
        too few free slots or blocks. None: it waits for images, and may not start early or, without the right to
        preempt, finds too few. A request that was not preempted may start early while fewer than `_early_limit` others
        did and still wait for images (`num_early`). One that waits for no images, and the oldest that does if
        `may_preempt_stalled`, preempt younger stalled prefills. Sets the cause of its wait if it found too few.

        Cached blocks may end at an image without features: no chunk yet, but blocks of features before it are free.
        """
        requests, kv = self._requests, self._kv
        if state.images and state.relies_on_prefix_hit:
            requests.repeat_prefix_lookup(state, step.now)
        waits = bool(state.images) and state.waits_for_images
        may_preempt = not waits or (state is requests.encoding.oldest() and policy.may_preempt_stalled(state))
        may_start_early = may_preempt or (num_early < self._early_limit and not state.preempted)
        if waits and not (may_start_early and state.num_computable):
            return None

        def preempt_next() -> bool:
            victim = policy.youngest_stalled(requests.prefilling) if may_preempt else None
            return victim is not None and victim.order > state.order and step.preempt(victim)

        num_tokens = policy.kv_tokens_to_admit(state)
        cached = self.find_blocks(state, num_tokens, preempt_next)
        if cached is None:
            requests.timelines[state.request.id].cause = "kv blocks" if may_preempt else "images"
            return False if may_preempt else None
        requests.start(state, len(cached), step.now)
        chunk = step.next_chunk_tokens(state)
        # A request that does not decode here keeps its blocks after its prefill until the connector has sent them, and
        # the order of age cannot take these back. So it must not wait for blocks of others: it gets all of them now.
        if not state.preempted and Role.D in state.stages:
            num_tokens = state.num_computed + chunk
        beside, capacity = state.num_state_blocks, state.request.max_total_tokens
        granted = kv.grow(state.request.id, num_tokens, capacity=capacity, extra_blocks=beside)
        assert granted, "blocks were found and are gone"
        requests.requeue(state)
        step.add(state, chunk)
        return True

    def _candidates(self, seen: set[Order]) -> Iterator[RequestState]:
        """Yields the requests that may start, the most urgent first: all that wait for no images, and of the others the
        first `_early_limit` (at most `MAX_SKIPPED`) and the oldest. Leaves out `seen`, to which the caller adds each.

        Overdue ones (`is_overdue`, asked anew each time) come before all: the oldest that waits for images, if it may
        preempt, then any of the `MAX_SKIPPED` oldest that wait for none.
        """
        waiting, encoding = self._requests.waiting, self._requests.encoding
        early = islice(encoding.by_urgency(), min(self._early_limit, policy.MAX_SKIPPED))
        oldest_encoding = [] if (oldest := encoding.oldest()) is None else [oldest]
        ordered = heapq.merge(waiting.by_urgency(), early, oldest_encoding, key=attrgetter("urgency"))
        while True:
            oldest = encoding.oldest()
            first = [oldest] if oldest is not None and policy.may_preempt_stalled(oldest) else []
            unseen = (s for s in chain(first, islice(waiting, policy.MAX_SKIPPED)) if s.order not in seen)
            state = next(filter(self._requests.is_overdue, unseen), None)
            if state is None:
                state = next((state for state in ordered if state.order not in seen), None)
            if state is None:
                return
            yield state


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """A plan, and what the budgets and the observer receive with its result."""

    plan: LanguagePlan
    load: LanguageLoad
    budget: StepBudget


class LanguagePlanner:
    """The planner of language steps.

    A step planned `ahead`, while the step before it runs, preempts no request; where that would be needed, planning is
    given up. Blocks granted and requests started until then stay: the next plan would have done the same.
    """

    def __init__(self, requests: RequestTable, budgets: Budgets, config: SchedulerConfig) -> None:
        self._requests = requests
        self._kv = requests.kv
        self._budgets = budgets
        self._starter = PrefillStarter(requests, config)

    def plan(self, step_id: StepId, now: float, *, ahead: bool, patches_in_flight: int) -> PlannedStep | None:
        """The next step, with blocks allocated and rows marked as scheduled. None if nothing can run or, `ahead`, if
        planning was given up. `patches_in_flight`: patches of the vision plans in flight."""
        step = StepBuilder(self._requests, now, ahead=ahead)
        try:
            ready = self._ready_decodes(step)
            can_start = not self._starter.is_full
            pending = pending_work(self._requests, ready, patches_in_flight, can_start=can_start, now=now)
            if self._requests.ttft_deadlines or self._requests.decodes.times.num_limited:
                due = self._requests.next_due(now)
                pending = self._budgets.with_limits(pending, self._requests, ready, due)
            budget = self._budgets.step_budget(pending)
            step.tokens_left = budget.tokens if len(ready.starts) else max(1, budget.tokens)
            self._requests.connector.before_language(now, step.preempt)
            blocked = self._continue_prefills(step)
            self._starter.start(step, blocked)
        except NeedsResult:
            return None
        return self._build_plan(step_id, ready, step, budget)

    def _build_plan(
        self, step_id: StepId, ready: ReadyDecodes, step: StepBuilder, budget: StepBudget
    ) -> PlannedStep | None:
        """Builds the plan and marks its rows as scheduled; None if it has no rows."""
        if not len(ready.starts) and not step.chunks:
            return None
        decodes = self._requests.decodes.take_rows(ready, ahead=step.ahead)
        rows = tuple([self._chunk_row(state, chunk) for state, chunk in step.chunks])
        checkpoints = self._requests.checkpoints
        state_slots = None if checkpoints is None else checkpoints.decode_slots(decodes)
        plan = LanguagePlan(step_id, decodes, rows, budget.vision_s, budget.partition, state_slots)
        return PlannedStep(plan, plan.load, budget)

    # ---- decodes

    def _ready_decodes(self, step: StepBuilder) -> ReadyDecodes:
        """The decodes of the step: those that may compute a row and have a block for it, allocated here if needed.
        While too few are free, the youngest running request is preempted, possibly the decode itself. A decode waits
        instead if it runs alone (a request about to end will free blocks) or the connector needs the victim's."""
        table = self._requests.decodes
        ready = table.ready()
        missing = table.without_next_block(ready)
        if not len(missing):
            return ready
        states = [table.states[index] for index in missing.tolist()]
        if blocks := self._kv.extend([state.request.id for state in states]):
            table.append_blocks(missing, blocks)
            return ready
        self._grow_by_age(states, step)
        ready = table.ready()
        return table.exclude(ready, table.without_next_block(ready))

    def _grow_by_age(self, states: list[RequestState], step: StepBuilder) -> None:
        """Allocates a block for each of these decodes, the oldest first, preempting the youngest running request as
        long as none is free. Then one that is preempted itself, runs alone, or may not preempt now gets none."""
        requests, table = self._requests, self._requests.decodes
        for state in sorted(states, key=lambda state: state.order):
            request_id = state.request.id
            while request_id in self._kv.tables:
                if blocks := self._kv.extend([request_id]):
                    table.append_blocks(np.array([table.index_of(requests.seq_slots.slot_of[request_id])]), blocks)
                    break
                victim = requests.youngest_running()
                alone = len(requests.prefilling) + len(requests.decoding) == 1
                if victim is None or (victim is state and alone) or not step.preempt(victim):
                    break

    # ---- running prefills

    def _continue_prefills(self, step: StepBuilder) -> RequestState | None:
        """Adds the chunks of running prefills: first those that count as decodes (`is_one_token_short`), then the
        others, each by age; preempts younger prefills for their blocks. Sets the cause of the wait of prefills without
        a chunk. Stops at the first one for whose chunk too few blocks are free, and returns it; None if there is none.

        A stalled prefill reserves nothing and delays no other.
        """
        for state in sorted(self._requests.prefilling, key=lambda state: not state.is_one_token_short):
            if state not in self._requests.prefilling:
                continue  # was preempted just now for an older one
            if state.num_planned == state.num_tokens:
                continue  # its last chunk is in flight
            timeline = self._requests.timelines[state.request.id]
            if policy.is_stalled(state):
                timeline.cause = "transfer" if state.external_kv else "images"
            elif not (chunk := step.next_chunk_tokens(state)):
                timeline.cause = "budget"
            elif self._grow_for_chunk(state, state.num_planned + chunk, step):
                step.add(state, chunk)
            else:
                timeline.cause = "kv blocks"
                return state  # younger prefills have been preempted already
        return None

    def _grow_for_chunk(self, state: RequestState, num_tokens: int, step: StepBuilder) -> bool:
        """Allocates blocks for positions [0, num_tokens), preempting younger prefills if needed, the youngest first;
        False if that is not enough, or if the connector needs the blocks of the youngest for now.

        Decodes are not preempted, nor requests with a chunk in this step already, which count as decodes: their blocks
        become free when they end or are preempted for their own next block.
        """
        while not self._kv.grow(state.request.id, num_tokens, capacity=state.request.max_total_tokens):
            younger = [other for other in self._requests.prefilling if other.order > state.order and other not in step]
            if not younger or not step.preempt(younger[-1]):
                return False
        return True

    # ---- rows

    def _chunk_row(self, state: RequestState, chunk: int) -> ChunkRow:
        """The row of a chunk; marks its tokens as scheduled and, if it is the last chunk and the request decodes here,
        adds the request to the table of decodes."""
        start, end = state.num_planned, state.num_planned + chunk
        request_id, checkpoints = state.request.id, self._requests.checkpoints
        seq_slot, table = self._requests.seq_slots.slot_of[request_id], self._kv.tables[request_id]
        sample = end == state.num_tokens
        state.num_scheduled += chunk
        state.plans_in_flight += 1
        state.slot_known = True
        moved = None
        if sample and state.num_state_blocks:
            first = self._kv.blocks_for(start if Role.D in state.stages else end)
            moved = table.block_ids[first : first + state.num_state_blocks]
        if sample and Role.D in state.stages:
            state.num_state_blocks = 0
            self._requests.decodes.join(state, seq_slot, table, self._requests.timelines[request_id], unread=1)
        return ChunkRow(
            request_id=request_id,
            seq_slot=seq_slot,
            token_ids=state.tokens(start, end),
            start=start,
            block_ids=table.block_ids,
            num_blocks=table.num_blocks,
            sample=sample,
            num_generated=len(state.generated),
            images=self._image_slices(state, start, end) if state.images else (),
            scored=state.scores_prompt and start < state.request.num_prompt - 1,
            state_slots=(-1, -1) if checkpoints is None else checkpoints.chunk_slots(state, start, end),
            imported_state=moved if Role.D in state.stages else None,
            exported_state=moved if Role.D not in state.stages else None,
        )

    def _image_slices(self, state: RequestState, start: int, end: int) -> tuple[ImageSlice, ...]:
        """The parts of image spans within token positions [start, end), with the blocks of their features."""
        slices = []
        for index, image in enumerate(state.request.images):
            first, last = max(image.start, start), min(image.end, end)
            if first < last:
                block_ids = self._requests.features.block_ids(state.image_keys[index])
                slices.append(ImageSlice(first - start, last - first, first - image.start, block_ids))
        return tuple(slices)


def pending_work(
    requests: RequestTable, ready: ReadyDecodes, patches_in_flight: int, *, can_start: bool, now: float
) -> PendingWork:
    """The work at hand for the budgets when a language step is planned, without latency limits. Counts at most
    `MAX_SEEN` requests of a queue, so its cost does not grow with the number that waits. `ready`: the decodes of the
    step. `patches_in_flight`: patches of the vision plans in flight. `can_start`: there is a free slot for a waiting
    request; otherwise none is counted."""
    num_prefills = prefill_tokens = prefill_context = 0
    waiting = islice(requests.waiting.by_urgency(), MAX_SEEN) if can_start else ()
    for state in chain(islice(requests.prefilling, MAX_SEEN), waiting):
        if computable := state.num_computable - state.num_planned:  # tokens, without a budget
            prefill_context = prefill_context if num_prefills else state.num_planned
            num_prefills += 1
            prefill_tokens += computable
    return PendingWork(
        now=now,
        num_decodes=len(ready.starts),
        decode_context=ready.num_keys,
        prefill_tokens=prefill_tokens,
        num_prefills=num_prefills,
        prefill_context=prefill_context,
        encode_patches=requests.images.patches_waiting + patches_in_flight,
    )
