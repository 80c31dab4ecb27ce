"""Decode stealing: an idle instance that encodes and decodes takes decodes over from a busy decoder.

`StealPolicy` is pure: it decides over the table of instances and the decodes on each; `now` is passed in. No request
moves twice, and both sides must have been ready for a while, so that nothing goes back and forth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Role, lends_decodes
from hydra_engine.frontend.request import Phase, RequestInFlight
from hydra_engine.frontend.routing.instances import InstanceLoad
from hydra_engine.frontend.transitions import Dispatcher

# Stolen decodes on one thief: an encode that arrives shares the instance with no more than these.
MAX_BORROWED = 8
# A thief has fewer decodes than this.
FEW_DECODES = 8
# Least number of tokens left to generate: fewer are done before the KV has been copied.
WORTH_TOKENS = 32
# Both sides must have been ready for this long: pictures come in bursts, and a short queue needs no help.
CALM_S = 0.5
# Between two hand-overs to one thief: the first must show in its status.
PERIOD_S = 0.1
# Share of the victim's KV blocks in use from which its queue waits for blocks rather than for a step.
VICTIM_FULL = 0.85


@dataclass(frozen=True, slots=True)
class Decode:
    """A request that decodes at `instance`. `moved`: it has been handed over before."""

    request_id: RequestId
    instance: str
    num_tokens: int  # whose KV is copied
    num_left: int  # at most, to generate
    moved: bool = False


class StealPolicy:
    """The choice of decodes to steal. `max_num_seqs`: by instance name, how many requests can hold KV blocks at
    once."""

    def __init__(self, max_num_seqs: Mapping[str, int]) -> None:
        self.max_num_seqs = dict(max_num_seqs)
        self._since: dict[tuple[str, str], float] = {}  # (name, side): since when it has been ready
        self._latest: dict[str, float] = {}

    def decide(
        self, instances: Mapping[str, InstanceLoad], decodes: Iterable[Decode], now: float
    ) -> list[tuple[Decode, str]]:
        """Returns (decode, thief) pairs, at most one per thief: from the victim with the longest queue, the decode with
        most tokens left for the KV to copy. Iterates `decodes` only if there are a thief and a victim."""
        thieves = [p for p in instances.values() if self._calm(p.name, "thief", _is_idle_thief(p), now)]
        victims = [p for p in instances.values() if self._calm(p.name, "victim", self._is_busy_victim(p), now)]
        if not thieves or not victims:
            return []
        decodes = list(decodes)
        borrowed = Counter(decode.instance for decode in decodes if decode.moved)
        victims.sort(key=lambda instance: (-_num_queued(instance), instance.name))
        plans: list[tuple[Decode, str]] = []
        taken: set[RequestId] = set()
        for thief in sorted(thieves, key=lambda instance: (instance.decodes, instance.name)):
            if borrowed[thief.name] >= MAX_BORROWED or now - self._latest.get(thief.name, -PERIOD_S) < PERIOD_S:
                continue
            decode = _best((d for d in decodes if d.request_id not in taken), victims, thief)
            if decode is not None:
                taken.add(decode.request_id)
                self._latest[thief.name] = now
                plans.append((decode, thief.name))
        return plans

    def _calm(self, name: str, side: str, ready: bool, now: float) -> bool:
        if not ready:
            self._since.pop((name, side), None)
            return False
        return now - self._since.setdefault((name, side), now) >= CALM_S

    def _is_busy_victim(self, instance: InstanceLoad) -> bool:
        """True if more requests want to run there than it has slots or blocks for."""
        status = instance.status
        if not instance.usable or not instance.serves(Role.D) or instance.serves(Role.E) or status is None:
            return False
        if not _num_queued(instance):
            return False
        return (
            status.num_running + _num_queued(instance) > self.max_num_seqs[instance.name]
            or status.kv_used >= VICTIM_FULL
        )


def _is_idle_thief(instance: InstanceLoad) -> bool:
    status = instance.status
    if not instance.usable or not instance.serves(Role.E) or not instance.serves(Role.D) or status is None:
        return False
    idle = not instance.patches and not status.num_encoding and not _num_queued(instance)
    return idle and instance.decodes < FEW_DECODES and not instance.nearly_full


def _num_queued(instance: InstanceLoad) -> int:
    return 0 if instance.status is None else instance.status.num_waiting + instance.status.num_arriving


def _best(decodes: Iterable[Decode], victims: Sequence[InstanceLoad], thief: InstanceLoad) -> Decode | None:
    """The decode with most tokens left to generate compared with the KV to copy, of the first victim that has one."""
    ranks = {
        instance.name: rank
        for rank, instance in enumerate(victims)
        if thief.name in instance.pairs and lends_decodes(instance.role, thief.role)
    }
    worth = [d for d in decodes if d.instance in ranks and not d.moved and d.num_left >= WORTH_TOKENS]
    return min(worth, key=lambda d: (ranks[d.instance], d.num_tokens - d.num_left, d.request_id), default=None)


class DecodeStealing:
    def __init__(self, config: EngineConfig, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        roles = {instance.name: instance.role for instance in dispatcher.instances.values()}
        limits = {name: config.for_instance(name, role).scheduler.max_running_requests for name, role in roles.items()}
        self._policy = StealPolicy(limits) if config.cluster.steal_decodes else None

    def on_up(self, name: str, max_num_seqs: int) -> None:
        """Sets the number of requests that the instance found room for at its start."""
        if self._policy is not None and max_num_seqs:
            self._policy.max_num_seqs[name] = max_num_seqs

    def stop(self) -> None:
        self._policy = None

    def tick(self, now: float) -> None:
        """Hands over what the policy chooses. Call it a few times a second."""
        instances = self._dispatcher.instances
        thieves = any(p.usable and p.serves(Role.E) and p.serves(Role.D) for p in instances.values())
        if self._policy is None or not thieves or len(instances) < 2:
            return
        decodes = filter(None, map(_decode_of, self._dispatcher.requests.values()))
        for decode, thief in self._policy.decide(instances, decodes, now):
            self._dispatcher.hand_over(self._dispatcher.by_id[decode.request_id], thief, now)


def _decode_of(in_flight: RequestInFlight) -> Decode | None:
    """The decode, or None unless the request decodes on one instance and no other works on it."""
    attempt, request = in_flight.attempt, in_flight.request
    if in_flight.phase is not Phase.DECODING or attempt is None or attempt.holders() != {attempt.decoder}:
        return None
    num_left = request.max_new_tokens - in_flight.num_known
    num_tokens = request.num_prompt + in_flight.num_known
    return Decode(attempt.id, attempt.decoder, num_tokens, num_left, in_flight.has_moved)
