"""What the scheduler calls where other instances may take part in a request: its one tie to them.

The connector of an instance that has no others, which does nothing. The one of an instance with peers is
`handover/connector.py`; whoever builds the scheduler puts it in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hydra_engine.core.messages import RequestMessage
from hydra_engine.core.plans import PullPlan
from hydra_engine.core.state import Ending, RequestState

if TYPE_CHECKING:
    from hydra_engine.scheduler.prefill import StepBuilder
    from hydra_engine.scheduler.request_table import RequestTable

# Takes requests that have ended, and the time; returns the messages of those that no plan in flight names.
Finish = Callable[[list[RequestState], float], list[RequestMessage]]


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

    # ---- vision steps

    def before_vision(self) -> None:
        """A vision step is about to be filled."""

    def may_encode(self, job: RequestState, index: int, num_blocks: int, now: float, *, may_take: bool) -> bool:
        """Whether an image of an encode job may have so many blocks, after taking those of later ones if it must and
        may."""
        return True

    # ---- the life of a request

    def on_image(self, state: RequestState, index: int, now: float) -> None:
        """An image of a live request is as far as its state says."""

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
