"""Whether requests are served and make progress, from the table of instances and what instances report of themselves.

Liveness is the supervisor's business; an instance that is alive and gets nothing done is found here.
"""

from __future__ import annotations

from dataclasses import replace

from hydra_engine.core.instances import Condition, InstanceState
from hydra_engine.core.messages import Status
from hydra_engine.core.roles import Role
from hydra_engine.frontend.dispatch import Dispatcher
from hydra_engine.frontend.reports import StatusTable

_SILENT_S = 5.0  # an instance reports several times a second; this long without a word is no progress
_STUCK_S = 120.0  # no lane finished a step for this long although there is work


class Watch:
    def __init__(self, dispatcher: Dispatcher, statuses: StatusTable) -> None:
        self._dispatcher = dispatcher
        self._statuses = statuses
        self._last_step: dict[str, tuple[int, float]] = {}

    def on_status(self, name: str, status: Status) -> None:
        steps = status.language_steps + status.vision_steps
        busy = status.num_running + status.num_waiting + status.num_encoding > 0
        latest = self._last_step.get(name)
        if latest is None or steps != latest[0] or not busy:
            self._last_step[name] = (steps, status.time_s)

    def forget(self, name: str) -> None:
        self._last_step.pop(name, None)

    def seen_from_here(self, state: InstanceState) -> InstanceState:
        """The supervisor's state with what the front knows besides: the role, and whether it is being emptied."""
        instance = self._dispatcher.instances[state.name]
        draining = state.condition is Condition.READY and instance.condition is Condition.DRAINING
        return replace(state, role=instance.role.letters, condition=instance.condition if draining else state.condition)

    def problem(self, now: float, *, images: bool) -> str | None:
        """One word, or None while every stage is served: hung, draining or instance_lost."""
        dispatcher = self._dispatcher
        missing = dispatcher.missing(images)
        if missing is None:
            hung = frozenset(name for name, status in self._statuses.latest.items() if self._hangs(name, status, now))
            return "hung" if hung and dispatcher.missing(images, without=hung) is not None else None
        conditions = {p.condition for p in list(dispatcher.instances.values()) if p.serves(Role[missing.stage])}
        if Condition.DRAINING in conditions:
            return "draining"
        return "hung" if Condition.SILENT in conditions else "instance_lost"

    def _hangs(self, name: str, status: Status, now: float) -> bool:
        if now - status.time_s > _SILENT_S:
            return True
        steps, since_s = self._last_step.get(name, (0, now))
        return bool(steps) and now - since_s > _STUCK_S and self._dispatcher.holds_work(name)
