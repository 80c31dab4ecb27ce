"""Random interleavings of the real source and target with a bad network, deaths, aborts and late copies.

A property test looks for short counterexamples; walks with fixed dice go further and have to find every mutant.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hydra_engine.transfer.offers import Source
from hydra_engine.transfer.pulls import Destination
from tests.examples import examples
from tests.transfer import mutants
from tests.transfer.world import FAULTS, WORK, World

CHOICE = st.integers(0, (1 << 16) - 1)
MOVES = WORK | FAULTS


class TransferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @initialize(first=st.lists(CHOICE, min_size=1, max_size=3))
    def start(self, first: list[int]) -> None:
        for n in first:
            self.world.submit(n)

    @rule(seed=st.integers(0, (1 << 32) - 1), count=st.integers(1, 60))
    def work(self, seed: int, count: int) -> None:
        dice = random.Random(seed)
        for name in dice.choices(list(WORK), list(WORK.values()), k=count):
            getattr(self.world, name)(dice.randrange(1 << 16))
            self.world.check()

    @rule(count=st.integers(1, 12), n=CHOICE)
    def copy(self, count: int, n: int) -> None:
        for _ in range(count):
            self.world.copy(n)
            self.world.check()

    @rule(count=st.integers(1, 6))
    def deliver_in_order(self, count: int) -> None:
        for _ in range(count):
            self.world.deliver(1)
            self.world.check()

    @rule(name=st.sampled_from(list(FAULTS)), n=CHOICE)
    def fault(self, name: str, n: int) -> None:
        getattr(self.world, name)(n)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.settle()


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None)


def walk(world: World, seed: int, num_moves: int = 400) -> World:
    dice = random.Random(seed)
    for name in dice.choices(list(MOVES), list(MOVES.values()), k=num_moves):
        getattr(world, name)(dice.randrange(1 << 16))
        world.check()
    world.settle()
    return world


@pytest.mark.slow
def test_long_walks_come_to_rest_and_meet_everything() -> None:
    totals = dict.fromkeys(("acknowledged", "withdrawn", "expired", "ignored", "pulled", "invalid"), 0)
    statuses: set[str] = set()
    for seed in range(150):
        world = walk(World(), seed)
        statuses |= {request.status for request in world.requests.values()}
        counters = [node.source for node in world.sources.values()] + [node.target for node in world.targets.values()]
        for name in totals:
            totals[name] += sum(getattr(table, name, 0) for table in counters)
    assert statuses == {"done", "failed", "aborted"}
    assert min(totals.values()) >= 10, totals


def test_without_faults_every_request_is_served() -> None:
    for seed in range(40):
        world, dice = World(), random.Random(seed)
        for name in dice.choices(list(WORK), list(WORK.values()), k=400):
            if name != "wait":  # no lease ends
                getattr(world, name)(dice.randrange(1 << 14) | 1)  # in order
        world.settle()
        assert {request.status for request in world.requests.values()} == {"done"}
        assert sum(node.target.invalid for node in world.targets.values()) == 0


MUTANTS = [
    ("TORN", {"source_type": mutants.WordStaysValid}),
    ("TORN", {"source_type": mutants.SequenceUsedAgain}),
    ("STUCK", {"source_type": mutants.AcknowledgesByPeer}),
    ("STUCK", {"source_type": mutants.NeverExpires}),
    ("STUCK", {"source_type": mutants.RenewsTheDeaf}),
    ("TORN", {"target_type": mutants.TakesAnyCopy}),
    ("GHOST", {"target_type": mutants.CommitsDoomed}),
    ("TORN", {"target_type": mutants.CommitsEarly}),
    ("TORN", {"target_type": mutants.CutsCopies}),
    ("TORN", {"target_type": mutants.LosesTooEarly}),
    ("TORN", {"target_type": mutants.TakesAnyPart}),
    ("TORN", {"target_type": mutants.TakesAnyIncarnation}),
    ("LEAK", {"target_type": mutants.KeepsRecords}),
    ("TORN", {"world_type": mutants.ReadsTheWordFirst}),
]


@pytest.mark.quick("TakesAnyPart", "KeepsRecords", "RenewsTheDeaf")
@pytest.mark.parametrize("kind,parts", MUTANTS, ids=lambda value: "" if isinstance(value, str) else mutant_name(value))
def test_every_mutant_is_found(kind: str, parts: dict) -> None:
    """The mutant's own tables are not read: faults show in memory, in held blocks, or in what never ends."""
    world_type = parts.get("world_type", World)
    types = (parts.get("source_type", Source), parts.get("target_type", Destination))
    for seed in range(1500):
        try:
            walk(world_type(*types, tables=False), seed)
        except AssertionError as error:
            if str(error).startswith(kind):
                return
    raise AssertionError("the mutant lives")


def mutant_name(parts: dict) -> str:
    return next(iter(parts.values())).__name__
