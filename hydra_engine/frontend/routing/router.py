"""The choice among instances: where a request prefills and decodes, where its images are encoded, what moves.

Each choice takes the instance with the least expected lateness, then the least seconds (`estimate.py`), then the one
chosen longest ago. The router decides over the table of instances and its own memory of earlier choices;
`frontend/transitions.py` acts on it. Reads no clock.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from hydra_engine.core.instances import Condition, Role
from hydra_engine.core.request import ImageItem, Request
from hydra_engine.frontend.routing.arrivals import Arrivals
from hydra_engine.frontend.routing.estimate import ANSWER_TOKENS, Decode, Estimate, Estimates
from hydra_engine.frontend.routing.instances import InstanceLoad, prefillers

_E, _P, _D = Role.E.value, Role.P.value, Role.D.value  # bits of stages, as `in` takes four times as long
LEAST_LOADED, AFFINITY, ROUND_ROBIN = "least-loaded", "affinity", "round-robin"

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
    likely_decoder: str = field(default="", compare=False)  # if it moves: the best one by the loads of this choice

    @property
    def moves(self) -> bool:
        return self.decode != self.prefill


class _Hit(NamedTuple):
    """Tokens and patches of a request that an instance has probably cached."""

    tokens: int = 0
    patches: int = 0


_MISS = _Hit()


class _Helpers:
    """Instances that could encode or decode for one that prefills, the best first. Of two that prefill, neither waits
    for the other's features or room unless it cannot do that itself, so no two wait for each other."""

    def __init__(
        self,
        estimates: Mapping[str, Estimate],
        able: Sequence[InstanceLoad],
        request: Request,
        patches: int,
        per_token: float,
    ) -> None:
        self._tokens, self._left = request.num_prompt, min(request.max_new_tokens, ANSWER_TOKENS)
        self._joined: dict[str, Decode] = {}
        self._estimates, self._able = estimates, able
        ready = self._ready = [estimate.load for estimate in estimates.values()]
        apart = self._apart = [load for load in ready if not load.role._value_ & _P]
        encode, images = _helping(ready, apart, able, _E) if patches else [], len(request.images)
        num_apart = sum(not load.role._value_ & _P for load in encode)
        part = -(-patches // max(min(images, num_apart or len(encode)), 1))
        encoders = [(estimates[load.name].encoded_s(part), load) for load in encode]
        self.encoders = _Ranking(encoders)
        self.encoders_apart = _Ranking([entry for entry in encoders if not entry[1].role._value_ & _P])
        self._coming = per_token * self._left

    def rank_decoders(self, ready_s: float) -> None:
        """Ranks the decoders for a prompt that is computed in `ready_s` seconds."""
        decoders = []
        for load in _helping(self._ready, self._apart, self._able, _D):
            estimate = self._estimates[load.name]
            joined = self._joined[load.name] = estimate.join(self._tokens, self._left, self._coming)
            decoders.append(((estimate.full, estimate.arrive(self._tokens, joined, ready_s)), load))
        self._decoders = _Ranking(decoders)
        self._decoders_apart = _Ranking([entry for entry in decoders if not entry[1].role._value_ & _P])

    def decode(self, estimate: Estimate) -> tuple[Decode, str]:
        """Returns the cost of the decode after a prefill at this instance, and where it will be."""
        load = estimate.load
        if not load.role._value_ & _D:
            best = self._decoders.best_for(load)
            return ((0.0, 0.0, 0.0), "") if best is None else (best[0][1], best[1].name)
        own = self._joined.get(load.name) or estimate.join(self._tokens, self._left, self._coming)
        best = self._decoders_apart.best_for(load)
        if best is not None and best[0] < (estimate.full, own):
            return best[0][1], best[1].name
        return own, load.name


_Cost = TypeVar("_Cost", float, tuple[bool, Decode])


class _Ranking(Generic[_Cost]):
    """Instances with the cost of each, which are ordered only where that is needed: usually all are connected, and the
    best of all is the best for each."""

    def __init__(self, entries: list[tuple[_Cost, InstanceLoad]]) -> None:
        self._entries: list[tuple[_Cost, InstanceLoad]] = entries
        self._least: tuple[_Cost, InstanceLoad] | None = min(entries, key=itemgetter(0), default=None)
        self._is_sorted = False

    def best_for(self, load: InstanceLoad) -> tuple[_Cost, InstanceLoad] | None:
        """The one with the least cost that is connected with this instance."""
        least = self._least
        if least is None or least[1].name in load.pairs:
            return least
        if not self._is_sorted:
            self._entries.sort(key=itemgetter(0))
            self._is_sorted = True
        return next((entry for entry in self._entries if entry[1].name in load.pairs), None)


def _helping(
    ready: Sequence[InstanceLoad], apart: Sequence[InstanceLoad], able: Sequence[InstanceLoad], stage: int
) -> list[InstanceLoad]:
    """The instances that may serve `stage` for one of `able`; `apart`: those that do not prefill."""
    others = ready if [load for load in able if not load.role._value_ & stage] else apart
    return [load for load in others if load.role._value_ & stage]


class Router:
    """The choice of instances for requests, over `instances`, which the caller keeps up to date. `policy`:
    least-loaded, affinity (counts what an instance has probably cached as done) or round-robin."""

    def __init__(self, instances: Mapping[str, InstanceLoad], policy: str = LEAST_LOADED) -> None:
        self._instances = instances
        self._policy = policy
        self.arrivals = Arrivals()
        self._turn = 0
        self._estimates = Estimates(ahead=False)
        self._later_estimates = Estimates(ahead=True)  # of what takes effect behind what waits now
        self._turns: dict[str, dict[str, int]] = {"E": {}, "P": {}, "D": {}}  # when each was chosen last for a stage
        self._prompts = _Memory()
        self._prefilled = _Memory()  # by image digest
        self._encoded = _Memory()

    def route(self, request: Request, preferred: str = "") -> Route | Role:
        """Returns the route, or the stage that no instance can serve. `preferred`: an instance that has just
        computed the whole prompt; it is chosen whatever its queue, if it is usable."""
        able = prefillers(self._instances.values(), images=bool(request.images))
        if isinstance(able, Role):
            return able
        if preferred:
            able = [instance for instance in able if instance.name == preferred] or able
        if self._policy == ROUND_ROBIN:
            prefill = min(able, key=lambda instance: self._turns["P"].get(instance.name, 0))
            remote, moves = bool(request.images) and not prefill.serves(Role.E), not prefill.serves(Role.D)
            decoder = ""
        else:
            prefill, remote, decoder = self._choose_prefill(request, able)
            moves = decoder != prefill.name
        self.arrivals.count += 1
        self._took("P", prefill.name)
        self._remember_prefill(request, prefill.name)
        here = Role.P | (Role(0) if remote else Role.E) | (Role(0) if moves else Role.D)
        stages = (here & prefill.role).letters
        return Route(prefill.name, "" if moves else prefill.name, stages, remote, decoder if moves else "")

    def _choose_prefill(self, request: Request, able: Sequence[InstanceLoad]) -> tuple[InstanceLoad, bool, str]:
        """Returns the instance for the prefill, whether the images are encoded elsewhere, and where it decodes."""
        tokens, features = request.num_prompt, request.num_image_tokens
        patches = sum(image.num_patches for image in request.images)
        ready, current = Condition.READY, self._later_estimates.current
        estimates = {name: current(load) for name, load in self._instances.items() if load.condition is ready}
        helpers = _Helpers(estimates, able, request, patches, self.arrivals.per_token)
        turns, hits = self._turns["P"], self._hits(request)
        ttft_s = math.inf if request.slo.ttft_s is None else request.slo.ttft_s
        prefills: list[tuple[InstanceLoad, Estimate, float, bool, int]] = []
        soonest_s = math.inf
        for load in able:
            estimate = estimates[load.name]
            todo, fresh = tokens, patches
            if hits and (hit := hits.get(load.name)) is not None:
                todo, fresh = max(tokens - hit.tokens, 1), patches - hit.patches
            first_s, remote = estimate.prefilled_s(todo, fresh), False
            encoders = helpers.encoders_apart if load.role._value_ & _E else helpers.encoders
            if (best := encoders.best_for(load)) is not None:
                encoded_s = best[0]
                copied_s = encoded_s + load.pace.feature_s * features
                behind_s = estimate.prefilled_behind_s(todo, copied_s)
                remote = behind_s < first_s or not load.role._value_ & _E
                first_s = behind_s if remote else first_s
            soonest_s = first_s if first_s < soonest_s else soonest_s
            prefills.append((load, estimate, first_s, remote, todo))
        helpers.rank_decoders(soonest_s)
        least: tuple[bool, float, float, int] | None = None
        for load, estimate, first_s, remote, todo in prefills:
            (late_s, slow_s, _), decoder = helpers.decode(estimate)
            if first_s > ttft_s:
                late_s += first_s - ttft_s
            if estimate.late_s > 0.0 and load.role._value_ & _D:
                late_s += estimate.delayed_s(todo, first_s, request.max_new_tokens)
            key = estimate.full, late_s, first_s + slow_s + estimate.stall_s * todo, turns.get(load.name, 0)
            if least is None or key < least:
                least, chosen = key, (load, remote, decoder)
        return chosen

    # ---- images

    def encoders(self, target: str, images: Sequence[tuple[int, ImageItem]]) -> dict[str, list[int]] | Role:
        """Returns the indices of these (index, image) per encoder, for a request prefilled at `target`, or Role.E if
        there is none. Largest image first, each to the encoder that finishes it first. Draining instances are used only
        if no other can."""
        instance = self._instances[target]
        candidates = self._partners(instance, Role.E) or self._partners(instance, Role.E, Condition.DRAINING)
        if instance.serves(Role.E):
            candidates = [other for other in candidates if not other.serves(Role.P)] or candidates
        if not candidates:
            return Role.E
        added = dict.fromkeys((candidate.name for candidate in candidates), 0)
        estimates = {candidate.name: self._estimates.current(candidate) for candidate in candidates}
        chosen: dict[str, list[int]] = {}
        for index, image in sorted(images, key=lambda pair: (-pair[1].num_patches, pair[0])):
            known = self._known(self._encoded, image.digest)

            def seconds(load: InstanceLoad, image: ImageItem = image, known: str | None = known) -> tuple[float, ...]:
                patches = added[load.name] + (0 if load.name == known else image.num_patches)
                return (estimates[load.name].encoded_s(patches),)

            encoder = self._choose("E", candidates, seconds)
            self._remember(self._encoded, image.digest, encoder.name)
            added[encoder.name] += image.num_patches
            chosen.setdefault(encoder.name, []).append(index)
        return {name: sorted(indices) for name, indices in chosen.items()}

    # ---- decodes

    def decoder(self, source: str, num_tokens: int, left: int = ANSWER_TOKENS) -> str | Role:
        """Returns the decoder for a request of `num_tokens` prefilled at `source` with up to `left` tokens to come, by
        current loads, or Role.D if there is none. Draining instances are used only if no other can."""
        instance = self._instances[source]
        candidates = self._partners(instance, Role.D) or self._partners(instance, Role.D, Condition.DRAINING)
        if instance.serves(Role.D):
            candidates = [other for other in candidates if not other.serves(Role.P)]
        if not candidates:
            return Role.D
        left = min(left, ANSWER_TOKENS)
        coming = self.arrivals.per_token * left

        def cost(load: InstanceLoad) -> tuple[float, ...]:
            estimate = self._estimates.current(load)
            return estimate.full, *estimate.arrive(num_tokens, estimate.join(num_tokens, left, coming))

        return self._choose("D", candidates, cost).name

    # ---- choosing

    def _partners(
        self, instance: InstanceLoad, stage: Role, condition: Condition = Condition.READY
    ) -> list[InstanceLoad]:
        """The instances in that condition that serve `stage` and are connected with `instance`."""
        others = self._instances.values()
        return [o for o in others if o.condition is condition and o.serves(stage) and o.name in instance.pairs]

    def _choose(
        self, stage: str, candidates: Sequence[InstanceLoad], cost: Callable[[InstanceLoad], tuple[float, ...]]
    ) -> InstanceLoad:
        """Returns the candidate with the least cost; among equals, the one chosen longest ago."""

        def turn(load: InstanceLoad) -> int:
            return self._turns[stage].get(load.name, 0)

        if self._policy == ROUND_ROBIN:
            best = min(candidates, key=turn)
        else:
            best = min(candidates, key=lambda load: (cost(load), turn(load)))
        self._took(stage, best.name)
        return best

    def _took(self, stage: str, name: str) -> None:
        self._turn += 1
        self._turns[stage][name] = self._turn

    # ---- memory of earlier choices

    def _hits(self, request: Request) -> dict[str, _Hit]:
        """Returns what instances have probably cached: as much of the prompt as it may share with the latest one that
        begins alike, and its pictures."""
        if self._policy != AFFINITY:
            return {}
        hits: dict[str, _Hit] = {}
        for image in request.images:
            if (entry := self._prefilled.get(image.digest)) is not None:
                hit = hits.get(entry.name, _MISS)
                hits[entry.name] = hit._replace(patches=hit.patches + image.num_patches)
        keys = _prompt_keys(request)
        for place in reversed(range(len(keys))):
            if (entry := self._prompts.get(keys[place])) is not None:
                shared = min(entry.tokens, request.num_prompt)
                if place + 1 < len(_DEPTHS):
                    shared = min(shared, _DEPTHS[place + 1])
                hits[entry.name] = hits.get(entry.name, _MISS)._replace(tokens=shared)
                break
        return hits

    def _remember_prefill(self, request: Request, name: str) -> None:
        if self._policy == AFFINITY:
            for key in _prompt_keys(request):
                self._prompts.put(key, _Entry(name, request.num_prompt))
            for image in request.images:
                self._prefilled.put(image.digest, _Entry(name))

    def _known(self, memory: _Memory, key: bytes) -> str | None:
        entry = memory.get(key) if self._policy == AFFINITY else None
        return None if entry is None else entry.name

    def _remember(self, memory: _Memory, key: bytes, name: str) -> None:
        if self._policy == AFFINITY:
            memory.put(key, _Entry(name))


class _Entry(NamedTuple):
    """An instance, and the length of the prompt that went there."""

    name: str
    tokens: int = 0


class _Memory:
    """The latest `REMEMBERED` keys and their instances."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> _Entry | None:
        return self._entries.get(key)

    def put(self, key: bytes, entry: _Entry) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        if len(self._entries) > REMEMBERED:
            self._entries.popitem(last=False)


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
