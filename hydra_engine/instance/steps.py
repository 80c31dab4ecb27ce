"""What runs on an instance's two lanes now, or ran last, for its status.

Plans are only kept here; they are counted when a status is made. Does not know when that is.
"""

from __future__ import annotations

from hydra_engine.core.messages import StepReport
from hydra_engine.core.plans import LanguagePlan, VisionPlan


class LaneSteps:
    def __init__(self) -> None:
        self._vision: tuple[VisionPlan, float] | None = None
        self._language: tuple[LanguagePlan, float] | None = None

    def begin_vision(self, plan: VisionPlan, now: float) -> None:
        self._vision = plan, now

    def begin_language(self, plan: LanguagePlan, now: float) -> None:
        self._language = plan, now

    def vision_report(self, *, running: bool) -> StepReport:
        if self._vision is None:
            return StepReport()
        plan, since_s = self._vision
        return StepReport(running, since_s, images=len(plan.items), tokens=plan.num_patches)

    def language_report(self, *, running: bool) -> StepReport:
        if self._language is None:
            return StepReport()
        plan, since_s = self._language
        return StepReport(running, since_s, len(plan.decodes), len(plan.chunks), tokens=plan.num_tokens)
