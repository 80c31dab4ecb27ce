"""The lag of the event loop: the delay of a timer, which shows whether something blocks the loop.

A block shorter than the timer's period is seen by chance, in proportion to its length, so the distribution is right
even though single blocks are missed. Does not know what ran.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_S = 0.1
LATE_S = 0.1  # noticeable in streams and health checks
QUIET_S = 60.0  # between two log lines


class LoopLag:
    """A measurement of the loop on which it is started. `observe` gets the lag in seconds once per period. Long lags
    are logged while `is_somebody_waiting` returns True."""

    def __init__(
        self,
        observe: Callable[[float], None],
        *,
        is_somebody_waiting: Callable[[], bool] = lambda: True,
        period_s: float = PERIOD_S,
    ) -> None:
        self._observe = observe
        self._is_somebody_waiting = is_somebody_waiting
        self._period_s = period_s
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._logged_s = float("-inf")
        self._num_late, self._longest_s = 0, 0.0  # long ones since the last line

    def start(self) -> None:
        self._plan(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = loop.time() + self._period_s
        self._timer = loop.call_at(self._due_s, self._note, loop)

    def _note(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        late_s = max(now - self._due_s, 0.0)  # a loop may run a timer within its clock's resolution early
        self._observe(late_s)
        if late_s > LATE_S and self._is_somebody_waiting():
            self._num_late, self._longest_s = self._num_late + 1, max(self._longest_s, late_s)
            if now - self._logged_s >= QUIET_S:
                self._logged_s = now
                self._tell()
        self._plan(loop)

    def _tell(self) -> None:
        often = f"{self._num_late} times since the last such line, at most " if self._num_late > 1 else ""
        words = "the event loop was blocked %sfor %.0f ms; streams and health checks waited"
        logger.warning(words, often, self._longest_s * 1e3)
        self._num_late, self._longest_s = 0, 0.0
