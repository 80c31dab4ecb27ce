"""Steps of the language lane that were launched and not read: their results, one after the other.

What a step sampled may lie on the device still. `Pending.result` waits for it, from any thread; whoever asks first
reads all steps before it too, so that a failure is known before later steps are reported. Does not know how a step is
launched, nor who wants its result.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from hydra_engine.backend.device import Fetch
from hydra_engine.clock import Clock
from hydra_engine.core.plans import Ints, LanguagePlan, LanguageResult
from hydra_engine.errors import BackendError, ErrorInfo, RequestFailed
from hydra_engine.worker.language.plan_rows import Samples
from hydra_engine.worker.language.slot_table import SlotOwners, SlotTable
from hydra_engine.worker.language.step import Unread
from hydra_engine.worker.ports import NO_GATE, Gate

FAILED_EARLIER = RequestFailed("an earlier step of this request failed").info()


class Pending:
    """A step of the lane. Its launch fills it; then only `result` may be used."""

    def __init__(self, order: StepOrder, plan: LanguagePlan, launched_s: float) -> None:
        self._order = order
        self._unread: list[tuple[Ints, Unread]] = []
        self._fences: list[Fetch] = []
        self.plan = plan
        self.launched_s = launched_s
        self.vision_s = 0.0  # of the vision lane, beside this step
        self.samples = Samples.none(plan.num_rows)  # as far as they are known
        self.slot_owners: SlotOwners | None = None  # None: no step before it was in flight when it was launched
        self.settled: LanguageResult | None = None

    def add(self, rows: Ints, outcome: Samples | Unread) -> None:
        """What became of these rows of the plan."""
        if isinstance(outcome, Unread):
            self._unread.append((rows, outcome))
        elif len(rows) == self.plan.num_rows:
            self.samples = outcome
        else:
            self.samples.put(rows, outcome)

    def fail(self, rows: Sequence[int] | Ints, error: ErrorInfo) -> None:
        self.samples.failures += [(int(row), error) for row in rows]

    def wait_for(self, fence: Fetch) -> None:
        """The result comes after what this has started: a launch that raised may have left work behind."""
        self._fences.append(fence)

    def result(self) -> LanguageResult:
        """Waits. Raises BackendError where the device failed."""
        return self._order.settle(self)

    def read(self, slot_table: SlotTable) -> None:
        """Waits; then `samples` are what the plan's rows got. All steps before it have been read."""
        for rows, unread in self._unread:
            self.samples.put(rows, unread.read())
        for fence in self._fences:
            fence.result()
        if self.slot_owners is None:
            return
        barred = slot_table.failed(self.slot_owners)
        if barred:
            self.samples.drop(barred)
            self.fail(barred, FAILED_EARLIER)
        if self.samples.failures:
            slot_table.fail(self.slot_owners, [row for row, _ in self.samples.failures])


class StepOrder:
    """The steps in flight, in their order. With a gate the vision lane is told when each of them begins and ends: on
    the device a step begins when it is launched or, if that is later, when the one before it ends."""

    def __init__(self, slot_table: SlotTable, clock: Clock, gate: Gate = NO_GATE) -> None:
        self._slot_table = slot_table
        self._clock = clock
        self._gate = gate
        self._reading = threading.Lock()  # held while the device is waited for; nobody who holds it launches
        self._changing = threading.Lock()  # of what follows; never held for long
        self._steps: deque[Pending] = deque()
        self._ended_s = float("-inf")  # the step that was read last
        self._error: BackendError | None = None

    def add(self, pending: Pending) -> None:
        """Before anything of the step is launched."""
        with self._changing:
            self._steps.append(pending)
            if len(self._steps) == 1:
                self._gate.begin(pending.plan.vision_s)

    def settle(self, pending: Pending) -> LanguageResult:
        with self._reading:
            while pending.settled is None:
                if self._error is not None:
                    raise self._error
                self._settle_next()
            return pending.settled

    def _settle_next(self) -> None:
        step = self._steps[0]
        try:
            step.read(self._slot_table)
        except BackendError as error:
            self._error = error
            raise
        finally:
            self._end(step)
        started_s, self._ended_s = max(step.launched_s, self._ended_s), self._clock.now()
        samples = step.samples
        step.settled = LanguageResult(
            step.plan.step_id,
            started_s,
            self._ended_s,
            samples.token_ids,
            tuple(samples.logprobs),
            tuple(samples.failures),
            step.vision_s,
            tuple(samples.scores),
        )

    def _end(self, step: Pending) -> None:
        with self._changing:
            self._steps.popleft()
            step.vision_s += self._gate.end()
            if self._steps:
                self._gate.begin(self._steps[0].plan.vision_s)
