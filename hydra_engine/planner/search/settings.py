"""Settings of a deployment that a plan may change, as flags of `serve`: each is tried on the topology that has won."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hydra_engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """`flags` are what `serve` takes; `change` does the same to a configuration."""

    flags: str
    change: Callable[[EngineConfig], EngineConfig]


def _tokens(value: int) -> Setting:
    return Setting(f"--token-budget {value}", lambda c: replace(c, scheduler=replace(c.scheduler, token_budget=value)))


def _requests(value: int) -> Setting:
    return Setting(f"--max-num-seqs {value}", lambda c: replace(c, scheduler=replace(c.scheduler, max_num_seqs=value)))


def settings_to_try(config: EngineConfig, num_tokens: int, num_requests: int) -> list[Setting]:
    """Around the limits that instances have without them: `num_tokens` of a step, `num_requests` at once. What the user
    has given stays."""
    found = []
    if config.scheduler.token_budget is None:
        found += [_tokens(max(num_tokens // 2, 64)), _tokens(2 * num_tokens)]
    if config.scheduler.max_num_seqs is None:
        found += [_requests(max(num_requests // 2, 1)), _requests(2 * num_requests)]
    if config.cluster.steal_decodes:
        off = Setting("--no-steal-decodes", lambda c: replace(c, cluster=replace(c.cluster, steal_decodes=False)))
        found.append(off)
    if config.cluster.router == "least-loaded":
        near = Setting("--router affinity", lambda c: replace(c, cluster=replace(c.cluster, router="affinity")))
        found.append(near)
    return found
