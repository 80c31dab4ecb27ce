"""Looks at every state of a transition system, breadth first, so that a violation comes with a shortest way to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol


class Violation(Exception):
    """The first word says what kind."""


class System(Protocol):
    def initial(self) -> Hashable: ...

    def moves(self, state: Any) -> tuple[list[tuple[str, Any]], int]:
        """The moves (label, state after), and how many of them are normal: faults are not."""
        ...

    def check(self, state: Any, *, at_rest: bool) -> None:
        """Raises Violation. `at_rest`: no normal move is left."""
        ...


class Outcome(NamedTuple):
    states: int
    violation: str = ""  # empty: every state was looked at, and all hold
    trace: tuple[str, ...] = ()  # the shortest way to it


def explore(model: System, max_states: int = 2_000_000) -> Outcome:
    """Breadth first, every reachable state."""
    first = model.initial()
    parents: dict[Any, tuple[Any, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        try:
            moves, num_normal = model.moves(state)
            model.check(state, at_rest=num_normal == 0)
        except Violation as error:
            return Outcome(len(parents), str(error), _trace(parents, state))
        for label, after in moves:
            if after not in parents:
                parents[after] = (state, label)
                queue.append(after)
        assert len(parents) <= max_states, "more states than expected: choose a smaller model"
    return Outcome(len(parents))


def _trace(parents: dict[Any, tuple[Any, str] | None], state: Any) -> tuple[str, ...]:
    labels = []
    while (step := parents[state]) is not None:
        state, label = step
        labels.append(label)
    return tuple(reversed(labels))
