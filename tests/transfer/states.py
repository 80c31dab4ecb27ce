"""A state of the protocol's model: the source, the target, the frontend and the network, as plain hashable values."""

from __future__ import annotations

from typing import Any, NamedTuple

Message = tuple[Any, ...]
Key = tuple[int, int]  # life of the source and sequence number: what names an offer
RUN, DONE, ABORTED, FAILED = "run", "done", "aborted", "failed"
COPYING, LANDED, VERIFIED = "copying", "landed", "verified"


class Job(NamedTuple):
    """A computation or an offer of the source. `sequence` 0: not offered yet."""

    request: int
    attempt: int
    blocks: tuple[int, ...] = ()
    computed: int = 0
    sequence: int = 0


class Entry(NamedTuple):
    """An offer at the target. `copies`: one state for each part that is known and granted."""

    key: Key
    request: int
    attempt: int
    source_blocks: tuple[int, ...]
    ended: bool
    target_blocks: tuple[int, ...] = ()
    copies: tuple[str, ...] = ()
    cancelled: bool = False

    @property
    def in_flight(self) -> bool:
        return COPYING in self.copies or LANDED in self.copies


class State(NamedTuple):
    life: int  # of the source
    next_sequence: int
    memory: tuple[tuple[Any, ...], ...]  # one for each life: a dead one stays mapped
    owned: tuple[Any, ...]  # source blocks: the owning (request, attempt), or None
    jobs: frozenset[Job]
    words: frozenset[Key]  # offers whose control word is valid
    unwritten: frozenset[Key]  # mutant: words that should be gone already
    target_life: int
    peer: tuple[int, int]  # at the target: life of the source, highest sequence number heard
    expected: frozenset[tuple[int, int]]
    entries: frozenset[Entry]
    held: frozenset[Entry]  # committed
    target_owned: tuple[Any, ...]  # target blocks: the key of the owning offer, or None
    target_memory: tuple[Any, ...]
    requests: tuple[tuple[int, str, bool], ...]  # attempt, status, committed
    network: tuple[Message, ...]
    budget: int


def assign(values: tuple[Any, ...], places: list[int], value: Any) -> tuple[Any, ...]:
    return tuple(value if i in places else old for i, old in enumerate(values))


def replace_at(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def release(owners: tuple[Any, ...], key: Key) -> tuple[Any, ...]:
    return tuple(None if owner == key else owner for owner in owners)
