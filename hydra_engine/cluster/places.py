"""The table that routing decides over: one `Place` for each instance of the topology, whatever becomes of its process.

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
Usable = Callable[["Place"], bool]


@dataclass(slots=True)
class Place:
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
        """In tokens: what is to be prefilled here, what decodes hold, and their rows."""
        return self.prefill_tokens + self.decode_tokens + DECODE_ROW_TOKENS * self.decodes

    def holds(self, stage: Role) -> bool:
        return stage in self.role


@dataclass(frozen=True, slots=True)
class Missing:
    """No instance can do `stage` now. `stage` is one of the letters E, P and D."""

    stage: str

    @property
    def reason(self) -> str:
        what = {"E": "encodes images", "P": "prefills prompts", "D": "decodes"}[self.stage]
        return f"no instance that {what} can be used now"


def is_usable(place: Place) -> bool:
    return place.usable


def prefillers(
    places: Iterable[Place], *, images: bool, usable: Usable = is_usable, any_pair: bool = False
) -> list[Place] | Missing:
    """Where a request can be prefilled so that all its stages find an instance. `any_pair`: pairs that are down now
    count too."""
    candidates = [place for place in places if usable(place)]

    def linked(one: Place, other: Place) -> bool:
        return any_pair or other.name in one.pairs

    def reaches(place: Place, stage: Role) -> bool:
        return place.holds(stage) or any(other.holds(stage) and linked(place, other) for other in candidates)

    found = [place for place in candidates if place.holds(Role.P)]
    if not found:
        return Missing("P")
    found = [place for place in found if reaches(place, Role.D)]
    if not found:
        return Missing("D")
    if images:
        found = [place for place in found if reaches(place, Role.E)]
    return found or Missing("E")


def missing_now(places: Iterable[Place], *, images: bool, usable: Usable = is_usable) -> Missing | None:
    """The stage that nobody can serve at this moment, if any."""
    found = prefillers(places, images=images, usable=usable)
    return found if isinstance(found, Missing) else None


def missing_for_good(places: Iterable[Place], *, images: bool) -> Missing | None:
    """The stage that nobody will serve again, if any: its instances have failed and are not started any more."""
    found = prefillers(places, images=images, usable=lambda place: place.may_return, any_pair=True)
    return found if isinstance(found, Missing) else None
