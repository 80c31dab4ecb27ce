"""The prefills of a language step: the step while it is filled (`StepBuilder`), and the start of waiting requests.

A request that starts gets a sequence slot, the blocks of its whole prompt and the rest of the step's budget.

Nothing is marked as scheduled before the step is complete, since planning may be given up. Requests start by urgency; a
request that was bypassed too often is never bypassed again. The oldest request may preempt younger prefills that are
stalled at an image even if it is not next by urgency: this guarantees progress, see `policy.py`. The cost does not grow
with the number of waiting requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.roles import Role
from hydra_engine.core.state import Order, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.request_table import RequestTable


class NeedsResult(Exception):
    """Raised when planning ahead would have to preempt a request: the step in flight must end first."""


class StepBuilder:
    """A language step while it is filled. `ahead`: a step is in flight, so no request is preempted. `handover_tokens`:
    as in the configuration; 0 if that is unset and no copy has been measured."""

    def __init__(self, requests: RequestTable, now: float, *, ahead: bool, handover_tokens: int = 0) -> None:
        self.chunks: list[tuple[RequestState, int]] = []
        self.left: int = 0  # tokens of the budget that are left
        self.now = now
        self._requests = requests
        self._ahead = ahead
        self._handover_tokens = handover_tokens

    def chunk_of(self, state: RequestState) -> int:
        """Number of tokens of a prefill's next chunk: at most the budget left, unless an image that must not be split
        needs more. A request with one missing token (its KV was pulled or found) counts as a decode and needs no
        budget: all decodes and these fit a step, since there are no more slots than a step has tokens."""
        start, end = state.num_planned, state.num_computable
        if state.lacks_one_token:
            return 1
        if self._handover_tokens and Role.D not in state.stages:
            part = policy.part_end(start, state.num_tokens, self._handover_tokens, self._requests.kv.block_size)
            end = min(end, part)
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
        self, state: RequestState, builder: StepBuilder | None, next_victim: Callable[[], RequestState | None]
    ) -> list[int] | None:
        """The cached blocks of a request for which a slot and enough other blocks are free, after preempting victims if
        a step is being built; None if they are not."""
        num_tokens, reserve = policy.kv_tokens_to_admit(state), len(self._requests.decoding)
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
            state, builder, lambda: policy.stalled_younger_than(state, prefilling) if insists else None
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
