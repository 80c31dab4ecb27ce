"""Interfaces of the scheduler's optional parts, as no-op base classes: the core knows no more of them.

`StepObserver` explains late tokens; the one in `latency/attribution.py` attributes them to a prefill, an encode or a
move of a request. `Connector` connects other instances; that of an instance with peers is in `handover/connector.py`.
`instance/hooks.py` creates and attaches them. Budgets that follow from limits have their interface in `budget.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Role
from hydra_engine.core.messages import RequestMessage
from hydra_engine.core.outputs import DelayCause
from hydra_engine.core.plans import LanguageLoad
from hydra_engine.core.reports import Status
from hydra_engine.core.state import Ending, RequestState
from hydra_engine.scheduler.step_stats import StepTimes

Work = Sequence[tuple[RequestId, int]]  # (request, tokens or patches), amounts positive

# Takes requests and the time; forgets those that have ended and that no plan in flight names, returns their Finished.
Finish = Callable[[list[RequestState], float], list[RequestMessage]]

# Preempts a request for the step that is filled; False if the connector needs its blocks for now. While the step before
# is in flight it raises NeedsResult (`step.py`), which the connector does not catch.
Preempt = Callable[[RequestState], bool]


class StepObserver:
    """A no-op observer, which blames every late token on its step. Calls for the steps of one lane come in order."""

    def on_vision_planned(self, now: float, items: Work) -> None:
        """Called when a vision step is planned, which runs after the ones before it. `items`: patches of each image."""

    def on_vision_done(self, started_s: float, ended_s: float, items: Work) -> None:
        """Called when the oldest vision step in flight has ended."""

    def on_language_done(
        self, started_s: float, ended_s: float, load: LanguageLoad, chunks: Work, vision_s: float
    ) -> None:
        """Called when a language step has ended, beside which vision ran for `vision_s` seconds. `chunks`: tokens of
        its prefill chunks. On the hot path."""

    def on_away(self, request_id: RequestId, kind: str, now: float, until_s: float = math.inf) -> None:
        """Called when a request has lost its KV, now or before it arrived (`until_s` infinite: until its next step
        here), or has just got it from another instance (at `until_s`). `kind`: as in `DelayCause`."""

    def explain(
        self, request_id: RequestId, since_s: float, until_s: float, tpot_limit_s: float
    ) -> tuple[DelayCause, ...]:
        """The causes, the largest first and at least one, of the time between a request's token at `since_s` and its
        next one at `until_s`, which is longer than `tpot_limit_s` (without a limit: `StepTimes.gap_s`)."""
        return (DelayCause("step", until_s - since_s),)


class Connector:
    """A no-op connector for an instance without peers: the hooks that the scheduler calls. `now` is the time of the
    scheduler's call or, while it applies a result, the end of that step.

    Like vLLM's KVConnector it decides which requests wait for features or KV from elsewhere (`on_arrival`, `parks`),
    and is called when blocks are allocated (`on_start`), while a step is filled (`before_language`) and when a request
    ends (`on_end`). Without `connector_state` a request's hooks, except `on_arrival` and `may_encode`, are not called.
    """

    vision_first = False  # True: a vision step is planned before the language step

    def attach(self, requests: object, times: StepTimes, finish: Finish) -> None:
        """Called once, before any other hook. `requests`: the scheduler's RequestTable. `times`: of its language steps,
        kept up to date. `finish`: for requests that the connector has ended outside of the scheduler's own calls."""

    def set_role(self, role: Role) -> None:
        """Called with the stages that are accepted from now on."""

    # ---- language steps

    def language_due_s(self, ended_s: float) -> float:
        """The time from which a language step may run while images are being encoded; minus infinity: at once.
        `ended_s`: the end of the latest language step."""
        return -math.inf

    def chunk_end(self, state: RequestState) -> int:
        """Upper bound for the end (exclusive) of a request's next chunk, at most `num_tokens`."""
        return state.num_tokens

    def before_language(self, now: float, preempt: Preempt) -> None:
        """Called when a language step has its decodes and budget, before any prefill is added. May preempt requests."""

    def on_computed(self, state: RequestState, now: float, *, sampled: bool) -> None:
        """Called when a chunk has been computed, unless its request ends. `sampled`: it was the last one."""

    # ---- vision steps

    def before_vision(self) -> None:
        """Called before a vision step is filled."""

    def may_encode(self, job: RequestState, index: int, num_blocks: int, now: float, *, may_evict: bool) -> bool:
        """True if image `index` of an encode job may have `num_blocks` blocks of the image cache. Evicts features of
        later jobs if that is needed and `may_evict`."""
        return True

    # ---- the life of a request

    def on_arrival(self, state: RequestState) -> None:
        """Called when a request arrives of which not all stages run here, or whose features or KV are to be loaded. May
        set its `connector_state`."""

    def parks(self, state: RequestState) -> bool:
        """True if the request is PARKED, in no new language plan: an encode job, or it waits for other instances."""
        return False

    def on_requeue(self, state: RequestState) -> None:
        """Called after the phase and the queue of the request were brought up to date."""

    def on_image(self, state: RequestState, index: int, now: float) -> None:
        """Called after the progress of image `index` of a request was set, unless the request is ending. Not called
        where freed KV makes a CONSUMED image CACHED."""

    def on_start(self, state: RequestState) -> None:
        """Called when the request has its slot and its cached blocks, before the blocks behind these are allocated."""

    def may_preempt(self, state: RequestState) -> bool:
        """False if the connector needs the request's blocks for now; it then preempts the request itself as soon as it
        does not, unless all of its KV is here by then."""
        return True

    def on_blocks_freed(self, state: RequestState) -> None:
        """Called before the KV blocks of a request that has not ended are freed."""

    def on_preempted(self, state: RequestState, now: float) -> None:
        """Called when a preempted request has lost its KV; may end the request."""

    def on_end(self, state: RequestState, ending: Ending) -> None:
        """Called when a request is about to end; its `ending` is not set yet."""

    # ---- reports

    def loads_images(self, state: RequestState) -> bool:
        """True if features of some image are being loaded for this request."""
        return False

    def with_counts(self, status: Status) -> Status:
        """The status with the parked requests counted too."""
        return status
