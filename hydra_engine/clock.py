"""`Clock`: time as a parameter. Code that decides receives a clock and never reads the system's.

Seconds on one monotonic clock. On Linux it is the same clock in every process of the node, so stamps taken by the
frontend process and by an instance can be subtracted; an instance on another node is handed a `SharedClock`. Does not
know the wall clock; `created` fields take that from `time.time` where they are made.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class SharedClock(Clock, Protocol):
    """The frontend's clock, as an instance has it."""

    @property
    def error_s(self) -> float:
        """The largest difference from the frontend's clock, in seconds; 0.0 on the frontend's machine."""
        ...


class MonotonicClock:
    error_s = 0.0

    def now(self) -> float:
        return time.monotonic()
