"""The table of instances that the frontend decides over: condition, role, load, and the ids that each works on.

Loads are counted here and always exact; the instance's own report, a fraction of a second old, adds what cannot be
counted here. An id that the frontend has given up stays with its instance as stale until the instance has reported its
end: a silent instance can be sent the abort again, a drain knows when it is over, and messages about an unknown id are
answered once. Reads no clock; messages leave through `send`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Condition, Role
from hydra_engine.core.messages import Abort, Status, ToInstance

# Share of KV blocks in use from which a new request waits or preempts others.
NEARLY_FULL = 0.95
# The cost of a decode's row in every step, besides reading its KV.
DECODE_ROW_TOKENS = 64
# Equal devices differ by less than this from one moment to the next.
ALIKE = 1.25
_ROUNDS = 10  # of the fit; the rest is smaller than the variation of steps

_GONE = frozenset({Condition.FAILED, Condition.STOPPED})
_UP = frozenset({Condition.READY, Condition.SILENT, Condition.DRAINING})

Send = Callable[[str, Sequence[ToInstance]], None]


@dataclass(slots=True)
class InstanceLoad:
    """Condition, role and load of an instance. `pairs` are the instances with which it can exchange blocks now."""

    name: str
    role: Role
    condition: Condition = Condition.STARTING
    pairs: set[str] = field(default_factory=set)
    prefill_tokens: int = 0  # of requests whose first token is still to come
    decodes: int = 0  # requests that decode here or will
    decode_tokens: int = 0  # their tokens so far
    patches: int = 0  # of images that wait for their encode here
    status: Status | None = None
    prefill_slowness: float = 1.0  # how many times as long it takes as the fastest instance
    decode_slowness: float = 1.0
    vision_slowness: float = 1.0
    # Ids that were given up and whose end it has not reported, with the number of the request that gets the report.
    stale: dict[RequestId, RequestId | None] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        return self.condition is Condition.READY

    @property
    def is_up(self) -> bool:
        return self.condition in _UP

    @property
    def may_return(self) -> bool:
        return self.condition not in _GONE

    @property
    def nearly_full(self) -> bool:
        return self.status is not None and self.status.kv_used >= NEARLY_FULL

    @property
    def language_load(self) -> float:
        """Work of its language lane in tokens of the fastest instance: tokens to prefill, tokens held by decodes, and
        `DECODE_ROW_TOKENS` per decode."""
        decode_load = self.decode_tokens + DECODE_ROW_TOKENS * self.decodes
        return self.prefill_slowness * self.prefill_tokens + self.decode_slowness * decode_load

    @property
    def vision_load(self) -> float:
        """Work of its vision lane in patches of the fastest instance."""
        return self.vision_slowness * self.patches

    def serves(self, stage: Role) -> bool:
        return stage in self.role


class Instances(dict[str, InstanceLoad]):
    """The instances of the topology by name, up or not. `send` sends to an instance that is up."""

    def __init__(self, roles: Mapping[str, Role], send: Send) -> None:
        super().__init__({name: InstanceLoad(name, role) for name, role in roles.items()})
        self.draining: set[str] = set()
        self._num_statuses = 0  # reports since speeds were compared
        self._send = send
        self._gathered: dict[str, list[ToInstance]] | None = None

    # ---- conditions

    def mark_up(self, name: str) -> None:
        """Marks the instance ready, or draining: it has started or is no longer silent."""
        self[name].condition = Condition.DRAINING if name in self.draining else Condition.READY

    def mark_down(self, name: str, *, restarts: bool) -> None:
        instance = self[name]
        instance.condition = Condition.STARTING if restarts else Condition.FAILED
        instance.status = None
        instance.prefill_slowness = instance.decode_slowness = instance.vision_slowness = 1.0
        for other in instance.pairs:
            self[other].pairs.discard(name)
        instance.pairs.clear()
        instance.stale.clear()

    def set_pair(self, one: str, other: str, up: bool) -> None:
        for name, peer in ((one, other), (other, one)):
            pairs = self[name].pairs
            if up:
                pairs.add(peer)
            else:
                pairs.discard(peer)

    def drain(self, names: Iterable[str]) -> None:
        """Keeps new requests away from the instances until `undrain`."""
        for name in names:
            self.draining.add(name)
            if self[name].usable:
                self[name].condition = Condition.DRAINING

    def undrain(self, names: Iterable[str]) -> None:
        for name in names:
            self.draining.discard(name)
            if self[name].condition is Condition.DRAINING:
                self[name].condition = Condition.READY

    # ---- speeds

    def on_status(self, name: str, status: Status) -> None:
        """Stores the latest report of an instance. Compares speeds about once per report of all."""
        self[name].status = status
        self._num_statuses += 1
        if self._num_statuses >= len(self):
            self._num_statuses = 0
            self._compare_speeds()

    def _compare_speeds(self) -> None:
        speeds = {name: one.status.speeds for name, one in self.items() if one.status is not None}
        prefill = slowness({name: speed.prefill for name, speed in speeds.items()})
        decode = slowness({name: speed.decode for name, speed in speeds.items()})
        vision = slowness({name: speed.vision for name, speed in speeds.items()})
        for name in speeds:
            instance = self[name]
            instance.prefill_slowness, instance.decode_slowness = prefill[name], decode[name]
            instance.vision_slowness = vision[name]

    # ---- messages

    def send(self, name: str, messages: Sequence[ToInstance]) -> None:
        if not self[name].is_up:
            return
        if self._gathered is None:
            self._send(name, messages)
        else:
            self._gathered.setdefault(name, []).extend(messages)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Holds back messages sent inside and sends those to one instance together, so that data shared by requests
        travels once. Nests."""
        if self._gathered is not None:
            yield
            return
        self._gathered = {}
        try:
            yield
        finally:
            gathered, self._gathered = self._gathered, None
            for name, messages in gathered.items():
                self.send(name, messages)

    def abort(self, name: str, number: RequestId, owner: RequestId | None) -> None:
        """Aborts this id at the instance, whose report goes to the request with number `owner`, if any."""
        if self[name].is_up:
            self[name].stale[number] = owner
            self.send(name, [Abort(number)])

    def reject(self, name: str, number: RequestId) -> None:
        """Aborts an id that is not the instance's, once."""
        if number not in self[name].stale:
            self.abort(name, number, None)

    def repeat_aborts(self, name: str) -> None:
        if stale := self[name].stale:
            self.send(name, [Abort(number) for number in stale])


def prefillers(
    instances: Iterable[InstanceLoad],
    *,
    images: bool,
    usable: Callable[[InstanceLoad], bool] = lambda instance: instance.usable,
    any_pair: bool = False,
) -> list[InstanceLoad] | Role:
    """Returns the instances that can prefill a request and reach one for every other stage, or the stage that none can
    serve. `any_pair`: pairs that are down now count too."""
    candidates = [instance for instance in instances if usable(instance)]

    def reaches(instance: InstanceLoad, stage: Role) -> bool:
        return instance.serves(stage) or any(
            other.serves(stage) and (any_pair or other.name in instance.pairs) for other in candidates
        )

    able = [instance for instance in candidates if instance.serves(Role.P)]
    if not able:
        return Role.P
    able = [instance for instance in able if reaches(instance, Role.D)]
    if not able:
        return Role.D
    if images:
        able = [instance for instance in able if reaches(instance, Role.E)]
    return able or Role.E


def missing_now(instances: Iterable[InstanceLoad], *, images: bool, without: Container[str] = ()) -> Role | None:
    """The stage that no instance can serve now, or None; instances in `without` do not count."""
    others = (instance for instance in instances if instance.name not in without)
    able = prefillers(others, images=images)
    return able if isinstance(able, Role) else None


def missing_for_good(instances: Iterable[InstanceLoad], *, images: bool) -> Role | None:
    """The stage that no instance will serve again, since all of its instances have failed for good, or None."""
    able = prefillers(instances, images=images, usable=lambda instance: instance.may_return, any_pair=True)
    return able if isinstance(able, Role) else None


def slowness(seconds: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Returns per instance how many times as long its steps take as the fastest one's, from its step durations [s] by
    size; 1.0 below `ALIKE` and where nothing can be compared. Fits duration = factor(instance) * factor(size), so
    instances without a common size are comparable through a third."""
    sizes = Counter(size for own in seconds.values() for size in own)
    logs = {
        name: {size: math.log(taken_s) for size, taken_s in own.items() if sizes[size] > 1 and taken_s > 0}
        for name, own in seconds.items()
    }
    known = {name: own for name, own in logs.items() if own}
    factors = dict.fromkeys(known, 0.0)
    for _ in range(_ROUNDS):
        by_size: dict[int, list[float]] = {}
        for name, own in known.items():
            for size, taken in own.items():
                by_size.setdefault(size, []).append(taken - factors[name])
        typical = {size: fmean(rests) for size, rests in by_size.items()}
        factors = {name: fmean(taken - typical[size] for size, taken in own.items()) for name, own in known.items()}
    least = min(factors.values(), default=0.0)
    found = {name: math.exp(factors.get(name, least) - least) for name in seconds}
    return {name: ratio if ratio >= ALIKE else 1.0 for name, ratio in found.items()}
