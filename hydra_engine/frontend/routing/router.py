"""The table of instances, and the choice among them: where a request prefills and decodes, where images are encoded.

The table has each instance's condition, role, load, and the ids that it works on. Loads are counted here in tokens and
patches, always exact, and multiplied by the instance's slowness; the instance's own report, a fraction of a second old,
adds what cannot be counted here. An id that the frontend has given up stays with its instance as stale until the
instance has reported its end: a silent instance can be sent the abort again, a drain knows when it is over, and
messages about an unknown id are answered once.

The router decides over the table and its own memory of earlier choices; `frontend/transitions.py` acts on it. Reads no
clock; messages leave through `send`.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from statistics import fmean

from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Condition, Role
from hydra_engine.core.messages import Abort, ToInstance
from hydra_engine.core.reports import Status
from hydra_engine.core.request import ImageItem, Request

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


# ---- the table


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


# ---- the choice

LEAST_LOADED, AFFINITY, ROUND_ROBIN = "least-loaded", "affinity", "round-robin"

# A cache hit saves at most a prefill: it is worth a queue up to `BUSIER` times as long, plus one of these.
BUSIER = 2
BUSIER_TOKENS = 2048
BUSIER_PATCHES = 4096
# Entries of each memory; a cache holds fewer long prompts than that.
REMEMBERED = 4096
# Lengths in tokens of the prefixes by which a prompt is recognised; the longest is tried first.
_DEPTHS = (32, 128, 512, 2048)


@dataclass(frozen=True, slots=True)
class Route:
    """The instances of an attempt. `decode` equals `prefill` if the request stays; it is empty if it moves, since the
    decoder is chosen when prefill begins. `stages` are those served by the prefilling instance."""

    prefill: str
    decode: str
    stages: str
    remote_images: bool = False

    @property
    def moves(self) -> bool:
        return self.decode != self.prefill


class Router:
    """The choice of instances for requests, over `instances`, which the caller keeps up to date. `policy`:
    least-loaded, affinity (prefers instances that may have a cache hit) or round-robin."""

    def __init__(self, instances: Mapping[str, InstanceLoad], policy: str = LEAST_LOADED) -> None:
        self._instances = instances
        self._policy = policy
        self._turn = 0
        self._turns: dict[tuple[str, str], int] = {}  # (stage, name): the turn in which it was chosen last
        self._prompts = _Memory()
        self._prefilled = _Memory()  # by image digest
        self._encoded = _Memory()

    def route(self, request: Request, preferred: str = "") -> Route | Role:
        """Returns the route, or the stage that no instance can serve. `preferred`: an instance that has just
        computed the whole prompt; it is chosen whatever its queue, if it is usable."""
        able = prefillers(self._instances.values(), images=bool(request.images))
        if isinstance(able, Role):
            return able
        able = [instance for instance in able if instance.name == preferred] or able
        known = self._known_prefill(request, able)
        prefill = self._choose("P", able, lambda p: _prefill_key(p, request.num_prompt), known, BUSIER_TOKENS)
        self._remember_prefill(request, prefill.name)
        remote = bool(request.images) and self._encodes_elsewhere(request, prefill)
        wanted = (Role.P, Role.D) if remote else (Role.E, Role.P, Role.D)
        stages = "".join(stage.name or "" for stage in wanted if prefill.serves(stage))
        return Route(prefill.name, prefill.name if prefill.serves(Role.D) else "", stages, remote)

    def decoder(self, source: str, num_tokens: int) -> str | Role:
        """Returns the decoder for a request of `num_tokens` prefilled at `source`, by current loads, or Role.D if there
        is none. Draining instances are used only if no other can."""
        instance = self._instances[source]
        candidates = self._partners(instance, Role.D) or self._partners(instance, Role.D, Condition.DRAINING)
        if not candidates:
            return Role.D
        return self._choose("D", candidates, lambda p: _decode_key(p, num_tokens), None, 0).name

    def encoders(self, target: str, images: Sequence[tuple[int, ImageItem]]) -> dict[str, list[int]] | Role:
        """Returns the indices of these (index, image) per encoder, for a request prefilled at `target`, or Role.E if
        there is none. Largest image first, each to the encoder that finishes it first. Draining instances are used only
        if no other can."""
        instance = self._instances[target]
        candidates = self._partners(instance, Role.E) or self._partners(instance, Role.E, Condition.DRAINING)
        if not candidates:
            return Role.E
        added = dict.fromkeys((candidate.name for candidate in candidates), 0)
        chosen: dict[str, list[int]] = {}
        for index, image in sorted(images, key=lambda pair: (-pair[1].num_patches, pair[0])):
            known = self._known(self._encoded, image.digest, candidates)
            encoder = self._choose(
                "E", candidates, partial(_encode_key, added=added, patches=image.num_patches), known, BUSIER_PATCHES
            )
            self._remember(self._encoded, image.digest, encoder.name)
            added[encoder.name] += image.num_patches
            chosen.setdefault(encoder.name, []).append(index)
        return {name: sorted(indices) for name, indices in chosen.items()}

    # ---- images here or elsewhere

    def _encodes_elsewhere(self, request: Request, prefill: InstanceLoad) -> bool:
        """True unless `prefill` encodes these images itself: it cannot, or an encoder that does not prefill would
        finish them before its turn for them came."""
        if not prefill.serves(Role.E):
            return True
        others = [instance for instance in self._partners(prefill, Role.E) if not instance.serves(Role.P)]
        if not others:
            return False
        margin = sum(image.num_patches for image in request.images)
        return prefill.vision_load > min(i.vision_slowness * (i.patches + margin) for i in others)

    # ---- choosing

    def _partners(
        self, instance: InstanceLoad, stage: Role, condition: Condition = Condition.READY
    ) -> list[InstanceLoad]:
        """The instances in that condition that serve `stage` and are connected with `instance`."""
        others = (self._instances[name] for name in sorted(instance.pairs))
        return [other for other in others if other.condition is condition and other.serves(stage)]

    def _choose(
        self,
        stage: str,
        candidates: Sequence[InstanceLoad],
        load: Callable[[InstanceLoad], tuple[float, ...]],
        known: InstanceLoad | None,
        slack: int,
    ) -> InstanceLoad:
        """Returns the candidate with the least key; among equals, the one chosen longest ago. Prefers `known`, which
        has a cache entry, unless only it is nearly full or the last part of its key exceeds `BUSIER` times the least
        one plus `slack`."""

        def turn(instance: InstanceLoad) -> int:
            return self._turns.get((stage, instance.name), 0)

        if self._policy == ROUND_ROBIN:
            best = min(candidates, key=turn)
        else:
            best = min(candidates, key=lambda instance: (load(instance), turn(instance)))
            if known is not None and known.nearly_full <= best.nearly_full:
                best = known if load(known)[-1] <= BUSIER * load(best)[-1] + slack else best
        self._turn += 1
        self._turns[stage, best.name] = self._turn
        return best

    # ---- memory of earlier choices

    def _known_prefill(self, request: Request, candidates: Sequence[InstanceLoad]) -> InstanceLoad | None:
        if self._policy != AFFINITY:
            return None
        for key in reversed(_prompt_keys(request)):
            if (instance := self._known(self._prompts, key, candidates)) is not None:
                return instance
        for image in request.images:
            if (instance := self._known(self._prefilled, image.digest, candidates)) is not None:
                return instance
        return None

    def _remember_prefill(self, request: Request, name: str) -> None:
        if self._policy == AFFINITY:
            for key in _prompt_keys(request):
                self._prompts.put(key, name)
            for image in request.images:
                self._prefilled.put(image.digest, name)

    def _known(self, memory: _Memory, key: bytes, candidates: Sequence[InstanceLoad]) -> InstanceLoad | None:
        name = memory.get(key) if self._policy == AFFINITY else None
        return next((instance for instance in candidates if instance.name == name), None)

    def _remember(self, memory: _Memory, key: bytes, name: str) -> None:
        if self._policy == AFFINITY:
            memory.put(key, name)


class _Memory:
    """The latest `REMEMBERED` keys and their instances."""

    def __init__(self) -> None:
        self._names: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def get(self, key: bytes) -> str | None:
        return self._names.get(key)

    def put(self, key: bytes, name: str) -> None:
        self._names[key] = name
        self._names.move_to_end(key)
        if len(self._names) > REMEMBERED:
            self._names.popitem(last=False)


# Keys: (nearly full,) load with this work, load without it; in tokens or patches of the fastest instance.


def _prefill_key(instance: InstanceLoad, num_tokens: int) -> tuple[float, ...]:
    load = instance.language_load
    return instance.nearly_full, load + instance.prefill_slowness * num_tokens, load


def _decode_key(instance: InstanceLoad, num_tokens: int) -> tuple[float, ...]:
    load = instance.language_load
    return instance.nearly_full, load + instance.decode_slowness * (num_tokens + DECODE_ROW_TOKENS), load


def _encode_key(instance: InstanceLoad, added: Mapping[str, int], patches: int) -> tuple[float, ...]:
    waiting = instance.patches + added[instance.name]
    return instance.vision_slowness * (waiting + patches), instance.vision_slowness * waiting


def _prompt_keys(request: Request) -> list[bytes]:
    """A key per prefix length of `_DEPTHS` that the prompt has, the shortest first; equal keys mean equal tokens and
    pictures."""
    tokens = array("q", request.prompt_token_ids[: _DEPTHS[-1]])
    salt = request.cache_salt.encode("utf-8", "surrogatepass")
    keys = []
    for depth in _DEPTHS:
        if depth > len(tokens):
            break
        digest = blake2b(salt, digest_size=16, person=b"hydra-route")
        digest.update(tokens[:depth].tobytes())
        for image in request.images:
            if image.start < depth:
                digest.update(image.digest)
        keys.append(digest.digest())
    return keys
