"""Interfaces of the scheduler's optional parts, as no-op base classes: the core knows no more of them.

`StepObserver` explains late tokens; `latency/attribution.py` has the one that attributes them to a prefill, an encode
or a move of a request. `Connector` connects other instances; the one of an instance with peers is
`handover/connector.py`. `instance/hooks.py` creates and attaches them. Budgets that follow from limits have their
interface in `budget.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Role
from hydra_engine.core.messages import RequestMessage, Status
from hydra_engine.core.outputs import DelayCause
from hydra_engine.core.plans import LanguageLoad
from hydra_engine.core.state import Ending, RequestState
from hydra_engine.scheduler.step_stats import StepTimes

Work = Sequence[tuple[RequestId, int]]  # (request, tokens or patches), amounts positive

# Takes requests that have ended, and the time; returns the messages of those that no plan in flight names.
Finish = Callable[[list[RequestState], float], list[RequestMessage]]


class StepObserver:
    """A no-op observer of steps, which attributes late tokens to the step. Calls for the steps of one lane come in
    order."""

    def on_vision_planned(self, now: float, items: Work) -> None:
        """Called when a vision step is submitted to its lane, which runs it after the ones before it."""

    def on_vision_done(self, started_s: float, ended_s: float, items: Work) -> None:
        """Called when the oldest unfinished vision step has ended."""

    def on_language_done(
        self, started_s: float, ended_s: float, load: LanguageLoad, chunks: Work, vision_s: float
    ) -> None:
        """Called when a language step has ended, beside which vision ran for `vision_s` seconds. On the hot path."""

    def on_away(self, request_id: RequestId, kind: str, now: float, until_s: float = math.inf) -> None:
        """Called when a request leaves the steps of this instance, until `until_s` or (infinite) its own next step.
        `kind`: the kind of `DelayCause` for that time."""

    def explain(
        self, request_id: RequestId, since_s: float, until_s: float, tpot_limit_s: float
    ) -> tuple[DelayCause, ...]:
        """The causes, the largest first and at least one, of the time between a request's token at `since_s` and its
        next one at `until_s`, which is longer than `tpot_limit_s`."""
        return (DelayCause("step", until_s - since_s),)


class OpenStep(Protocol):
    """A language step while it is filled, as far as a connector needs it."""

    now: float

    def preempt(self, victim: RequestState) -> bool: ...


class Connector:
    """A no-op connector for an instance without peers: the hooks that the scheduler calls. `now` is the time of the
    scheduler's call.

    As vLLM's KVConnector it answers how much of a request it brings (`on_arrival`, `parks`), learns that blocks were
    allocated (`on_start`), adds to a step (`before_language`) and learns that a request ends (`on_end`). Hooks about
    one request are called only if the connector has set its `connector_state`.
    """

    vision_first = False  # True: the vision lane is asked for a step before the language lane

    def attach(self, requests: object, times: StepTimes, finish: Finish) -> None:
        """Called once, before any other hook. `requests`: the scheduler's RequestTable."""

    def set_role(self, role: Role) -> None:
        """Called with the stages that are accepted from now on."""

    # ---- language steps

    def language_due_s(self, ended_s: float) -> float:
        """The time from which a language step may run while images are being encoded. `ended_s`: the end of the latest
        language step."""
        return -math.inf

    def chunk_end(self, state: RequestState) -> int:
        """The latest position at which the next chunk of a request may end, at most `num_tokens`."""
        return state.num_tokens

    def before_language(self, step: OpenStep) -> None:
        """Called when a language step has its decodes and its budget, before any prefill is added."""

    def on_computed(self, state: RequestState, now: float, *, sampled: bool) -> None:
        """Called when a chunk of a request that continues has come back. `sampled`: it was the last one."""

    # ---- vision steps

    def before_vision(self) -> None:
        """Called before a vision step is filled."""

    def may_encode(self, job: RequestState, index: int, num_blocks: int, now: float, *, may_evict: bool) -> bool:
        """True if an image of an encode job may have `num_blocks`, after evicting features of later jobs if needed and
        `may_evict`."""
        return True

    # ---- the life of a request

    def on_arrival(self, state: RequestState) -> None:
        """Called when a request arrives of which not all stages run here, or with features or KV to load. Sets its
        `connector_state`."""

    def parks(self, state: RequestState) -> bool:
        """True if the request waits for other instances, so that the scheduler must leave it alone."""
        return False

    def on_requeue(self, state: RequestState) -> None:
        """Called after the phase of the request was derived again, since something that `parks` reads may have
        changed."""

    def on_image(self, state: RequestState, index: int, now: float) -> None:
        """Called when the progress of an image of a live request has changed."""

    def on_start(self, state: RequestState) -> None:
        """Called when the request has its first blocks; its first chunk can be planned."""

    def may_preempt(self, state: RequestState) -> bool:
        """False if the request cannot be preempted now; the connector then preempts it as soon as possible."""
        return True

    def on_blocks_freed(self, state: RequestState) -> None:
        """Called before the KV blocks of a request are freed."""

    def on_preempted(self, state: RequestState, now: float) -> None:
        """Called when a request has lost its KV and is not queued again yet."""

    def on_end(self, state: RequestState, ending: Ending) -> None:
        """Called before a request ends."""

    # ---- reports

    def loads_images(self, state: RequestState) -> bool:
        """True if features of an image are being loaded for this request."""
        return False

    def with_counts(self, status: Status) -> Status:
        """The status with the requests that the connector parks."""
        return status
