"""When the tokens of running decodes came: gaps against limits, and the stretch of each timeline that is still open.

Entry i of everything belongs to place i of the table of decodes (`decodes.py`), which says who joins, leaves and moves
to another place. When a request leaves, its timeline takes over what is to be kept. Is told times, never asks for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hydra_engine.core.plans import Ints
from hydra_engine.core.state import RequestState
from hydra_engine.scheduler.timeline import Timeline, is_late

Seconds = npt.NDArray[np.float64]
Indices = slice | Ints  # of some members; a slice if they are the first ones


@dataclass(slots=True)
class _Watched:
    """A member and its open span of decode steps: the begin, and the counts at that time."""

    state: RequestState
    timeline: Timeline
    since_s: float = 0.0
    num_generated: int = 0
    num_steps: int = 0
    num_rows: int = 0


class DecodeTimes:
    def __init__(self, num_slots: int) -> None:
        self._watched: list[_Watched] = []
        self._limits, self._first_s, self._last_s = self._floats = np.zeros((3, num_slots))  # of tokens, 0.0: none
        self._late_gaps = np.zeros(num_slots, dtype=np.int64)
        self._num_limited = 0
        self._num_steps = self._num_rows = 0  # of all steps with decodes so far
        self._latest_batch = 0

    # ---- coming and going

    def join(self, state: RequestState, timeline: Timeline) -> None:
        """At the place behind all others."""
        index = len(self._watched)
        self._watched.append(_Watched(state, timeline))
        self._limits[index] = timeline.limit_s
        self._num_limited += timeline.limit_s < math.inf
        self._first_s[index], self._last_s[index] = timeline.first_token_s, timeline.last_token_s
        self._late_gaps[index] = timeline.late_gaps
        self._open(self._watched[index], timeline.last_s)

    def leave(self, index: int) -> None:
        """The last member takes the place."""
        watched = self._watched[index]
        timeline = watched.timeline
        self._num_limited -= bool(self._limits[index] < math.inf)
        self._close(watched, float(self._last_s[index]))
        timeline.first_token_s, timeline.last_token_s = float(self._first_s[index]), float(self._last_s[index])
        timeline.last_s = max(timeline.last_s, timeline.last_token_s)
        timeline.late_gaps = int(self._late_gaps[index])
        mover = self._watched.pop()
        last = len(self._watched)
        if index != last:
            self._watched[index] = mover
            self._floats[:, index] = self._floats[:, last]
            self._late_gaps[index] = self._late_gaps[last]

    def _open(self, watched: _Watched, since_s: float) -> None:
        watched.since_s, watched.num_generated = since_s, watched.state.num_generated
        watched.num_steps, watched.num_rows = self._num_steps, self._num_rows

    def _close(self, watched: _Watched, until_s: float, late: int = 0) -> None:
        """`late` 1: the token that came last is not part of the span."""
        tokens = watched.state.num_generated - watched.num_generated - late
        if tokens > 0:
            batch = (self._num_rows - watched.num_rows) / max(1, self._num_steps - watched.num_steps)
            watched.timeline.decoded(watched.since_s, until_s, tokens=tokens, batch=round(batch))

    # ---- results

    def read_chunk(self, index: int, ended_s: float, gap_s: float) -> float | None:
        """The last chunk of a member has given its token. If that is late: when the token before came."""
        watched = self._watched[index]
        timeline = watched.timeline
        late_since_s = timeline.prefill_sampled(ended_s, gap_s)
        self._first_s[index], self._last_s[index] = timeline.first_token_s, ended_s
        self._late_gaps[index] = timeline.late_gaps
        self._open(watched, ended_s)
        return late_since_s

    def tick(self, indices: Indices, ended_s: float, *, batch: int, gap_s: float) -> list[tuple[int, float]]:
        """These members have got a token in a step of `batch` rows. Returns those to whom it came late, and when the
        token before came: (place, seconds). `gap_s`: `StepTimes.gap_s`."""
        before_s = self._last_s[indices]
        late = is_late(ended_s - before_s, self._limits[indices], gap_s).nonzero()[0]
        found: list[tuple[int, float]] = []
        if late.size:
            among = late if isinstance(indices, slice) else indices[late]
            self._late_gaps[among] += 1
            found = list(zip(among.tolist(), before_s[late].tolist(), strict=True))
        self._last_s[indices] = ended_s
        for index, last_s in found:
            self._close(self._watched[index], last_s, late=1)
        self._num_steps += 1
        self._num_rows += batch
        self._latest_batch = batch
        return found

    def resume(self, index: int, resumed_s: float) -> None:
        """The gap that `tick` has named ends here; what follows, its token included, is decoding again."""
        watched = self._watched[index]
        watched.since_s, watched.num_generated = resumed_s, watched.state.num_generated - 1
        watched.num_steps, watched.num_rows = self._num_steps - 1, self._num_rows - self._latest_batch

    # ---- questions

    @property
    def has_limits(self) -> bool:
        return self._num_limited > 0

    def limits(self, indices: Indices) -> Seconds:
        """Not to be changed, nor kept."""
        return self._limits[indices]

    def elapsed(self, indices: Indices) -> tuple[Seconds, Ints]:
        """(seconds from the first to the latest token, late gaps) of these members, as far as tokens have been read."""
        return self._last_s[indices] - self._first_s[indices], self._late_gaps[indices]

    def check(self, states: list[RequestState]) -> None:
        """Raises AssertionError unless these are the members, in this order."""
        assert len(states) == len(self._watched), "the times of a decode are lost"
        assert all(watched.state is state for watched, state in zip(self._watched, states, strict=True))
        assert self._num_limited == int((self._limits[: len(states)] < math.inf).sum())
