"""The language lane: plans -> results, the steps in flight between them, and the lane's threads.

A row that makes the model raise, or whose logits are not finite, fails alone: a step that raised is run again row by
row, and later rows of its request fail too, those planned ahead included. On an asynchronous device
`LanguageLane.launch` returns while a step still runs, and the next one is launched before it is read; one more thread
waits for the results, in order. Does not decide when a request ends.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import numpy as np

from hydra_engine.backend.base import Backend, PagedCache, StateCache
from hydra_engine.backend.device import Fetch, Lane
from hydra_engine.clock import Clock
from hydra_engine.config import EngineConfig
from hydra_engine.core.plans import Int64s, LanguagePlan
from hydra_engine.core.results import LanguageResult
from hydra_engine.errors import BackendError, ErrorInfo, RequestFailed
from hydra_engine.models.implementation import ServedModel
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.worker.blank_steps import warm_language
from hydra_engine.worker.boundary import OUT_OF_MEMORY, run_guarded_step
from hydra_engine.worker.language.batches import StepParts
from hydra_engine.worker.language.constraints import MaskTurns
from hydra_engine.worker.language.graphs import StepGraphs, default_sizes, mixed_sizes
from hydra_engine.worker.language.slot_table import SlotOwners, SlotTable, StateTable, part_of
from hydra_engine.worker.language.step import LanguageStep, PendingSamples, Samples
from hydra_engine.worker.ports import Gate, Guard, Job, WorkerRequest

logger = logging.getLogger(__name__)

FAILED_EARLIER = RequestFailed("an earlier step of this request failed").info()


class Pending:
    """A step of the lane whose result may be outstanding. The launch fills it; afterwards only `result` may be used.
    `divided`: the step runs on a partition of the device, so vision beside it has no time limit."""

    def __init__(self, order: StepOrder, plan: LanguagePlan, launched_s: float, *, divided: bool = False) -> None:
        self._order = order
        self._pending: list[tuple[Int64s, PendingSamples]] = []
        self._fences: list[Fetch] = []
        self.plan = plan
        self.launched_s = launched_s
        self.allowance_s = inf if divided else plan.vision_s
        self.vision_s = 0.0  # for which the vision lane ran beside this step
        self.deferred: list[int] = []
        self.samples = Samples.none(plan.num_rows)  # complete once `read` has been called
        self.slot_owners: SlotOwners | None = None  # None on a synchronous device, where no step is launched ahead
        self.resolved: LanguageResult | None = None

    def add(self, rows: Int64s, outcome: Samples | PendingSamples) -> None:
        """Stores the outcome of these rows of the plan: samples, or a pending read."""
        if isinstance(outcome, PendingSamples):
            self._pending.append((rows, outcome))
        elif len(rows) == self.plan.num_rows:
            self.samples = outcome
        else:
            self.samples.put(rows, outcome)

    def fail(self, rows: Sequence[int] | Int64s, error: ErrorInfo) -> None:
        """Records the error for these rows of the plan."""
        self.samples.failures += [(int(row), error) for row in rows]

    def wait_for(self, fence: Fetch) -> None:
        """Makes the result wait for `fence`: a launch that raised may have left work on the device."""
        self._fences.append(fence)

    def result(self) -> LanguageResult:
        """Waits for the result, and reads all earlier steps first. Thread-safe. Raises BackendError if the device
        failed in this step or an earlier one."""
        return self._order.resolve(self)

    def read(self, slot_table: SlotTable) -> None:
        """Waits for the device and completes `samples`. If `slot_owners` is set, also fails rows whose request failed
        in an earlier step, and records all failed rows in the slot table. Read steps in order. Raises BackendError if
        the device failed."""
        for rows, pending in self._pending:
            self.samples.put(rows, pending.read())
        for fence in self._fences:
            fence.result()
        if self.slot_owners is None:
            return
        failed_rows = slot_table.failed_rows_of(self.slot_owners)
        if failed_rows:
            self.samples.drop(failed_rows)
            self.fail(failed_rows, FAILED_EARLIER)
        if self.samples.failures:
            slot_table.fail(self.slot_owners, [row for row, _ in self.samples.failures])


class StepOrder:
    """The queue of steps in flight, oldest first. The gate's `begin` and `end` are called for the oldest one: on the
    device a step begins when it is launched or, if that is later, when the one before it ends."""

    def __init__(self, slot_table: SlotTable, clock: Clock, gate: Gate) -> None:
        self._slot_table = slot_table
        self._clock = clock
        self._gate = gate
        self._reading = threading.Lock()  # held while the device is waited for; no thread that holds it launches
        self._changing = threading.Lock()  # of what follows; never held for long
        self._steps: deque[Pending] = deque()
        self._ended_s = float("-inf")  # end of the step that was read last
        self._error: BackendError | None = None

    def add(self, pending: Pending) -> None:
        """Appends the step, and begins it at the gate if no other is in flight. Call it before any work of the step is
        launched."""
        with self._changing:
            self._steps.append(pending)
            if len(self._steps) == 1:
                self._gate.begin(pending.allowance_s)

    def resolve(self, pending: Pending) -> LanguageResult:
        """Reads the steps up to this one, in order, and returns its result. Thread-safe. Raises the BackendError of the
        first step that failed to be read, for that step and all later ones."""
        with self._reading:
            while pending.resolved is None:
                if self._error is not None:
                    raise self._error
                self._resolve_next()
            return pending.resolved

    def _resolve_next(self) -> None:
        """Reads and removes the oldest step and stores its result, or a BackendError. The caller holds `_reading`."""
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
        step.resolved = LanguageResult(
            step.plan.step_id,
            started_s,
            self._ended_s,
            samples.token_ids,
            tuple(samples.logprobs),
            tuple(samples.failures),
            step.vision_s,
            tuple(samples.scores),
            tuple(step.deferred),
        )

    def _end(self, step: Pending) -> None:
        """Removes the oldest step: ends it at the gate and begins the next one there."""
        with self._changing:
            self._steps.popleft()
            step.vision_s += self._gate.end()
            if self._steps:
                self._gate.begin(self._steps[0].allowance_s)


class LanguageLane:
    """The lane that runs language plans in order, in its own thread. `asynchronous`: a step is launched before the
    previous one is read, and decode steps, and steps with prompts of at most `captured_tokens` tokens, may be replayed.
    `run` wraps every job, in the lane's threads."""

    captures = "language steps"

    def __init__(
        self,
        model: ServedModel,
        backend: Backend,
        spec: ModelSpec,
        kv_cache: PagedCache,
        image_cache: PagedCache | None,
        states: StateCache | None,
        config: EngineConfig,
        clock: Clock,
        gate: Gate,
        run: Guard,
        *,
        asynchronous: bool,
        captured_tokens: int,
    ) -> None:
        self.graphs: StepGraphs | None = None
        self._readers: Lane | None = None  # where results are waited for
        self._run = run
        self._clock = clock
        self._kv_cache = kv_cache
        self._device = device = backend.device
        num_seq_slots, max_model_len = config.scheduler.max_running_requests, config.max_model_len or spec.max_model_len
        self._warm_up = partial(
            warm_language, model, backend, spec.language, kv_cache, image_cache, states, max_model_len, asynchronous
        )
        self._states = None if states is None else StateTable(states, num_seq_slots)
        multimodal = spec.language.rope_sections is not None
        parts = StepParts(model, backend.ops, device, kv_cache, image_cache, self._states, multimodal)
        self._slot_table = slot_table = SlotTable(num_seq_slots, device.torch_device, asynchronous=asynchronous)
        if asynchronous:
            self._readers = device.reader("results")
            if model.can_be_captured and not config.enforce_eager:
                scheduler = config.scheduler
                mixed = mixed_sizes(scheduler.max_step_tokens, scheduler.max_running_requests, captured_tokens)
                self.graphs = StepGraphs(parts, slot_table, _graph_sizes(config), mixed, max_model_len)
        self._step = LanguageStep(parts, slot_table, self.graphs)
        self._order = StepOrder(slot_table, clock, gate)
        self._mask_turns = MaskTurns(slot_table, expected_only=asynchronous)
        self.thread = device.lane("language")

    def submit(
        self, plan: LanguagePlan, records: Sequence[WorkerRequest], deliver: Callable[[LanguageResult], None]
    ) -> None:
        """Queues a plan. `records[i]` belongs to `plan.chunks[i]`; `deliver` is called in one of the lane's threads."""

        def step() -> None:
            pending = self.launch(plan, records)
            if self._readers is None:
                deliver(pending.result())
            else:
                self._readers.submit(partial(self._run, lambda: deliver(pending.result())))

        self.thread.submit(partial(self._run, step))

    @property
    def note(self) -> str:
        """A note for the user on steps that are not replayed, after capture; may be empty."""
        return "" if self.graphs is None else self.graphs.mixed.note

    @property
    def warm_up_jobs(self) -> list[Job]:
        """Dummy steps to run in the lane's thread, a prefill and a step of decodes."""
        return [partial(self._warm_up, decode=decode) for decode in (False, True)]

    def close(self) -> None:
        """Waits for the submitted steps and their results."""
        self.thread.close()
        if self._readers is not None:
            self._readers.close()

    def launch(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Pending:
        """Launches a step on the plan's partition, in the lane's thread, which is in inference mode. `records[i]`
        belongs to `plan.chunks[i]`. A request's content never makes it raise; raises BackendError if the device failed.
        On an asynchronous device the result may still be outstanding."""
        partitions = self._device.partitions
        partitions.set_partition(plan.partition)
        pending = Pending(self._order, plan, self._clock.now(), divided=partitions.current() > 0)
        self._order.add(pending)
        self._launch(pending, records)
        return pending

    # ---- rows that fail alone

    def _launch(self, pending: Pending, records: Sequence[WorkerRequest]) -> None:
        """Launches the step's rows and fills `pending`, except rows that are deferred, and rows whose request failed
        earlier, which fail. Records the rows that failed so far in the slot table."""
        plan, slot_table = pending.plan, self._slot_table
        slot_table.begin_step(plan, records)
        if self._states is not None:
            self._states.begin(plan, self._kv_cache)
        if self._readers is not None:
            pending.slot_owners = slot_table.slot_owners(plan)
        rows, failed_rows = np.arange(plan.num_rows), slot_table.failed_rows(plan)
        pending.deferred = self._mask_turns.deferred(plan, failed_rows)
        if failed_rows or pending.deferred:
            pending.fail(failed_rows, FAILED_EARLIER)
            rows = np.setdiff1d(rows, [*failed_rows, *pending.deferred])
            self._run_rows(pending, rows, *part_of(plan, records, rows))
        else:
            self._run_rows(pending, rows, plan, records)
        failures = pending.samples.failures
        if failures:
            slot_table.fail(pending.slot_owners or slot_table.slot_owners(plan), [row for row, _ in failures])

    def _run_rows(
        self,
        pending: Pending,
        rows: Int64s,
        plan: LanguagePlan,
        records: Sequence[WorkerRequest],
        *,
        alone: bool = False,
    ) -> None:
        """Runs `plan`, whose row i is row `rows[i]` of the step; if it raises, row by row. A single row that ran out of
        memory is retried once, after memory has been released. `alone`: a retry of one row, which fails if it raises
        again."""
        if not len(rows):
            return
        outcome = run_guarded_step(
            self._device, f"language step of {len(rows)}", partial(self._step.run, plan, records)
        )
        if not isinstance(outcome, ErrorInfo):
            pending.add(rows, outcome)
            return
        pending.wait_for(self._device.fetch(()))
        if alone or (len(rows) == 1 and outcome is not OUT_OF_MEMORY):
            pending.fail(rows, outcome)
            return
        for index in range(len(rows)):
            row = np.array([index], dtype=np.int64)
            self._run_rows(pending, rows[row], *part_of(plan, records, row), alone=True)


def _graph_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Rows of the decode graphs, ascending, at most the rows of a step. Skips configured sizes that are larger, with a
    warning; if none is left, the one size is the rows of a step."""
    most = config.scheduler.max_running_requests
    if not config.cuda_graph_sizes:
        return default_sizes(most)
    fitting = tuple(size for size in config.cuda_graph_sizes if size <= most)
    if len(fitting) < len(config.cuda_graph_sizes):
        logger.warning("cuda_graph_sizes above max_num_seqs (%d) are left out: no step is as large", most)
    return fitting or (most,)
