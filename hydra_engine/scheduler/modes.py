"""Which lane may get a step when: the stage schedule that the engine is made for, and two others to compare it with.

Request schedule: as engines without stages do it, all images of the requests that are served next are encoded, then
their prompts are prefilled whole in steps of their own, and decodes go on when that is done. Without lanes at most one
step of either model is under way and the two take turns. Decides about lanes only, never about requests.
"""

from __future__ import annotations

from hydra_engine.config import SchedulerConfig


class Mode:
    def __init__(self, config: SchedulerConfig) -> None:
        self.whole_requests = config.schedule == "request"
        self._lanes = config.lanes
        self._look_ahead = config.look_ahead
        self._last_was_vision = True

    @property
    def vision_first(self) -> bool:
        """Whether vision is asked for a step before language is, and not only behind it."""
        if self.whole_requests:
            return True
        return not self._lanes and not self._last_was_vision

    def may_plan_language(self, *, vision_runs: bool, language_runs: bool, images_wait: bool) -> bool:
        """`vision_runs` and `language_runs`: a plan of that lane is in flight; with one of language the next step is
        planned ahead. `images_wait`: images of requests that are served next still need an encode; those that could be
        encoded now are in a plan already, for vision goes first where this matters."""
        if vision_runs and (self.whole_requests or not self._lanes):
            return False
        if language_runs:
            return self._look_ahead and self._lanes and not (self.whole_requests and images_wait)
        return True

    def may_plan_vision(self, *, vision_runs: bool, language_runs: bool) -> bool:
        return not vision_runs and (self._lanes or not language_runs)

    def planned(self, *, vision: bool) -> None:
        self._last_was_vision = vision
