"""Fills a language step: every running decode, then chunks of running prefills, then waiting requests.

Running prefills go by age, waiting requests by urgency. Takes blocks, preempts and marks what is scheduled; results are
the scheduler's business. Text never waits for images: what waits for an encode is passed over. The rules of who goes
first and who gives way are in `policy.py`, the arrays of decodes in `decodes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.cost import LanguageLoad
from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.plans import ChunkRow, DecodeRows, ImageSlice, Ints, LanguagePlan
from hydra_engine.core.state import RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.book import RequestBook
from hydra_engine.scheduler.budget import Budgets, StepBudget
from hydra_engine.scheduler.demand import demand_of

_NO_SEATS: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class LanguageStep:
    """A plan, and what is told to budgets and log when it has come back."""

    plan: LanguagePlan
    load: LanguageLoad
    budget: StepBudget
    chunks: tuple[tuple[RequestId, int], ...]  # (request, tokens)


class _NeedsResult(Exception):
    """Planning ahead has come to a point where somebody would have to give way: the step before must end first."""


class _Draft:
    """Chunks of a step that is being filled. Nothing is marked before the step is complete, for it may be dropped."""

    def __init__(self, budget: int, *, whole: bool) -> None:
        self.chunks: list[tuple[RequestState, int]] = []
        self.left = budget
        self._whole = whole

    def chunk_of(self, state: RequestState) -> int:
        """How many tokens of a prefill come next: at most what is left, unless an image that must not be cut needs
        more. Where prompts are not cut, all that can be computed or nothing."""
        start, end = state.num_planned, state.num_computable
        if self._whole:
            return end - start if end - start <= self.left or not self.chunks else 0
        return policy.chunk_end(start, min(end, start + self.left), state.request.images) - start

    def add(self, state: RequestState, chunk: int) -> None:
        if chunk:
            self.chunks.append((state, chunk))
            self.left = max(0, self.left - chunk)


class LanguagePlanner:
    """A step planned `ahead`, while the one before it runs, preempts nobody and takes nothing from anybody: it gives up
    where that would be needed. What it has done by then (blocks granted, requests started) stays, and is what the next
    plan would have done."""

    def __init__(self, book: RequestBook, budgets: Budgets, config: SchedulerConfig, *, whole_requests: bool) -> None:
        self._book = book
        self._kv = book.kv
        self._budgets = budgets
        self._max_bypass = config.max_bypass
        self._max_seqs = policy.sequence_limit(config.max_num_seqs, config.token_budget)
        self._early_limit = 0 if whole_requests else policy.early_limit(self._max_seqs)
        self._whole = whole_requests
        self._ahead = False

    def plan(self, step_id: StepId, now: float, *, ahead: bool, patches_in_flight: int) -> LanguageStep | None:
        """The next step, or None if nothing can run (ahead: or if it cannot be planned yet)."""
        self._ahead = ahead
        try:
            seats = _NO_SEATS if self._whole else self._ready_decodes(now)
            can_start = not self._is_full()
            demand = demand_of(self._book, seats, patches_in_flight, can_start=can_start, now=now)
            budget = self._budgets.language(demand)
            draft = _Draft(budget.tokens if len(seats) else max(1, budget.tokens), whole=self._whole)
            short = self._continue_prefills(draft, now)
            self._start_prefills(draft, short, now)
            if self._whole and not draft.chunks:
                seats = self._ready_decodes(now)
        except _NeedsResult:
            return None
        if not len(seats) and not draft.chunks:
            return None
        decodes = self._book.decodes.take_rows(seats, ahead=ahead)
        return self._step(step_id, decodes, draft, budget)

    def _step(self, step_id: StepId, decodes: DecodeRows, draft: _Draft, budget: StepBudget) -> LanguageStep:
        chunks = tuple(self._chunk_row(state, chunk) for state, chunk in draft.chunks)
        load = LanguageLoad(
            num_decodes=len(decodes),
            decode_context=int(decodes.starts.sum()) + len(decodes),
            prefill_tokens=sum(chunk for _, chunk in draft.chunks),
            prefill_pairs=sum(row.num_pairs for row in chunks),
            num_chunks=len(chunks),
        )
        named = tuple((state.request.id, chunk) for state, chunk in draft.chunks)
        return LanguageStep(LanguagePlan(step_id, decodes, chunks, budget.vision_s), load, budget, named)

    # ---- decodes

    def _ready_decodes(self, now: float) -> Ints:
        """Seats of the decodes that have a block for their next token. Where blocks lack, the youngest running request
        gives way, be it the decode itself; alone it waits, for then blocks of an ending request are about to come back.
        """
        table = self._book.decodes
        seats = table.ready()
        lacking = table.lacking(seats)
        if not len(lacking):
            return seats
        if blocks := self._kv.extend(table.owners(lacking)):
            table.grant(lacking, blocks)
            return seats
        self._grow_by_age(lacking, now)
        seats = table.ready()
        return seats[~np.isin(seats, table.lacking(seats))]

    def _grow_by_age(self, lacking: Ints, now: float) -> None:
        table = self._book.decodes
        pairs = [(state, seat) for seat in lacking.tolist() if (state := table.states[seat]) is not None]
        for state, seat in sorted(pairs, key=lambda pair: pair[0].order):
            request_id = state.request.id
            while request_id in self._kv.tables:
                if blocks := self._kv.extend([request_id]):
                    table.grant(np.array([seat]), blocks)
                    break
                victim = self._book.youngest_running()
                if victim is None or (victim is state and self._runs_alone()):
                    break
                self._preempt(victim, now)

    def _runs_alone(self) -> bool:
        return len(self._book.prefilling) + len(self._book.decoding) == 1

    def _preempt(self, victim: RequestState, now: float) -> None:
        if self._ahead:
            raise _NeedsResult
        self._book.preempt(victim, now)

    # ---- running prefills

    def _continue_prefills(self, draft: _Draft, now: float) -> RequestState | None:
        """Adds chunks; returns the prefill that lacks blocks, if there is one.

        A prefill that has more to compute uses up the budget, so whoever starts in the rest of it finds the blocks of
        all others taken; one that stands before an image keeps nothing free and holds nobody up.
        """
        for state in list(self._book.prefilling):
            if state.request.id not in self._book.prefilling:
                continue  # gave way to an older one just now
            if state.num_planned == state.num_tokens:
                continue  # its last chunk is in flight
            timeline = self._book.timelines[state.request.id]
            if policy.is_stalled(state):
                timeline.cause = "images"
            elif not (chunk := draft.chunk_of(state)):
                timeline.cause = "budget"
            elif self._grow_for_chunk(state, state.num_planned + chunk, now):
                draft.add(state, chunk)
            else:
                timeline.cause = "kv blocks"
                return state  # it has taken what younger prefills had
        return None

    def _grow_for_chunk(self, state: RequestState, num_tokens: int, now: float) -> bool:
        """Room for a chunk, from younger prefills if need be. Decodes are left alone: they have their rows already
        and free their blocks by ending or by giving way themselves."""
        while not self._grow(state, num_tokens):
            victim = self._book.prefilling.youngest()
            if victim is None or victim.order <= state.order:
                return False
            self._preempt(victim, now)
        return True

    def _grow(self, state: RequestState, num_tokens: int) -> bool:
        return self._kv.grow(state.request.id, num_tokens, max_tokens=state.max_tokens)

    # ---- waiting requests

    def _start_prefills(self, draft: _Draft, short: RequestState | None, now: float) -> None:
        """Admits waiting requests while budget, sequences and blocks last; none younger than a running prefill that is
        `short` of blocks.

        A request that lacks blocks may be overtaken by younger ones `max_bypass` times; then nobody passes it, and what
        is freed is saved for it. Every running decode keeps room for one more block, or admitting would only lead to
        preempting.
        """
        book = self._book
        if not book.waiting and not book.encoding:
            return
        if self._is_full() and not book.prefilling and (first := book.waiting.after(None)) is not None:
            book.timelines[first.request.id].cause = "kv blocks"  # and nobody has a place that could be taken
            return
        num_early = sum(state.waits_for_images for state in book.prefilling)
        head = book.encoding.oldest()
        passed: list[RequestState] = []
        for state in self._candidates():
            if state.request.id in self._kv.tables or state in passed:
                continue  # it was among the first already
            if not draft.left or (short is not None and state.order > short.order):
                book.timelines[state.request.id].cause = "budget" if not draft.left else "kv blocks"
                return
            if state.trusts_cache:
                book.recheck(state, now)
            if state.waits_for_images:
                allowed = policy.may_start_early(
                    state, head=state is head, num_early=num_early, limit=self._early_limit
                )
                if not allowed or not state.num_computable:
                    continue
            insists = policy.may_insist(state, head=state is head)
            found = self._room_for(state, insists, now)
            if found is None:
                book.timelines[state.request.id].cause = "kv blocks" if insists else "images"
                if not insists:
                    continue
                passed.append(state)
                saved = book.overtaken(state) >= self._max_bypass
                if saved or len(passed) >= policy.MAX_PASSED or self._is_full():
                    return
                continue
            if not self._admit(state, found, draft, now):
                return
            num_early += state.waits_for_images
            if any(book.overtaken(other) >= self._max_bypass for other in passed):
                return

    def _candidates(self) -> Iterator[RequestState]:
        """Those that have been overtaken too often go first, the oldest of them before others; then by urgency."""
        book = self._book
        for state in list(islice(book.waiting, policy.MAX_PASSED)):
            if book.overtaken(state) >= self._max_bypass:
                yield state
            elif not state.num_preemptions:
                break  # whoever is younger has been overtaken no more often
        yield from policy.candidates(book.waiting, book.encoding, self._early_limit)

    def _is_full(self) -> bool:
        return len(self._kv.tables) >= self._max_seqs

    def _room_for(self, state: RequestState, insists: bool, now: float) -> list[int] | None:
        """The blocks found in the cache for a request that may start: there is a free place among the sequences and
        blocks for all that it has to prefill. Who insists takes them from younger prefills that stand before an image.
        None if there is no room."""
        num_tokens = policy.kv_tokens_to_admit(state)
        reserve = len(self._book.decoding)
        found: list[int] | None = None
        while True:
            if not self._is_full():
                if found is None:
                    found = self._book.prefixes.find(state)
                if self._kv.num_free - reserve >= self._kv.num_to_take(num_tokens, found):
                    return found
            victim = policy.stalled_younger_than(state, self._book.prefilling) if insists else None
            if victim is None:
                return None
            self._preempt(victim, now)

    def _admit(self, state: RequestState, found: Sequence[int], draft: _Draft, now: float) -> bool:
        """Grants what was found in the cache and the blocks of the first chunk, after a preemption those of everything.
        False, and nothing has changed, if its prompt is not to be cut and does not fit into the step.

        What was found may reach to an image without features. Then there is no chunk yet, but the features that lie
        before are let go, which the image may be waiting for.
        """
        if self._whole and draft.chunks and state.num_tokens - len(found) * self._kv.block_size > draft.left:
            self._book.timelines[state.request.id].cause = "budget"
            return False
        self._book.start(state, len(found), now)
        chunk = draft.chunk_of(state)
        num_tokens = state.max_tokens if state.num_preemptions else state.num_computed + chunk
        granted = self._grow(state, num_tokens)
        assert granted, "room was found and is gone"
        self._book.place(state)
        draft.add(state, chunk)
        return True

    # ---- rows

    def _chunk_row(self, state: RequestState, chunk: int) -> ChunkRow:
        start, end = state.num_planned, state.num_planned + chunk
        request_id = state.request.id
        table = self._kv.tables[request_id]
        sample = end == state.num_tokens
        state.num_scheduled += chunk
        state.plans_in_flight += 1
        state.seated = True
        if sample:
            self._book.join_decodes(state, unread=1)
        return ChunkRow(
            request_id=request_id,
            seat=self._book.seats.of(request_id),
            token_ids=state.tokens(start, end),
            start=start,
            block_ids=table.block_ids,
            num_blocks=table.num_blocks,
            sample=sample,
            num_generated=state.num_generated,
            images=self._slices(state, start, end),
        )

    def _slices(self, state: RequestState, start: int, end: int) -> tuple[ImageSlice, ...]:
        """The parts of image spans within token positions [start, end)."""
        found = []
        for index, image in enumerate(state.request.images):
            first, last = max(image.start, start), min(image.end, end)
            if first < last:
                block_ids = self._book.features.block_ids(state.image_keys[index])
                found.append(ImageSlice(first - start, last - first, first - image.start, block_ids))
        return tuple(found)
