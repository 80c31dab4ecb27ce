"""Fills a language step: every running decode, then chunks of running prefills, then waiting requests, oldest first.

Takes blocks, preempts and marks what is scheduled; results are the scheduler's business. Text never waits for images:
what waits for an encode is passed over. The rules of age are in `policy.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import StepId
from hydra_engine.core.plans import ImageSlice, LanguagePlan, LanguageRow
from hydra_engine.core.state import RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.book import RequestBook
from hydra_engine.scheduler.budget import Budgets


class LanguagePlanner:
    def __init__(self, book: RequestBook, budgets: Budgets, config: SchedulerConfig) -> None:
        self._book = book
        self._kv = book.kv
        self._budgets = budgets
        self._max_bypass = config.max_bypass
        self._max_seqs = policy.sequence_limit(config.max_num_seqs, config.token_budget)

    def plan(self, step_id: StepId, now: float) -> LanguagePlan | None:
        """The next step, or None if nothing can run."""
        rows = [self._decode_row(state) for state in self._ready_decodes(now)]
        budget = self._budgets.language(len(rows))
        budget, short = self._continue_prefills(rows, budget, now)
        self._start_prefills(rows, budget, short, now)
        return LanguagePlan(step_id, tuple(rows)) if rows else None

    # ---- decodes

    def _ready_decodes(self, now: float) -> list[RequestState]:
        """Running decodes with a slot for their next token. Where blocks lack, the youngest running request gives way,
        be it the decode itself; alone it waits, for then blocks of an ending request are about to come back."""
        tables = self._kv.tables
        ready: list[RequestState] = []
        needy: list[RequestState] = []
        for state in self._book.decoding:
            (ready if state.num_computed < tables[state.request.id].num_slots else needy).append(state)
        if not needy:
            return ready
        for state in needy:
            while state.request.id in self._book.decoding and not self._grow(state, state.num_tokens):
                victim = self._book.youngest_running()
                if victim is None or (victim is state and self._runs_alone()):
                    break
                self._book.preempt(victim, now)
        return [state for state in self._book.decoding if state.num_computed < tables[state.request.id].num_slots]

    def _runs_alone(self) -> bool:
        return len(self._book.prefilling) + len(self._book.decoding) == 1

    # ---- running prefills

    def _continue_prefills(self, rows: list[LanguageRow], budget: int, now: float) -> tuple[int, RequestState | None]:
        """Adds chunks; returns the budget left and the prefill that lacks blocks, if there is one.

        A prefill that has more to compute uses up the budget, so whoever starts in the rest of it finds the blocks of
        all others taken; one that stands before an image keeps nothing free and holds nobody up.
        """
        for state in list(self._book.prefilling):
            if state.request.id not in self._book.prefilling:
                continue  # gave way to an older one just now
            timeline = self._book.timelines[state.request.id]
            chunk = _chunk(state, budget)
            if policy.is_stalled(state):
                timeline.cause = "images"
            elif not chunk:
                timeline.cause = "budget"
            elif self._grow_for_chunk(state, state.num_computed + chunk, now):
                rows.append(self._chunk_row(state, chunk))
                budget = max(0, budget - chunk)
            else:
                timeline.cause = "kv blocks"
                return budget, state  # it has taken what younger prefills had
        return budget, None

    def _grow_for_chunk(self, state: RequestState, num_tokens: int, now: float) -> bool:
        """Room for a chunk, from younger prefills if need be. Decodes are left alone: they have their rows already
        and free their blocks by ending or by giving way themselves."""
        while not self._grow(state, num_tokens):
            victim = self._book.prefilling.youngest()
            if victim is None or victim.order <= state.order:
                return False
            self._book.preempt(victim, now)
        return True

    def _grow(self, state: RequestState, num_tokens: int) -> bool:
        return self._kv.grow(state.request.id, num_tokens, max_tokens=state.max_tokens)

    # ---- waiting requests

    def _start_prefills(self, rows: list[LanguageRow], budget: int, short: RequestState | None, now: float) -> None:
        """Admits waiting requests while budget, sequences and blocks last; none younger than a running prefill that is
        `short` of blocks.

        A request that lacks blocks may be passed by younger ones `max_bypass` times; then nobody passes it, and what
        is freed is saved for it. Every running decode keeps room for one more block, or admitting would only lead to
        preempting.
        """
        book = self._book
        limit = policy.early_limit(self._max_seqs)
        num_early = sum(state.waits_for_images for state in book.prefilling)
        head = book.encoding.oldest()
        passed: list[RequestState] = []
        for state in policy.candidates(list(book.waiting), book.encoding, limit):
            if not budget or (short is not None and state.order > short.order):
                book.timelines[state.request.id].cause = "budget" if not budget else "kv blocks"
                return
            if state.trusts_cache:
                book.recheck(state, now)
            if state.waits_for_images:
                allowed = policy.may_start_early(state, head=state is head, num_early=num_early, limit=limit)
                if not allowed or not state.num_computable:
                    continue
            insists = policy.may_insist(state, head=state is head)
            found = book.prefixes.find(state)
            if not self._has_room(state, found, insists, now):
                book.timelines[state.request.id].cause = "kv blocks" if insists else "images"
                if not insists:
                    continue
                passed.append(state)
                saved = state.num_bypassed >= self._max_bypass
                if saved or len(passed) >= policy.MAX_PASSED or self._is_full():
                    return
                continue
            self._admit(state, len(found), budget, now)
            if chunk := _chunk(state, budget):
                rows.append(self._chunk_row(state, chunk))
                budget = max(0, budget - chunk)
            num_early += state.waits_for_images
            for other in passed:
                other.num_bypassed += 1
            if any(other.num_bypassed >= self._max_bypass for other in passed):
                return

    def _is_full(self) -> bool:
        return len(self._kv.tables) >= self._max_seqs

    def _has_room(self, state: RequestState, found: Sequence[int], insists: bool, now: float) -> bool:
        """A free place among the sequences and blocks for all that the request has to prefill, those `found` in the
        cache included; who insists takes them from younger prefills that stand before an image."""
        num_tokens = policy.kv_tokens_to_admit(state)
        reserve = len(self._book.decoding)
        while self._is_full() or self._kv.num_free - reserve < self._kv.num_to_take(num_tokens, found):
            victim = policy.stalled_younger_than(state, self._book.prefilling) if insists else None
            if victim is None:
                return False
            self._book.preempt(victim, now)
        return True

    def _admit(self, state: RequestState, num_found: int, budget: int, now: float) -> None:
        """Grants what was found in the cache and the blocks of the first chunk, after a preemption those of everything.

        What was found may reach to an image without features. Then there is no chunk yet, but the features that lie
        before are let go, which the image may be waiting for.
        """
        self._book.start(state, num_found, now)
        num_tokens = state.max_tokens if state.num_preemptions else state.num_computed + _chunk(state, budget)
        granted = self._grow(state, num_tokens)
        assert granted, "room was found and is gone"
        self._book.place(state)

    # ---- rows

    def _chunk_row(self, state: RequestState, chunk: int) -> LanguageRow:
        start, end = state.num_computed, state.num_computed + chunk
        table = self._kv.tables[state.request.id]
        state.num_scheduled += chunk
        state.plans_in_flight += 1
        return LanguageRow(
            request_id=state.request.id,
            token_ids=state.tokens(start, end),
            start=start,
            block_ids=table.block_ids,
            num_blocks=table.num_blocks,
            sample=end == state.num_tokens,
            num_generated=state.num_generated,
            is_decode=False,
            images=self._slices(state, start, end),
            state_slot=self._book.slots.of(state.request.id),
        )

    def _decode_row(self, state: RequestState) -> LanguageRow:
        state.num_scheduled += 1
        state.plans_in_flight += 1
        table = self._kv.tables[state.request.id]
        return LanguageRow(
            state.request.id,
            (state.generated[-1],),
            state.num_computed,
            table.block_ids,
            table.num_blocks,
            True,
            len(state.generated),
            True,
            state_slot=self._book.slots.of(state.request.id),
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


def _chunk(state: RequestState, budget: int) -> int:
    """How many tokens of a prefill come next: at most `budget`, unless an image that must not be cut needs more."""
    start = state.num_computed
    end = min(state.num_computable, start + budget)
    return policy.chunk_end(start, end, state.request.images) - start
