"""Masks of grammars take turns of clients, and a step waits for so many of them and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hydra_engine.core.ids import StepId
from hydra_engine.core.plans import DecodeRows, LanguagePlan
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.worker.language.constraints import ALONE_S, STEP_S, MaskTurns
from hydra_engine.worker.language.sampler import SamplingState
from hydra_engine.worker.language.slot_table import SlotTable
from tests.worker.test_constraints import request_of


class Masks:
    """A constraint whose masks take so long, on a clock that nothing else moves."""

    def __init__(self, mask_s: float) -> None:
        self.mask_s = self.max_mask_s = mask_s
        self.num_made = 0
        self.now: list[float] = []

    def prepare(self, output_ids: Sequence[int]) -> None:
        self.num_made += 1
        self.now[0] += self.mask_s

    def allowed(self, output_ids: Sequence[int]) -> Any:
        raise AssertionError("nobody samples here")


class Rows:
    """Decodes, one a slot, that are as far as they were before while they are deferred."""

    def __init__(self, masks: Sequence[tuple[str, Masks | None]], *, expected_only: bool = False) -> None:
        self.table, self.now = SlotTable(len(masks)), [0.0]
        self.turns = MaskTurns(self.table, expected_only=expected_only, clock=lambda: self.now[0])
        self.masks = [mask for _, mask in masks]
        self.starts = np.full(len(masks), 3, dtype=np.int64)
        self.requests = []
        for slot, (client, mask) in enumerate(masks):
            request = replace(request_of(), client=client)
            state = replace(SamplingState.from_request(request), constraint=mask)
            if mask is None:
                state = SamplingState.from_request(replace(request, sampling=SamplingParams()))
            else:
                mask.now = self.now
            assert mask is None or state.history is not None
            self.requests.append(request)
            self.table.owners[slot], self.table._requests[slot] = request.id, request
            self.table._sampling_states[slot] = state
            self.table._constrained[slot] = mask is not None

    def step(self) -> list[int]:
        """Rows that are deferred."""
        count = len(self.masks)
        decodes = DecodeRows(
            np.array([request.id for request in self.requests]),
            np.arange(count),
            np.full(count, 7),
            self.starts.copy(),
            self.starts - 2,
            np.zeros((count, 1), dtype=np.int32),
        )
        deferred = self.turns.deferred(LanguagePlan(StepId(0), decodes, ()), ())
        self.starts[np.setdiff1d(np.arange(count), deferred)] += 1
        return deferred


def test_a_step_of_several_clients_waits_for_so_many_masks_and_no_more() -> None:
    rows = Rows([("bob", None), *(("alice", Masks(0.4 * STEP_S)) for _ in range(64))])
    waits = []
    for _ in range(100):
        before_s = rows.now[0]
        assert 0 not in rows.step()
        waits.append(rows.now[0] - before_s)
    assert max(waits) < 1.5 * STEP_S and sum(waits) < 150 * STEP_S
    made = [mask.num_made for mask in rows.masks if mask is not None]
    assert min(made) >= 3 and max(made) - min(made) <= 1, "rows of one client take turns as well"


def test_what_took_longer_is_paid_with_the_steps_that_follow() -> None:
    rows = Rows([("bob", None), ("alice", Masks(4.5 * STEP_S)), ("alice", Masks(4.5 * STEP_S))])
    waits = []
    for _ in range(50):
        before_s = rows.now[0]
        rows.step()
        waits.append(rows.now[0] - before_s)
    assert sum(waits) < 75 * STEP_S and sum(wait > 0 for wait in waits) >= 10


def test_who_has_cheap_masks_waits_for_nobody_with_dear_ones() -> None:
    cheap = Masks(0.01 * STEP_S)
    rows = Rows([*(("alice", Masks(0.6 * STEP_S)) for _ in range(64)), ("bob", cheap)])
    for _ in range(20):
        rows.step()
    assert cheap.num_made >= 19


def test_a_client_alone_has_longer_steps_and_pays_for_nothing() -> None:
    rows = Rows([("alice", Masks(0.4 * ALONE_S)) for _ in range(6)])
    assert rows.step() == [3, 4, 5] and rows.step() == [0, 1, 2] and rows.step() == [3, 4, 5]
    slow = Rows([("alice", Masks(3 * ALONE_S)) for _ in range(2)])
    assert slow.step() == [1] and slow.step() == [0]
    assert Rows([("alice", Masks(0.01 * ALONE_S)) for _ in range(64)]).step() == []


def test_on_a_device_masks_hold_up_no_launch_before_they_take_too_long() -> None:
    dear = Masks(0.3 * STEP_S)
    rows = Rows([("bob", None), ("alice", dear), ("alice", Masks(0.3 * STEP_S))], expected_only=True)
    assert rows.step() == [] and rows.now == [0.0]
    dear.mask_s = dear.max_mask_s = 1.5 * STEP_S
    assert rows.step() == [2] and dear.num_made == 1


def test_a_grammar_that_cannot_be_followed_is_its_own_rows_business(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(masks: Masks, output_ids: Sequence[int]) -> None:
        raise InvalidRequest("too complex")

    rows = Rows([("bob", None), ("alice", Masks(0.0))])
    monkeypatch.setattr(Masks, "prepare", fails)
    assert rows.step() == []


def test_rows_behind_a_deferred_one_are_deferred_too_until_it_is_computed() -> None:
    rows = Rows([("bob", None), ("alice", Masks(2.5 * STEP_S)), ("alice", Masks(2.5 * STEP_S))])
    assert rows.step() == [2]
    rows.starts[2] += 1  # as it is planned ahead
    assert rows.step() == [1, 2]
    rows.starts[2] -= 1
    assert rows.step() == [1]
