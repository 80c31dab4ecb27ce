"""Fills a language step: every running decode, then chunks of running prefills by age, then waiting requests.

Allocates blocks, preempts and marks what is scheduled; the scheduler handles results. Text never waits for images: a
request that waits for an encode is skipped. The rules of order and preemption are in `policy.py`, the arrays of decodes
in `decodes.py`.

A request that starts gets a sequence slot, the blocks of its whole prompt and the rest of the step's budget. Nothing is
marked as scheduled before the step is complete, since planning may be given up. Requests start by urgency; a request
that was bypassed too often is never bypassed again. The oldest request may preempt younger prefills that are stalled at
an image even if it is not next by urgency: this guarantees progress, see `policy.py`. The cost does not grow with the
number of waiting requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.cost import LanguageLoad
from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.plans import ChunkRow, ImageSlice, LanguagePlan
from hydra_engine.core.roles import Role
from hydra_engine.core.state import ImageProgress, Order, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.budget import Budgets, PendingWork, StepBudget, stretch
from hydra_engine.scheduler.decodes import Ready
from hydra_engine.scheduler.requests import RequestTable

MAX_SEEN = 16  # requests of a queue that `pending_work` counts


class NeedsResult(Exception):
    """Raised when planning ahead would have to preempt a request: the step in flight must end first."""


class StepBuilder:
    """A language step while it is filled. `ahead`: a step is in flight, so no request is preempted."""

    def __init__(self, requests: RequestTable, now: float, *, ahead: bool) -> None:
        self.chunks: list[tuple[RequestState, int]] = []
        self.left: int = 0  # tokens of the budget that are left
        self.now = now
        self._requests = requests
        self._ahead = ahead

    def chunk_of(self, state: RequestState) -> int:
        """Number of tokens of a prefill's next chunk: at most the budget left, unless an image that must not be split
        needs more. A request with one missing token (its KV was loaded or found) counts as a decode and needs no
        budget: all decodes and these fit a step, since there are no more slots than a step has tokens."""
        start, end = state.num_planned, state.num_computable
        if state.lacks_one_token:
            return 1
        if state.connector_state is not None:
            end = min(end, self._requests.connector.chunk_end(state))
        return policy.chunk_end(start, min(end, start + self.left), state.request.images) - start

    def __contains__(self, state: RequestState) -> bool:
        return any(other is state for other, _ in self.chunks)

    def add(self, state: RequestState, chunk: int) -> None:
        if chunk:
            self.chunks.append((state, chunk))
            self.left = max(0, self.left - chunk)

    def preempt(self, victim: RequestState) -> bool:
        """Preempts a request; False if the connector needs its blocks for now. Raises NeedsResult while a step is in
        flight."""
        if self._ahead:
            raise NeedsResult
        return self._requests.preempt(victim, self.now)


class Admission:
    """The admission of requests: finds and grants a sequence slot and blocks, while every running decode keeps one free
    block in reserve."""

    def __init__(self, requests: RequestTable, config: SchedulerConfig) -> None:
        self._requests = requests
        self._kv = requests.kv
        self._max_bypass = config.max_bypass
        self._max_seqs = policy.sequence_limit(config.max_running_requests, config.max_step_tokens)

    @property
    def is_full(self) -> bool:
        return len(self._kv.tables) >= self._max_seqs

    def _is_overdue(self, state: RequestState) -> bool:
        """True if at least `max_bypass` younger requests have started since this one began to wait."""
        return self._requests.overtaken(state) >= self._max_bypass

    def _find_room(
        self,
        state: RequestState,
        num_tokens: int,
        builder: StepBuilder | None,
        next_victim: Callable[[], RequestState | None],
    ) -> list[int] | None:
        """The cached blocks of a request for which a slot and enough other blocks are free, after preempting victims if
        a step is being built; None if they are not."""
        reserve = len(self._requests.decoding)
        found: list[int] | None = None
        while True:
            if not self.is_full:
                if found is None:
                    found = self._requests.prefixes.find(state)
                if self._kv.num_free - reserve >= self._kv.num_to_take(num_tokens, found):
                    return found
            if builder is None or (victim := next_victim()) is None or not builder.preempt(victim):
                return None

    def _grant(self, state: RequestState, num_tokens: int) -> None:
        """Allocates blocks for these positions to a request that has just started; `_find_room` has made sure that they
        are free."""
        granted = self._kv.grow(state.request.id, num_tokens, capacity=state.request.max_total_tokens)
        assert granted, "room was found and is gone"
        self._requests.requeue(state)


class PrefillStarter(Admission):
    """The admission of waiting requests to a language step."""

    def __init__(self, requests: RequestTable, config: SchedulerConfig) -> None:
        super().__init__(requests, config)
        self._early_limit = policy.early_limit(self._max_seqs)

    def start(self, builder: StepBuilder, short: RequestState | None) -> None:
        """Admits waiting requests while budget, slots and blocks last, but none younger than `short`, a running prefill
        for whose chunk too few blocks are free. Every running decode keeps one free block in reserve, or admission
        would only cause preemption."""
        requests = self._requests
        if not requests.waiting and not requests.encoding:
            return
        if not requests.prefilling and (self.is_full or self._kv.num_free <= len(requests.decoding)):
            if first := requests.waiting.first_by_urgency():  # a start takes at least one block, and there is no victim
                requests.timelines[first.request.id].cause = "kv blocks"
            return
        seen: set[Order] = set()
        self._start_by_urgency(builder, short, seen)
        oldest = self._oldest()
        if oldest is None or oldest.order in seen or not builder.left:
            return
        if short is None or oldest.order < short.order:
            self._consider(oldest, builder, num_early=0)

    def _start_by_urgency(self, builder: StepBuilder, short: RequestState | None, seen: set[Order]) -> None:
        """Starts requests by urgency. Younger requests may bypass one without free blocks `max_bypass` times; then none
        does, and freed blocks are kept for it. `seen` collects the orders of the requests that were considered."""
        requests = self._requests
        num_early = sum(state.waits_for_images for state in requests.prefilling)
        passed: list[RequestState] = []
        for state in self._candidates(seen):
            if not builder.left or (short is not None and state.order > short.order):
                requests.timelines[state.request.id].cause = "budget" if not builder.left else "kv blocks"
                return
            seen.add(state.order)
            started = self._consider(state, builder, num_early)
            if started is None:
                continue
            if started:
                num_early += state.waits_for_images
            else:
                passed.append(state)
                if len(passed) >= policy.MAX_PASSED or self.is_full:
                    return
            if any(map(self._is_overdue, passed)):
                return

    def _consider(self, state: RequestState, builder: StepBuilder, num_early: int) -> bool | None:
        """Tries to start a request. True: started. False: no free slot or blocks. None: it waits for something else."""
        requests = self._requests
        timeline = requests.timelines[state.request.id]
        if state.trusts_cache:
            requests.recheck(state, builder.now)
        head = state is requests.encoding.oldest()
        if state.waits_for_images:
            allowed = policy.may_start_early(state, head=head, num_early=num_early, limit=self._early_limit)
            if not allowed or not state.num_computable:
                return None
        insists = policy.may_insist(state, head=head)
        found = self._room_for(state, insists, builder)
        if found is None:
            timeline.cause = "kv blocks" if insists else "images"
            return False if insists else None
        self._admit(state, found, builder)
        return True

    # ---- in which order

    def _candidates(self, seen: set[Order]) -> Iterator[RequestState]:
        """Yields every candidate once by urgency; but requests bypassed too often, also within this step, come first,
        the oldest of these before the rest."""
        requests = self._requests
        ordered = policy.candidates(requests.waiting, requests.encoding, self._early_limit)
        while True:
            state = self._overdue(seen) or next((s for s in ordered if s.order not in seen), None)
            if state is None:
                return
            yield state

    def _overdue(self, seen: set[Order]) -> RequestState | None:
        """An unseen request that was bypassed too often: the oldest that waits for images, else the oldest of the first
        `MAX_PASSED` that wait."""
        requests = self._requests
        head = requests.encoding.oldest()
        waits = head is not None and head.order not in seen and policy.may_insist(head, head=True)
        if head is not None and waits and self._is_overdue(head):
            return head
        for state in islice(requests.waiting, policy.MAX_PASSED):
            if self._is_overdue(state) and state.order not in seen:
                return state
        return None

    def _oldest(self) -> RequestState | None:
        """The oldest request that may preempt."""
        requests = self._requests
        head, first = requests.encoding.oldest(), requests.waiting.oldest()
        if head is not None and policy.may_insist(head, head=True) and (first is None or head.order < first.order):
            return head
        return first

    # ---- blocks

    def _room_for(self, state: RequestState, insists: bool, builder: StepBuilder) -> list[int] | None:
        """The cached blocks of a request for whose prefill enough other blocks are free; None if they are not. With
        `insists`, younger prefills that are stalled at an image are preempted for it."""
        prefilling = self._requests.prefilling
        return self._find_room(
            state,
            policy.kv_tokens_to_admit(state),
            builder,
            lambda: policy.stalled_younger_than(state, prefilling) if insists else None,
        )

    def _admit(self, state: RequestState, found: Sequence[int], builder: StepBuilder) -> None:
        """Starts a request: adopts its cached blocks, and allocates the blocks of the first chunk, or of everything.

        Cached blocks may reach up to an image without features. Then there is no chunk yet, but the features before it
        are freed, which the image may be waiting for.
        """
        num_tokens = policy.kv_tokens_to_admit(state)
        self._requests.start(state, len(found), builder.now)
        chunk = builder.chunk_of(state)
        if not policy.takes_all_at_once(state):
            num_tokens = state.num_computed + chunk
        self._grant(state, num_tokens)
        builder.add(state, chunk)


@dataclass(frozen=True, slots=True, eq=False)
class LanguageStep:
    """A plan, and what the budgets and the observer receive with its result."""

    plan: LanguagePlan
    load: LanguageLoad
    budget: StepBudget
    chunks: tuple[tuple[RequestId, int], ...]  # (request, tokens)


class LanguagePlanner:
    """The planner of language steps.

    A step planned `ahead`, while the step before it runs, preempts no request; planning stops where that would be
    needed. Blocks granted and requests started until then stay: the next plan would have done the same.
    """

    def __init__(self, requests: RequestTable, budgets: Budgets, config: SchedulerConfig) -> None:
        self._requests = requests
        self._kv = requests.kv
        self._budgets = budgets
        self._starter = PrefillStarter(requests, config)

    def plan(self, step_id: StepId, now: float, *, ahead: bool, patches_in_flight: int) -> LanguageStep | None:
        """The next step, or None if nothing can run (ahead: or if it cannot be planned yet)."""
        builder = StepBuilder(self._requests, now, ahead=ahead)
        try:
            ready = self._ready_decodes(builder)
            can_start = not self._starter.is_full
            pending = pending_work(self._requests, ready, patches_in_flight, can_start=can_start, now=now)
            budget = self._budgets.language(pending)
            builder.left = budget.tokens if ready.num_rows else max(1, budget.tokens)
            self._requests.connector.before_language(builder)
            short = self._continue_prefills(builder)
            self._starter.start(builder, short)
        except NeedsResult:
            return None
        if not ready.num_rows and not builder.chunks:
            return None
        return self._step(step_id, ready, builder, budget, ahead=ahead)

    def _step(
        self, step_id: StepId, ready: Ready, builder: StepBuilder, budget: StepBudget, *, ahead: bool
    ) -> LanguageStep:
        decodes = self._requests.decodes.take_rows(ready, ahead=ahead)
        chunks = tuple(self._chunk_row(state, chunk) for state, chunk in builder.chunks)
        chunk_tokens = tuple((state.request.id, chunk) for state, chunk in builder.chunks)
        plan = LanguagePlan(step_id, decodes, chunks, budget.vision_s, budget.partition)
        return LanguageStep(plan, plan.load, budget, chunk_tokens)

    # ---- decodes

    def _ready_decodes(self, builder: StepBuilder) -> Ready:
        """The decodes that have a block for their next token. If blocks are missing, the youngest running request is
        preempted, possibly the decode itself. A decode that runs alone waits instead: blocks of a request that ends or
        is handed over will be free soon."""
        table = self._requests.decodes
        ready = table.ready()
        lacking = table.lacking(ready)
        if not len(lacking):
            return ready
        states = [table.states[index] for index in lacking.tolist()]
        if blocks := self._kv.extend([state.request.id for state in states]):
            table.show(lacking, blocks)
            return ready
        self._grow_by_age(states, builder)
        ready = table.ready()
        return table.without(ready, table.lacking(ready))

    def _grow_by_age(self, lacking: list[RequestState], builder: StepBuilder) -> None:
        """Allocates a block for each of these decodes, the oldest first, preempting the youngest running request if
        needed."""
        requests, table = self._requests, self._requests.decodes
        for state in sorted(lacking, key=lambda state: state.order):
            request_id = state.request.id
            while request_id in self._kv.tables:
                if blocks := self._kv.extend([request_id]):
                    table.show(np.array([table.index_of(requests.seq_slots.slot_of[request_id])]), blocks)
                    break
                victim = requests.youngest_running()
                alone = len(requests.prefilling) + len(requests.decoding) == 1
                if victim is None or (victim is state and alone) or not builder.preempt(victim):
                    break

    # ---- running prefills

    def _continue_prefills(self, builder: StepBuilder) -> RequestState | None:
        """Adds the chunks of running prefills; returns the first prefill for whose chunk too few blocks are free, or
        None.

        A prefill with more to compute uses up the budget, so a request that starts on the rest of the budget finds the
        blocks of all running prefills allocated. A prefill stalled at an image reserves nothing and delays no other.
        """
        for state in sorted(self._requests.prefilling, key=lambda state: not state.lacks_one_token):
            if state not in self._requests.prefilling:
                continue  # was preempted just now for an older one
            if state.num_planned == state.num_tokens:
                continue  # its last chunk is in flight
            timeline = self._requests.timelines[state.request.id]
            if policy.is_stalled(state):
                timeline.cause = "transfer" if state.external_kv else "images"
            elif not (chunk := builder.chunk_of(state)):
                timeline.cause = "budget"
            elif self._grow_for_chunk(state, state.num_planned + chunk, builder):
                builder.add(state, chunk)
            else:
                timeline.cause = "kv blocks"
                return state  # younger prefills have been preempted already
        return None

    def _grow_for_chunk(self, state: RequestState, num_tokens: int, builder: StepBuilder) -> bool:
        """Allocates blocks for a chunk, preempting younger prefills if needed; False if that is not enough.

        Decodes are not preempted, nor the one-token chunks of requests with loaded KV, which come before all prefills:
        both have their rows already, and free their blocks by ending or by being preempted for themselves.
        """
        while not self._kv.grow(state.request.id, num_tokens, capacity=state.request.max_total_tokens):
            younger = [
                other for other in self._requests.prefilling if other.order > state.order and other not in builder
            ]
            if not younger or not builder.preempt(younger[-1]):
                return False
        return True

    # ---- rows

    def _chunk_row(self, state: RequestState, chunk: int) -> ChunkRow:
        """The row of a chunk; marks its tokens as scheduled and, if it is the last chunk, adds the request to the
        decodes."""
        start, end = state.num_planned, state.num_planned + chunk
        request_id = state.request.id
        table = self._kv.tables[request_id]
        sample = end == state.num_tokens
        state.num_scheduled += chunk
        state.plans_in_flight += 1
        state.slot_known = True
        if sample and Role.D in state.stages:
            self._requests.join_decodes(state, unread=1)
        return ChunkRow(
            request_id=request_id,
            seq_slot=self._requests.seq_slots.slot_of[request_id],
            token_ids=state.tokens(start, end),
            start=start,
            block_ids=table.block_ids,
            num_blocks=table.num_blocks,
            sample=sample,
            num_generated=state.num_generated,
            images=self._slices(state, start, end),
            scored=state.scores_prompt and start < state.request.num_prompt - 1,
        )

    def _slices(self, state: RequestState, start: int, end: int) -> tuple[ImageSlice, ...]:
        """The parts of image spans within token positions [start, end)."""
        slices = []
        for index, image in enumerate(state.request.images):
            first, last = max(image.start, start), min(image.end, end)
            if first < last:
                block_ids = self._requests.features.block_ids(state.image_keys[index])
                slices.append(ImageSlice(first - start, last - first, first - image.start, block_ids))
        return tuple(slices)


def pending_work(
    requests: RequestTable, ready: Ready, patches_in_flight: int, *, can_start: bool, now: float
) -> PendingWork:
    """Sums up the work at hand for the budgets when a language step is planned. Looks at no more than `MAX_SEEN`
    requests of a queue, so its cost does not grow with the number that waits. `ready`: the decodes of the step.
    `can_start`: there is a free slot for a waiting request."""
    prefills = [state for state in islice(requests.prefilling, MAX_SEEN) if _computable(state)]
    if can_start:
        prefills += islice(requests.waiting.by_urgency(), MAX_SEEN)
    table = requests.decodes
    tpot_limit_s = stretch_s = math.inf
    if table.times.has_limits and ready.num_rows:
        limits = table.times.limits(ready.indices)
        tpot_limit_s, stretch_s = float(limits.min()), stretch(limits, *table.pace(ready))
    due = requests.next_due(now)
    due_tokens, due_patches = _before_due(requests, due) if due is not None else (0, 0)
    return PendingWork(
        now=now,
        num_decodes=ready.num_rows,
        decode_context=ready.num_keys,
        tpot_limit_s=tpot_limit_s,
        stretch_s=stretch_s,
        prefill_tokens=sum(map(_computable, prefills)),
        num_prefills=len(prefills),
        prefill_context=prefills[0].num_planned if prefills else 0,
        encode_patches=requests.images.patches_waiting + patches_in_flight,
        ttft_due_s=math.inf if due is None else due.due_s,
        due_tokens=due_tokens,
        due_patches=due_patches,
    )


def _computable(state: RequestState) -> int:
    """Tokens that could be computed now without a budget."""
    return state.num_computable - state.num_planned


def _before_due(requests: RequestTable, due: RequestState) -> tuple[int, int]:
    """(tokens, patches) to compute before the first token of `due`: for itself, for the running prefills ahead of it
    and, if it has not started, for more urgent requests."""
    first = [due]
    if due.request.id in requests.kv.tables:
        first += (state for state in islice(requests.prefilling, MAX_SEEN) if state.order < due.order)
    else:
        first += islice(requests.prefilling, MAX_SEEN)
        first += (state for state in islice(requests.waiting.by_urgency(), MAX_SEEN) if state.urgency < due.urgency)
    tokens = sum(state.num_tokens - state.num_planned for state in first if not state.external_kv)
    return tokens, sum(map(_patches, first)) if due.waits_for_images else 0


def _patches(state: RequestState) -> int:
    """Patches of a request that are still to be encoded here."""
    images = enumerate(zip(state.request.images, state.images, strict=True))
    waiting = ((i, image) for i, (image, progress) in images if progress <= ImageProgress.ENCODING)
    return sum(image.num_patches for i, image in waiting if i not in state.external_images)
