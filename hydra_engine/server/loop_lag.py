"""How late the event loop runs what is due: the number that says whether something blocks it.

A timer that notes how much later than planned it runs. A stretch that is shorter than the period is met by chance, in
proportion to its length, so the distribution is right even though single stretches are missed. Does not know what ran.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_S = 0.1
LATE_S = 0.1  # what streams and health checks begin to notice
_QUIET_S = 10.0  # between two log lines


class LoopLag:
    """`observe` gets seconds, once in a period. Belongs to the loop that is running when it is started."""

    def __init__(self, observe: Callable[[float], None], *, period_s: float = PERIOD_S) -> None:
        self._observe = observe
        self._period_s = period_s
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._told_s = float("-inf")

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
        if late_s > LATE_S and now - self._told_s >= _QUIET_S:
            self._told_s = now
            logger.warning("the event loop was blocked for %.0f ms; streams and health checks waited", late_s * 1e3)
        self._plan(loop)
