"""Starts requests whose KV comes from another instance: who gets a slot and all its blocks, so that it can be pulled.

What is computed to its end over there waits for nothing but the room here, and holds what others need there until it
has it. So it goes before everything that is still to be computed, and may take the room of whatever stands still here:
prefills before an image, whatever their age, and requests that are granted room while their prefill is still running
elsewhere. These have it only as long as nobody else needs it; then their KV is pulled later.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.state import Order, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.prefill import StepBuilder
from hydra_engine.scheduler.request_table import RequestTable


class RemoteKvAdmission:
    """With that no decode waits for a prefill, and no prefill (on the way to its decode) for an encode: stages wait for
    later ones only, and the last one for nobody."""

    def __init__(self, requests: RequestTable, config: SchedulerConfig) -> None:
        self._requests = requests
        self._kv = requests.kv
        self._max_bypass = config.max_bypass
        self._max_seqs = policy.sequence_limit(config.max_num_seqs, config.token_budget)

    def admit(self, now: float, builder: StepBuilder | None = None) -> None:
        """Admits as many as there is room for. In a language step, with its `builder`, others give way if they must;
        between two steps nobody does."""
        if not self._requests.kv_offered:
            return
        passed: list[RequestState] = []
        for state in self._complete():
            if not self._admit(state, now, builder):
                passed.append(state)
            if len(passed) >= policy.MAX_PASSED or any(map(self._is_overdue, passed)):
                return
        if passed or self._requests.waiting:
            return  # room that is free is spoken for
        for state in islice(self._requests.kv_offered.by_urgency(), policy.MAX_PASSED):
            if state.request.id not in self._kv.tables and not self._admit(state, now, None):
                return

    def _complete(self) -> Iterator[RequestState]:
        """Each once, by urgency; but those that have been overtaken too often, by those before them too, go first."""
        seen: set[Order] = set()
        while True:
            waiting = [s for s in self._requests.kv_offered if policy.is_complete(s) and s.order not in seen]
            if not waiting:
                return
            overdue = next(filter(self._is_overdue, waiting), None)
            state = overdue or min(waiting, key=lambda state: state.urgency)
            seen.add(state.order)
            yield state

    def _is_overdue(self, state: RequestState) -> bool:
        return self._requests.overtaken(state) >= self._max_bypass

    def _admit(self, state: RequestState, now: float, builder: StepBuilder | None) -> bool:
        found = self._room_for(state, builder)
        if found is None:
            self._requests.timelines[state.request.id].cause = "kv blocks"
            return False
        num_tokens = policy.kv_tokens_to_admit(state)
        self._requests.start(state, len(found), now)
        if state.remote_kv is not None:
            state.remote_kv.num_copied = len(found)
        granted = self._kv.grow(state.request.id, num_tokens, capacity=state.request.max_total_tokens)
        assert granted, "room was found and is gone"
        self._requests.requeue(state)
        return True

    def _room_for(self, state: RequestState, builder: StepBuilder | None) -> list[int] | None:
        """The blocks found in the cache for a request that may start; None if there is no room. Every running decode
        keeps room for one more block."""
        num_tokens, reserve = policy.kv_tokens_to_admit(state), len(self._requests.decoding)
        while True:
            if len(self._kv.tables) < self._max_seqs:
                found = self._requests.prefixes.find(state)
                if self._kv.num_free - reserve >= self._kv.num_to_take(num_tokens, found):
                    return found
            victim = policy.youngest_stalled(self._requests.prefilling) if builder is not None else None
            if victim is None or builder is None or not builder.preempt(victim):
                return None
