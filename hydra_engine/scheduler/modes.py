"""Which lane may get a step when: the stage schedule that the engine is made for, and two others to compare it with.

An instance that encodes and decodes may borrow decodes from others (HeteroServe, section 5.3): as long as it has no
others, the vision lane goes first at every step. Its own decodes run beside encodes as everywhere.

Request schedule: as engines without stages do it, all images of the requests that are served next are encoded, then
their prompts are prefilled whole in steps of their own, and decodes go on when that is done. Without lanes at most one
step of either model is under way and the two take turns. Decides about lanes only, never about requests.
"""

from __future__ import annotations

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.roles import EPD, Role

# How long borrowed decodes stand still for encodes: a reader notices a longer pause, and a first token that waits for
# an image is late by far more. With a TPOT limit no longer than half of that.
STEAL_PATIENCE_S = 0.1


def yields_to_vision(*, vision_runs: bool, since_step_s: float, patience_s: float = STEAL_PATIENCE_S) -> bool:
    """Whether the next language step waits, so that the vision lane has the device to itself. `since_step_s`: since the
    last language step has ended.

    An image that could be encoded is in a vision step already, for vision goes first; for one that lacks room there is
    nothing to wait for. The vision lane itself waits for nothing but the language step that runs.
    """
    return vision_runs and since_step_s < patience_s


class Mode:
    def __init__(self, config: SchedulerConfig, role: Role = EPD) -> None:
        self.whole_requests = config.schedule == "request"
        self._lanes = config.lanes
        self._look_ahead = bool(config.look_ahead)
        self._last_was_vision = True
        self._language_ended_s = 0.0
        self._patience_s = STEAL_PATIENCE_S if config.tpot_slo is None else min(STEAL_PATIENCE_S, config.tpot_slo / 2)
        self.set_role(role)

    def set_role(self, role: Role) -> None:
        may_borrow = Role.E in role and Role.D in role
        self._borrows = may_borrow and self._lanes and not self.whole_requests
        self._prefills = Role.P in role
        self._has_language_lane = role.needs_language

    @property
    def vision_first(self) -> bool:
        """Whether vision is asked for a step before language is, and not only behind it."""
        if self.whole_requests or (self._borrows and not self._prefills):
            return True
        return not self._lanes and not self._last_was_vision

    def may_plan_language(self, *, vision_runs: bool, language_runs: bool, images_wait: bool) -> bool:
        """`vision_runs` and `language_runs`: a plan of that lane is in flight; with one of language the next step is
        planned ahead. `images_wait`: images of requests that are served next still need an encode; those that could be
        encoded now are in a plan already, for vision goes first where this matters."""
        if not self._has_language_lane or (vision_runs and (self.whole_requests or not self._lanes)):
            return False
        if language_runs:
            return self._look_ahead and self._lanes and not (self.whole_requests and images_wait)
        return True

    def may_plan_vision(self, *, vision_runs: bool, language_runs: bool) -> bool:
        return not vision_runs and (self._lanes or not language_runs)

    def may_yield(self, *, vision_runs: bool) -> bool:
        """Whether it matters if all that the language lane could compute is borrowed."""
        return self._borrows and vision_runs

    def yields(self, now: float, *, vision_runs: bool, language_runs: bool, only_borrowed: bool) -> bool:
        """Whether the next language step waits for the vision lane although both could run."""
        since_step_s = 0.0 if language_runs else now - self._language_ended_s
        waits = yields_to_vision(vision_runs=vision_runs, since_step_s=since_step_s, patience_s=self._patience_s)
        return self._borrows and only_borrowed and waits

    def language_ended(self, ended_s: float) -> None:
        self._language_ended_s = ended_s

    @property
    def due_s(self) -> float:
        """When a language step that has yielded may be planned."""
        return self._language_ended_s + self._patience_s

    def planned(self, *, vision: bool) -> None:
        self._last_was_vision = vision
