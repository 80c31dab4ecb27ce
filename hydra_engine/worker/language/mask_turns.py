"""The budget of a step for masks of grammars, and the rows that are deferred beyond it.

The lane waits for masks, so a step computes them until its budget is used; the mask begun last may exceed it. Rows
without a mask are deferred to a later step. In a step with several clients their masks take turns, and a client whose
mask exceeded the budget pays in the following steps; a single client has a larger budget, since only it waits. A row's
token does not depend on the step that computes it. Does not know what a grammar is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hydra_engine.core.fairness import FairQueue
from hydra_engine.core.plans import LanguagePlan
from hydra_engine.worker.boundary import run_guarded
from hydra_engine.worker.language.sampler import Constraint, TokenHistory
from hydra_engine.worker.language.slot_table import SlotTable, seq_slots_of

STEP_S = 0.01  # of processor time for masks, in a step with several clients
ALONE_S = 0.05  # in one with a single client: how long the first request of another may have to wait

_MAX_ROWS = 1 << 20  # more than a step has


@dataclass(slots=True, eq=False)
class _Mask:
    """The mask of a row, with the inputs to compute it."""

    row: int
    seq_slot: int
    client: str
    constraint: Constraint
    history: TokenHistory

    def prepare(self) -> None:
        self.constraint.prepare(self.history.output_ids)


class MaskTurns:
    """Chooses the rows to defer.

    `expected_only`: sampling is on a device, where masks are computed while a step's forward runs and delay nothing.
    Then masks are computed ahead only if they are expected to exceed the budget.
    """

    def __init__(
        self, slot_table: SlotTable, *, expected_only: bool, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._slot_table = slot_table
        self._expected_only = expected_only
        self._clock = clock
        self._queue: FairQueue[_Mask] = FairQueue("masks", _MAX_ROWS)
        self._owed_s: dict[str, float] = {}
        self._deferred_since: dict[int, int] = {}  # by slot: the first of the steps that its row was deferred in
        self._step = 0

    def deferred(self, plan: LanguagePlan, failed_rows: Collection[int]) -> list[int]:
        """Returns the deferred rows of the plan, ascending, without `failed_rows`. Computes the masks of the other rows
        or, with `expected_only`, may leave that to the sampler."""
        table = self._slot_table
        rows = [row for row in table.deferrable(plan) if row not in failed_rows]
        if not rows:
            return []
        behind = [row for row in table.after_deferred(plan) if row not in failed_rows]
        left = self.choose(plan, [row for row in rows if row not in behind])
        table.defer(plan, left)
        return sorted([*behind, *left])

    def choose(self, plan: LanguagePlan, rows: Sequence[int]) -> list[int]:
        """Computes masks within the budget and returns the rows, of these, that are left for a later step."""
        self._step += 1
        self._owed_s = {client: owed_s - STEP_S for client, owed_s in self._owed_s.items() if owed_s > STEP_S}
        is_alone = len({request.client for request in self._slot_table.requests(plan)}) == 1
        masks = [
            self._mask(row, seq_slot) for row, seq_slot in zip(rows, seq_slots_of(plan)[rows].tolist(), strict=True)
        ]
        max_s = ALONE_S if is_alone else STEP_S
        if self._expected_only and sum(mask.constraint.dearest_s for mask in masks) <= max_s:
            return []
        masks = [mask for mask in sorted(masks, key=self._since) if self._is_next(plan, mask)]
        left = self._left_alone(masks) if is_alone else self._left_by_turns(masks)
        since = {mask.seq_slot: self._since(mask) for mask in left}
        for mask in masks:
            self._deferred_since.pop(mask.seq_slot, None)
        self._deferred_since |= since
        return [mask.row for mask in left]

    def _left_alone(self, masks: list[_Mask]) -> list[_Mask]:
        left_s = ALONE_S
        for index, mask in enumerate(masks):
            if left_s <= 0:
                return masks[index:]
            left_s -= self._prepare(mask)
        return []

    def _left_by_turns(self, masks: list[_Mask]) -> list[_Mask]:
        for mask in masks:
            self._queue.push(mask.client, mask)
        left, left_s = dict.fromkeys(masks), STEP_S
        while left_s > 0 and (begun := self._queue.pop(lambda client: client not in self._owed_s)) is not None:
            client, mask = begun
            used_s = self._prepare(mask)
            self._queue.end(client, used_s)
            del left[mask]
            left_s -= used_s
            if left_s < 0:
                self._owed_s[client] = -left_s
        for mask in left:
            self._queue.remove(mask.client, mask)
        return list(left)

    def _prepare(self, mask: _Mask) -> float:
        """Computes the mask and returns the seconds that it took. An error is raised again when the row is sampled."""
        began_s = self._clock()
        run_guarded("a mask", mask.prepare)
        return self._clock() - began_s

    def _mask(self, row: int, seq_slot: int) -> _Mask:
        state, request = self._slot_table.sampling_state(seq_slot), self._slot_table.request(seq_slot)
        assert state.constraint is not None and state.history is not None
        return _Mask(row, seq_slot, request.client, state.constraint, state.history)

    def _since(self, mask: _Mask) -> int:
        return self._deferred_since.get(mask.seq_slot, self._step)

    def _is_next(self, plan: LanguagePlan, mask: _Mask) -> bool:
        """True if the row samples the token after those of its history; False if an earlier row of it failed."""
        mask.history.resolve()
        if not self._expected_only and mask.row < len(plan.decodes):
            start, token_id = self._slot_table.known_token(plan.decodes, mask.row)
            mask.history.record(start, (token_id,))
        return not mask.history.is_broken
