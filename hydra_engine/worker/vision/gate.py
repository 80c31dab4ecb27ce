"""The gate between the two lanes of one device: the vision lane waits between layers where it would make a language
step late.

A language step comes with an allowance, the seconds of vision that may run beside it. When they are used up the vision
lane stops at its next checkpoint and goes on when that step has ended, or with the allowance of the next. Two threads:
the language lane calls `begin` and `end`, the vision lane all else. Does not know where allowances come from, what a
layer is, or requests.

What it bounds. A layer that runs is not interrupted, so a step has at most its allowance plus one piece of vision (what
lies between two checkpoints) beside it. On a CPU a piece of a large picture may take longer than a decode step; then
every step has some of it beside it, and only fewer patches in a batch make pieces shorter. The vision lane computes at
least one piece between two waits, so a long row of language steps slows it down and never stops it.

On CUDA the seconds that count are those in which the host launches: the gate bounds launches, not what runs on the GPU
(docs/gpu.md).
"""

from __future__ import annotations

import threading
from math import inf

from hydra_engine.clock import Clock
from hydra_engine.worker.ports import Gate


class LaneGate(Gate):
    """Seconds of vision are those between `enter` and `leave`, without waits, on the given clock and whether or not the
    system let the thread run; only those while a language step runs count."""

    can_hold = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()  # guards what follows; only the vision lane ever waits for it
        self._closed = False
        self._running = False
        self._limited = False  # a step with a finite allowance runs
        self._allowance_s = inf
        self._used_s = 0.0  # in this step, up to `_since_s`
        self._since_s: float | None = None  # the vision lane computes since then; None: it waits or has nothing to do
        self._waiting = False  # the vision lane stands at the gate and has not been released

    # ---- the language lane

    def begin(self, allowance_s: float = inf) -> None:
        assert allowance_s >= 0, "an allowance is a time"
        with self._changed:
            assert not self._running, "a language step began inside another"
            self._running = True
            self._allowance_s = allowance_s
            self._limited = allowance_s < inf and not self._closed
            self._used_s = 0.0
            if self._since_s is not None:
                self._since_s = self._clock.now()

    def end(self) -> float:
        with self._changed:
            assert self._running, "a language step ended that had not begun"
            self._count()
            self._running = self._limited = False
            self._release()
            return self._used_s

    # ---- the vision lane

    def enter(self) -> None:
        with self._changed:
            assert self._since_s is None, "a vision step began inside another"
            self._since_s = self._clock.now()
        self.checkpoint()

    def checkpoint(self) -> None:
        # Read without the lock, so that a checkpoint costs nothing where there is no limit. A step that begins at this
        # very moment finds a piece running, as it would a moment later.
        if self._limited:
            self._wait_for_turn()

    def leave(self) -> None:
        with self._changed:
            assert self._since_s is not None, "a vision step ended that had not begun"
            self._count()
            self._since_s = None

    # ---- both

    @property
    def waiting(self) -> bool:
        """Whether the vision lane is held up now."""
        return self._waiting

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._limited = False
            self._release()

    def _wait_for_turn(self) -> None:
        with self._changed:
            assert self._since_s is not None, "a checkpoint outside a vision step"
            self._count()
            if not self._limited or self._used_s < self._allowance_s:
                return
            self._since_s = None
            self._waiting = True
            # A next step may have begun before this thread wakes: then its turn is in that one, also with no allowance.
            while self._waiting:
                self._changed.wait()
            self._since_s = self._clock.now()

    def _release(self) -> None:
        self._waiting = False
        self._changed.notify_all()

    def _count(self) -> None:
        """Adds what the vision lane has computed since the last count to the step that runs."""
        if self._running and self._since_s is not None:
            now = self._clock.now()
            self._used_s += now - self._since_s
            self._since_s = now
