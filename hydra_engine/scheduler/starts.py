"""Starts waiting requests: who gets a seat, the blocks of a whole prompt and the rest of a step's budget.

By urgency, and never past a request that has been overtaken too often. Whether or not its turn comes, the oldest
request may take the place of younger ones that stand before an image: on that everybody's progress rests, see
`policy.py`. Costs no more the more requests wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.state import Order, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.book import RequestBook
from hydra_engine.scheduler.draft import Draft


class PrefillStarter:
    def __init__(self, book: RequestBook, config: SchedulerConfig, *, whole_requests: bool) -> None:
        self._book = book
        self._kv = book.kv
        self._max_bypass = config.max_bypass
        self._max_seqs = policy.sequence_limit(config.max_num_seqs, config.token_budget)
        self._early_limit = 0 if whole_requests else policy.early_limit(self._max_seqs)

    @property
    def is_full(self) -> bool:
        return len(self._kv.tables) >= self._max_seqs

    def start(self, draft: Draft, short: RequestState | None) -> None:
        """Admits waiting requests while budget, sequences and blocks last; none younger than a running prefill that is
        `short` of blocks. Every running decode keeps room for one more block, or admitting would only lead to
        preempting."""
        book = self._book
        if not book.waiting and not book.encoding:
            return
        if not book.prefilling and (self.is_full or self._kv.num_free <= len(book.decoding)):
            if first := book.waiting.after(None):  # whoever starts needs a block at least, and nobody can give way
                book.timelines[first.request.id].cause = "kv blocks"
            return
        seen: set[Order] = set()
        self._start_by_urgency(draft, short, seen)
        oldest = self._oldest()
        if oldest is None or oldest.order in seen or not draft.left:
            return
        if short is None or oldest.order < short.order:
            self._consider(oldest, draft, num_early=0)

    def _start_by_urgency(self, draft: Draft, short: RequestState | None, seen: set[Order]) -> None:
        """A request that lacks room may be overtaken by younger ones `max_bypass` times; then nobody passes it, and
        what is freed is saved for it. `seen` takes the orders of those that were considered."""
        book = self._book
        num_early = sum(state.waits_for_images for state in book.prefilling)
        passed: list[RequestState] = []
        for state in self._candidates(seen):
            if not draft.left or (short is not None and state.order > short.order):
                book.timelines[state.request.id].cause = "budget" if not draft.left else "kv blocks"
                return
            seen.add(state.order)
            started = self._consider(state, draft, num_early)
            if started is None:
                continue
            if started:
                num_early += state.waits_for_images
            else:
                passed.append(state)
                if len(passed) >= policy.MAX_PASSED or self.is_full:
                    return
            if any(book.overtaken(other) >= self._max_bypass for other in passed):
                return

    def _consider(self, state: RequestState, draft: Draft, num_early: int) -> bool | None:
        """True: it has started. False: it lacks room. None: it has to wait for something else."""
        book = self._book
        timeline = book.timelines[state.request.id]
        if state.trusts_cache:
            book.recheck(state, draft.now)
        head = state is book.encoding.oldest()
        if state.waits_for_images:
            allowed = policy.may_start_early(state, head=head, num_early=num_early, limit=self._early_limit)
            if not allowed or not state.num_computable:
                return None
        insists = policy.may_insist(state, head=head)
        found = self._room_for(state, insists, draft)
        if found is None:
            timeline.cause = "kv blocks" if insists else "images"
            return False if insists else None
        if not draft.takes_whole(state.num_tokens - len(found) * self._kv.block_size):
            timeline.cause = "budget"
            draft.left = 0  # nobody else gets what is too little for this one
            return None
        self._admit(state, found, draft)
        return True

    # ---- in which order

    def _candidates(self, seen: set[Order]) -> Iterator[RequestState]:
        """Each once, by urgency; but those that have been overtaken too often, by those before them in this step too,
        go first, the oldest of them before the others."""
        book = self._book
        ordered = policy.candidates(book.waiting, book.encoding, self._early_limit)
        while True:
            state = self._overdue(seen) or next((s for s in ordered if s.order not in seen), None)
            if state is None:
                return
            yield state

    def _overdue(self, seen: set[Order]) -> RequestState | None:
        book = self._book
        head = book.encoding.oldest()
        waits = head is not None and head.order not in seen and policy.may_insist(head, head=True)
        if head is not None and waits and book.overtaken(head) >= self._max_bypass:
            return head
        for state in islice(book.waiting, policy.MAX_PASSED):
            if book.overtaken(state) >= self._max_bypass and state.order not in seen:
                return state
        return None

    def _oldest(self) -> RequestState | None:
        """Of those that may take room from others."""
        book = self._book
        head, first = book.encoding.oldest(), book.waiting.oldest()
        if head is not None and policy.may_insist(head, head=True) and (first is None or head.order < first.order):
            return head
        return first

    # ---- room

    def _room_for(self, state: RequestState, insists: bool, draft: Draft) -> list[int] | None:
        """The blocks found in the cache for a request that may start: there is a free place among the sequences and
        blocks for all that it has to prefill. Who insists takes them from younger prefills that stand before an image.
        None if there is no room."""
        num_tokens = policy.kv_tokens_to_admit(state)
        reserve = len(self._book.decoding)
        found: list[int] | None = None
        while True:
            if not self.is_full:
                if found is None:
                    found = self._book.prefixes.find(state)
                if self._kv.num_free - reserve >= self._kv.num_to_take(num_tokens, found):
                    return found
            victim = policy.stalled_younger_than(state, self._book.prefilling) if insists else None
            if victim is None or not draft.preempt(victim):
                return None

    def _admit(self, state: RequestState, found: Sequence[int], draft: Draft) -> None:
        """Grants what was found in the cache and the blocks of the first chunk, or those of everything.

        What was found may reach to an image without features. Then there is no chunk yet, but the features that lie
        before are let go, which the image may be waiting for.
        """
        num_tokens = policy.kv_tokens_to_admit(state)
        self._book.start(state, len(found), draft.now)
        chunk = draft.chunk_of(state)
        if not policy.takes_all_at_once(state):
            num_tokens = state.num_computed + chunk
        granted = self._kv.grow(state.request.id, num_tokens, max_tokens=state.max_tokens)
        assert granted, "room was found and is gone"
        self._book.place(state)
        draft.add(state, chunk)
