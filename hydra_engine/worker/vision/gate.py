"""The gates between the two lanes of one device: the vision lane waits between layers where it would make a language
step late.

A language step comes with an allowance, the seconds of vision that may run beside it. When it is used up, the vision
lane stops at its next checkpoint and resumes when that step has ended, or with the allowance of the next. The
language lane calls `begin` and `end`, the vision lane `enter`, `checkpoint` and `leave`, any thread `close`. Does not
know where allowances come from, what a layer is, or requests.

The bound: a running layer is not interrupted, so at most the allowance plus one piece of vision (the work between two
checkpoints) runs beside a step; `DeviceGate` has the bound for pieces that are launched ahead. On a CPU a piece of a
large picture may take longer than a decode step; then part of it runs beside every step, and only fewer patches in a
batch make pieces shorter. The vision lane computes at least one piece between two waits, so a long series of language
steps slows it down and never stops it.

`LaneGate` is for a synchronous device, where a call returns with its work done, `DeviceGate` for an asynchronous one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from hydra_engine.backend.device import Mark
from hydra_engine.clock import Clock
from hydra_engine.worker.ports import Gate

EXPECTED_KEPT = 0.9  # an expected time falls by at most this factor per faster piece


class LaneGate(Gate):
    """A gate that counts, while a language step runs, the wall time of the vision lane between `enter` and `leave`,
    less its waits at the gate. This includes time in which the system did not run the thread."""

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
        self._waiting = False  # the vision lane waits and has not been released

    # ---- the language lane

    def begin(self, allowance_s: float = inf) -> None:
        """Starts a language step, beside which vision may run for `allowance_s` seconds, 0 or more. Asserts that no
        other runs."""
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
        """Ends the language step. Returns the seconds of vision that ran beside it."""
        with self._changed:
            assert self._running, "a language step ended that had not begun"
            self._count()
            self._running = self._limited = False
            self._release()
            return self._used_s

    # ---- the vision lane

    def enter(self, num_patches: int = 0) -> None:
        """Starts a vision step, of any number of patches; waits first if the running language step has no allowance
        left."""
        with self._changed:
            assert self._since_s is None, "a vision step began inside another"
            self._since_s = self._clock.now()
        self.checkpoint()

    def checkpoint(self) -> None:
        """Waits for the end of the running language step if that has no allowance left."""
        # Read without the lock, so that a checkpoint costs nothing where there is no limit. A step that begins at this
        # very moment finds a piece running, as it would a moment later.
        if self._limited:
            self._wait_for_turn()

    def leave(self) -> None:
        """Ends the vision step, successful or not."""
        with self._changed:
            assert self._since_s is not None, "a vision step ended that had not begun"
            self._count()
            self._since_s = None

    # ---- both

    def close(self) -> None:
        """Opens the gate for good: no call waits for a language step from now on."""
        with self._changed:
            self._closed = True
            self._limited = False
            self._release()

    def _wait_for_turn(self) -> None:
        """Waits until the running step has ended or the gate is closed, if the step's allowance is used up."""
        with self._changed:
            assert self._since_s is not None, "a checkpoint outside a vision step"
            self._count()
            if not self._limited or self._used_s < self._allowance_s:
                return
            self._since_s = None
            self._waiting = True
            # A next step may have begun before this thread wakes: then a piece runs beside it, whatever its allowance.
            while self._waiting:
                self._changed.wait()
            self._since_s = self._clock.now()

    def _release(self) -> None:
        """Ends the vision lane's wait, if it waits; it then computes at least one piece. The caller holds
        `_changed`."""
        self._waiting = False
        self._changed.notify_all()

    def _count(self) -> None:
        """Adds the vision time since the last count to the running step, if there is one. The caller holds
        `_changed`."""
        if self._running and self._since_s is not None:
            now = self._clock.now()
            self._used_s += now - self._since_s
            self._since_s = now


class _Piece(NamedTuple):
    """The work launched between two checkpoints, which ends at `mark`. The device begins it after `begin_mark`, and not
    before `begun_s` on the host's clock."""

    begin_mark: Mark
    mark: Mark
    begun_s: float
    kind: int  # bit length of the encode's patches: such pieces take about the same time


class DeviceGate(Gate):
    """A gate that counts device time of vision, between marks after the pieces. At most two pieces are in flight:
    before it launches a third the vision lane waits for the first, so that the device never idles and the launched work
    stays short. Before it launches a piece beside a step it adds the vision time of the step so far and the expected
    rest of the piece in flight, from recent pieces of encodes of that size.

    The bound. Let a piece take at most p seconds, and at most e more than was expected of it. Beside a step with an
    allowance of a seconds vision runs for at most max(2 p, a + p + e) seconds, which is a + p + e from an allowance of
    one piece on. Proof: let L be the last piece that the lane begins to launch during the step. If there is none, what
    runs beside the step was in flight when it began: two pieces at most. Else, when L was admitted, either nothing was
    in flight and the step had had less than a, or the end of a step before had ended the lane's wait, and then the step
    had had nothing; so it has no more than a + p. Or one piece K was in flight, and what the step had had with what was
    expected to be left of K was less than a; K takes at most e longer, and L at most p: a + p + e. Pieces of a size
    that is not known yet are never in flight together with another one that is admitted, so e is about pieces that were
    seen. Times are taken when the host learns of a mark, later than it is reached by as long as the lane takes to wake.

    `paced`: some step may have a finite allowance. Otherwise nothing waits, and an encode gets only two marks.
    """

    def __init__(self, clock: Clock, mark: Callable[[], Mark], *, paced: bool) -> None:
        self.can_hold = paced
        self._clock = clock
        self._mark = mark
        self._changed = threading.Condition()  # guards what follows; only the vision lane ever waits for it
        self._closed = False
        self._allowance_s: float | None = None  # of the step that runs
        self._step_s = 0.0  # when it began
        self._used_s = 0.0  # beside it, by pieces that are done
        self._in_flight: deque[_Piece] = deque()
        self._done_s = -inf  # when the last piece known to be done ended
        self._expected: dict[int, float] = {}  # seconds, by kind
        self._kind: int | None = None  # of the vision step that runs
        self._behind: Mark | None = None  # the piece being launched begins after it, at `_begun_s` or later
        self._begun_s = 0.0
        self._waiting = False  # the vision lane waits and has not been released

    # ---- the language lane

    def begin(self, allowance_s: float = inf) -> None:
        """Starts a language step, beside which vision may run for `allowance_s` seconds, 0 or more. Asserts that no
        other runs."""
        assert allowance_s >= 0, "an allowance is a time"
        with self._changed:
            assert self._allowance_s is None, "a language step began inside another"
            self._take_done()
            self._allowance_s, self._step_s, self._used_s = allowance_s, self._clock.now(), 0.0

    def end(self) -> float:
        """Ends the language step. Returns the device seconds of vision that ran beside it, so far as the host knows."""
        with self._changed:
            assert self._allowance_s is not None, "a language step ended that had not begun"
            self._take_done()
            used_s = self._used_s + self._running_s()
            self._allowance_s = None
            self._release()
            return used_s

    # ---- the vision lane

    def enter(self, num_patches: int = 0) -> None:
        """Starts a vision step of `num_patches` patches. If `paced`, waits first until at most one earlier piece is in
        flight, and the running language step has allowance left or has ended. `leave` must follow."""
        with self._changed:
            assert self._kind is None, "a vision step began inside another"
            self._kind = num_patches.bit_length()
        self._admit()

    def checkpoint(self) -> None:
        """Marks the end of the launched piece and waits until the next may be launched: at most one other piece is in
        flight, and the running language step has allowance left or has ended. Does nothing if no step has a finite
        allowance."""
        if self.can_hold:
            self._launched()
            self._admit()

    def leave(self) -> None:
        """Ends the vision step, successful or not."""
        assert self._kind is not None, "a vision step ended that had not begun"
        if self._behind is not None:
            self._launched()
        self._kind = None

    # ---- both

    def close(self) -> None:
        """Opens the gate for good: no call waits for a language step from now on."""
        with self._changed:
            self._closed = True
            self._release()

    # ---- pieces

    def _launched(self) -> None:
        """Marks the end of the piece whose work has been launched: it is in flight now."""
        with self._changed:
            assert self._behind is not None and self._kind is not None, "a checkpoint outside a vision step"
            self._in_flight.append(_Piece(self._behind, self._mark(), self._begun_s, self._kind))
            self._behind = None

    def _admit(self) -> None:
        """Waits until the next piece may be launched, then begins it."""
        while (blocking := self._begin_piece()) is not None:
            blocking.wait()

    def _begin_piece(self) -> Mark | None:
        """Begins the next piece and returns None, or returns the mark to wait for before the next try. If the running
        step has no allowance left and nothing is in flight, waits itself until that step has ended, then begins the
        piece."""
        with self._changed:
            self._take_done()
            if self.can_hold and not self._closed:
                if len(self._in_flight) > 1:
                    return self._in_flight[0].mark
                if self._allowance_s is not None and self._used_s + self._left_s() >= self._allowance_s:
                    if self._in_flight:
                        return self._in_flight[0].mark
                    self._waiting = True
                    # A next step may have begun before this thread wakes: then a piece runs beside it.
                    while self._waiting:
                        self._changed.wait()
            self._behind = self._in_flight[-1].mark if self._in_flight else self._mark()
            self._begun_s = self._clock.now()
            return None

    def _release(self) -> None:
        """Ends the vision lane's wait, if it waits; it then begins a piece. The caller holds `_changed`."""
        self._waiting = False
        self._changed.notify_all()

    # ---- seconds, with `_changed` held

    def _take_done(self) -> None:
        """Removes pieces that are done, adds what ran beside the running step to its vision time, and updates the
        expected times."""
        now = self._clock.now()
        while self._in_flight and self._in_flight[0].mark.is_done():
            piece = self._in_flight.popleft()
            took_s = piece.mark.seconds_since(piece.begin_mark)
            begun_s = max(self._done_s, piece.begun_s)
            self._done_s = min(now, begun_s + took_s)
            self._expected[piece.kind] = max(took_s, EXPECTED_KEPT * self._expected.get(piece.kind, 0.0))
            if self._allowance_s is not None:
                self._used_s += max(0.0, self._done_s - max(begun_s, self._step_s))

    def _running_s(self) -> float:
        """Seconds since the oldest piece that is not done began, the one being launched included, or since the running
        step began if that is later; 0 without such a piece."""
        begun_s = [piece.begun_s for piece in self._in_flight] + ([self._begun_s] if self._behind is not None else [])
        return max(0.0, self._clock.now() - max(begun_s[0], self._done_s, self._step_s)) if begun_s else 0.0

    def _left_s(self) -> float:
        """Seconds of the pieces in flight beside the running step: so far, plus their expected rest; infinite if the
        kind of a piece has not been measured yet."""
        running_s, now = self._running_s(), self._clock.now()
        for index, piece in enumerate(self._in_flight):
            expected_s = self._expected.get(piece.kind, inf)
            ran_s = now - max(piece.begun_s, self._done_s) if index == 0 else 0.0
            running_s += max(0.0, expected_s - ran_s)
        return running_s
