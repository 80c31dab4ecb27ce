"""Durations of the latest language steps: the expected duration of the next one, and the gap from which a token is
late.

Reads no clock; times are arguments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

MIN_GAP_S = 0.05
_REMEMBERED_STEPS = 64
_NEW_SHARE = 0.25  # weight of the newest step in a moving mean


class Window:
    """The latest `size` values, kept both in order of time and sorted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        if len(self._values) == self._size:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)

    def quantile(self, share: float) -> float:
        """The value that the next one exceeds with a probability of at most 1 - `share`, if it is distributed like the
        window."""
        rank = min(len(self._sorted) - 1, int(share * (len(self._sorted) + 1)))
        return self._sorted[rank]

    @property
    def median(self) -> float:
        middle = len(self._sorted) // 2
        return self._sorted[middle] if len(self._sorted) % 2 else (self._sorted[middle - 1] + self._sorted[middle]) / 2


class StepTimes:
    """The durations of the latest language steps. `typical_s`: their median; 0.0 before the first."""

    def __init__(self) -> None:
        self._durations = Window(_REMEMBERED_STEPS)
        self._by_size: dict[int, float] = {}  # moving mean, by the bit length of the number of tokens
        self.typical_s = 0.0

    def record(self, duration_s: float, num_tokens: int) -> None:
        size = num_tokens.bit_length()
        before_s = self._by_size.get(size, duration_s)
        self._by_size[size] = before_s + _NEW_SHARE * (duration_s - before_s)
        self._durations.add(duration_s)
        self.typical_s = self._durations.median

    def expected_s(self, num_tokens: int) -> float | None:
        """Expected seconds of a step of `num_tokens` tokens: the moving mean of its size, else the median of all steps;
        None before the first step."""
        return self._by_size.get(num_tokens.bit_length(), self.typical_s if len(self._durations) else None)

    @property
    def shortest_s(self) -> float:
        """Fixed cost of a step: the moving mean of the cheapest size; 0.0 before the first."""
        return min(self._by_size.values(), default=0.0)

    @property
    def gap_s(self) -> float:
        """Gap between two tokens, in seconds, above which the later one is late if its request has no limit."""
        return max(MIN_GAP_S, 2 * self.typical_s)
