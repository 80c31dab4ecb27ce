"""What the start-up summary says about latency limits: the budgets they lead to, and those that cannot be kept here."""

from __future__ import annotations

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.cost import VisionLoad
from hydra_engine.core.messages import LimitBudget, LimitSummary
from hydra_engine.models.specs.base import VisionSpec
from hydra_engine.planner.report import TYPICAL_CONTEXT, allowance
from hydra_engine.planner.start import StepCosts
from hydra_engine.scheduler.latency.limit_check import check_limits

_DECODES = (1, 8)  # and as many as may run


def limit_summary(config: SchedulerConfig, step_times: StepCosts, vision: VisionSpec | None) -> LimitSummary:
    """`config` has no "auto" left; `step_times` holds for this machine."""
    picture, picture_tokens = None, 0
    if vision is not None:
        patches, picture_tokens = vision.max_patches_per_image, vision.max_tokens_per_image
        picture = VisionLoad(patches, float(patches) ** 2)
    pause_s = step_times.profile.submit_s + step_times.profile.collect_s
    warnings = check_limits(
        step_times.surface,
        config,
        picture=picture,
        picture_tokens=picture_tokens,
        pause_s=0.0 if config.look_ahead else pause_s,
    )
    budgets: tuple[LimitBudget, ...] = ()
    if config.tpot_slo is not None:
        counts = sorted({min(count, config.max_num_seqs) for count in (*_DECODES, config.max_num_seqs)})
        budgets = tuple(_budget(config, step_times, count, has_vision=vision is not None) for count in counts)
    return LimitSummary(
        tpot_limit_s=config.tpot_slo or 0.0,
        ttft_limit_s=config.ttft_slo or 0.0,
        source=step_times.source,
        budgets=budgets,
        warnings=tuple(warnings),
    )


def _budget(config: SchedulerConfig, step_times: StepCosts, num_decodes: int, *, has_vision: bool) -> LimitBudget:
    assert config.tpot_slo is not None
    most = max(config.token_budget - num_decodes, 0)
    left = allowance(step_times.surface, num_decodes, TYPICAL_CONTEXT, config.tpot_slo, most)
    return LimitBudget(num_decodes, left.step_s, left.tokens_alone, left.vision_s if has_vision else None)
