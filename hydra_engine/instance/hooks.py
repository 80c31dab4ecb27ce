"""What an instance's scheduler is given beside its caches: budgets where there are latency limits, who explains late
tokens, and a connector where there are peers.

The one file of the assembly that imports the scheduler's wings: an instance that is given none of them serves too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from hydra_engine.core.messages import LimitSummary
from hydra_engine.core.pools import Exports
from hydra_engine.instance.compute_stack import ComputeStack, Progress, step_times
from hydra_engine.instance.limits import limit_summary
from hydra_engine.instance.migration import Migration
from hydra_engine.instance.ports import PeerPort
from hydra_engine.scheduler.budget import Budgets
from hydra_engine.scheduler.connector import Connector
from hydra_engine.scheduler.handover.connector import PeerConnector
from hydra_engine.scheduler.latency.attribution import StepHistory
from hydra_engine.scheduler.latency.latency_budget import LatencyBudgets
from hydra_engine.scheduler.observer import StepObserver

Connect = Callable[[Exports, tuple[int, ...]], PeerPort]  # lets other instances in, which may map what is exported


@dataclass(frozen=True, slots=True)
class Hooks:
    """`limits` and `notes` are what the start-up summary says about them."""

    budgets: Budgets | None
    observer: StepObserver | None
    connector: Connector | None
    migration: Migration | None
    limits: LimitSummary
    notes: tuple[str, ...]


def make_hooks(stack: ComputeStack, wake: threading.Event, progress: Progress, connect: Connect | None) -> Hooks:
    config = stack.config.scheduler
    budgets, surface, limits = None, None, LimitSummary()
    notes: tuple[str, ...] = ()
    if (config.tpot_slo is not None or config.ttft_slo is not None) and stack.context.role.needs_language:
        measured = step_times(stack, wake, progress)
        surface, notes = measured.surface, measured.notes
        limits = limit_summary(config, measured, stack.spec.vision)
        budgets = LatencyBudgets(surface, config, num_slices=stack.worker.num_slices)
    connector = migration = None
    if connect is not None:
        connector = PeerConnector(config)
        migration = _migration(stack, connector, connect)
    return Hooks(budgets, StepHistory(surface), connector, migration, limits, notes)


def _migration(stack: ComputeStack, connector: PeerConnector, connect: Connect) -> Migration:
    exports, descriptors = stack.worker.exports()
    return Migration(
        incarnation=stack.context.incarnation,
        connector=connector,
        worker=stack.worker,
        peers=connect(exports, descriptors),
        num_slots=exports.num_words,
        config=stack.config.cluster,
        hit=stack.faults.hit,
    )
