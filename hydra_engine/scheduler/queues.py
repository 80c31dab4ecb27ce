"""A queue of requests in order of arrival, with membership and removal by id in constant time.

Appending the youngest is the common case; a request that comes back (preempted, or its features gone) keeps its age and
is sorted in. Does not know why a request is in it.
"""

from __future__ import annotations

from collections.abc import Iterator

from hydra_engine.core.ids import RequestId
from hydra_engine.core.state import RequestState


class ArrivalQueue:
    """Invariant: iteration goes from the oldest to the youngest."""

    __slots__ = ("_highest", "_states")

    def __init__(self) -> None:
        self._states: dict[RequestId, RequestState] = {}
        self._highest = -1  # no member is younger than this order

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._states

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def push(self, state: RequestState) -> None:
        """Constant time for the youngest, linear in the length of the queue for others."""
        assert state.request.id not in self._states, "a request is queued twice"
        self._states[state.request.id] = state
        if state.order > self._highest:
            self._highest = state.order
        else:
            self._states = {s.request.id: s for s in sorted(self._states.values(), key=lambda s: s.order)}

    def discard(self, request_id: RequestId) -> None:
        self._states.pop(request_id, None)

    def oldest(self) -> RequestState | None:
        return next(iter(self._states.values()), None)

    def youngest(self) -> RequestState | None:
        return next(reversed(self._states.values()), None)
