"""Starts requests whose KV comes from another instance: who gets a slot and all its blocks, so that it can be pulled.

What is computed to its end over there waits for nothing but the room here, and holds what others need there until it
has it. So it goes before everything that is still to be computed, and may take the room of whatever stands still here:
prefills before an image, whatever their age, and requests that are granted room while their prefill is still running
elsewhere. These have it only as long as no other request needs it; then their KV is pulled later.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from hydra_engine.core.state import Order, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.prefill import Admission, StepBuilder


class RemoteKvAdmission(Admission):
    """With that no decode waits for a prefill, and no prefill (on the way to its decode) for an encode: stages wait for
    later ones only, and the last one for none."""

    def admit(self, now: float, builder: StepBuilder | None = None) -> None:
        """Admits as many as there is room for. In a language step, with its `builder`, others are preempted where
        needed; between two steps none is."""
        if not self._requests.kv_offered:
            return
        passed: list[RequestState] = []
        for state in self._complete():
            if not self._start(state, now, builder):
                passed.append(state)
            if len(passed) >= policy.MAX_PASSED or any(map(self._is_overdue, passed)):
                return
        if passed or self._requests.waiting:
            return  # room that is free is spoken for
        for state in islice(self._requests.kv_offered.by_urgency(), policy.MAX_PASSED):
            if state.request.id not in self._kv.tables and not self._start(state, now, None):
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

    def _start(self, state: RequestState, now: float, builder: StepBuilder | None) -> bool:
        """False: it lacks room."""
        found = self._find_room(state, builder, lambda: policy.youngest_stalled(self._requests.prefilling))
        if found is None:
            self._requests.timelines[state.request.id].cause = "kv blocks"
            return False
        num_tokens = policy.kv_tokens_to_admit(state)
        self._requests.start(state, len(found), now)
        if state.remote_kv is not None:
            state.remote_kv.num_copied = len(found)
        self._grant(state, num_tokens)
        return True
