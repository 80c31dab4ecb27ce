"""Settings of a deployment that a plan may change: each is tried on the topology that has won."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from hydra_engine.config import EngineConfig


class Setting(msgspec.Struct, frozen=True):
    """One field of a section of the configuration, for example ("scheduler", "token_budget", 1024)."""

    section: str
    field: str
    value: int | str | bool

    @property
    def flags(self) -> str:
        """As `serve` takes it."""
        name = self.field.replace("_", "-")
        if isinstance(self.value, bool):
            return f"--{'' if self.value else 'no-'}{name}"
        return f"--{name} {self.value}"

    def apply(self, config: EngineConfig) -> EngineConfig:
        changed = replace(getattr(config, self.section), **{self.field: self.value})
        return replace(config, **{self.section: changed})


def settings_to_try(config: EngineConfig, num_tokens: int, num_requests: int) -> list[Setting]:
    """Around the limits that instances have without them: `num_tokens` of a step, `num_requests` at once. What the user
    has given stays."""
    found = []
    if config.scheduler.token_budget is None:
        found += [Setting("scheduler", "token_budget", count) for count in (max(num_tokens // 2, 64), 2 * num_tokens)]
    if config.scheduler.max_num_seqs is None:
        found += [
            Setting("scheduler", "max_num_seqs", count) for count in (max(num_requests // 2, 1), 2 * num_requests)
        ]
    if config.cluster.steal_decodes:
        found.append(Setting("cluster", "steal_decodes", value=False))
    if config.cluster.router == "least-loaded":
        found.append(Setting("cluster", "router", "affinity"))
    return found
