"""How a part of a request leaves this instance: fetched, given up by those who should fetch it, or lent elsewhere.

Ends the state and says so; the scheduler forgets it when no plan in flight names it any more.
"""

from __future__ import annotations

from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import Departure
from hydra_engine.core.plans import KvEnd
from hydra_engine.core.roles import Role
from hydra_engine.core.state import Ending, RequestState
from hydra_engine.scheduler.handover.events import KvEvent, KvGoneEvent
from hydra_engine.scheduler.handover.remote_events import RemoteEvents
from hydra_engine.scheduler.request_table import RequestTable

_KV = -1  # the key of the KV in `RequestState.offered_s`, beside the images of jobs


class HandoverEnd:
    """Methods that take ids take unknown ones too, and those of requests that have ended: then nothing happens. Those
    that return requests name the ones that have ended now."""

    def __init__(self, requests: RequestTable, events: RemoteEvents) -> None:
        self._requests = requests
        self._events = events

    # ---- KV that others may fetch

    def offer_kv(self, state: RequestState, now: float, *, ends: bool, earlier: tuple[int, ...] | None = None) -> None:
        """Full blocks that are new since the last time; where it `ends`, the last one too. `earlier`: tokens that who
        goes on with it may not know."""
        kv, table = self._requests.kv, self._requests.kv.tables[state.request.id]
        stop = kv.blocks_for(state.num_prefilled) if ends else state.num_prefilled // kv.block_size
        if not ends and stop <= state.num_offered:
            return
        block_ids = tuple(table.block_ids[state.num_offered : stop].tolist())
        self._events.tell(KvEvent(state.request.id, block_ids, self._kv_end(state, earlier) if ends else None))
        state.num_offered = stop
        if ends:
            state.hands_over = True
            state.offered_s[_KV] = now
            self._requests.requeue(state)

    def _kv_end(self, state: RequestState, earlier: tuple[int, ...] | None) -> KvEnd:
        timeline = self._requests.timelines[state.request.id]
        times = timeline.last_token_s, timeline.first_token_s, timeline.late_gaps
        return KvEnd(state.num_prefilled, state.generated[-1], *times, earlier)

    def withdraw_kv(self, state: RequestState) -> None:
        if state.num_offered:
            self._events.tell(KvGoneEvent(state.request.id))
        state.num_offered, state.hands_over = 0, False

    # ---- how it leaves

    def release_features(self, request_id: RequestId, image_index: int, now: float) -> list[RequestState]:
        """Features of an encode job have been fetched, or are not wanted."""
        state = self._live(request_id)
        if state is None or not state.is_encode_job or not self._requests.images.release(state, image_index, now):
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
        if state is None or (not state.is_encode_job and Role.D in state.stages):
            return []
        self._close_offers(state, now, reason)
        return self._end(state, Departure.WITHDRAWN)

    def hand_over(self, request_id: RequestId, now: float) -> bool:
        """A decode goes on elsewhere, behind its last token. Not one whose tokens depend on counts of those before: who
        takes it over has not seen them all."""
        state = self._live(request_id)
        if state is None or not state.decodes or state.request.sampling.needs_history:
            return False
        self._requests.leave_decodes(state)
        state.num_prefilled, state.decodes = state.num_computed, False
        state.stages &= ~Role.D
        self.offer_kv(state, now, ends=True, earlier=tuple(state.generated[:-1]))
        return True

    def _live(self, request_id: RequestId) -> RequestState | None:
        state = self._requests.states.get(request_id)
        return None if state is None or state.ending is not None else state

    def _end(self, state: RequestState, departure: Departure) -> list[RequestState]:
        self._requests.end(state, Ending(departure))
        return [state]

    def _close_offers(self, state: RequestState, now: float, cause: str | None) -> None:
        timeline = self._requests.timelines[state.request.id]
        for index, since_s in state.offered_s.items():
            tokens = state.num_prefilled if index == _KV else state.request.images[index].num_tokens
            stage = "offered_kv" if index == _KV else "offered_features"
            timeline.offered(stage, since_s, now, tokens, cause)
        state.offered_s.clear()
