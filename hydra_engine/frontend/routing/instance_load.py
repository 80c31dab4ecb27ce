"""The table that routing decides over: one `InstanceLoad` for each instance of the topology, whether it is up or not.

The numbers are those that the front counts itself, exact at every moment; the instance's own report, a fraction of a
second old, corrects them where they cannot know. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hydra_engine.core.instances import Condition
from hydra_engine.core.messages import Status
from hydra_engine.core.roles import Role

# Of its KV blocks: what comes now waits, or makes others give way.
NEARLY_FULL = 0.95
# A decode is a row in every step besides the KV that it reads.
DECODE_ROW_TOKENS = 64

_GONE = frozenset({Condition.FAILED, Condition.STOPPED})
Usable = Callable[["InstanceLoad"], bool]


@dataclass(slots=True)
class InstanceLoad:
    """`pairs` are the instances with which it can exchange blocks now."""

    name: str
    role: Role
    condition: Condition = Condition.STARTING
    pairs: set[str] = field(default_factory=set)
    prefill_tokens: int = 0  # of requests whose first token is still to come
    decodes: int = 0  # requests that decode here or will
    decode_tokens: int = 0  # their tokens so far
    patches: int = 0  # of images that wait for their encode here
    status: Status | None = None

    @property
    def usable(self) -> bool:
        return self.condition is Condition.READY

    @property
    def may_return(self) -> bool:
        return self.condition not in _GONE

    @property
    def nearly_full(self) -> bool:
        return self.status is not None and self.status.kv_used >= NEARLY_FULL

    @property
    def language_load(self) -> int:
        """The load of its language lane in tokens: to be prefilled, held by decodes, and the decodes' rows."""
        return self.prefill_tokens + self.decode_tokens + DECODE_ROW_TOKENS * self.decodes

    def serves(self, stage: Role) -> bool:
        return stage in self.role


@dataclass(frozen=True, slots=True)
class Missing:
    """No instance can do `stage` now. `stage` is one of the letters E, P and D."""

    stage: str

    @property
    def reason(self) -> str:
        what = {"E": "encodes images", "P": "prefills prompts", "D": "decodes"}[self.stage]
        return f"no instance that {what} can be used now"


def is_usable(instance: InstanceLoad) -> bool:
    return instance.usable


def prefillers(
    instances: Iterable[InstanceLoad], *, images: bool, usable: Usable = is_usable, any_pair: bool = False
) -> list[InstanceLoad] | Missing:
    """The instances that can prefill a request so that all its stages find one. `any_pair`: pairs that are down now
    count too."""
    candidates = [instance for instance in instances if usable(instance)]

    def linked(one: InstanceLoad, other: InstanceLoad) -> bool:
        return any_pair or other.name in one.pairs

    def reaches(instance: InstanceLoad, stage: Role) -> bool:
        return instance.serves(stage) or any(other.serves(stage) and linked(instance, other) for other in candidates)

    able = [instance for instance in candidates if instance.serves(Role.P)]
    if not able:
        return Missing("P")
    able = [instance for instance in able if reaches(instance, Role.D)]
    if not able:
        return Missing("D")
    if images:
        able = [instance for instance in able if reaches(instance, Role.E)]
    return able or Missing("E")


def missing_now(instances: Iterable[InstanceLoad], *, images: bool, usable: Usable = is_usable) -> Missing | None:
    """The stage that no instance can serve at this moment, if any."""
    able = prefillers(instances, images=images, usable=usable)
    return able if isinstance(able, Missing) else None


def missing_for_good(instances: Iterable[InstanceLoad], *, images: bool) -> Missing | None:
    """The stage that no instance will serve again, if any: all of its instances have failed for good."""
    able = prefillers(instances, images=images, usable=lambda instance: instance.may_return, any_pair=True)
    return able if isinstance(able, Missing) else None
