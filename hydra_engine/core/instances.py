"""The outside view of one instance: its place in the topology, its condition and its latest report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hydra_engine.core.messages import InstanceSummary, Status


class Condition(StrEnum):
    STARTING = "starting"  # for the first time, or again after a death
    READY = "ready"
    SILENT = "silent"  # no message for too long: it gets no work, and is killed if that continues
    DRAINING = "draining"  # it finishes its requests and gets no new ones
    FAILED = "failed"  # its starts have failed and it is not started again
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class InstanceState:
    """The state of an instance. `role`: the stages that it serves now; `loaded`: those that it has weights for; both as
    letters. `restarts` counts its deaths."""

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
