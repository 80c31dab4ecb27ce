"""The table of instances: each one's condition, role, load, and the ids that it works on.

Loads are counted here in tokens and patches, always exact; what work takes comes from the instance's own reports, a
fraction of a second old. An id that the frontend has given up stays with its instance as stale until the
instance has reported its end: a silent instance can be sent the abort again, a drain knows when it is over, and
messages about an unknown id are answered once.

Reads no clock; messages leave through `send`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Condition, Role
from hydra_engine.core.messages import Abort, ToInstance
from hydra_engine.core.reports import Status
from hydra_engine.frontend.routing.pace import Pace, paces

# Share of KV blocks in use from which a new request waits or preempts others.
NEARLY_FULL = 0.95

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
    later_decodes: int = 0  # part of `decodes`: whose first token is still to come
    expected_decodes: int = 0  # requests that will probably decode here, whose prefill elsewhere has not begun
    expected_tokens: int = 0  # of their prompts
    arriving_tokens: int = 0  # of requests that decode here once their KV has been copied
    patches: int = 0  # of images that wait for their encode here
    max_num_seqs: int = 0  # requests that hold KV blocks at once; 0: not known
    kv_tokens: int = 0  # that its KV cache has room for; 0: not known
    status: Status | None = None
    pace: Pace = field(default_factory=Pace)
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
        """True if one more request would wait for a slot or for KV blocks, or preempt others."""
        if self.max_num_seqs and self.decodes >= self.max_num_seqs:
            return True
        return self.status is not None and self.status.kv_used >= NEARLY_FULL

    def serves(self, stage: Role) -> bool:
        wanted = stage._value_  # a quarter of the time that `in` takes, where a choice asks hundreds of times
        return self.role._value_ & wanted == wanted


class Instances(dict[str, InstanceLoad]):
    """The instances of the topology by name, up or not. `send` sends to an instance that is up."""

    def __init__(self, roles: Mapping[str, Role], send: Send) -> None:
        super().__init__({name: InstanceLoad(name, role) for name, role in roles.items()})
        self.draining: set[str] = set()
        self._context = Pace().context
        self._num_statuses = 0  # reports since paces were compared
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
        """Stores the latest report of an instance. Compares paces about once per report of all."""
        self[name].status = status
        self._num_statuses += 1
        if self._num_statuses >= len(self):
            self._num_statuses = 0
            self._compare()

    def _compare(self) -> None:
        statuses = {name: one.status for name, one in self.items() if one.status is not None}
        decodes = sum(one.decodes for one in self.values())
        if decodes:
            self._context = max(sum(one.decode_tokens for one in self.values()) / decodes, 1.0)
        found = paces(statuses, self._context)
        fastest = min(found.values(), key=lambda pace: pace.prefill.each_s)
        for name, instance in self.items():
            instance.pace = found.get(name, fastest)

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
    usable: Callable[[InstanceLoad], bool] | None = None,
    any_pair: bool = False,
) -> list[InstanceLoad] | Role:
    """Returns the instances that can prefill a request and reach one for every other stage, or the stage that none can
    serve. `usable`: default those that are ready; `any_pair`: pairs that are down now count too."""
    ready, prefills = Condition.READY, Role.P.value
    candidates = [one for one in instances if (usable(one) if usable else one.condition is ready)]
    able = [one for one in candidates if one.role._value_ & prefills]
    if not able:
        return Role.P
    for stage in (Role.D, Role.E) if images else (Role.D,):
        wanted = stage.value
        if not [one for one in able if not one.role._value_ & wanted]:
            continue
        names = {one.name for one in candidates if one.role._value_ & wanted}
        able = [one for one in able if one.name in names or (names if any_pair else not names.isdisjoint(one.pairs))]
        if not able:
            return stage
    return able


def missing_now(instances: Iterable[InstanceLoad], *, images: bool, without: Container[str] = ()) -> Role | None:
    """The stage that no instance can serve now, or None; instances in `without` do not count."""
    others = (instance for instance in instances if instance.name not in without)
    able = prefillers(others, images=images)
    return able if isinstance(able, Role) else None


def missing_for_good(instances: Iterable[InstanceLoad], *, images: bool) -> Role | None:
    """The stage that no instance will serve again, since all of its instances have failed for good, or None."""
    able = prefillers(instances, images=images, usable=lambda instance: instance.may_return, any_pair=True)
    return able if isinstance(able, Role) else None
