"""Language plans -> language results, in the language lane's thread.

A row that makes the model raise, or whose logits are not finite, fails alone: a step that raised is run again row by
row, and rows of a request that failed are barred, also those that were planned ahead. Where the device works behind the
call, `launch` returns while a step still runs, and the next one is launched before it was read. Does not decide when a
request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from hydra_engine.backend.device import Device
from hydra_engine.clock import Clock
from hydra_engine.core.plans import Ints, LanguagePlan
from hydra_engine.errors import ErrorInfo
from hydra_engine.worker.boundary import OUT_OF_MEMORY, attempt_step
from hydra_engine.worker.language.in_flight import FAILED_EARLIER, Pending, StepOrder
from hydra_engine.worker.language.plan_rows import part_of
from hydra_engine.worker.language.slot_table import SlotTable
from hydra_engine.worker.language.step import Step
from hydra_engine.worker.ports import NO_GATE, Gate, WorkerRequest


class LanguageLane:
    """`ahead`: steps are launched before the ones before them have been read. `gate` is told of whole steps; a step may
    tell another one of its forwards itself."""

    def __init__(
        self,
        step: Step,
        slot_table: SlotTable,
        device: Device,
        clock: Clock,
        *,
        ahead: bool,
        gate: Gate = NO_GATE,
    ) -> None:
        self._step = step
        self._slot_table = slot_table
        self._device = device
        self._clock = clock
        self._ahead = ahead
        self._order = StepOrder(slot_table, clock, gate)

    def launch(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Pending:
        """`records[i]` belongs to `plan.chunks[i]`. Never raises because of a request's content; BackendError where the
        device failed. With `ahead` the result may not be there yet."""
        pending = Pending(self._order, plan, self._clock.now())
        self._order.add(pending)
        self._step.vision_s = 0.0
        with torch.inference_mode():
            self._launch(pending, records)
        pending.vision_s = self._step.vision_s
        return pending

    # ---- rows that fail alone

    def _launch(self, pending: Pending, records: Sequence[WorkerRequest]) -> None:
        plan, slot_table = pending.plan, self._slot_table
        slot_table.take(plan, records)
        if self._ahead:
            pending.slot_owners = slot_table.slot_owners(plan)
        rows, barred = np.arange(plan.num_rows), slot_table.barred(plan)
        if barred:
            pending.fail(barred, FAILED_EARLIER)
            rows = np.setdiff1d(rows, barred)
            self._attempt(pending, rows, *part_of(plan, records, rows))
        else:
            self._attempt(pending, rows, plan, records)
        failures = pending.samples.failures
        if failures:
            slot_table.fail(pending.slot_owners or slot_table.slot_owners(plan), [row for row, _ in failures])

    def _attempt(
        self, pending: Pending, rows: Ints, plan: LanguagePlan, records: Sequence[WorkerRequest], *, alone: bool = False
    ) -> None:
        """Row i of `plan` is row `rows[i]` of the step. A row that was alone and found too little memory is tried once
        more, now that memory has been given back."""
        if not len(rows):
            return
        outcome = attempt_step(self._device, f"language step of {len(rows)}", partial(self._step.run, plan, records))
        if not isinstance(outcome, ErrorInfo):
            pending.add(rows, outcome)
            return
        if self._ahead:
            pending.wait_for(self._device.fetch(()))
        if alone or (len(rows) == 1 and outcome is not OUT_OF_MEMORY):
            pending.fail(rows, outcome)
            return
        for index in range(len(rows)):
            one = np.array([index], dtype=np.int64)
            self._attempt(pending, rows[one], *part_of(plan, records, one), alone=True)
