"""The connector of an instance with peers: passes the scheduler's hooks on to pulls, offers and admission.

Pulls from other instances are in `pulls.py`, the admission of requests with remote KV in `remote_kv.py`, offers to
other instances in `offers.py`.
"""

from __future__ import annotations

import math
from itertools import chain

import msgspec

from hydra_engine.config import ClusterConfig, SchedulerConfig
from hydra_engine.core.ids import StepId
from hydra_engine.core.instances import Role
from hydra_engine.core.messages import Finished, NeedDecoder, RequestMessage
from hydra_engine.core.outputs import Departure
from hydra_engine.core.reports import Status
from hydra_engine.core.state import Ending, RequestState
from hydra_engine.scheduler.handover.events import RemoteEvent, RemoteEvents
from hydra_engine.scheduler.handover.offers import EncodeJobQuota, Offers
from hydra_engine.scheduler.handover.pulls import Pulls
from hydra_engine.scheduler.handover.remote_kv import RemoteKvAdmission
from hydra_engine.scheduler.handover.state import (
    HandoverState,
    ParkedRequests,
    RemoteKv,
    find_handover,
    handover_of,
    remote_kv_of,
)
from hydra_engine.scheduler.hooks import Connector, Finish, Preempt
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.scheduler.step_stats import StepTimes

# Longest pause of borrowed decodes for encodes. A reader notices a longer one; a first token that waits for an image is
# later by far.
STEAL_PATIENCE_S = 0.1
_NEW_SHARE = 0.25  # weight of the newest report in the moving mean


class PeerConnector(Connector):
    """The connector of one instance to its peers.

    If every result comes back, every image that it asks for is offered, every decoder that it asks for is named, and
    every offer of its own is fetched or withdrawn, then every request ends, whatever the sizes of the caches. Any
    number of pulls may be in flight; the caller reports the end of each exactly once (`on_pull`), also if it failed.

    The owner reports offers of other instances to `pulls`, and what they have fetched to `offers`. It calls
    `take_events` after each plan and before the plan is submitted: the events name blocks that others may not read any
    more.
    """

    pulls: Pulls
    offers: Offers

    def __init__(self, config: SchedulerConfig, cluster: ClusterConfig) -> None:
        self._config = config
        self._cluster = cluster
        self._may_borrow = False
        self._patience_s = yield_patience_s(config.tpot_slo)
        self._block_s = 0.0  # seconds to copy a KV block of this instance, as its readers report; 0.0: unknown

    def attach(self, requests: object, times: StepTimes, finish: Finish) -> None:
        """Creates the parts that need the scheduler's tables. Called once, before any other hook."""
        assert isinstance(requests, RequestTable)
        self._requests, self._times, self._finish = requests, times, finish
        self._events = RemoteEvents()
        self._parked = ParkedRequests(requests)
        self._admission = RemoteKvAdmission(requests, self._parked, self._config)
        self._quota = EncodeJobQuota(requests, self._parked)
        self.pulls = Pulls(requests, self._events, self._admission, self._parked, self._config, self._cluster)
        self.offers = Offers(requests, self._events, finish)

    # ---- hooks of the scheduler

    def on_arrival(self, state: RequestState) -> None:
        """Sets the handover state of a request in which other instances take part."""
        state.connector_state = HandoverState(RemoteKv() if state.external_kv else None)

    def parks(self, state: RequestState) -> bool:
        return self._parked.parking_of(state) is not None

    def on_requeue(self, state: RequestState) -> None:
        self._parked.requeue(state)

    def before_language(self, now: float, preempt: Preempt) -> None:
        """Admits requests whose KV comes from other instances, ahead of all prefills; may preempt for them."""
        self._admission.admit(now, preempt)

    def on_computed(self, state: RequestState, now: float, *, sampled: bool) -> None:
        """Offers the KV of a request that decodes elsewhere: after its last chunk (`sampled`), with `early_kv` after
        every chunk."""
        if Role.D not in state.stages and (sampled or self._cluster.early_kv):
            self.offers.offer_kv(state, now, ends=sampled)

    def chunk_end(self, state: RequestState) -> int:
        """The end of the next part (`part_end`) of the prompt of a request that decodes elsewhere, since KV is offered
        between chunks; `num_tokens` if it decodes here, or prompts are not split for copies."""
        if Role.D in state.stages or not (part_tokens := self._part_tokens()):
            return state.num_tokens
        return part_end(state.num_planned, state.num_tokens, part_tokens, self._requests.kv.block_size)

    def _part_tokens(self) -> int:
        """Minimum tokens of a part of a prompt whose KV is copied early: as configured, else as many as take at least
        the fixed cost of a step to copy. 0 (prompts are not split for copies) if configured so, or before the first
        copy was reported.

        Like EPD-Serve's groups, of tokens instead of layers: a part is copied while the next one is computed, so a
        split saves the copy of the first part and costs one more step's read of the weights.
        """
        if self._config.handover_tokens is not None:
            return self._config.handover_tokens
        step_s = self._times.shortest_s
        return math.ceil(step_s / self._block_s) * self._requests.kv.block_size if self._block_s else 0

    # ---- decodes lent by other instances

    def set_role(self, role: Role) -> None:
        """Lets borrowed decodes wait for encodes (`language_due_s`) on an instance that encodes and decodes: it borrows
        them while it has nothing to encode (HeteroServe, section 5.3). If it does not prefill, its vision steps are
        planned before its language steps."""
        self._may_borrow = Role.E in role and Role.D in role
        self.vision_first = self._may_borrow and Role.P not in role

    def language_due_s(self, ended_s: float) -> float:
        """The time until which a language step waits for the vision step in flight: `yield_patience_s` after `ended_s`
        while all language work here is borrowed decodes, so that the encode has the device to itself; otherwise minus
        infinity. Images for which no blocks are free are in no vision step and are not waited for."""
        return ended_s + self._patience_s if self._may_borrow and self._only_borrowed() else -math.inf

    def _only_borrowed(self) -> bool:
        """True if the language work here is decodes that other instances have lent to this one, at least one, and
        nothing else. Requests whose KV is not here yet, or that wait for images before their start, do not count."""
        requests, some = self._requests, False
        for state in chain(requests.prefilling, requests.decoding):
            if state.external_kv:
                continue
            if (handover := find_handover(state)) is None or not handover.is_lent:
                return False  # usually at the first request
            some = True
        return some and not requests.waiting

    # ---- vision steps

    def before_vision(self) -> None:
        self._quota.refresh()

    def may_encode(self, job: RequestState, index: int, num_blocks: int, now: float, *, may_evict: bool) -> bool:
        return self._quota.has_room(job, index, num_blocks, now, may_evict=may_evict)

    def on_image(self, state: RequestState, index: int, now: float) -> None:
        """Asks for the features of a remote image or refuses offers of them; offers or withdraws features of an encode
        job."""
        if index in state.external_images:
            self.pulls.images.request(state, index)
        elif state.is_encode_job:
            self.offers.update_features(state, index, now)

    def on_start(self, state: RequestState) -> None:
        """Asks which instance decodes the request, if this one does not: late enough to know where slots are free,
        early enough for the first blocks to be copied while the rest is computed."""
        if Role.D not in state.stages:
            self._events.add(NeedDecoder(state.request.id))

    def may_preempt(self, state: RequestState) -> bool:
        """False while KV is being copied into the request's blocks. The request is then preempted when the copy has
        ended, unless that was the last, so that all KV is here."""
        if (remote_kv := remote_kv_of(state)) is None or remote_kv.copied_offer is None:
            return True
        remote_kv.preempt_after_copy = True
        return False

    def on_blocks_freed(self, state: RequestState) -> None:
        """Withdraws the KV that the request offers, and forgets what was copied into its blocks."""
        self.offers.withdraw_kv(state)
        if (remote_kv := remote_kv_of(state)) is not None:
            remote_kv.num_copied, remote_kv.preempt_after_copy = 0, False

    def on_preempted(self, state: RequestState, now: float) -> None:
        """Ends, as RETURNED, a request that got its KV from elsewhere and cannot be prefilled here."""
        if not state.external_kv and Role.P not in state.stages:
            self._requests.end(state, Ending(Departure.RETURNED))
            for message in self._finish([state], now):
                assert isinstance(message, Finished)
                self._events.add(message)

    def on_end(self, state: RequestState, ending: Ending) -> None:
        """Withdraws what the request offers, except KV that has been fetched or refused (MOVED), and refuses what is
        offered for it."""
        if state.is_encode_job:
            self.offers.withdraw_features(state)
        if ending.reason != Departure.MOVED:
            self.offers.withdraw_kv(state)
        self.pulls.forget(state)

    # ---- reports

    def loads_images(self, state: RequestState) -> bool:
        return bool(handover_of(state).images_copied)

    def with_counts(self, status: Status) -> Status:
        """The status with the numbers of requests that wait for peers; encode jobs count as encoding."""
        parked = self._parked
        return msgspec.structs.replace(
            status,
            num_encoding=status.num_encoding + len(parked.encode_jobs),
            num_handing_over=len(parked.handing_over),
            num_arriving=len(parked.remote_prefills) + len(parked.kv_offered),
        )

    # ---- for the owner

    def on_pull(
        self, step_id: StepId, now: float, *, valid: bool, started_s: float, ended_s: float
    ) -> list[RequestMessage]:
        """Records the end of a pull. Returns the Finished of its request if that has ended and no other plan names it.
        Not `valid`: the copy failed, or its offer ended first."""
        state = self.pulls.end(step_id, now, valid=valid, started_s=started_s, ended_s=ended_s)
        return self._finish([state], now)

    def record_copy(self, block_s: float) -> None:
        """Records the mean seconds that a reader of this instance takes to copy a block of KV, in a moving mean over
        all readers. Ignores 0.0: not measured."""
        if block_s:
            self._block_s = block_s if not self._block_s else self._block_s + _NEW_SHARE * (block_s - self._block_s)

    def take_events(self) -> list[RemoteEvent]:
        """Removes and returns the events for other instances since the last call, in order, NeedImages last; among
        them the Finished of requests that departed during planning."""
        return self._events.take()


def yield_patience_s(tpot_limit_s: float | None) -> float:
    """Longest time in seconds that borrowed decodes wait for the vision lane: `STEAL_PATIENCE_S`, with a TPOT limit at
    most half of the limit."""
    return STEAL_PATIENCE_S if tpot_limit_s is None else min(STEAL_PATIENCE_S, tpot_limit_s / 2)


def part_end(start: int, num_tokens: int, min_tokens: int, block_size: int) -> int:
    """End of the next part of a prompt whose KV is copied to another instance while the next part is computed: the
    block boundary at or behind the middle of what is left from `start`, or `num_tokens` if less than twice `min_tokens`
    is left.

    Only the copy of the last part is waited for. By halving, the last part is short after a few steps; the other copies
    are hidden as long as copying a token takes no longer than computing it.
    """
    rest = num_tokens - start
    if rest < 2 * min_tokens:
        return num_tokens
    middle = start + (rest + 1) // 2
    return min(num_tokens, -(-middle // block_size) * block_size)
