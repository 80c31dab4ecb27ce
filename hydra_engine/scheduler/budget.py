"""How much one step may hold: prefill tokens beside the decodes of a language step, patches of a vision step.

Fixed numbers from the configuration. The scheduler asks before every step, so budgets that depend on the decode set fit
in here without touching it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Budgets:
    token_budget: int
    image_budget: int  # patches; zero means one image per step

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Budgets:
        return cls(config.token_budget, config.image_budget)

    def language(self, num_decodes: int) -> int:
        """Prefill tokens that a language step with so many decodes may hold."""
        return max(0, self.token_budget - num_decodes)

    def vision(self) -> int:
        """Patches that a vision step may hold; its first image may exceed them."""
        return self.image_budget
