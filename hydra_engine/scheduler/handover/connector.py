"""The connector of an instance with peers: hands the scheduler's hooks, and what its owner hears of other instances, to
those that decide what follows.

What is fetched is in `pulls.py`, who gets blocks for it in `remote_kv.py`, image features in `remote_features.py`, and
how a request leaves in `handover_end.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.messages import Finished, RequestMessage
from hydra_engine.core.outputs import Departure
from hydra_engine.core.plans import KvEnd, PullPlan
from hydra_engine.core.roles import Role
from hydra_engine.core.state import Ending, RequestState
from hydra_engine.scheduler.connector import Connector, Finish
from hydra_engine.scheduler.handover.audit import check_offers, check_pulls
from hydra_engine.scheduler.handover.encode_jobs import EncodeJobQuota
from hydra_engine.scheduler.handover.events import RemoteEvent
from hydra_engine.scheduler.handover.handover_end import HandoverEnd
from hydra_engine.scheduler.handover.pulls import Pulls
from hydra_engine.scheduler.handover.remote_events import RemoteEvents
from hydra_engine.scheduler.handover.remote_features import RemoteFeatures
from hydra_engine.scheduler.handover.remote_kv import RemoteKvAdmission
from hydra_engine.scheduler.prefill import StepBuilder
from hydra_engine.scheduler.request_table import RequestTable


class PeerConnector(Connector):
    """Contract: if every result comes back, what is asked of other instances is offered and what is offered to them is
    fetched, every request ends, whatever the sizes of the caches. Any number of pulls may be in flight; each is given
    back exactly once, also when it failed.

    `take_events` is called after each plan and before it is submitted: what others may not read any more is in it.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._departed: list[RequestState] = []  # ended while a plan was made, to be forgotten behind it

    def attach(self, requests: RequestTable, finish: Finish) -> None:
        self._requests, self._finish = requests, finish
        self._events = RemoteEvents()
        self._features = RemoteFeatures(requests, self._events)
        self._handover_end = HandoverEnd(requests, self._events)
        self._admission = RemoteKvAdmission(requests, self._config)
        self._quota = EncodeJobQuota(requests)
        self._pulls = Pulls(requests, self._events, self._features, self._admission, self._config)

    # ---- hooks of the scheduler

    def before_language(self, builder: StepBuilder) -> None:
        self._admission.admit(builder.now, builder)

    def after_language(self, now: float) -> None:
        departed, self._departed = self._departed, []
        for event in self._finish(departed, now):
            assert isinstance(event, Finished)
            self._events.tell(event)

    def on_computed(self, state: RequestState, now: float, *, sampled: bool) -> None:
        if Role.D not in state.stages:
            self._handover_end.offer_kv(state, now, ends=sampled)

    @property
    def only_borrowed(self) -> bool:
        requests = self._requests
        running = [
            state for queue in (requests.prefilling, requests.decoding) for state in queue if state.arrival is None
        ]
        return bool(running) and all(state.borrowed for state in running) and not requests.waiting

    def before_vision(self) -> None:
        self._quota.refresh()

    def may_encode(self, job: RequestState, index: int, num_blocks: int, now: float, *, may_take: bool) -> bool:
        return self._quota.has_room(job, index, num_blocks, now, may_take=may_take)

    def on_image(self, state: RequestState, index: int, now: float) -> None:
        if index in state.remote_images:
            self._features.ask(state, index)
        elif state.is_encode_job:
            self._features.tell_target(state, index, now)

    def may_preempt(self, state: RequestState) -> bool:
        return self._pulls.may_preempt(state)

    def on_blocks_freed(self, state: RequestState) -> None:
        self._handover_end.withdraw_kv(state)
        if state.arrival is not None:
            state.arrival.num_copied, state.arrival.preempt_after_copy = 0, False

    def on_preempted(self, state: RequestState, now: float) -> None:
        """What has got its KV from elsewhere and may not compute it here has departed with that."""
        if state.arrival is None and Role.P not in state.stages:
            self._requests.end(state, Ending(Departure.RETURNED))
            self._departed.append(state)

    def on_end(self, state: RequestState, ending: Ending) -> None:
        self._features.end(state)
        if ending.reason != Departure.MOVED:
            self._handover_end.withdraw_kv(state)
        self._pulls.end_offer(state)

    # ---- what other instances offer

    def image_offered(self, request_id: RequestId, image_index: int, offer: int) -> None:
        """Features of a remote image can be pulled. `offer` is a number of the caller's, as in the plan of the pull."""
        self._features.offered(request_id, image_index, offer)

    def image_offer_gone(self, offer: int) -> None:
        """They cannot be pulled any more; a copy in flight comes back all the same."""
        self._features.offer_gone(offer)

    def kv_offered(self, request_id: RequestId, offer: int, num_blocks: int, end: KvEnd | None) -> None:
        """`num_blocks` of a request's KV can be pulled, in all: told again whenever there are more, the last time with
        `end`."""
        self._pulls.kv_offered(request_id, offer, num_blocks, end)

    def kv_offer_gone(self, offer: int) -> None:
        self._pulls.kv_offer_gone(offer)

    def plan_pulls(self, now: float) -> list[PullPlan]:
        """Copies to begin now. They write to blocks of ours until `on_pull`."""
        return self._pulls.plan(now)

    def on_pull(
        self, step_id: StepId, now: float, *, valid: bool, started_s: float, ended_s: float
    ) -> list[RequestMessage]:
        """Takes back a pull. Not `valid`: its offer was gone before the copy had ended, or the bytes were wrong."""
        state = self._pulls.end(step_id, now, valid=valid, started_s=started_s, ended_s=ended_s)
        self.after_language(now)
        return self._finish([state], now)

    # ---- what other instances take

    def release_features(self, request_id: RequestId, image_index: int, now: float) -> list[RequestMessage]:
        """Features that an encode job has offered have been fetched, or are not wanted."""
        return self._finish(self._handover_end.release_features(request_id, image_index, now), now)

    def release_kv(self, request_id: RequestId, now: float) -> list[RequestMessage]:
        """All KV that was offered has been fetched, or is not wanted."""
        return self._finish(self._handover_end.release_kv(request_id, now), now)

    def withdraw(self, request_id: RequestId, now: float, reason: str) -> list[RequestMessage]:
        """Nobody is going to fetch what an encode job or a request that moves on offers. `reason` is for its
        timeline."""
        return self._finish(self._handover_end.withdraw(request_id, now, reason), now)

    def hand_over(self, request_id: RequestId, now: float) -> bool:
        """A decode that runs here is to go on elsewhere: from here on its KV is offered. False if it does not run."""
        return self._handover_end.hand_over(request_id, now)

    def take_events(self) -> list[RemoteEvent]:
        """What other instances have to be told since the last call, in order, and the ends of requests that departed
        while something was planned."""
        return self._events.take()

    # ---- looking

    @property
    def in_flight(self) -> Iterable[PullPlan]:
        return self._pulls.in_flight.values()

    def check(self) -> None:
        assert not self._departed, "a request has departed and is still here"
        check_offers(self._requests, self._features.offers, self._pulls.kv_offers)
        check_pulls(self._requests, self.in_flight)
