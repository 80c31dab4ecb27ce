"""How a part of a request leaves this instance: fetched, given up by those who should fetch it, or lent elsewhere.

Ends the state and says so; the scheduler forgets it when no plan in flight names it any more.
"""

from __future__ import annotations

from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import Departure
from hydra_engine.core.roles import Role
from hydra_engine.core.state import Ending, RequestState
from hydra_engine.scheduler.book import RequestBook

_KV = -1  # the key of the KV in `RequestState.offered_s`, beside the images of jobs


class Parts:
    """Every method takes ids that may be unknown or of requests that have ended: then nothing happens. Those that
    return requests name the ones that have ended now."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book

    def release_features(self, request_id: RequestId, image_index: int, now: float) -> list[RequestState]:
        """Features of an encode job have been fetched, or are not wanted."""
        state = self._live(request_id)
        if state is None or not state.is_job or not self._book.images.release(state, image_index, now):
            return []
        return self._end(state, Departure.MOVED)

    def release_kv(self, request_id: RequestId, now: float) -> list[RequestState]:
        """All KV that was offered has been fetched, or is not wanted; if not all of it was there yet, nobody has it."""
        state = self._live(request_id)
        if state is None or not state.num_offered:
            return []
        self._close_offers(state, now, None)
        return self._end(state, Departure.MOVED if state.hands_over else Departure.WITHDRAWN)

    def withdraw(self, request_id: RequestId, now: float, reason: str) -> list[RequestState]:
        """Nobody fetches what is offered here."""
        state = self._live(request_id)
        if state is None or (not state.is_job and Role.D in state.part):
            return []
        self._close_offers(state, now, reason)
        return self._end(state, Departure.WITHDRAWN)

    def hand_over(self, request_id: RequestId, now: float) -> bool:
        """A decode goes on elsewhere, behind its last token. Not one whose tokens depend on counts of those before: who
        takes it over has not seen them all."""
        state = self._live(request_id)
        if state is None or not state.decodes or state.request.sampling.needs_history:
            return False
        self._book.hand_over(state, now)
        return True

    def _live(self, request_id: RequestId) -> RequestState | None:
        state = self._book.states.get(request_id)
        return None if state is None or state.ending is not None else state

    def _end(self, state: RequestState, departure: Departure) -> list[RequestState]:
        self._book.end(state, Ending(departure))
        return [state]

    def _close_offers(self, state: RequestState, now: float, cause: str | None) -> None:
        timeline = self._book.timelines[state.request.id]
        for index, since_s in state.offered_s.items():
            tokens = state.num_prefilled if index == _KV else state.request.images[index].num_tokens
            stage = "offered_kv" if index == _KV else "offered_features"
            timeline.offered(stage, since_s, now, tokens, cause)
        state.offered_s.clear()
