"""What the supervisor knows of one instance of the topology, over all its lives."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hydra_engine.cluster import wire
from hydra_engine.cluster.children import Child
from hydra_engine.cluster.watch import Pace, Restarts, Silence
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import Condition, InstanceState
from hydra_engine.core.messages import WIRE_VERSION, InstanceSummary, Status
from hydra_engine.core.roles import InstanceSpec
from hydra_engine.errors import HydraError


@dataclass(slots=True)
class Exiting:
    """The instance is on its way out: its channel or its process has ended, or it was killed."""

    since_s: float
    reason: str = ""  # why it was killed
    channel_ended: bool = False  # nothing more is to be read


class Member:
    def __init__(self, name: str, spec: InstanceSpec, config: EngineConfig, pace: Pace) -> None:
        """`spec` says on which device."""
        self.name = name
        self.loaded = spec.role
        self.role = spec.role  # that it serves now
        self.config = replace(config, device=spec.device)
        self.condition = Condition.STARTING
        self.reason = ""
        self.incarnation = 0
        self.child: Child | None = None  # the live incarnation
        self.killed_child: Child | None = None  # killed, and not gone yet
        self.exiting: Exiting | None = None
        self.failure: HydraError | None = None  # what it said before it ended
        self.start_due_s: float | None = None
        self.ready_s: float | None = None
        self.summary: InstanceSummary | None = None
        self.status: Status | None = None
        self.restarts = Restarts(pace)
        self.silence = Silence(config.cluster.suspect_s, config.cluster.fence_s)

    @property
    def is_up(self) -> bool:
        return self.condition in (Condition.READY, Condition.SILENT)

    def begin(self, incarnation: int, *, neighbours: tuple[str, ...], has_peers: bool) -> wire.Start:
        """Begins a new life of the instance."""
        self.incarnation = incarnation
        self.condition = Condition.STARTING
        self.start_due_s = self.ready_s = None
        self.exiting = self.failure = self.summary = self.status = None
        self.silence = Silence(self.config.cluster.suspect_s, self.config.cluster.fence_s)
        letters = self.loaded.letters
        return wire.Start(WIRE_VERSION, self.name, letters, self.config, incarnation, neighbours, has_peers)

    def become_ready(self, summary: InstanceSummary, now: float) -> None:
        self.summary = summary
        self.condition = Condition.READY
        self.reason = ""
        self.ready_s = now
        self.silence.heartbeat(now)

    def served_s(self, now: float) -> float:
        return now - self.ready_s if self.ready_s is not None else 0.0

    def state(self) -> InstanceState:
        return InstanceState(
            name=self.name,
            role=self.role.letters,
            loaded=self.loaded.letters,
            condition=self.condition,
            incarnation=self.incarnation,
            restarts=self.restarts.total,
            pid=self.child.pid if self.child is not None else None,
            reason=self.reason,
            status=self.status,
            summary=self.summary,
        )
