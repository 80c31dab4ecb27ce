"""The connections between pairs of instances: which are up, and which have to be made. Decides only; reads no clock.

Any two ready instances get a connection. It is up when both have reported it, and is made again when either reports its
end, or when a report is missing after `pair_patience_s`. Nothing looks at all pairs, of which 512 instances have
130,816: the supervisor asks with every tick, and with every report while it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hydra_engine.cluster.member import Pace

Names = tuple[str, str]  # in the order of the topology


@dataclass(slots=True)
class _Pair:
    made_s: float = 0.0
    up_sides: set[str] = field(default_factory=set)
    is_up: bool = False
    failures: int = 0  # in a row
    problem: str = ""


class Pairs:
    def __init__(self, names: Sequence[str], pace: Pace) -> None:
        self._order = {name: position for position, name in enumerate(names)}
        self._pace = pace
        self._ready: dict[str, None] = {}  # in the order in which they joined
        self._pairs: dict[Names, _Pair] = {}
        self._due_s: dict[Names, float] = {}  # of those to connect: when
        self._made: dict[Names, None] = {}  # connected and not up, the oldest first
        self._hopeless: dict[Names, None] = {}

    def names_of(self, one: str, other: str) -> Names:
        return (one, other) if self._order[one] < self._order[other] else (other, one)

    def join(self, name: str, now: float) -> None:
        for other in self._ready:
            names = self.names_of(name, other)
            self._pairs[names] = _Pair()
            self._due_s[names] = now
        self._ready[name] = None

    def remove(self, name: str) -> list[Names]:
        """Removes the instance. Returns its pairs that were up."""
        self._ready.pop(name, None)
        gone = [names for other in self._ready if (names := self.names_of(name, other)) in self._pairs]
        for names in gone:
            self._forget(names)
        return [names for names in gone if self._pairs.pop(names).is_up]

    def report(self, name: str, peer: str, up: bool, problem: str, now: float) -> bool | None:
        """Takes one side's report about the other. Returns whether the pair has come up (True) or gone down (False)."""
        names = self.names_of(name, peer)
        pair = self._pairs.get(names)
        if pair is None:
            return None
        if up:
            pair.up_sides.add(name)
            if len(pair.up_sides) == 2 and not pair.is_up:
                # An earlier connection is over for both sides, even if a new one was due.
                pair.is_up, pair.failures, pair.problem = True, 0, ""
                self._forget(names)
                return True
            return None
        pair.up_sides.discard(name)
        if names not in self._due_s:
            self._fail(names, problem, now)
        was_up, pair.is_up = pair.is_up, False
        return False if was_up else None

    def pairs_due(self, now: float) -> list[Names]:
        """Returns the pairs to connect now. Counts a failure of each pair that has not come up in time."""
        while self._made and now - self._pairs[oldest := next(iter(self._made))].made_s >= self._pace.pair_patience_s:
            self._fail(oldest, "they do not answer each other", now)
        return [names for names, due_s in self._due_s.items() if due_s <= now]

    def connected(self, names: Names, now: float) -> None:
        """Records that both instances have received their end of a connection."""
        pair = self._pairs[names]
        pair.made_s = now
        pair.up_sides.clear()
        self._due_s.pop(names, None)
        self._made.pop(names, None)
        if not pair.is_up:
            self._made[names] = None

    def record_failure(self, names: Names, problem: str, now: float) -> None:
        """Records that the pair's connection could not be handed over."""
        self._fail(names, problem, now)

    def _fail(self, names: Names, problem: str, now: float) -> None:
        pair = self._pairs[names]
        pair.failures += 1
        pair.problem = problem
        self._made.pop(names, None)
        self._due_s[names] = now + self._pace.reconnect_s
        if pair.failures >= self._pace.pair_attempts:
            self._hopeless[names] = None

    def _forget(self, names: Names) -> None:
        """Has nothing more to do for a pair that is up or gone."""
        self._due_s.pop(names, None)
        self._made.pop(names, None)
        self._hopeless.pop(names, None)

    @property
    def complete(self) -> bool:
        """True if all instances are ready and connected with each other."""
        return len(self._ready) == len(self._order) and not self._due_s and not self._made

    def find_hopeless(self) -> tuple[Names, str] | None:
        """A pair that has failed `pair_attempts` times in a row, with the latest problem."""
        names = next(iter(self._hopeless), None)
        return None if names is None else (names, self._pairs[names].problem)
