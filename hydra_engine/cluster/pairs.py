"""The connections between pairs of instances: which are up, and which have to be made. Decides only; reads no clock.

Any two ready instances get a connection. It is up when both have reported it, and is made again when either reports its
end, or when a report is missing after `pair_patience_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hydra_engine.cluster.member import Pace

Names = tuple[str, str]  # in the order of the topology


@dataclass(slots=True)
class _Pair:
    due_s: float | None  # when to connect; None: a connection has been made
    made_s: float = 0.0
    up_sides: set[str] = field(default_factory=set)
    is_up: bool = False
    failures: int = 0  # in a row
    problem: str = ""


class Pairs:
    def __init__(self, names: Sequence[str], pace: Pace) -> None:
        self._order = {name: position for position, name in enumerate(names)}
        self._pace = pace
        self._ready: set[str] = set()
        self._pairs: dict[Names, _Pair] = {}

    def names_of(self, one: str, other: str) -> Names:
        return (one, other) if self._order[one] < self._order[other] else (other, one)

    def join(self, name: str, now: float) -> None:
        for other in self._ready:
            self._pairs[self.names_of(name, other)] = _Pair(due_s=now)
        self._ready.add(name)

    def remove(self, name: str) -> list[Names]:
        """Removes the instance. Returns its pairs that were up."""
        self._ready.discard(name)
        gone = [names for names in self._pairs if name in names]
        return [names for names in gone if self._pairs.pop(names).is_up]

    def report(self, name: str, peer: str, up: bool, problem: str, now: float) -> bool | None:
        """Takes one side's report about the other. Returns whether the pair has come up (True) or gone down (False)."""
        pair = self._pairs.get(self.names_of(name, peer))
        if pair is None:
            return None
        if up:
            pair.up_sides.add(name)
            if len(pair.up_sides) == 2 and not pair.is_up:
                # An earlier connection is over for both sides, even if a new one was due.
                pair.is_up, pair.due_s, pair.failures, pair.problem = True, None, 0, ""
                return True
            return None
        pair.up_sides.discard(name)
        if pair.due_s is None:
            self._fail(pair, problem, now)
        was_up, pair.is_up = pair.is_up, False
        return False if was_up else None

    def pairs_due(self, now: float) -> list[Names]:
        """Returns the pairs to connect now. Counts a failure of each pair that has not come up in time."""
        for pair in self._pairs.values():
            if pair.due_s is None and not pair.is_up and now - pair.made_s >= self._pace.pair_patience_s:
                self._fail(pair, "they do not answer each other", now)
        return [names for names, pair in self._pairs.items() if pair.due_s is not None and pair.due_s <= now]

    def connected(self, names: Names, now: float) -> None:
        """Records that both instances have received their end of a connection."""
        pair = self._pairs[names]
        pair.due_s, pair.made_s = None, now
        pair.up_sides.clear()

    def record_failure(self, names: Names, problem: str, now: float) -> None:
        """Records that the pair's connection could not be handed over."""
        self._fail(self._pairs[names], problem, now)

    def _fail(self, pair: _Pair, problem: str, now: float) -> None:
        pair.due_s = now + self._pace.reconnect_s
        pair.failures += 1
        pair.problem = problem

    @property
    def complete(self) -> bool:
        """True if all instances are ready and connected with each other."""
        return len(self._ready) == len(self._order) and all(pair.is_up for pair in self._pairs.values())

    def find_hopeless(self) -> tuple[Names, str] | None:
        """A pair that has failed `pair_attempts` times in a row, with the latest problem."""
        for names, pair in self._pairs.items():
            if pair.failures >= self._pace.pair_attempts:
                return names, pair.problem
        return None
