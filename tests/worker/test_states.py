"""Which place of a slot a row reads and writes: never the same one, and the other way round only after a whole step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hydra_engine.backend.base import StateCache
from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import LanguageRow
from hydra_engine.worker.states import StateTable


def row(slot: int, start: int, count: int) -> LanguageRow:
    blocks = np.zeros(8, dtype=np.int32)
    return LanguageRow(RequestId(slot), (1,) * count, start, blocks, 8, False, 0, False, state_slot=slot)


def table() -> StateTable:
    return StateTable(StateCache(torch.zeros(6, 1, 3, 4), torch.zeros(6, 1, 1, 2, 2)))


def test_places_change_roles_after_a_whole_step() -> None:
    states = table()
    first = [row(2, 0, 5), row(0, 0, 3)]
    expected = ([0, 5, 8], [0, 0], [4, 0], [5, 1])
    assert states.rows(first).lists() == expected
    assert states.rows(first).lists() == expected  # again, for the step raised
    states.advance(first)
    assert states.rows([row(0, 3, 1), row(2, 5, 1)]).lists() == ([0, 1, 2], [3, 5], [1, 5], [0, 4])
    states.advance([row(2, 5, 1)])
    assert states.rows([row(2, 6, 1)]).lists() == ([0, 1], [6], [4], [5])
    with pytest.raises(AssertionError, match="state of 3 tokens where a row begins at 4"):
        states.rows([row(0, 4, 1)])
    assert states.rows([row(2, 0, 4)]).lists() == ([0, 4], [0], [4], [5])  # its next owner
