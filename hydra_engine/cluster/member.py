"""The supervisor's record of one instance of the topology over all its incarnations, and the frontend's view of it.

Decides when an instance counts as silent and when a dead one is started again. Reads no clock: `now` is passed in, in
seconds on the monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec

from hydra_engine.cluster import channel
from hydra_engine.cluster.channel import FrontendEnd
from hydra_engine.cluster.children import Child
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import Condition, InstanceSpec, InstanceState, Role
from hydra_engine.core.messages import WIRE_VERSION, Loading, ToFrontend
from hydra_engine.core.processes.status import ProcessStatus
from hydra_engine.core.reports import BlockFormat, InstanceSummary, Status
from hydra_engine.errors import HydraError


@dataclass(frozen=True, slots=True)
class Pace:
    """The supervisor's periods and patience, in seconds unless a field says otherwise."""

    tick_s: float = 0.05
    last_words_s: float = 0.25  # from the end of a channel to the exit code, then it is reported without
    start_last_words_s: float = 10.0  # the same while an instance starts, where no request waits and the code says why
    exit_grace_s: float = 5.0  # from Shutdown to SIGKILL, without what the process waits for a processor
    backoff_s: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before the next start
    settled_s: float = 60.0  # who served this long starts again without waiting, as does one that nobody replaces
    max_failed_starts: int = 5  # in a row, then it is not started again
    reconnect_s: float = 1.0  # before a pair whose connection ended gets a new one
    pair_patience_s: float = 15.0  # for both sides of a pair to say that the connection is up
    pair_attempts: int = 3  # while the cluster starts, then it does not


PACE = Pace()


class Waits(NamedTuple):
    """Seconds before the next start of an instance."""

    usual_s: float
    needed_s: float  # while no other instance serves what it does: only starts that fail make this one longer


class Restarts:
    """The count of one instance's deaths, and the backoff before its next start."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._in_a_row = 0
        self._failed_starts = 0
        self.total = 0

    def record_death(self, served_s: float) -> Waits | None:
        """Returns the waits before the next start, or None if too many starts in a row have failed. `served_s`: seconds
        for which it was ready. An instance that was ready is always started again: a client's request may have ended
        it."""
        self.total += 1
        self._failed_starts = 0 if served_s > 0 else self._failed_starts + 1
        if self._failed_starts >= self._pace.max_failed_starts:
            return None
        self._in_a_row = 1 if served_s >= self._pace.settled_s else self._in_a_row + 1
        waits = self._pace.backoff_s
        usual, needed = (waits[min(number, len(waits) - 1)] for number in (self._in_a_row - 1, self._failed_starts))
        return Waits(usual, needed)


class Change(Enum):
    SILENT = "silent"
    FENCE = "fence"


class Silence:
    """The time since the last message of an instance."""

    def __init__(self, suspect_s: float, fence_s: float) -> None:
        self._suspect_s = suspect_s
        self._fence_s = fence_s
        self.heard_s = 0.0
        self.silent = False

    def heartbeat(self, now: float) -> bool:
        """Records a message. Returns True if the instance was silent before."""
        self.heard_s = now
        was_silent, self.silent = self.silent, False
        return was_silent

    def reset_timer(self, now: float) -> None:
        """Restarts the time at `now`, because the supervisor did not listen before. A silent instance stays silent."""
        self.heard_s = now

    def change_due(self, now: float) -> Change | None:
        """Returns the change that is due, if any."""
        quiet_s = now - self.heard_s
        if quiet_s >= self._fence_s:
            return Change.FENCE
        if quiet_s >= self._suspect_s and not self.silent:
            self.silent = True
            return Change.SILENT
        return None


class StartProgress:
    """The signs of life of an instance that starts: its messages and the CPU use of its processes. A start may take
    hours; an instance that is stopped, or sleeps without any sign, is killed."""

    QUIET = 12  # times `fence_s`: programs wait for a network or for another process now and then

    def __init__(self, fence_s: float, now: float = 0.0) -> None:
        self._fence_s = fence_s
        self._sign_s = now
        self._cpu_s = 0.0
        self._look_s = now

    def record_sign(self, now: float) -> None:
        """Records a sign of life, or restarts the time after a pause of the supervisor."""
        self._sign_s = now

    def is_due(self, now: float) -> bool:
        """True if it is time to check its processes again; then restarts the interval."""
        if now - self._look_s < self._fence_s / 20:
            return False
        self._look_s = now
        return True

    def problem(self, now: float, status: ProcessStatus | None) -> str | None:
        """Returns the reason to kill it, as it follows a name in a sentence; None if there is none."""
        if status is None:
            return None
        if not status.is_stopped and (status.is_ready or status.cpu_s != self._cpu_s):
            self._cpu_s, self._sign_s = status.cpu_s, now
        quiet_s = now - self._sign_s
        if status.is_stopped and quiet_s >= self._fence_s:
            return f"was stopped for {self._fence_s:g} s while it started and was killed"
        if quiet_s >= self.QUIET * self._fence_s:
            return f"did nothing for {self.QUIET * self._fence_s:g} s while it started and was killed"
        return None


class OwnPauses:
    """A detector of pauses of the supervisor itself: stopped, asleep, or busy. Frames that arrived meanwhile may be
    unread, and on a sleeping machine the instances slept as well."""

    def __init__(self, now: float, longest_s: float) -> None:
        self._longest_s = longest_s
        self._seen_s = now

    def was_paused(self, now: float) -> bool:
        """True if more than `longest_s` have passed since the last call. Call this at every tick."""
        gap_s, self._seen_s = now - self._seen_s, now
        return gap_s > self._longest_s


@dataclass(slots=True)
class Exiting:
    """The state of an instance that is ending: its channel or its process has ended, or it was killed."""

    since_s: float
    reason: str = ""  # why it was killed
    channel_ended: bool = False  # nothing more is to be read


class Member:
    def __init__(self, name: str, spec: InstanceSpec, config: EngineConfig, pace: Pace) -> None:
        """Sets up the record of an instance that starts; `spec` has its role and device."""
        self.name = name
        self.loaded = spec.role
        self.role = spec.role  # that it serves now
        self.node = spec.node
        self.config = replace(config, device=spec.device)
        self.condition = Condition.STARTING
        self.reason = ""
        self.incarnation = 0
        self.child: Child | None = None  # the live incarnation
        self.killed_child: Child | None = None  # killed, and not gone yet
        self.exiting: Exiting | None = None
        self.failure: HydraError | None = None  # what it said before it ended
        self.start_due_s: float | None = None
        self.start_due_if_needed_s = 0.0
        self.ready_s: float | None = None
        self.format: BlockFormat | None = None
        self.summary: InstanceSummary | None = None
        self.status: Status | None = None
        self.restarts = Restarts(pace)
        self.silence = Silence(config.cluster.suspect_s, config.cluster.fence_s)
        self.start_progress = StartProgress(config.cluster.fence_s)

    @property
    def label(self) -> str:
        return f"{self.name} on node {self.node}" if self.node else self.name

    @property
    def is_up(self) -> bool:
        return self.condition in (Condition.READY, Condition.SILENT)

    def begin(self, now: float, incarnation: int, *, neighbours: tuple[str, ...], has_peers: bool) -> channel.Start:
        """Begins a new incarnation. Returns the first frame to send to it."""
        self.incarnation = incarnation
        self.condition = Condition.STARTING
        self.start_due_s = self.ready_s = None
        self.exiting = self.failure = self.format = self.summary = self.status = None
        self.silence = Silence(self.config.cluster.suspect_s, self.config.cluster.fence_s)
        self.start_progress = StartProgress(self.config.cluster.fence_s, now)
        letters = self.loaded.letters
        return channel.Start(WIRE_VERSION, self.name, letters, self.config, incarnation, neighbours, has_peers)

    def become_ready(self, summary: InstanceSummary, now: float) -> InstanceSummary:
        """Returns the summary with the device as the cluster knows it: a process sees only its own GPU, as cuda:0."""
        if self.node:
            device = summary.device if self.config.device == "auto" else self.config.device
            summary = msgspec.structs.replace(summary, device=f"{self.node}:{device}")
        self.summary = summary
        self.condition = Condition.READY
        self.reason = ""
        self.ready_s = now
        self.silence.heartbeat(now)
        return summary

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
            node=self.node,
        )


@dataclass(frozen=True, slots=True)
class InstanceLink:
    """An incarnation of an instance, as the frontend gets it. Only the frontend's loop calls `end.send`, which does
    nothing after the instance's death."""

    name: str
    role: Role  # what it has weights for
    device: str  # as configured
    incarnation: int
    end: FrontendEnd
    summary: InstanceSummary
    pid: int | None  # None: no process of its own on this machine


class ClusterListener(Protocol):
    """The receiver of the supervisor's events. Its methods run on the loop that called `Supervisor.start`, and must not
    block it."""

    def on_progress(self, name: str, loading: Loading) -> None: ...

    def on_messages(self, name: str, messages: list[ToFrontend]) -> None:
        """Messages of the live incarnation, but for those about its start and PeerState."""
        ...

    def on_up(self, link: InstanceLink) -> None:
        """The instance is ready, for the first time or again. Connections to others follow, each with `on_pair`."""
        ...

    def on_down(self, name: str, reason: str, since_s: float, *, restarts: bool) -> None:
        """The instance died or was killed, which began to show at `since_s`; no event of that incarnation follows. Also
        called for each death before it was ready. `reason` follows its name in a sentence."""
        ...

    def on_silent(self, name: str, since_s: float | None) -> None:
        """The instance has been silent since then, for `suspect_s`; with None, it has sent a message again. A death
        ends silence too."""
        ...

    def on_pair(self, one: str, other: str, up: bool) -> None:
        """The pair can exchange blocks (both sides have reported it), or no longer can. Names are in the order of the
        topology. A pair goes down before one of its instances does."""
        ...
