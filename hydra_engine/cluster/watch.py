"""When an instance counts as silent, and when a dead one is started again. Decides only; `now` is passed in, in seconds
on the monotonic clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Pace:
    """The supervisor's periods and patience, in seconds unless a field says otherwise."""

    tick_s: float = 0.05
    last_words_s: float = 0.25  # from the end of a channel to the exit code, then it is reported without
    exit_grace_s: float = 5.0  # from Shutdown to SIGKILL
    backoff_s: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before the next start
    settled_s: float = 60.0  # who served this long starts again without waiting
    window_s: float = 60.0
    max_deaths: int = 5  # in `window_s`, then it is not started again
    reconnect_s: float = 1.0  # before a pair whose connection ended gets a new one
    pair_patience_s: float = 15.0  # for both sides of a pair to say that the connection is up
    pair_attempts: int = 3  # while the cluster starts, then it does not


PACE = Pace()


class Restarts:
    """The deaths of one instance."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._recent: deque[float] = deque()
        self._in_a_row = 0
        self.total = 0

    def died(self, now: float, served_s: float) -> float | None:
        """The wait before the next start; None: the instance dies too often. `served_s`: how long it was ready."""
        self.total += 1
        self._recent.append(now)
        while self._recent[0] <= now - self._pace.window_s:
            self._recent.popleft()
        if len(self._recent) >= self._pace.max_deaths:
            return None
        self._in_a_row = 1 if served_s >= self._pace.settled_s else self._in_a_row + 1
        waits = self._pace.backoff_s
        return waits[min(self._in_a_row, len(waits)) - 1]


class Change(Enum):
    SILENT = "silent"
    FENCE = "fence"


class Silence:
    """The time since the last message of an instance."""

    def __init__(self, suspect_s: float, fence_s: float) -> None:
        self._suspect_s = suspect_s
        self._fence_s = fence_s
        self._heard_s = 0.0
        self.silent = False

    def heartbeat(self, now: float) -> bool:
        """A message has come. True: the instance had been silent."""
        self._heard_s = now
        was_silent, self.silent = self.silent, False
        return was_silent

    def reset_timer(self, now: float) -> None:
        """The supervisor did not listen until now, so the time does not count. A silent instance stays silent."""
        self._heard_s = now

    def check(self, now: float) -> Change | None:
        """The change since the last call."""
        quiet_s = now - self._heard_s
        if quiet_s >= self._fence_s:
            return Change.FENCE
        if quiet_s >= self._suspect_s and not self.silent:
            self.silent = True
            return Change.SILENT
        return None


class OwnPauses:
    """Notices that the supervisor itself was not running: stopped, asleep, or busy with something else. Frames that
    came meanwhile may still be unread, and on a sleeping machine the others slept as well."""

    def __init__(self, now: float, longest_s: float) -> None:
        self._longest_s = longest_s
        self._seen_s = now

    def paused(self, now: float) -> bool:
        """Call this at every tick."""
        gap_s, self._seen_s = now - self._seen_s, now
        return gap_s > self._longest_s
