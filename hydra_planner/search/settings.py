"""Settings of a deployment that a plan may change: each is tried on the topology that has won."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from hydra_engine.config import EngineConfig

ORDERS = frozenset({"scheduling_policy", "encode_policy"})  # change who waits, not how much is done


class InstanceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and caches of the instances of a role on one kind of device, from its memory or from the
    configuration."""

    role: str
    device: str = ""
    token_budget: int
    max_num_seqs: int
    image_budget: int
    kv_tokens: int


class Setting(msgspec.Struct, frozen=True):
    """A value for a field of a section of the configuration, for example ("scheduler", "token_budget", 1024); an empty
    section is the configuration itself."""

    section: str
    field: str
    value: int | str | bool

    @property
    def flags(self) -> str:
        """The setting as a flag of `serve`."""
        name = self.field.replace("_", "-")
        if isinstance(self.value, bool):
            return f"--{'' if self.value else 'no-'}{name}"
        return f"--{name} {self.value}"

    def apply(self, config: EngineConfig) -> EngineConfig:
        if not self.section:
            return replace(config, **{self.field: self.value})  # type: ignore[arg-type]
        changed = replace(getattr(config, self.section), **{self.field: self.value})
        return replace(config, **{self.section: changed})


def settings_to_try(config: EngineConfig, limits: Sequence[InstanceLimits], *, repeats: bool = True) -> list[Setting]:
    """Settings to try one at a time: limits around `limits`, which instances have by default, role by role; the order
    of requests; decode stealing; and the router if the load `repeats` prompts or pictures that caches may hold.
    Settings that the user gave are not varied."""
    found = [*_limits(config, limits)] if not config.instance_limits else []
    roles = [one.role for one in limits]
    if config.scheduler.scheduling_policy == "priority":
        found.append(Setting("scheduler", "scheduling_policy", "sjf"))
    if config.scheduler.encode_policy == "priority" and any("E" in role for role in roles):
        found.append(Setting("scheduler", "encode_policy", "srpt"))
    if len(roles) > 1 and config.cluster.steal_decodes and any({"E", "D"} <= set(role) for role in roles):
        found.append(Setting("cluster", "steal_decodes", value=False))
    if repeats and config.cluster.router == "least-loaded":
        found.append(Setting("cluster", "router", "affinity"))
    return found


def _limits(config: EngineConfig, limits: Sequence[InstanceLimits]) -> Iterator[Setting]:
    roles = [one.role for one in limits]
    for one in (one for place, one in enumerate(limits) if one.role not in roles[:place]):
        if "E" in one.role and not config.scheduler.image_budget:
            for count in (max(one.image_budget // 2, 1), 2 * one.image_budget):
                yield Setting("", "instance_limits", f"{one.role}:image_budget={count}")
        if "P" in one.role and config.scheduler.token_budget is None:
            for count in (max(one.token_budget // 2, 64), 2 * one.token_budget):
                yield Setting("", "instance_limits", f"{one.role}:token_budget={count}")
        if "D" in one.role and config.scheduler.max_num_seqs is None:
            for count in (max(one.max_num_seqs // 2, 1), 2 * one.max_num_seqs):
                yield Setting("", "instance_limits", f"{one.role}:max_num_seqs={count}")
