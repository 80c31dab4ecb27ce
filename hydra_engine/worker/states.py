"""Which of a slot's two places holds the state of its request, and how far that state has come.

A step reads one place and writes the other; only when it has come back whole do they change roles. So a step that
raised can be run again, row by row. Used by the language lane's thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hydra_engine.backend.base import StateCache, StateRows
from hydra_engine.core.plans import LanguageRow


class StateTable:
    def __init__(self, cache: StateCache) -> None:
        self.cache = cache
        self._current: dict[int, tuple[int, int]] = {}  # slot -> (0 or 1, tokens that the state there has seen)

    def rows(self, rows: Sequence[LanguageRow]) -> StateRows:
        """Where each row reads and writes. A row that begins at 0 reads nothing, whatever its slot was used for."""
        cu_q, reads, writes = [0], [], []
        for row in rows:
            which, num_tokens = self._current.get(row.state_slot, (0, 0)) if row.start else (0, 0)
            assert num_tokens == row.start, f"state of {num_tokens} tokens where a row begins at {row.start}"
            cu_q.append(cu_q[-1] + len(row.token_ids))
            reads.append(2 * row.state_slot + which)
            writes.append(2 * row.state_slot + 1 - which)
        starts = [row.start for row in rows]
        return StateRows(*(torch.tensor(values, dtype=torch.int64) for values in (cu_q, starts, reads, writes)))

    def advance(self, rows: Sequence[LanguageRow]) -> None:
        """The step of these rows has come back whole."""
        for row in rows:
            which = self._current.get(row.state_slot, (0, 0))[0] if row.start else 0
            self._current[row.state_slot] = 1 - which, row.start + len(row.token_ids)
