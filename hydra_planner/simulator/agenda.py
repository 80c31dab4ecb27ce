"""Virtual time: what happens when, in order, as fast as it can be computed. Does not know what happens."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Agenda:
    """A clock that jumps from one event to the next. Events of one moment happen in the order of their scheduling, so
    equal runs are equal."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._num_scheduled = 0

    def now(self) -> float:
        """`now_s`, as clocks of the engine are read."""
        return self.now_s

    def schedule_at(self, time_s: float, action: Action) -> None:
        """Schedules an action; a time in the past means now."""
        self._num_scheduled += 1
        heapq.heappush(self._events, (max(time_s, self.now_s), self._num_scheduled, action))

    def schedule_after(self, seconds: float, action: Action) -> None:
        self.schedule_at(self.now_s + seconds, action)

    def step(self) -> bool:
        """Runs the next event; False if there is none."""
        if not self._events:
            return False
        self.now_s, _, action = heapq.heappop(self._events)
        action()
        return True
