"""When an instance that encodes and decodes takes decodes over from a busy one, while it has nothing to encode.

Pure: decides over the table of instances and a list of what decodes where; `now` is passed in. Nothing moves twice and
both sides must have been as they are for a while, so that nothing goes back and forth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hydra_engine.core.ids import RequestId
from hydra_engine.core.roles import Role, lends_decodes
from hydra_engine.frontend.routing.instance_load import InstanceLoad

# Borrowed at once: an encode that comes meanwhile shares its instance with no more than these.
MOST_BORROWED = 8
# A thief with more decodes than this has work enough of its own.
FEW_DECODES = 8
# Left to generate: less than this is done before its KV has arrived and been started on.
WORTH_TOKENS = 32
# Both sides must have been ready for this long: pictures come in bursts, and a queue that passes needs no help.
CALM_S = 0.5
# Between two hand-overs to one thief: time for the first to show in the numbers.
PERIOD_S = 0.1
# Of the victim's KV blocks: with more than this held, whoever waits does so for blocks and not for a step.
VICTIM_FULL = 0.85


@dataclass(frozen=True, slots=True)
class Decode:
    """A request that decodes at `instance`. `moved`: it has been handed over before."""

    request_id: RequestId
    instance: str
    num_tokens: int  # whose KV would have to be copied
    num_left: int  # at most, to generate
    moved: bool = False


@dataclass(frozen=True, slots=True)
class HandOverPlan:
    request_id: RequestId
    victim: str
    thief: str


class StealPolicy:
    """`max_num_seqs`: how many requests can hold KV blocks on one instance at once."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._since: dict[tuple[str, str], float] = {}  # (name, side): since when it has been ready for it
        self._latest: dict[str, float] = {}

    def decide(
        self, instances: Mapping[str, InstanceLoad], decodes: Sequence[Decode], now: float
    ) -> list[HandOverPlan]:
        """At most one hand-over for each thief: from the victim with the longest queue, what has most left to do."""
        borrowed = Counter(decode.instance for decode in decodes if decode.moved)
        thieves = [p for p in instances.values() if self._calm(p.name, "thief", _is_idle_thief(p), now)]
        victims = [p for p in instances.values() if self._calm(p.name, "victim", self._is_busy_victim(p), now)]
        victims.sort(key=lambda instance: (-_num_queued(instance), instance.name))
        plans: list[HandOverPlan] = []
        taken: set[RequestId] = set()
        for thief in sorted(thieves, key=lambda instance: (instance.decodes, instance.name)):
            if borrowed[thief.name] >= MOST_BORROWED or now - self._latest.get(thief.name, -PERIOD_S) < PERIOD_S:
                continue
            decode = _best((d for d in decodes if d.request_id not in taken), victims, thief)
            if decode is not None:
                taken.add(decode.request_id)
                self._latest[thief.name] = now
                plans.append(HandOverPlan(decode.request_id, decode.instance, thief.name))
        return plans

    def _calm(self, name: str, side: str, ready: bool, now: float) -> bool:
        if not ready:
            self._since.pop((name, side), None)
            return False
        return now - self._since.setdefault((name, side), now) >= CALM_S

    def _is_busy_victim(self, instance: InstanceLoad) -> bool:
        """More requests want to run there than it has slots or blocks for."""
        status = instance.status
        if not instance.usable or not instance.serves(Role.D) or instance.serves(Role.E) or status is None:
            return False
        if not _num_queued(instance):
            return False
        return status.num_running + _num_queued(instance) > self._max_num_seqs or status.kv_used >= VICTIM_FULL


def _is_idle_thief(instance: InstanceLoad) -> bool:
    status = instance.status
    if not instance.usable or not instance.serves(Role.E) or not instance.serves(Role.D) or status is None:
        return False
    idle = not instance.patches and not status.num_encoding and not _num_queued(instance)
    return idle and instance.decodes < FEW_DECODES and not instance.nearly_full


def _num_queued(instance: InstanceLoad) -> int:
    return 0 if instance.status is None else instance.status.num_waiting + instance.status.num_arriving


def _best(decodes: Iterable[Decode], victims: Sequence[InstanceLoad], thief: InstanceLoad) -> Decode | None:
    """The decode with most left to generate for the KV that has to be copied."""
    ranks = {
        instance.name: rank
        for rank, instance in enumerate(victims)
        if thief.name in instance.pairs and lends_decodes(instance.role, thief.role)
    }
    worth = [d for d in decodes if d.instance in ranks and not d.moved and d.num_left >= WORTH_TOKENS]
    return min(worth, key=lambda d: (ranks[d.instance], d.num_tokens - d.num_left, d.request_id), default=None)
