"""A language step while it is being filled: its chunks so far, what is left of its budget, and who may be preempted.

Nothing is marked as scheduled before the step is complete, for it may be dropped. Does not choose anybody.
"""

from __future__ import annotations

from hydra_engine.core.state import RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.book import RequestBook


class NeedsResult(Exception):
    """Planning ahead has come to a point where somebody would have to give way: the step before must end first."""


class Draft:
    """`ahead`: a step is in flight, so nobody gives way. `whole`: prompts are not cut."""

    def __init__(self, book: RequestBook, now: float, *, ahead: bool, whole: bool) -> None:
        self.chunks: list[tuple[RequestState, int]] = []
        self.left: int = 0  # tokens
        self.now = now
        self._book = book
        self._ahead = ahead
        self._whole = whole

    def chunk_of(self, state: RequestState) -> int:
        """How many tokens of a prefill come next: at most what is left, unless an image that must not be cut needs
        more. Where prompts are not cut, all that can be computed or nothing. A request that lacks its last token only
        (its KV has been pulled, or found) is a decode but in name, and waits for nobody's budget; together with the
        decodes it fits a step, for there are no more seats than a step has tokens."""
        start, end = state.num_planned, state.num_computable
        if state.goes_on and not self._whole:
            return 1
        if self._whole:
            return end - start if self.takes_whole(end - start) else 0
        return policy.chunk_end(start, min(end, start + self.left), state.request.images) - start

    def takes_whole(self, num_tokens: int) -> bool:
        """Whether so many tokens can be added without a cut; the first may exceed the budget where none is made."""
        return not self._whole or not self.chunks or num_tokens <= self.left

    def __contains__(self, state: RequestState) -> bool:
        return any(other is state for other, _ in self.chunks)

    def add(self, state: RequestState, chunk: int) -> None:
        if chunk:
            self.chunks.append((state, chunk))
            self.left = max(0, self.left - chunk)

    def preempt(self, victim: RequestState) -> bool:
        """False: KV is being copied into its blocks, which come back when that has ended. Raises NeedsResult while a
        step is in flight."""
        if self._ahead:
            raise NeedsResult
        return self._book.preempt(victim, self.now)
