"""What is known of one instance from outside: its place in the topology, its state and its latest report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hydra_engine.core.messages import InstanceSummary, Status


class Condition(StrEnum):
    STARTING = "starting"  # for the first time, or again after a death
    READY = "ready"
    SILENT = "silent"  # it has not been heard of for too long: it gets no work, and is killed if that goes on
    DRAINING = "draining"  # it finishes what it has and gets nothing new
    FAILED = "failed"  # its starts have failed and it is not started again
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class InstanceState:
    """`role` is what it serves now, `loaded` what it has weights for, as letters. `restarts` counts its deaths."""

    name: str
    role: str
    loaded: str
    condition: Condition
    incarnation: int
    restarts: int = 0
    pid: int | None = None
    reason: str = ""  # why it is not ready
    status: Status | None = None
    summary: InstanceSummary | None = None
