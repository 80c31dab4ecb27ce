"""`SyncedClock`: the frontend's monotonic clock, as seen from another node.

Each answer to a ping bounds the difference of the two clocks: it was taken between the ping and its arrival. The clock
follows the answer that bounds it best by now, an answer's bound growing with its age, since clocks drift. It never goes
back: a correction is spread (`_MAX_SLEW`), or made at once if it is large and forwards.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import NamedTuple

from hydra_engine.clock import Clock, MonotonicClock
from hydra_nodes.session import ClockSample

MAX_DRIFT = 200e-6  # seconds per second, of one node's clock against another's
_WINDOW = 64  # answers, half a minute
_MAX_SLEW = 0.05  # seconds per second
_JUMP_S = 0.1  # larger corrections forwards are made at once: one of the clocks was stopped


class _Bound(NamedTuple):
    """The difference of the clocks is `offset_s`, give or take `error_s`, at `at_s` of the node's own."""

    at_s: float
    offset_s: float
    error_s: float

    def error_at(self, now_s: float) -> float:
        return self.error_s + MAX_DRIFT * abs(now_s - self.at_s)


class SyncedClock:
    """A `SharedClock`, right within `error_s` while answers to pings come to `observe`. Any thread may call any
    method. `raw`: the clock that the samples' own times are from."""

    def __init__(self, sample: ClockSample, raw: Clock | None = None) -> None:
        self._raw = raw or MonotonicClock()
        self._lock = threading.Lock()
        bound = _bound_of(sample)
        self._bounds = deque([bound], maxlen=_WINDOW)
        self._best = bound
        self._slewing_s = bound.at_s  # since when `_offset_s` has been on its way to that of `_best`
        self._offset_s = bound.offset_s
        self._last_s = float("-inf")

    def now(self) -> float:
        with self._lock:
            raw_s = self._raw.now()
            self._last_s = max(self._last_s, raw_s + self._offset_at(raw_s))
            return self._last_s

    @property
    def error_s(self) -> float:
        """The largest error of `now`, in seconds: the bound of the best answer, and what is left to correct."""
        with self._lock:
            raw_s = self._raw.now()
            return self._best.error_at(raw_s) + abs(self._best.offset_s - self._offset_at(raw_s))

    def observe(self, sample: ClockSample) -> None:
        """Takes an answer to a ping. Ignores one that cannot be."""
        bound = _bound_of(sample)
        if bound.error_s < 0 or not math.isfinite(bound.error_s + bound.offset_s):
            return
        with self._lock:
            raw_s = self._raw.now()
            offset_s = self._offset_at(raw_s)
            if any(_contradict(other, bound) for other in self._bounds):
                self._bounds.clear()  # one of the clocks was stopped, as in a suspended machine
            self._bounds.append(bound)
            self._best = min(self._bounds, key=lambda other: other.error_at(raw_s))
            is_jump = self._best.offset_s - offset_s > _JUMP_S
            self._slewing_s, self._offset_s = raw_s, self._best.offset_s if is_jump else offset_s

    def _offset_at(self, raw_s: float) -> float:
        left_s = self._best.offset_s - self._offset_s
        max_step_s = _MAX_SLEW * max(raw_s - self._slewing_s, 0.0)
        return self._offset_s + min(max(left_s, -max_step_s), max_step_s)


def _bound_of(sample: ClockSample) -> _Bound:
    sent_s, answered_s, received_s = sample
    middle_s = (sent_s + received_s) / 2
    return _Bound(middle_s, answered_s - middle_s, (received_s - sent_s) / 2)


def _contradict(one: _Bound, other: _Bound) -> bool:
    return abs(one.offset_s - other.offset_s) > one.error_at(other.at_s) + other.error_s
