"""Which of a sequence slot's two state slots holds its request's recurrent state, and how many tokens that has seen.

A step reads one state slot and writes the other; they swap only when the step has come back whole. So a step that
raised can be run again, row by row. Used by the language lane's thread alone.
"""

from __future__ import annotations

import numpy as np
import torch

from hydra_engine.backend.base import StateCache, StateRows
from hydra_engine.core.plans import Ints, LanguagePlan
from hydra_engine.worker.language.plan_rows import counts_of, seq_slots_of, starts_of


class StateTable:
    """Sequence slot s has the cache's state slots 2 s and 2 s + 1."""

    def __init__(self, cache: StateCache) -> None:
        self.cache = cache
        num_seq_slots = cache.conv.shape[0] // 2
        self._current: Ints = np.zeros(num_seq_slots, dtype=np.int64)  # 0 or 1: which state slot holds the state
        self._num_tokens: Ints = np.zeros(num_seq_slots, dtype=np.int64)  # that the state has seen

    def rows(self, plan: LanguagePlan) -> StateRows:
        """Where each row reads and writes. A row that begins at 0 reads nothing, whatever its slot was used for."""
        seq_slots, starts = seq_slots_of(plan), starts_of(plan)
        seen = np.where(starts > 0, self._num_tokens[seq_slots], 0)
        wrong = np.flatnonzero(seen != starts)
        assert not wrong.size, f"state of {seen[wrong[0]]} tokens where a row begins at {starts[wrong[0]]}"
        current = self._current[seq_slots]
        cu_q = np.zeros(len(seq_slots) + 1, dtype=np.int64)
        np.cumsum(counts_of(plan), out=cu_q[1:])
        reads = 2 * seq_slots + current
        writes = 2 * seq_slots + 1 - current
        return StateRows(*(torch.from_numpy(values) for values in (cu_q, starts, reads, writes)))

    def advance(self, plan: LanguagePlan) -> None:
        """The step of this plan has come back whole."""
        seq_slots = seq_slots_of(plan)
        self._current[seq_slots] = 1 - self._current[seq_slots]
        self._num_tokens[seq_slots] = starts_of(plan) + counts_of(plan)
