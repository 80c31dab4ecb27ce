"""The offers of this instance: KV of requests that decode elsewhere, and features of encode jobs.

Also how such a request leaves: fetched, given up by the instances that should fetch it, or handed over as a decode. Its
state is ended here; the scheduler forgets it when no plan in flight names it any more.
"""

from __future__ import annotations

from itertools import chain

from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Role
from hydra_engine.core.messages import RequestMessage
from hydra_engine.core.outputs import Departure
from hydra_engine.core.state import Ending, ImageProgress, RequestPhase, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.handover.events import (
    FeaturesEvent,
    FeaturesGoneEvent,
    KvEvent,
    KvGoneEvent,
    RemoteEvents,
)
from hydra_engine.scheduler.handover.state import HandoverState, ParkedRequests, find_handover, handover_of
from hydra_engine.scheduler.hooks import Finish
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.transfer.plans import KvEnd

_KV = -1  # key of the KV in `HandoverState.offered_s`; keys from 0 are images


class Offers:
    """The offers of this instance. Methods with a `request_id` ignore unknown ids and ended requests. Those that return
    messages return the Finished of a request that they ended; [] if they ended none, or if a plan in flight names it:
    its Finished then comes with the result of that plan."""

    def __init__(self, requests: RequestTable, events: RemoteEvents, finish: Finish) -> None:
        self._requests = requests
        self._events = events
        self._finish = finish

    # ---- offers

    def offer_kv(self, state: RequestState, now: float, *, ends: bool, earlier: tuple[int, ...] | None = None) -> None:
        """Offers the full blocks computed since the last call, if any. With `ends`, also offers the last one, full or
        not, and those of its state, and names the latest token; the request is then parked until its KV is fetched,
        refused or given up. `earlier`: the generated tokens before the latest one, if the decoding instance may not
        know them."""
        kv, table = self._requests.kv, self._requests.kv.tables[state.request.id]
        handover = handover_of(state)
        stop = state.num_prefilled // kv.block_size
        if ends:
            stop = kv.blocks_for(state.num_prefilled) + state.num_state_blocks
        if not ends and stop <= handover.num_offered:
            return
        block_ids = tuple(table.block_ids[handover.num_offered : stop].tolist())
        self._events.add(KvEvent(state.request.id, block_ids, self._kv_end(state, earlier) if ends else None))
        handover.num_offered = stop
        if ends:
            handover.offers_all = True
            handover.offered_s[_KV] = now
            self._requests.requeue(state)

    def _kv_end(self, state: RequestState, earlier: tuple[int, ...] | None) -> KvEnd:
        """Returns the end with the number of tokens with KV, the latest token, which has none, the times of this token
        and the first one, and the number of late gaps. Needs a generated token. `earlier`: as in `offer_kv`."""
        timeline = self._requests.timelines[state.request.id]
        times = timeline.last_token_s, timeline.first_token_s, timeline.late_gaps
        return KvEnd(state.num_prefilled, state.generated[-1], *times, earlier)

    def withdraw_kv(self, state: RequestState) -> None:
        """Withdraws the offered KV, if any, of a request that loses its blocks or ends; none counts as offered then."""
        handover = handover_of(state)
        if handover.num_offered:
            self._events.add(KvGoneEvent(state.request.id))
        handover.num_offered, handover.offers_all = 0, False

    def update_features(self, job: RequestState, index: int, now: float) -> None:
        """Offers the features of an encode job's image once they are encoded. Ends the offer when they were fetched or
        refused or, with a FeaturesGoneEvent, evicted."""
        progress, features = job.images[index], self._requests.features
        request_id, num_tokens = job.request.id, job.request.images[index].num_tokens
        offered_s = handover_of(job).offered_s
        if progress == ImageProgress.ENCODED:
            block_ids = features.block_ids(job.image_keys[index])[: features.blocks_for(num_tokens)]
            self._events.add(FeaturesEvent(request_id, index, tuple(block_ids.tolist())))
            offered_s[index] = now
        elif index in offered_s:
            since_s = offered_s.pop(index)
            self._requests.timelines[request_id].add_transfer("offered_features", since_s, now, num_tokens)
            if progress == ImageProgress.WAITING:
                self._events.add(FeaturesGoneEvent(request_id, index))

    def withdraw_features(self, job: RequestState) -> None:
        """Withdraws the encoded features of a job that ends."""
        for index, progress in enumerate(job.images):
            if progress == ImageProgress.ENCODED:
                self._events.add(FeaturesGoneEvent(job.request.id, index))

    # ---- how a request leaves

    def release_features(self, request_id: RequestId, image_index: int, now: float) -> list[RequestMessage]:
        """Ends the offer of features that were fetched or refused and, with its last image, the job as MOVED. Ignores
        a request that is no encode job."""
        state, images = self._live(request_id), self._requests.images
        if state is None or not state.is_encode_job or not images.release_features(state, image_index, now):
            return []
        return self._end(state, Departure.MOVED, now)

    def release_kv(self, request_id: RequestId, now: float) -> list[RequestMessage]:
        """Ends the request whose KV was fetched or refused, as MOVED. If not all of it was offered yet, it was refused,
        and the request ends as WITHDRAWN. Ignores a request of which no KV is offered."""
        state = self._live(request_id)
        handover = None if state is None else find_handover(state)
        if state is None or handover is None or not handover.num_offered:
            return []
        departure = Departure.MOVED if handover.offers_all else Departure.WITHDRAWN
        self._close_offers(state, now, None)
        return self._end(state, departure, now)

    def withdraw(self, request_id: RequestId, now: float, reason: str) -> list[RequestMessage]:
        """Ends an encode job, or a request that decodes elsewhere, whose offers will not be fetched, as WITHDRAWN.
        Ignores a request that decodes here. `reason` is for its timeline."""
        state = self._live(request_id)
        if state is None or (not state.is_encode_job and Role.D in state.stages):
            return []
        self._close_offers(state, now, reason)
        return self._end(state, Departure.WITHDRAWN, now)

    def hand_over(self, request_id: RequestId, now: float) -> bool:
        """Offers the KV of a running decode, so that another instance continues it after its latest token; from now on
        it does not decode here. False, without any change, if it is not decoding here, if its sampling needs the
        history of its tokens (penalties or a grammar), or if the model keeps recurrent states."""
        state = self._live(request_id)
        if state is None or state.phase is not RequestPhase.DECODING or state.request.sampling.needs_history:
            return False
        if self._requests.has_states:
            return False
        self._requests.leave_decodes(state)
        state.num_prefilled = state.num_computed
        state.stages &= ~Role.D
        if state.connector_state is None:
            state.connector_state = HandoverState()
        self.offer_kv(state, now, ends=True, earlier=tuple(state.generated[:-1]))
        return True

    def _live(self, request_id: RequestId) -> RequestState | None:
        """The request, if it is here and has not ended; otherwise None."""
        state = self._requests.states.get(request_id)
        return None if state is None or state.ending is not None else state

    def _end(self, state: RequestState, departure: Departure, now: float) -> list[RequestMessage]:
        self._requests.end(state, Ending(departure))
        return self._finish([state], now)

    def _close_offers(self, state: RequestState, now: float, cause: str | None) -> None:
        """Records in the timeline how long each open offer of the request lasted, and forgets them. `cause`: why they
        were given up; None if they were fetched or refused."""
        timeline, offered_s = self._requests.timelines[state.request.id], handover_of(state).offered_s
        for index, since_s in offered_s.items():
            tokens = state.num_prefilled if index == _KV else state.request.images[index].num_tokens
            stage = "offered_kv" if index == _KV else "offered_features"
            timeline.add_transfer(stage, since_s, now, tokens, cause)
        offered_s.clear()


class EncodeJobQuota:
    """The share of the image cache that features of encode jobs may hold until their target instances have fetched
    them.

    The rest has space for the largest image that a request of this instance waits for, so that no request here waits
    for another instance to fetch something. A job's image too large for the quota is exempt from it. Only features of
    jobs are evicted for the quota, so the oldest job always progresses.
    """

    def __init__(self, requests: RequestTable, parked: ParkedRequests) -> None:
        self._requests = requests
        self._parked = parked
        self._num_blocks = 0  # the quota, valid while a vision step is filled

    def refresh(self) -> None:
        """Computes the quota before a vision step is filled."""
        self._num_blocks = self._requests.features.pool.num_blocks - self._largest_local()

    def _largest_local(self) -> int:
        """Number of blocks of the largest image without features that a request of this instance waits for; 0 if none
        does, or if there are no jobs."""
        requests = self._requests
        if not self._parked.encode_jobs:
            return 0
        sizes = (
            requests.features.blocks_for(image.num_tokens)
            for state in chain(requests.encoding, requests.prefilling)
            for image, progress in zip(state.request.images, state.images, strict=True)
            if progress <= ImageProgress.ENCODING
        )
        return max(sizes, default=0)

    def has_room(self, job: RequestState, index: int, num_blocks: int, now: float, *, may_evict: bool) -> bool:
        """True if an image of a job may have `num_blocks`: they fit the quota, after evicting features of later jobs if
        needed and `may_evict`, or they exceed it by themselves, or the quota is the whole cache."""
        images, quota = self._requests.images, self._num_blocks
        if num_blocks > quota or quota == self._requests.features.pool.num_blocks:
            return True
        if (excess := self._held_by_jobs() + num_blocks - quota) <= 0:
            return True
        if may_evict:
            of_jobs = (
                holder for holder in images.encoded_features() if all(user.is_encode_job for user, _ in holder[1])
            )
            for key in policy.features_to_evict(job, index, of_jobs, excess):
                images.evict(key, now)
        return self._held_by_jobs() + num_blocks <= quota

    def _held_by_jobs(self) -> int:
        """Number of blocks of features that only encode jobs use."""
        states, features = self._requests.states, self._requests.features
        held = ((features.users(key), num_blocks) for key, _, num_blocks in features.held_blocks())
        return sum(n for users, n in held if all(states[request_id].is_encode_job for request_id, _ in users))
