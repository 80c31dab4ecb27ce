"""The admission of requests whose KV comes from another instance: they get a slot and all blocks, so that it can be
pulled.

A request that is prefilled to its end elsewhere waits only for free blocks here, and holds blocks there until the copy
ends. So it goes before all requests that are still to be computed, and may preempt every stalled one: prefills at an
image, whatever their age, and requests admitted here whose prefill still runs elsewhere. The latter keep their blocks
only as long as no other request needs them; otherwise their KV is pulled later.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.instances import Role
from hydra_engine.core.state import Order, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.handover.state import ParkedRequests, offers_all_kv, remote_kv_of
from hydra_engine.scheduler.hooks import Preempt
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.scheduler.step import BlockSearch


class RemoteKvAdmission(BlockSearch):
    """The admission of requests with remote KV. So that instances never wait for each other in a circle, a stage waits
    only for later ones: a decode never for a prefill, a prefill that decodes elsewhere never for an encode."""

    def __init__(self, requests: RequestTable, parked: ParkedRequests, config: SchedulerConfig) -> None:
        super().__init__(requests, config)
        self._kv_offered = parked.kv_offered

    def admit(self, now: float, preempt: Preempt | None = None) -> None:
        """Admits requests while slots and blocks last: first those of which all KV is offered, then, if none of them
        was left out and no request is WAITING, others with an offer. `preempt`: for the former only, None outside of a
        language step."""
        if not self._kv_offered:
            return
        skipped: list[RequestState] = []
        for state in self._complete():
            if not self._start(state, now, preempt):
                skipped.append(state)
            if len(skipped) >= policy.MAX_SKIPPED or any(map(self._requests.is_overdue, skipped)):
                return
        if skipped or self._requests.waiting:
            return  # free blocks are reserved for these requests
        for state in islice(self._kv_offered.by_urgency(), policy.MAX_SKIPPED):
            if state.request.id not in self._kv.tables and not self._start(state, now, None):
                return

    def _complete(self) -> Iterator[RequestState]:
        """Yields each request with completely offered KV once, by urgency; those bypassed too often, also within this
        call, first."""
        seen: set[Order] = set()
        while True:
            waiting = [s for s in self._kv_offered if offers_all_kv(s) and s.order not in seen]
            if not waiting:
                return
            overdue = next(filter(self._requests.is_overdue, waiting), None)
            state = overdue or min(waiting, key=lambda state: state.urgency)
            seen.add(state.order)
            yield state

    def _num_tokens(self, state: RequestState) -> int:
        """Number of token positions that need free blocks before the request may start: one more than it pulls, for the
        next token, if it decodes here; after a preemption, all that it can need."""
        num_tokens = policy.kv_tokens_to_admit(state)
        if Role.D not in state.stages or state.preempted:
            return num_tokens
        remote_kv = remote_kv_of(state)
        end = None if remote_kv is None else remote_kv.end
        return min(max(num_tokens, 0 if end is None else end.num_tokens) + 1, state.request.max_total_tokens)

    def _start(self, state: RequestState, now: float, preempt: Preempt | None) -> bool:
        """Starts a request and allocates all its blocks, with `preempt` after preempting stalled prefills for them, if
        needed. False if a slot or blocks are still missing: the cause of its wait is then "kv blocks"."""
        num_tokens = self._num_tokens(state)

        def preempt_next() -> bool:
            if preempt is None:
                return False
            victim = policy.youngest_stalled(self._requests.prefilling)
            return victim is not None and preempt(victim)

        found = self.find_blocks(state, num_tokens, preempt_next)
        if found is None:
            self._requests.timelines[state.request.id].cause = "kv blocks"
            return False
        self._requests.start(state, len(found), now)
        if (remote_kv := remote_kv_of(state)) is not None:
            remote_kv.num_copied = len(found)
        beside, capacity = state.num_state_blocks, state.request.max_total_tokens
        granted = self._kv.grow(state.request.id, num_tokens, capacity=capacity, extra_blocks=beside)
        assert granted, "blocks were found and are gone"
        self._requests.requeue(state)
        return True
