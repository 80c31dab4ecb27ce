"""Fills a language step: every running decode, then chunks of running prefills by age, then waiting requests.

Allocates blocks, preempts and marks what is scheduled; the scheduler handles results. Text never waits for images: a
request that waits for an encode is skipped. The rules of order and preemption are in `policy.py`, the arrays of decodes
in `decodes.py`, the start of waiting requests in `prefill.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

import numpy as np

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.cost import LanguageLoad
from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.plans import ChunkRow, ImageSlice, LanguagePlan
from hydra_engine.core.roles import Role
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.budget import Budgets, PendingWork, StepBudget, stretch
from hydra_engine.scheduler.decode_rows import Ready
from hydra_engine.scheduler.prefill import NeedsResult, PrefillStarter, StepBuilder
from hydra_engine.scheduler.request_table import RequestTable
from hydra_engine.scheduler.step_times import StepTimes

MAX_SEEN = 16  # requests of a queue that `pending_work` counts


@dataclass(frozen=True, slots=True, eq=False)
class LanguageStep:
    """A plan, and what the budgets and the observer receive with its result."""

    plan: LanguagePlan
    load: LanguageLoad
    budget: StepBudget
    chunks: tuple[tuple[RequestId, int], ...]  # (request, tokens)


class LanguagePlanner:
    """The planner of language steps.

    A step planned `ahead`, while the step before it runs, preempts no request; planning stops where that would be
    needed. Blocks granted and requests started until then stay: the next plan would have done the same.
    """

    def __init__(self, requests: RequestTable, budgets: Budgets, config: SchedulerConfig, times: StepTimes) -> None:
        self._requests = requests
        self._kv = requests.kv
        self._budgets = budgets
        self._starter = PrefillStarter(requests, config)
        self._handover_tokens = config.handover_tokens
        self._times = times

    def plan(self, step_id: StepId, now: float, *, ahead: bool, patches_in_flight: int) -> LanguageStep | None:
        """The next step, or None if nothing can run (ahead: or if it cannot be planned yet)."""
        builder = StepBuilder(self._requests, now, ahead=ahead, handover_tokens=self._part_tokens())
        try:
            ready = self._ready_decodes(builder)
            can_start = not self._starter.is_full
            pending = pending_work(self._requests, ready, patches_in_flight, can_start=can_start, now=now)
            budget = self._budgets.language(pending)
            builder.left = budget.tokens if ready.num_rows else max(1, budget.tokens)
            self._requests.connector.before_language(builder)
            short = self._continue_prefills(builder)
            self._starter.start(builder, short)
        except NeedsResult:
            return None
        if not ready.num_rows and not builder.chunks:
            return None
        return self._step(step_id, ready, builder, budget, ahead=ahead)

    def _part_tokens(self) -> int:
        if self._handover_tokens is not None:
            return self._handover_tokens
        return self._requests.connector.part_tokens(self._times.shortest_s)

    def _step(
        self, step_id: StepId, ready: Ready, builder: StepBuilder, budget: StepBudget, *, ahead: bool
    ) -> LanguageStep:
        decodes = self._requests.decodes.take_rows(ready, ahead=ahead)
        chunks = tuple(self._chunk_row(state, chunk) for state, chunk in builder.chunks)
        chunk_tokens = tuple((state.request.id, chunk) for state, chunk in builder.chunks)
        plan = LanguagePlan(step_id, decodes, chunks, budget.vision_s, budget.partition)
        return LanguageStep(plan, plan.load, budget, chunk_tokens)

    # ---- decodes

    def _ready_decodes(self, builder: StepBuilder) -> Ready:
        """The decodes that have a block for their next token. If blocks are missing, the youngest running request is
        preempted, possibly the decode itself. A decode that runs alone waits instead: blocks of a request that ends or
        is handed over will be free soon."""
        table = self._requests.decodes
        ready = table.ready()
        lacking = table.lacking(ready)
        if not len(lacking):
            return ready
        states = [table.states[index] for index in lacking.tolist()]
        if blocks := self._kv.extend([state.request.id for state in states]):
            table.show(lacking, blocks)
            return ready
        self._grow_by_age(states, builder)
        ready = table.ready()
        return table.without(ready, table.lacking(ready))

    def _grow_by_age(self, lacking: list[RequestState], builder: StepBuilder) -> None:
        """Allocates a block for each of these decodes, the oldest first, preempting the youngest running request if
        needed."""
        requests, table = self._requests, self._requests.decodes
        for state in sorted(lacking, key=lambda state: state.order):
            request_id = state.request.id
            while request_id in self._kv.tables:
                if blocks := self._kv.extend([request_id]):
                    table.show(np.array([table.index_of(requests.seq_slots.slot_of[request_id])]), blocks)
                    break
                victim = requests.youngest_running()
                alone = len(requests.prefilling) + len(requests.decoding) == 1
                if victim is None or (victim is state and alone) or not builder.preempt(victim):
                    break

    # ---- running prefills

    def _continue_prefills(self, builder: StepBuilder) -> RequestState | None:
        """Adds the chunks of running prefills; returns the first prefill for whose chunk too few blocks are free, or
        None.

        A prefill with more to compute uses up the budget, so a request that starts on the rest of the budget finds the
        blocks of all running prefills allocated. A prefill stalled at an image reserves nothing and delays no other.
        """
        for state in sorted(self._requests.prefilling, key=lambda state: not state.lacks_one_token):
            if state not in self._requests.prefilling:
                continue  # was preempted just now for an older one
            if state.num_planned == state.num_tokens:
                continue  # its last chunk is in flight
            timeline = self._requests.timelines[state.request.id]
            if policy.is_stalled(state):
                timeline.cause = "images" if state.remote_kv is None else "transfer"
            elif not (chunk := builder.chunk_of(state)):
                timeline.cause = "budget"
            elif self._grow_for_chunk(state, state.num_planned + chunk, builder):
                builder.add(state, chunk)
            else:
                timeline.cause = "kv blocks"
                return state  # younger prefills have been preempted already
        return None

    def _grow_for_chunk(self, state: RequestState, num_tokens: int, builder: StepBuilder) -> bool:
        """Allocates blocks for a chunk, preempting younger prefills if needed; False if that is not enough.

        Decodes are not preempted, nor the one-token chunks of moved requests, which come before all prefills: both have
        their rows already, and free their blocks by ending or by being preempted for themselves.
        """
        while not self._kv.grow(state.request.id, num_tokens, capacity=state.request.max_total_tokens):
            younger = [
                other for other in self._requests.prefilling if other.order > state.order and other not in builder
            ]
            if not younger or not builder.preempt(younger[-1]):
                return False
        return True

    # ---- rows

    def _chunk_row(self, state: RequestState, chunk: int) -> ChunkRow:
        """The row of a chunk; marks its tokens as scheduled and, if it is the last chunk, adds the request to the
        decodes."""
        start, end = state.num_planned, state.num_planned + chunk
        request_id = state.request.id
        table = self._kv.tables[request_id]
        sample = end == state.num_tokens
        state.num_scheduled += chunk
        state.plans_in_flight += 1
        state.slot_known = True
        if sample and Role.D in state.stages:
            self._requests.join_decodes(state, unread=1)
        return ChunkRow(
            request_id=request_id,
            seq_slot=self._requests.seq_slots.slot_of[request_id],
            token_ids=state.tokens(start, end),
            start=start,
            block_ids=table.block_ids,
            num_blocks=table.num_blocks,
            sample=sample,
            num_generated=state.num_generated,
            images=self._slices(state, start, end),
            scored=state.scores_prompt and start < state.request.num_prompt - 1,
        )

    def _slices(self, state: RequestState, start: int, end: int) -> tuple[ImageSlice, ...]:
        """The parts of image spans within token positions [start, end)."""
        slices = []
        for index, image in enumerate(state.request.images):
            first, last = max(image.start, start), min(image.end, end)
            if first < last:
                block_ids = self._requests.features.block_ids(state.image_keys[index])
                slices.append(ImageSlice(first - start, last - first, first - image.start, block_ids))
        return tuple(slices)


def pending_work(
    requests: RequestTable, ready: Ready, patches_in_flight: int, *, can_start: bool, now: float
) -> PendingWork:
    """Sums up the work at hand for the budgets when a language step is planned. Looks at no more than `MAX_SEEN`
    requests of a queue, so its cost does not grow with the number that waits. `ready`: the decodes of the step.
    `can_start`: there is a free slot for a waiting request."""
    prefills = [state for state in islice(requests.prefilling, MAX_SEEN) if _computable(state)]
    if can_start:
        prefills += islice(requests.waiting.by_urgency(), MAX_SEEN)
    table = requests.decodes
    tpot_limit_s = stretch_s = math.inf
    if table.times.has_limits and ready.num_rows:
        limits = table.times.limits(ready.indices)
        tpot_limit_s, stretch_s = float(limits.min()), stretch(limits, *table.pace(ready))
    due = requests.next_due(now)
    due_tokens, due_patches = _before_due(requests, due) if due is not None else (0, 0)
    return PendingWork(
        now=now,
        num_decodes=ready.num_rows,
        decode_context=ready.num_keys,
        tpot_limit_s=tpot_limit_s,
        stretch_s=stretch_s,
        prefill_tokens=sum(map(_computable, prefills)),
        num_prefills=len(prefills),
        prefill_context=prefills[0].num_planned if prefills else 0,
        encode_patches=requests.images.patches_waiting + patches_in_flight,
        ttft_due_s=math.inf if due is None else due.due_s,
        due_tokens=due_tokens,
        due_patches=due_patches,
    )


def _computable(state: RequestState) -> int:
    """Tokens that could be computed now without a budget."""
    return state.num_computable - state.num_planned


def _before_due(requests: RequestTable, due: RequestState) -> tuple[int, int]:
    """(tokens, patches) to compute before the first token of `due`: for itself, for the running prefills ahead of it
    and, if it has not started, for more urgent requests."""
    first = [due]
    if due.request.id in requests.kv.tables:
        first += (state for state in islice(requests.prefilling, MAX_SEEN) if state.order < due.order)
    else:
        first += islice(requests.prefilling, MAX_SEEN)
        first += (state for state in islice(requests.waiting.by_urgency(), MAX_SEEN) if state.urgency < due.urgency)
    tokens = sum(state.num_tokens - state.num_planned for state in first if state.remote_kv is None)
    return tokens, sum(map(_patches, first)) if due.waits_for_images else 0


def _patches(state: RequestState) -> int:
    """Patches of a request that are still to be encoded here."""
    images = enumerate(zip(state.request.images, state.images, strict=True))
    waiting = ((i, image) for i, (image, progress) in images if progress <= ImageProgress.ENCODING)
    return sum(image.num_patches for i, image in waiting if i not in state.remote_images)
