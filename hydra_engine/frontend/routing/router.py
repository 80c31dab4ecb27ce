"""Chooses the instances of a request: where it is prefilled, where it decodes, where each image is encoded.

Decides over the table of `frontend/routing/instances.py` and its own memory of earlier choices. Loads are counted in
tokens and patches, multiplied by the instance's slowness. No I/O and no clock; `frontend/transitions.py` acts on it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from hydra_engine.core.instances import Condition, Role
from hydra_engine.core.request import ImageItem, Request
from hydra_engine.frontend.routing.instances import DECODE_ROW_TOKENS, InstanceLoad, prefillers

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
