"""Which of a seat's two places holds the recurrent state of its request, and how far that state has come.

A step reads one place and writes the other; only when it has come back whole do they change roles. So a step that
raised can be run again, row by row. Used by the language lane's thread alone.
"""

from __future__ import annotations

import numpy as np
import torch

from hydra_engine.backend.base import StateCache, StateRows
from hydra_engine.core.plans import Ints, LanguagePlan
from hydra_engine.worker.parts import counts_of, seats_of, starts_of


class StateTable:
    """Seat s has the cache's places 2 s and 2 s + 1."""

    def __init__(self, cache: StateCache) -> None:
        self.cache = cache
        num_seats = cache.conv.shape[0] // 2
        self._current: Ints = np.zeros(num_seats, dtype=np.int64)  # 0 or 1: the place that holds the state
        self._num_tokens: Ints = np.zeros(num_seats, dtype=np.int64)  # that the state has seen

    def rows(self, plan: LanguagePlan) -> StateRows:
        """Where each row reads and writes. A row that begins at 0 reads nothing, whatever its seat was used for."""
        seats, starts = seats_of(plan), starts_of(plan)
        seen = np.where(starts > 0, self._num_tokens[seats], 0)
        wrong = np.flatnonzero(seen != starts)
        assert not wrong.size, f"state of {seen[wrong[0]]} tokens where a row begins at {starts[wrong[0]]}"
        current = self._current[seats]
        cu_q = np.zeros(len(seats) + 1, dtype=np.int64)
        np.cumsum(counts_of(plan), out=cu_q[1:])
        reads = 2 * seats + current
        writes = 2 * seats + 1 - current
        return StateRows(*(torch.from_numpy(values) for values in (cu_q, starts, reads, writes)))

    def advance(self, plan: LanguagePlan) -> None:
        """The step of this plan has come back whole."""
        seats = seats_of(plan)
        self._current[seats] = 1 - self._current[seats]
        self._num_tokens[seats] = starts_of(plan) + counts_of(plan)
