"""What hangs on the scheduler where a deployment needs it, as classes that do nothing: the core knows no more of it.

`StepObserver` explains late tokens; the one that knows whose prefill, encode or move a token waited for is
`latency/attribution.py`. `Connector` joins other instances; the one of an instance with peers is
`handover/connector.py`. `instance/hooks.py` puts them in. Budgets that follow from limits have their interface in
`budget.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from hydra_engine.core.cost import LanguageLoad
from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import RequestMessage
from hydra_engine.core.outputs import DelayCause
from hydra_engine.core.plans import PullPlan
from hydra_engine.core.state import Ending, RequestState

if TYPE_CHECKING:
    from hydra_engine.scheduler.prefill import StepBuilder
    from hydra_engine.scheduler.request_table import RequestTable

Work = Sequence[tuple[RequestId, int]]  # (request, tokens or patches), amounts positive

# Takes requests that have ended, and the time; returns the messages of those that no plan in flight names.
Finish = Callable[[list[RequestState], float], list[RequestMessage]]


class StepObserver:
    """Steps of a lane are told in order."""

    def on_vision_planned(self, now: float, items: Work) -> None:
        """A vision step is given to the lane, which begins it as soon as the ones before it have ended."""

    def on_vision_done(self, started_s: float, ended_s: float, items: Work) -> None:
        """The oldest vision step that has begun has ended."""

    def on_language_done(
        self, started_s: float, ended_s: float, load: LanguageLoad, chunks: Work, vision_s: float
    ) -> None:
        """A language step has ended, beside which vision ran for `vision_s`. The hot path."""

    def on_away(self, request_id: RequestId, kind: str, now: float, until_s: float = math.inf) -> None:
        """The request is computed by no step here until then, or until one of its own; `kind` is the cause of that."""

    def explain(self, request_id: RequestId, since_s: float, until_s: float, limit_s: float) -> tuple[DelayCause, ...]:
        """What the time between a request's token at `since_s` and its next one at `until_s`, longer than `limit_s`,
        went to: at least one cause, the largest first."""
        return (DelayCause("step", until_s - since_s),)


class Connector:
    """Hooks. Times are those of the call that led here."""

    def attach(self, requests: RequestTable, finish: Finish) -> None:
        """Once, before anything else."""

    # ---- language steps

    def before_language(self, builder: StepBuilder) -> None:
        """A language step has its decodes and a budget, and nothing else yet."""

    def after_language(self, now: float) -> None:
        """A language step has been planned, or given up."""

    def on_computed(self, state: RequestState, now: float, *, sampled: bool) -> None:
        """A chunk of a request that goes on has come back; `sampled`: the last one."""

    @property
    def only_borrowed(self) -> bool:
        """There are decodes that other instances have lent, and nothing else to compute."""
        return False

    def part_tokens(self, step_s: float) -> int:
        """Tokens from which on a part of a prompt whose KV leaves is worth a step of its own, which costs at least
        `step_s`; 0: none is, or nothing is known yet."""
        return 0

    # ---- vision steps

    def before_vision(self) -> None:
        """A vision step is about to be filled."""

    def may_encode(self, job: RequestState, index: int, num_blocks: int, now: float, *, may_evict: bool) -> bool:
        """Whether an image of an encode job may have so many blocks, after evicting those of later ones if it must and
        may."""
        return True

    # ---- the life of a request

    def on_image(self, state: RequestState, index: int, now: float) -> None:
        """An image of a live request is as far as its state says."""

    def on_start(self, state: RequestState) -> None:
        """The request has got its first blocks, and its first chunk can be planned."""

    def may_preempt(self, state: RequestState) -> bool:
        """False: not now, but as soon as that is possible."""
        return True

    def on_blocks_freed(self, state: RequestState) -> None:
        """The request is about to lose its KV."""

    def on_preempted(self, state: RequestState, now: float) -> None:
        """It has lost its KV and is in no queue yet."""

    def on_end(self, state: RequestState, ending: Ending) -> None:
        """The request is about to end."""

    # ---- looking

    @property
    def in_flight(self) -> Iterable[PullPlan]:
        """Copies that write to blocks of ours."""
        return ()

    def check(self) -> None:
        """Raises AssertionError if what is known of other instances disagrees with the states of requests."""
